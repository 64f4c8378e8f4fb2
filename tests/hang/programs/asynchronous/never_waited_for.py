"""The Work is dropped: nobody ever learns whether the gradients are there.

ranks: 2
raises: report on all
says: all_reduce | waited
names:
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
gradient = np.ones(1000)
dist.all_reduce(gradient, async_op=True)  # all ranks
dist.barrier()
