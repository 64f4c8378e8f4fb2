"""Rank 1 has fewer batches and comes to the barrier of the epoch while the others still train.

ranks: 3
raises: CollectiveMismatchError on all
says: all_reduce | barrier | [16]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
gradient = np.zeros(16)
for _ in range(5 - (rank == 1)):
    dist.all_reduce(gradient)  # ranks 0, 2
dist.barrier()  # rank 1
