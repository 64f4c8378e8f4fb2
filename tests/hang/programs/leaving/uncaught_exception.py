"""One rank fails between two collectives.

ranks: 3
raises: ValueError on 1; PeerFailedError on 0, 2
says: barrier | ValueError: bad sample 17
names: 1
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
dist.barrier()
if rank == 1:
    raise ValueError("bad sample 17")  # rank 1
dist.barrier()  # ranks 0, 2
