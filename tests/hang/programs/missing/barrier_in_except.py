"""A rank that hits a bad file waits for the others in an except clause that only it enters.

ranks: 3
raises: CollectiveMismatchError on all
says: barrier | all_reduce | [4]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(4)
for shard in range(3):
    try:
        if rank == 1 and shard == 2:
            raise OSError("shard 2 is damaged")
        dist.all_reduce(x)  # ranks 0, 2
    except OSError:
        dist.barrier()  # rank 1
