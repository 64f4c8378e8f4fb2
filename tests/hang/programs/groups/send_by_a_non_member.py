"""A rank outside the group sends to one of its members, which it has no number for there.

ranks: 3
raises: ValueError on 2; PeerFailedError on 0, 1
says: barrier | ValueError | group
names: 2
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
pair = dist.new_group([0, 1])
dist.all_reduce(np.ones(3), group=pair)
if dist.get_rank() == 2:
    time.sleep(1)  # the others are through with their call, which needs nothing of this rank
    dist.send(np.ones(3), 0, group=pair)  # rank 2
dist.barrier()  # ranks 0-1
