"""An iterative solver that stops when its own residual is small, not everybody's.

ranks: 4
raises: CollectiveMismatchError on all
says: all_reduce | gather | MAX
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
residual, halo = 1.0, np.ones(6)
while residual > 1e-3:
    dist.all_reduce(halo, dist.ReduceOp.MAX)  # ranks 1-3
    residual *= 0.1 if rank == 0 else 0.5
parts = [np.empty(6) for _ in range(size)] if rank == 0 else None
dist.gather(halo, parts, dst=0)  # rank 0
