"""The list on the root is one array short, because it leaves itself out.

ranks: 3
raises: ValueError or RuntimeError on 0; CollectiveMismatchError on 1, 2
says: gather | gather_list
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
mine = np.array([rank * 1.0])
others = [np.empty(1) for _ in range(size - 1)] if rank == 0 else None
dist.gather(mine, others, dst=0)  # all ranks
