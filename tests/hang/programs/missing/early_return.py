"""A function returns early on the rank whose shard is empty, before the collective at its end.

ranks: 3
raises: CollectiveMismatchError on all
says: all_reduce | all_gather_object
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()


def accuracy(shard):
    if len(shard) == 0:
        return 0.0
    counts = np.array([np.sum(shard > 0), len(shard)])
    dist.all_reduce(counts)  # ranks 0-1
    return counts[0] / counts[1]


found = accuracy(np.arange(4 if rank < 2 else 0))
everybody = [None] * size
dist.all_gather_object(everybody, found)  # rank 2
