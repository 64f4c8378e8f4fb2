"""The source sends two objects, the others make room for three.

ranks: 2
raises: CollectiveMismatchError on all
says: broadcast_object_list | 2 | 3
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
objects = ["config", "vocabulary"] if rank == 0 else [None] * 3
dist.broadcast_object_list(objects, src=0)  # all ranks
