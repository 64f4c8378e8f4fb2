"""Collectives and messages of nothing at all.

ranks: 2
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
nothing = np.empty(0)
dist.all_reduce(nothing)
dist.broadcast(nothing, src=1)
dist.all_gather([np.empty(0), np.empty(0)], nothing)
if rank == 0:
    dist.send(nothing, dst=1)
else:
    dist.recv(nothing, src=0)
dist.all_to_all_single(np.empty(0), nothing)
