"""Each rank first talks to its right neighbour's group: nobody ever starts with the left one.

ranks: 3
raises: DeadlockError on all
says: all_reduce | [5]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
pairs = [dist.new_group([i, (i + 1) % size]) for i in range(size)]
edge = np.full(5, rank, np.float64)
dist.all_reduce(edge, group=pairs[rank])  # all ranks
dist.all_reduce(edge, group=pairs[rank - 1])
