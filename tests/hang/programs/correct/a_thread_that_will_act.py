"""A thread waits for a message, while the main thread will do what the other rank waits for.

ranks: 2
raises: nothing
"""

import threading
import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
group = dist.new_group()
x = np.ones(4)
if rank == 0:
    thread = threading.Thread(target=lambda: dist.recv(np.empty(4), src=1, group=group))
    thread.start()
    time.sleep(1.5)
    dist.send(x, dst=1)
    thread.join()
else:
    dist.recv(x, src=0)
    dist.send(x, dst=0, group=group)
