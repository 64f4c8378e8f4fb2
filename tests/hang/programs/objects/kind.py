"""One rank broadcasts objects where the others gather them.

ranks: 3
raises: CollectiveMismatchError on all
says: broadcast_object_list | all_gather_object
"""

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
settings = [{"seed": rank}] * size
if rank == 0:
    dist.broadcast_object_list(settings, src=0)  # rank 0
else:
    dist.all_gather_object(settings, {"seed": rank})  # ranks 1-2
