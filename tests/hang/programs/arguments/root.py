"""Every rank broadcasts from itself.

ranks: 3
raises: CollectiveMismatchError on all
says: broadcast | root 0 | root 1 | root 2
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
weights = np.full(10, rank, np.float32)
dist.broadcast(weights, src=rank)  # all ranks
