"""A small message is never received: sending it succeeds, and its data is lost.

ranks: 2
raises: report on any
says: send | rank 0 | rank 1 | tag 7
names: 0-1
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(3)
if rank == 0:
    dist.send(x, dst=1, tag=7)  # rank 0
dist.barrier()
