"""Four float64 fill eight float32: as many bytes, another meaning.

ranks: 2
raises: CollectiveMismatchError on 1; PeerFailedError on 0
says: recv | float32 | float64
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
if rank == 0:
    dist.send(np.ones(4), dst=1)  # rank 0
else:
    dist.recv(np.empty(8, np.float32), src=0)  # rank 1
dist.barrier()  # rank 0
