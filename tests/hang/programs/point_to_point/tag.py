"""The sender counts its tags from one, the receiver from zero.

ranks: 2
raises: DeadlockError on all
says: recv | barrier | tag 1 | tag 2 | pass the same tag= to its
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(3)
if rank == 0:
    dist.send(x, dst=1, tag=1)
    dist.barrier()  # rank 0
else:
    dist.recv(x, src=0, tag=2)  # rank 1
    dist.barrier()
