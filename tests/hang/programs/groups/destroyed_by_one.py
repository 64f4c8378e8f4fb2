"""One rank tears everything down while the others still reduce.

ranks: 3
raises: PeerExitedError or PeerFailedError on 0, 1
says: all_reduce | ended
names: 2
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
dist.barrier()
if rank == 2:
    dist.destroy_process_group()
else:
    dist.all_reduce(np.ones(3))  # ranks 0-1
