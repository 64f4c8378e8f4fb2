"""The last stage of a pipeline sends to a rank that is not there.

ranks: 3
raises: ValueError on 2; PeerFailedError on 0, 1
says: ValueError | Global rank 3 | barrier
names: 2
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.full(4, float(rank))
if rank > 0:
    dist.recv(x, src=rank - 1)
dist.send(x, dst=rank + 1)  # rank 2
dist.barrier()  # ranks 0-1
