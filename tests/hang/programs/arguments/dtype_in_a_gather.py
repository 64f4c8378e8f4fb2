"""Indices are int32 on one rank and float32 on the other: as many bytes.

ranks: 2
raises: CollectiveMismatchError on all
says: all_gather | int32 | float32
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
mine = np.arange(6, dtype=np.int32 if rank else np.float32)
everything = [np.empty_like(mine) for _ in range(size)]
dist.all_gather(everything, mine)  # all ranks
