"""A large message waits for a receiver that has ended.

ranks: 2
raises: PeerExitedError on 0
says: send | ended
names: 1
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
field = np.ones(2_000_000)
if rank == 0:
    dist.send(field, dst=1)  # rank 0
