"""A rank gets SIGTERM, as from a batch system, while the others wait for it.

ranks: 2
raises: PeerFailedError or report on 0
says: recv
names: 1
"""

import os
import signal
import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.empty(3)
if rank == 0:
    dist.recv(x, src=1)  # rank 0
else:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
