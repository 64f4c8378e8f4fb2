"""Rank 1 has returned early, and the others ask again and again whether the reduction is done.

ranks: 3
raises: PeerExitedError on 0, 2
says: all_reduce | ended the program
names: 1
"""

import sys
import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
x = np.ones(3)
if dist.get_rank() == 1:
    sys.exit(0)
work = dist.all_reduce(x, async_op=True)  # ranks 0, 2
while not work.is_completed():
    time.sleep(0.01)
