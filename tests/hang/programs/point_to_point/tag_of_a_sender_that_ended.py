"""The receiver waits for another tag than was sent, and the sender's program is over.

ranks: 2
raises: DeadlockError on 1
says: recv | which has ended (it has sent tag 1) | pass the same tag= to its
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(3)
if rank == 0:
    dist.send(x, dst=1, tag=1)
else:
    dist.recv(x, src=0, tag=2)  # rank 1
