"""Only rank 0 logs the global loss, so only rank 0 asks for it.

ranks: 3
raises: CollectiveMismatchError on all
says: all_reduce | [1] | [100]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
gradient, loss = np.ones(100), np.array([0.5])
for _ in range(3):
    if rank == 0:
        dist.all_reduce(loss)  # rank 0
        print("loss", loss / size)
    dist.all_reduce(gradient)  # ranks 1-2
