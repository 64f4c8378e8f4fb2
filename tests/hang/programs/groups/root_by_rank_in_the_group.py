"""src= is a global rank; here it was meant as the rank in the group, on one side only.

ranks: 4
raises: CollectiveMismatchError on 2, 3; PeerFailedError on 0, 1
says: broadcast | root 2 | root 3
names: 2-3
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
upper = dist.new_group([2, 3])
x = np.ones(3)
if rank == 2:
    dist.broadcast(x, src=2, group=upper)  # rank 2
elif rank == 3:
    dist.broadcast(x, group_src=1, group=upper)  # rank 3
dist.barrier()  # ranks 0-1
