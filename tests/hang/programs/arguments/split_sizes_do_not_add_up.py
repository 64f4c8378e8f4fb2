"""One rank's split sizes do not add up to what it has.

ranks: 3
raises: RuntimeError on 1; CollectiveMismatchError on 0, 2
says: all_to_all_single | input_split_sizes | 6 | 5
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
rows, received = np.ones(6), np.empty(6)
splits = [2, 2, 1] if rank == 1 else [2, 2, 2]
dist.all_to_all_single(received, rows, [2, 2, 2], splits)  # all ranks
