"""The main thread of rank 0 fails while a thread of its own waits for a message.

ranks: 2
raises: KeyError on 0; PeerFailedError on 1
says: rank 0 failed | KeyError: 'main broke'
names: 0
"""

import threading
import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
if dist.get_rank() == 0:
    threading.Thread(target=lambda: dist.recv(np.empty(3), 1)).start()
    time.sleep(1)
    raise KeyError("main broke")
dist.barrier()
