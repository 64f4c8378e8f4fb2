"""A thread that only draws a progress bar lives beside a straggler.

ranks: 2
raises: nothing
"""

import threading
import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
done = threading.Event()
bar = threading.Thread(target=done.wait, daemon=True)
bar.start()
if rank == 1:
    time.sleep(3)
dist.all_reduce(np.ones(5))
done.set()
bar.join()
