"""One rank counts the samples before it adds the losses, the others the other way round.

ranks: 3
raises: CollectiveMismatchError on all
says: all_reduce | float64 | int64 | [1]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
loss, samples = np.array([0.5]), np.array([32])
for step in range(3):
    if rank == 2 and step == 1:
        dist.all_reduce(samples)  # rank 2
        dist.all_reduce(loss)
    else:
        dist.all_reduce(loss)  # ranks 0-1
        dist.all_reduce(samples)
