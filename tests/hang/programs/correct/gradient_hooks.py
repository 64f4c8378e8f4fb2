"""Bucket after bucket is reduced in its sub-group while the backward pass goes on, then all meet.

ranks: 4
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
pair = pairs[rank // 2]
for _ in range(10):
    buckets = [np.full(5000, 1.0) for _ in range(4)]
    works = []
    for bucket in buckets:
        time.sleep(0.003 * rank)
        works.append(dist.all_reduce(bucket, group=pair, async_op=True))
    norm = np.array([1.0])
    dist.all_reduce(norm)
    for work in works:
        work.wait()
    assert all((bucket == 2).all() for bucket in buckets)
