"""A last barrier "to be safe" that only rank 0 reaches.

ranks: 2
raises: PeerExitedError on 0
says: barrier | ended
names: 1
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
dist.barrier()
if rank == 0:
    print("all done, cleaning up")
    dist.barrier()  # rank 0
