"""Every rank makes only the group that it is in.

ranks: 4
raises: CollectiveMismatchError on all
says: new_group | 0, 1 | 2, 3
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
first = rank - rank % 2
node = dist.new_group([first, first + 1])  # all ranks
dist.all_reduce(np.ones(1), group=node)
