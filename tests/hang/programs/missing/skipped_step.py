"""A rank skips the step whose loss is not finite.

ranks: 2
raises: CollectiveMismatchError on all
says: all_reduce | all_gather | [8]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
gradient, losses = np.ones(8), [np.empty(1) for _ in range(size)]
for step in range(4):
    loss = np.array([np.nan if (rank, step) == (1, 2) else 1.0])
    if not np.isfinite(loss).all():
        continue
    dist.all_reduce(gradient)  # rank 0
dist.all_gather(losses, loss)  # rank 1
