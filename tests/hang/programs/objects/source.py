"""The ranks do not agree on whose settings count.

ranks: 3
raises: CollectiveMismatchError on all
says: broadcast_object_list | root 0 | root 2
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
chief = 2 if rank == 2 else 0
settings = [{"lr": 0.1 / (rank + 1)}]
dist.broadcast_object_list(settings, src=chief)  # all ranks
