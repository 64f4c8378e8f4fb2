"""The ranks disagree on how much one of them brings.

ranks: 3
raises: CollectiveMismatchError on all
says: all_gather | 4 | 5
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
counts = [3, 4, 5] if rank == 0 else [3, 4, 4]
counts[rank] = [3, 4, 4][rank]
outputs = [np.empty(count) for count in counts]
dist.all_gather(outputs, np.ones(counts[rank]))  # all ranks
