"""After one extra call everything fits but shifted by one: equal calls hide it until another one comes.

ranks: 2
raises: CollectiveMismatchError on all
says: all_reduce | broadcast | root 0
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
loss = np.zeros(1)
if rank == 0:
    dist.all_reduce(loss)  # the warm-up that only rank 0 makes
for _ in range(5):
    dist.all_reduce(loss)  # rank 0
    loss /= size
dist.broadcast(loss, src=0)  # rank 1
