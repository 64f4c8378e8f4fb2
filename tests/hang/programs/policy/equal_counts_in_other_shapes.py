"""Equal counts in different shapes: a row on one rank, a column on the other.

ranks: 2
raises: CollectiveMismatchError on all, or ok
says: all_reduce
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones((2, 6) if rank == 0 else (3, 4))
dist.all_reduce(x)  # all ranks
