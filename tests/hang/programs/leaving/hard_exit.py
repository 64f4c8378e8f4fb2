"""os._exit runs no hook at all; the others must hear of it all the same.

ranks: 3
raises: PeerFailedError on 0, 2
says: barrier
names: 1
recover: yes
"""

import os

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
dist.barrier()
if rank == 1:
    os._exit(4)
dist.barrier()  # ranks 0, 2
