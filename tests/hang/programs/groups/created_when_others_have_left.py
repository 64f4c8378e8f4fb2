"""Rank 0 makes a group for its clean-up when the others have ended.

ranks: 2
raises: PeerExitedError on 0
says: new_group | ended
names: 1
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
dist.barrier()
if rank == 0:
    everybody = dist.new_group()  # rank 0
