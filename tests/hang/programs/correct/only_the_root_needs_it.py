"""Lists are given on the root only, as None or as an empty list elsewhere.

ranks: 3
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
mine = np.array([rank * 1.0])
parts = [np.empty(1) for _ in range(size)]
dist.gather(mine, parts if rank == 1 else None, dst=1)
dist.scatter(mine, parts if rank == 1 else [], src=1)
assert mine[0] == rank
