"""Rank 0 prepared and goes on; one of the others fails in its part of the block.

ranks: 3
raises: PermissionError on 2; PeerFailedError on 0, 1
says: all_reduce | PermissionError
names: 2
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
if rank != 0:
    dist.barrier()
if rank == 2:
    raise PermissionError("cache is not readable")  # rank 2
if rank == 0:
    dist.barrier()
dist.all_reduce(np.ones(1))  # ranks 0-1
