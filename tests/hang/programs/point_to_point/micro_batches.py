"""The stages of a pipeline disagree on the number of micro-batches.

ranks: 2
raises: DeadlockError on all
says: recv | barrier
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
batches = 4 if rank == 0 else 5
x = np.ones(8)
for _ in range(batches):
    if rank == 0:
        dist.send(x, dst=1)
    else:
        dist.recv(x, src=0)  # rank 1
dist.barrier()  # rank 0
