"""One rank waits for a message, the other for a reduction.

ranks: 2
raises: DeadlockError on all
says: recv | all_reduce | needs rank
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(5)
if rank == 0:
    dist.recv(x, src=1)  # rank 0
else:
    dist.all_reduce(x)  # rank 1
