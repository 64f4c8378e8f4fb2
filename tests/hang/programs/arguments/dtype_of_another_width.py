"""Mixed precision is on for one rank only.

ranks: 2
raises: CollectiveMismatchError on all
says: all_reduce | float32 | float64
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
gradient = np.ones(128, np.float32 if rank == 0 else np.float64)
dist.all_reduce(gradient)  # all ranks
