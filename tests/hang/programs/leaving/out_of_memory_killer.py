"""A rank is killed by signal 9, as by the kernel when memory runs out.

ranks: 3
raises: PeerFailedError or report on any
says: all_reduce
names: 2
"""

import os
import signal

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
x = np.ones(1000)
for step in range(5):
    if (rank, step) == (2, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)  # ranks 0-1
    x /= size
