"""A small list of objects is never received: sending it succeeds, and what it holds is lost.

ranks: 2
raises: report on any
says: send_object_list | rank 0 | rank 1
names: 0-1
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
if rank == 0:
    dist.send_object_list([{"best": 0.25}], dst=1)  # rank 0
dist.barrier()
