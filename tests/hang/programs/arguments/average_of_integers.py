"""AVG has no meaning on integers, on any rank.

ranks: 2
raises: RuntimeError on all
says: all_reduce | AVG | int64
names:
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
steps = np.array([100 + rank])
dist.all_reduce(steps, dist.ReduceOp.AVG)  # all ranks
