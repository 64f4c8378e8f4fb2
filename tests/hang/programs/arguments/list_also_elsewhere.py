"""One rank passes its list of outputs although it is not the destination.

ranks: 3
raises: ValueError on 2; CollectiveMismatchError on 0, 1
says: gather | gather_list
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
outputs = [np.empty(3) for _ in range(size)] if rank in (0, 2) else None
dist.gather(np.ones(3), outputs, dst=0)  # all ranks
