"""An all_to_all meets an all_gather of the same blocks: raw MPI may well move something.

ranks: 2
raises: CollectiveMismatchError on all
says: all_to_all_single | all_gather_into_tensor
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
mine, all_of_them = np.full(4, rank, np.int32), np.empty(8, np.int32)
if rank == 0:
    dist.all_gather_into_tensor(all_of_them, mine)  # rank 0
else:
    dist.all_to_all_single(all_of_them, np.tile(mine, 2))  # rank 1
