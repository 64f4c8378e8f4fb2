"""Between two barriers rank 0 shares what it found, but only rank 0 knows.

ranks: 2
raises: CollectiveMismatchError on all
says: barrier | broadcast_object_list
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
dist.barrier()
if rank == 0:
    found = [{"files": 12}]
    dist.broadcast_object_list(found, src=0)  # rank 0
dist.barrier()  # rank 1
