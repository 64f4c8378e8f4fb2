"""One rank reduces a Python list.

ranks: 3
raises: TypeError on 1; CollectiveMismatchError on 0, 2
says: all_reduce | TypeError
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
losses = [0.1, 0.2] if rank == 1 else np.array([0.1, 0.2])
dist.all_reduce(losses)  # all ranks
