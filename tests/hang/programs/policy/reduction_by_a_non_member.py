"""A rank outside the group calls its reduction: torch warns and goes on.

ranks: 3
raises: ValueError on 2, or ok
says: all_reduce
names: 2
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
pair = dist.new_group([0, 1])
dist.all_reduce(np.ones(2), group=pair)  # rank 2
