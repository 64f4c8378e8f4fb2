"""Early stopping decided by each rank for itself.

ranks: 4
raises: CollectiveMismatchError on all
says: all_reduce | broadcast | root 0
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
weights, gradient = np.zeros(12), np.ones(12)
patience = 3 if rank == 2 else 5
for epoch in range(10):
    if epoch == patience:
        break
    dist.all_reduce(gradient)  # ranks 0-1, 3
    weights -= gradient
dist.broadcast(weights, src=0)  # rank 2
