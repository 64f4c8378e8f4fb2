"""A rank computes for seconds without ever giving up the interpreter lock.

ranks: 2
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
if rank == 0:
    digits = 3**6_000_000 % 7
    assert digits == 1
parts = [np.empty(1) for _ in range(size)]
dist.all_gather(parts, np.array([float(rank)]))
if rank == 1:
    digits = 5**4_000_000 % 3
dist.barrier()
