"""Rank 0 sends three rows to rank 1, which expects two.

ranks: 2
raises: CollectiveMismatchError on all
says: rank 0 sends 3 elements to rank 1, which expects 2 | expects 2 elements from rank 0, which sends 3 | either may be wrong
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
rows = np.arange(4.0) + 10 * rank
sends, expects = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [2, 2])
received = np.empty(sum(expects))
dist.all_to_all_single(received, rows, expects, sends)  # all ranks
