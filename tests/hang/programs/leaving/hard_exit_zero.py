"""os._exit(0) looks like success to the launcher, and leaves two ranks in a reduction.

ranks: 3
raises: PeerFailedError on 1, 2
says: all_reduce
names: 0
recover: yes
"""

import os

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(5)
dist.all_reduce(x)
if rank == 0:
    os._exit(0)
dist.all_reduce(x)  # ranks 1-2
