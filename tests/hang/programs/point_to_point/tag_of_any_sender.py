"""The receiver takes from any rank, with another tag than the senders use; one of these has ended.

ranks: 3
raises: DeadlockError on 0, 2
says: recv | barrier | rank 1 has ended | ranks 1-2 have sent tag 1 | pass the same tag= to its
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
ends = dist.new_group([0, 2])
x = np.ones(3)
if rank == 0:
    dist.recv(x, tag=2)  # rank 0
else:
    dist.send(x, dst=0, tag=1)
if rank != 1:
    dist.barrier(ends)  # rank 2
