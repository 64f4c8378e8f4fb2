"""The ranks reduce to the last rank, as one of them counts it.

ranks: 3
raises: CollectiveMismatchError on all
says: reduce | root 1 | root 2
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
last = size - 1 if rank else size - 2
dist.reduce(np.ones(5), dst=last)  # all ranks
