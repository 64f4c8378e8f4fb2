"""A rank swallows an exception inside its step and goes on with the next one: off by one from there on.

ranks: 3
raises: CollectiveMismatchError on all
says: all_reduce | barrier
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(4)
for step in range(3):
    try:
        scale = 1 / (step - 1) if rank == 2 else 1.0
        x *= scale
        dist.all_reduce(x)  # ranks 0-1
    except ZeroDivisionError:
        pass
dist.barrier()  # rank 2
