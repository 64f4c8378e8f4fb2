"""A group made by its members alone; one of those listed does something else.

ranks: 3
raises: DeadlockError on all
says: new_group | barrier | needs rank
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
if rank == 2:
    dist.barrier()  # rank 2
else:
    group = dist.new_group([0, 1, 2], use_local_synchronization=True)  # ranks 0-1
dist.barrier()
