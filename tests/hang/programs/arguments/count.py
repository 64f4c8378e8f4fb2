"""The last batch of one rank is smaller, and so is what it reduces.

ranks: 3
raises: CollectiveMismatchError on all
says: all_reduce | [32] | [17]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
rows = 17 if rank == 2 else 32
dist.all_reduce(np.ones(rows))  # all ranks
