"""Everybody first receives from the left.

ranks: 4
raises: DeadlockError on all
says: recv | needs rank
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
left, right = (rank - 1) % size, (rank + 1) % size
x, y = np.full(2, rank, np.float64), np.empty(2)
dist.recv(y, src=left)  # all ranks
dist.send(x, dst=right)
