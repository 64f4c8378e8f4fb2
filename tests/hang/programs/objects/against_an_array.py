"""One rank takes the objects' function for an array.

ranks: 2
raises: CollectiveMismatchError on all
says: broadcast_object_list | broadcast | [3]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
data = np.arange(3)
if rank == 0:
    dist.broadcast(data, src=0)  # rank 0
else:
    dist.broadcast_object_list([None], src=0)  # rank 1
