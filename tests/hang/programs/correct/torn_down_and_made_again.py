"""The default group is destroyed and made again, with a late rank in between.

ranks: 2
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
dist.all_reduce(np.ones(2))
dist.destroy_process_group()
time.sleep(0.6 * rank)
dist.init_process_group()
x = np.ones(2)
dist.all_reduce(x)
assert (x == 2).all()
dist.destroy_process_group()
