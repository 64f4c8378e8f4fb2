"""Rank 0 prepares while the others wait in a barrier that it calls from another line.

ranks: 4
raises: nothing
"""

import time

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
for _ in range(3):
    if rank != 0:
        dist.barrier()
    time.sleep(0.2 if rank == 0 else 0.01)
    if rank == 0:
        dist.barrier()
