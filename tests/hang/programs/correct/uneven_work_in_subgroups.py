"""Two halves make a different number of reductions, then all meet.

ranks: 4
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
mine, steps = (low, 3) if rank < 2 else (high, 40)
x = np.ones(2)
for _ in range(steps):
    time.sleep(0.02)
    dist.all_reduce(x, dist.ReduceOp.AVG, group=mine)
dist.barrier()
