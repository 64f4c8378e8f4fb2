"""Two groups of the same ranks are used in opposite order, but asynchronously.

ranks: 2
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
x, y = np.ones(300_000), np.ones(3)
order = [(first, x), (second, y)] if rank == 0 else [(second, y), (first, x)]
works = [dist.all_reduce(array, group=group, async_op=True) for group, array in order]
for work in works:
    work.wait()
assert x[0] == y[0] == 2
