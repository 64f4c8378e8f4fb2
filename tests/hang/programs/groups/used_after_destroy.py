"""One rank destroys its group one collective too early.

ranks: 2
raises: ValueError on 0; PeerFailedError on 1
says: all_reduce | destroyed
names: 0
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
both = dist.new_group([0, 1])
dist.all_reduce(np.ones(2), group=both)
if rank == 0:
    dist.destroy_process_group(both)
dist.all_reduce(np.ones(2), group=both)  # ranks 0-1
