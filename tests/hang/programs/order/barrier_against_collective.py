"""Rank 0 waits for the others in a barrier while they gather their results.

ranks: 4
raises: CollectiveMismatchError on all
says: barrier | all_gather | [2]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
result = np.array([rank, rank**2])
everything = [np.empty_like(result) for _ in range(size)]
if rank == 0:
    dist.barrier()  # rank 0
else:
    dist.all_gather(everything, result)  # ranks 1-3
print(everything[0])
