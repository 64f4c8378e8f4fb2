"""Rank 0 forgets the releasing barrier and ends.

ranks: 3
raises: PeerExitedError or PeerFailedError on 1, 2
says: barrier | ended
names: 0
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
if rank == 0:
    print("prepared")
else:
    dist.barrier()  # ranks 1-2
    print("loaded")
