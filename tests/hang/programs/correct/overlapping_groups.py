"""Overlapping groups, used in one order by all.

ranks: 3
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
for _ in range(5):
    for number, members in enumerate([(0, 1), (1, 2), (0, 2)]):
        if rank in members:
            time.sleep(0.05 * rank)
            dist.all_reduce(np.ones(3), group=pairs[number])
