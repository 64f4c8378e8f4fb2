"""The download fails on rank 0, and the others wait for its release.

ranks: 4
raises: ConnectionError on 0; PeerFailedError on 1-3
says: barrier | ConnectionError: no route to data
names: 0
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
if rank != 0:
    dist.barrier()  # ranks 1-3
if rank == 0:
    raise ConnectionError("no route to data")  # rank 0
if rank == 0:
    dist.barrier()
