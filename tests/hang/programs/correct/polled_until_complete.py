"""Works that are never waited for, because the program has seen that they are complete.

ranks: 2
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x, y = np.ones(4), np.ones(50_000)
work = dist.all_reduce(x, async_op=True)
time.sleep(0.5 * rank)
while not work.is_completed():
    time.sleep(0.01)
future = dist.all_reduce(y, async_op=True).get_future()
future.result()
assert x[0] == y[0] == 2
