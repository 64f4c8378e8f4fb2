"""Saving on rank 0 gathers the shards of the optimizer, which the others never hear of.

ranks: 3
raises: CollectiveMismatchError on all
says: gather | barrier | [7] | root 0
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
state = np.full(7, rank, np.float32)


def save():
    shards = [np.empty_like(state) for _ in range(size)]
    dist.gather(state, shards, dst=0)  # rank 0
    return np.concatenate(shards)


if rank == 0:
    save()
dist.barrier()  # ranks 1-2
