"""A rank sends to itself, and would wait for itself.

ranks: 2
raises: ValueError on 0; PeerFailedError on 1
says: ValueError | same as the rank
names: 0
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(2)
if rank == 0:
    dist.send(x, dst=0)  # rank 0
dist.barrier()  # rank 1
