"""Exceptions of the program's own, and a mismatch that all ranks handle: the group is still good.

ranks: 3
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
try:
    [][rank]
except IndexError:
    pass
x = np.ones(2 if rank else 3)
try:
    dist.all_reduce(x)
except dist.CollectiveMismatchError:
    x = np.ones(2)
dist.all_reduce(x)
assert (x == size).all()
