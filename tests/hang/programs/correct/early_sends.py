"""Messages are sent long before they are received, with collectives in between.

ranks: 2
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.empty(2)
if rank == 0:
    for tag in range(5):
        dist.send(np.full(2, float(tag)), dst=1, tag=tag)
dist.barrier()
dist.all_reduce(np.ones(3))
if rank == 1:
    for tag in reversed(range(5)):
        dist.recv(x, src=0, tag=tag)
        assert (x == tag).all()
