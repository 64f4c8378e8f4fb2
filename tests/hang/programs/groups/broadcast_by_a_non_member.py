"""A rank outside the group joins its broadcast, and names a source that it has no right to.

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
if dist.get_rank() == 2:
    time.sleep(1)  # the others are through with their broadcast, which needs nothing of this rank
dist.broadcast(np.ones(3), src=0, group=pair)  # rank 2
dist.barrier()  # ranks 0-1
