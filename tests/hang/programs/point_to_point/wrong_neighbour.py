"""In a pipeline the second stage listens to its successor.

ranks: 3
raises: DeadlockError on all
says: recv | barrier | needs rank
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
x = np.ones(4)
if rank > 0:
    source = rank - 1 if rank == 2 else rank + 1
    dist.recv(x, src=source)  # ranks 1-2
if rank < size - 1:
    dist.send(x, dst=rank + 1)
dist.barrier()  # rank 0
