"""The receivers make room for fewer words than the root has.

ranks: 2
raises: CollectiveMismatchError on all
says: broadcast | [100] | [80]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
words = np.zeros(100 if rank == 0 else 80, np.int64)
dist.broadcast(words, src=0)  # all ranks
