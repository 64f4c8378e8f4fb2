"""Buckets are reduced in the order in which their gradients became ready, which differs.

ranks: 2
raises: CollectiveMismatchError on all
says: all_reduce | [300] | [20]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
buckets = [np.ones(300), np.ones(20)]
ready = buckets if rank == 0 else buckets[::-1]
works = [dist.all_reduce(bucket, async_op=True) for bucket in ready]  # all ranks
for work in works:
    work.wait()
