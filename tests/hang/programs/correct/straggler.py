"""One rank is two seconds late, three times.

ranks: 3
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
for late in range(size):
    if rank == late:
        time.sleep(2)
    x = np.ones(10)
    dist.all_reduce(x)
    assert (x == size).all()
