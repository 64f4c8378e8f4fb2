"""One rank of a pair averages over the world instead of its pair.

ranks: 4
raises: DeadlockError on all
says: all_reduce | barrier | WORLD
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
x = np.ones(6)
if rank == 3:
    dist.all_reduce(x)  # rank 3
else:
    dist.all_reduce(x, group=pairs[rank // 2])  # rank 2
dist.barrier()  # ranks 0-1
