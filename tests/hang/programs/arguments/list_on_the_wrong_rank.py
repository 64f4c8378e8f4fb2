"""The list to scatter is made on rank 1, but the root is rank 0.

ranks: 2
raises: ValueError on all
says: scatter | scatter_list
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
part = np.empty(2)
parts = [np.zeros(2), np.ones(2)] if rank == 1 else None
dist.scatter(part, parts, src=0)  # all ranks
