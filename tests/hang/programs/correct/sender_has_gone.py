"""A message whose sender has ended before it is received.

ranks: 2
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(3)
if rank == 0:
    dist.send(x, dst=1)
else:
    time.sleep(1.5)
    dist.recv(x, src=0)
