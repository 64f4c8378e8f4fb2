"""The block that rank 0 runs first contains a collective: rank 0 meets the others in their barrier.

ranks: 3
raises: CollectiveMismatchError on all
says: barrier | broadcast | root 0
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
vocabulary = np.arange(6)
if rank != 0:
    dist.barrier()  # ranks 1-2
dist.broadcast(vocabulary, src=0)  # rank 0
if rank == 0:
    dist.barrier()
