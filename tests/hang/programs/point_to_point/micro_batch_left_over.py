"""The receiving stage of a pipeline stops one micro-batch early.

ranks: 2
raises: report on any
says: send | rank 0 | rank 1 | tag 0
names: 0-1
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
batches = 5 if rank == 0 else 4
x = np.ones(8)
for _ in range(batches):
    if rank == 0:
        dist.send(x, dst=1)  # rank 0
    else:
        dist.recv(x, src=0)
