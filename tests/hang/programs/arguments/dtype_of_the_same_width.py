"""A counter is int64 on the ranks that counted and float64 where it came from np.zeros.

ranks: 3
raises: CollectiveMismatchError on all
says: all_reduce | int64 | float64
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
seen = np.zeros(4)
if rank > 0:
    seen = seen.astype(np.int64)
dist.all_reduce(seen)  # all ranks
