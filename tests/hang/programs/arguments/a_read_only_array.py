"""One rank's weights are mapped from a file that is only read.

ranks: 2
raises: ValueError or TypeError or RuntimeError on 1; CollectiveMismatchError on 0
says: broadcast | rank 1
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
weights = np.zeros(8)
if rank == 1:
    weights.flags.writeable = False
dist.broadcast(weights, src=0)  # all ranks
