"""Rank 0 collects a result from everybody, itself included by mistake.

ranks: 3
raises: PeerExitedError on 0
says: recv | ended
names: 1-2
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
result = np.array([rank + 0.5])
if rank == 0:
    for _ in range(size):
        dist.recv(result)  # rank 0
else:
    dist.send(result, dst=0)
