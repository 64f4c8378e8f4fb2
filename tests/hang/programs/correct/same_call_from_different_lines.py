"""The same collective is called from two branches.

ranks: 3
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(4)
if rank == 0:
    x *= 2
    dist.all_reduce(x)
else:
    dist.all_reduce(x)
assert (x == 4).all()
