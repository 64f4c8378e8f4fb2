"""Rank 0 averages the loss with reduce, the others with all_reduce: with the right root it would even end.

ranks: 3
raises: CollectiveMismatchError on all
says: reduce | all_reduce | root 0
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
loss = np.array([0.1 * rank])
if rank == 0:
    dist.reduce(loss, dst=0)  # rank 0
else:
    dist.all_reduce(loss)  # ranks 1-2
print(loss / size)
