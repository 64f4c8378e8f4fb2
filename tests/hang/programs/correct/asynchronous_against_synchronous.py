"""One rank is asynchronous where the others wait.

ranks: 3
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
for elements in (4, 200_000):
    x = np.ones(elements)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.5)
        work.wait()
    else:
        dist.all_reduce(x)
    assert (x == size).all()
