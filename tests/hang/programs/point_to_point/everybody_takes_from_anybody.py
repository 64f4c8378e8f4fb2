"""A pool of workers in which all wait for work and nobody gives any.

ranks: 3
raises: DeadlockError on all
says: recv | any rank
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
task = np.empty(1)
dist.recv(task)  # all ranks
dist.send(task + 1, dst=(rank + 1) % size)
