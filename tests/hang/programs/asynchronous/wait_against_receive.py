"""A rank waits for a reduction that its peer will only join after a message from it.

ranks: 2
raises: DeadlockError on all
says: all_reduce | recv
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x, token = np.ones(6), np.zeros(1)
if rank == 0:
    work = dist.all_reduce(x, async_op=True)  # rank 0
    work.wait()
    dist.send(token, dst=1)
else:
    dist.recv(token, src=0)  # rank 1
    dist.all_reduce(x)
