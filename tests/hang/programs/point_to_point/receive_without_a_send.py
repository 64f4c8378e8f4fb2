"""A rank waits for a message that nobody sends.

ranks: 2
raises: PeerExitedError on 1
says: recv | ended
names: 0
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(3)
if rank == 1:
    dist.recv(x, src=0)  # rank 1
