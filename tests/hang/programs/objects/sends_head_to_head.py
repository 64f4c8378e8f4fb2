"""Both send their results before they receive: small ones forgive it, large ones do not.

ranks: 2
raises: DeadlockError on all
says: send_object_list | 1
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
mine, theirs = [{"rank": rank, "table": np.ones(100_000)}], [None]
dist.send_object_list(mine, dst=1 - rank)  # all ranks
dist.recv_object_list(theirs, src=1 - rank)
