"""A check fails on rank 0 when the others have nothing left to do.

ranks: 2
raises: AssertionError on 0
says: AssertionError: the sum is wrong
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.array([1.0])
dist.all_reduce(x)
if rank == 0:
    assert x[0] == 3, "the sum is wrong"
