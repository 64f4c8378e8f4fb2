"""Every rank waits for its right neighbour, the last one for nobody.

ranks: 4
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
x = np.ones(2)
if rank == size - 1:
    time.sleep(1.5)
else:
    dist.recv(x, src=rank + 1)
if rank > 0:
    dist.send(x, dst=rank - 1)
dist.barrier()
