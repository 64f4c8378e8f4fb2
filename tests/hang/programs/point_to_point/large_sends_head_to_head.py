"""Both send before they receive: small messages forgive it, large ones do not.

ranks: 2
raises: DeadlockError on all
says: send | [3000000]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
mine, theirs = np.ones(3_000_000), np.empty(3_000_000)
dist.send(mine, dst=1 - rank)  # all ranks
dist.recv(theirs, src=1 - rank)
