"""One rank takes the maximum of what the others add.

ranks: 4
raises: CollectiveMismatchError on all
says: all_reduce | SUM | MAX
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
norm = np.array([rank + 0.5])
if rank == 3:
    dist.all_reduce(norm, dist.ReduceOp.MAX)  # rank 3
else:
    dist.all_reduce(norm, dist.ReduceOp.SUM)  # ranks 0-2
