"""A rank swallows the exception of its own data and ends its program as if nothing had been.

ranks: 2
raises: PeerExitedError on 0
says: all_reduce | ended
names: 1
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
try:
    sample = [1.0, 2.0][rank * 2]
    x = np.array([sample])
    dist.all_reduce(x)  # rank 0
except IndexError:
    print("no data here, never mind")
