"""The root scatters the shards that the others expect by broadcast.

ranks: 3
raises: CollectiveMismatchError on all
says: broadcast | scatter | [6]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
shard = np.zeros(6)
if rank == 0:
    dist.scatter(shard, [np.full(6, i, np.float64) for i in range(size)], src=0)  # rank 0
else:
    dist.broadcast(shard, src=0)  # ranks 1-2
