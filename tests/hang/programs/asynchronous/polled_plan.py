"""Rank 1 has returned early, and the others ask a plan that they have started again and again.

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
plan = dist.all_reduce_init(x)
if dist.get_rank() == 1:
    sys.exit(0)
plan.start()  # ranks 0, 2
while not plan.is_completed():
    time.sleep(0.01)
