"""A timer of rank 1 sends, some seconds after both ranks have begun to wait, what releases them.

ranks: 2
raises: nothing
"""

import threading

import numpy as np

import mpicoll as dist

dist.init_process_group()
a, b = np.ones(3), np.empty(3)
if dist.get_rank() == 1:
    threading.Timer(4, dist.send, (a, 0)).start()
    dist.recv(b, 0)
else:
    dist.recv(b, 1)
    dist.send(a, 1)
