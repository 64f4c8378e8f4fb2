"""A message is asked for, and forgotten.

ranks: 2
raises: report on 1
says: irecv | waited
names:
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(4)
if rank == 0:
    dist.send(x, dst=1)
else:
    work = dist.irecv(x, src=0)  # rank 1
dist.barrier()
