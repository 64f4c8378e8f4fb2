"""The rank that should send fails first.

ranks: 2
raises: ZeroDivisionError on 0; PeerFailedError on 1
says: recv | ZeroDivisionError
names: 0
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
x = np.ones(4)
if rank == 0:
    x /= 1 // (size - 2)  # rank 0
    dist.send(x, dst=1)
else:
    dist.recv(x, src=0)  # rank 1
