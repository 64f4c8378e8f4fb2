"""Many asynchronous reductions, waited for from the last to the first, late on one rank.

ranks: 3
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
buckets = [np.full(n, 1.0) for n in range(1, 30)]
works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
time.sleep(0.3 * rank)
for work in reversed(works):
    work.wait()
assert all((bucket == size).all() for bucket in buckets)
