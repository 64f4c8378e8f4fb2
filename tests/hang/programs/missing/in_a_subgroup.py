"""One member of a sub-group leaves its reduction out and goes to the barrier of all.

ranks: 4
raises: DeadlockError on all
says: all_reduce | barrier | needs rank 3
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
odd = dist.new_group([1, 3])
x = np.ones(2)
if rank == 1:
    dist.all_reduce(x, group=odd)  # rank 1
dist.barrier()  # ranks 0, 2-3
