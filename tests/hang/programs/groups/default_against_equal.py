"""A group of all ranks is not the default group.

ranks: 3
raises: DeadlockError on all
says: all_reduce | WORLD
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
everybody = dist.new_group(list(range(size)))
x = np.ones(2)
if rank == 1:
    dist.all_reduce(x)  # rank 1
else:
    dist.all_reduce(x, group=everybody)  # ranks 0, 2
