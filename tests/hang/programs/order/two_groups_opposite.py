"""Two groups of the same ranks, one for data and one for control, are used in opposite order.

ranks: 2
raises: DeadlockError on all
says: all_reduce | barrier
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
data, control = dist.new_group([0, 1]), dist.new_group([0, 1])
x = np.ones(8)
if rank == 0:
    dist.all_reduce(x, group=data)  # rank 0
    dist.barrier(control)
else:
    dist.barrier(control)  # rank 1
    dist.all_reduce(x, group=data)
