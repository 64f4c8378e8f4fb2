"""The ranks do not agree on who is still in.

ranks: 3
raises: CollectiveMismatchError on all
says: new_group | 0, 1, 2 | 0, 1
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
alive = [0, 1] if rank == 0 else [0, 1, 2]
survivors = dist.new_group(alive)  # all ranks
