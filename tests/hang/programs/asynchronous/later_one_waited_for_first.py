"""Rank 1 has issued two reductions in the other order, and waits for the later one first.

ranks: 3
raises: CollectiveMismatchError on 0, 1, 2
says: all_reduce | float64
names: 1
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
first, second = np.zeros(100), np.zeros(200)
if dist.get_rank() == 1:
    first, second = second, first
works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]  # ranks 0, 1, 2
if dist.get_rank() == 1:
    works.reverse()
for work in works:
    work.wait()
