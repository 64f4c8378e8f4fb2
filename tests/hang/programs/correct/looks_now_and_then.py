"""A rank looks every now and then whether a message has come.

ranks: 2
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.zeros(1)
if rank == 0:
    work = dist.irecv(x, src=1)
    while not work.is_completed():
        time.sleep(0.05)
    work.wait()
else:
    time.sleep(1)
    dist.send(np.ones(1), dst=0)
