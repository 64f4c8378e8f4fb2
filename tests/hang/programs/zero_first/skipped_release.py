"""A cache hit makes rank 0 return before its releasing barrier; then it trains.

ranks: 2
raises: CollectiveMismatchError on all
says: barrier | all_reduce | [9]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()


def prepare(cached):
    if rank != 0:
        dist.barrier()  # rank 1
    if rank == 0 and cached:
        return
    if rank == 0:
        dist.barrier()


prepare(cached=True)
dist.all_reduce(np.ones(9))  # rank 0
