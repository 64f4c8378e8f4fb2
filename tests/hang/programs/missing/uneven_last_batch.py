"""The data set does not divide evenly: rank 0 has one batch more than the others, which end.

ranks: 3
raises: PeerExitedError on 0
says: all_reduce | ended
names: 0
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
samples = np.arange(10 * size + 1)[rank::size]
gradient = np.zeros(16)
for batch in samples.reshape(-1, 1):
    gradient[:] = batch
    dist.all_reduce(gradient, dist.ReduceOp.AVG)  # rank 0
