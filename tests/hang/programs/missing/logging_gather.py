"""Every tenth step rank 0 gathers statistics for its log.

ranks: 2
raises: CollectiveMismatchError on all
says: all_gather_object | all_reduce | [3]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
x, stats = np.ones(3), [None] * size
for step in range(25):
    dist.all_reduce(x)  # rank 1
    x /= size
    if step % 10 == 9 and rank == 0:
        dist.all_gather_object(stats, {"step": step, "norm": float(x @ x)})  # rank 0
