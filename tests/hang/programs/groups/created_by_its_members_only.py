"""Only the members make the new group; the others train on.

ranks: 4
raises: CollectiveMismatchError on all
says: new_group | 0, 1 | all_reduce
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
if rank in (0, 1):
    pair = dist.new_group([0, 1])  # ranks 0-1
dist.all_reduce(np.ones(4))  # ranks 2-3
