"""Calls that no line of Python makes: an exit handler, and a thread that runs one alone.

ranks: 2
raises: nothing
"""

import _thread
import atexit
import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
atexit.register(dist.barrier)
x = np.ones(3)
_thread.start_new_thread(dist.all_reduce, (x,))
while (x == 1).all():
    time.sleep(0.01)
dist.barrier()
