"""A rank that has no work ends with sys.exit(0), but the others count on it.

ranks: 3
raises: PeerExitedError or PeerFailedError on 0, 1
says: all_gather | ended
names: 2
"""

import sys

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
tasks = list(range(2))
if rank >= len(tasks):
    sys.exit(0)
parts = [np.empty(1) for _ in range(size)]
dist.all_gather(parts, np.array([float(rank)]))  # ranks 0-1
