"""The list for the gathered objects is too short on one rank.

ranks: 2
raises: ValueError or RuntimeError on 1; CollectiveMismatchError on 0
says: all_gather_object | object_list | 1 | 2
"""

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
names = [None] * (1 if rank == 1 else size)
dist.all_gather_object(names, f"node{rank}")  # all ranks
