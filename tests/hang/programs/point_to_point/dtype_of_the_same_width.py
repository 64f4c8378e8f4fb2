"""Token ids are sent as int32 and received as float32.

ranks: 2
raises: CollectiveMismatchError on 0; PeerFailedError on 1
says: recv | float32 | int32
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
if rank == 1:
    dist.send(np.arange(16, dtype=np.int32), dst=0)  # rank 1
else:
    dist.recv(np.empty(16, np.float32), src=1)  # rank 0
dist.barrier()  # rank 1
