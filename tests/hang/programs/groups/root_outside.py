"""The source is a rank of the world, but not of the group.

ranks: 3
raises: ValueError on 0, 1; PeerFailedError on 2
says: ValueError | 2 | group
names: 2
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
pair = dist.new_group([0, 1])
if rank < 2:
    dist.broadcast(np.ones(3), src=2, group=pair)  # ranks 0-1
dist.barrier()  # rank 2
