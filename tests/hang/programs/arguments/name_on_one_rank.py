"""A barrier has a name on one rank only: it is another one.

ranks: 2
raises: CollectiveMismatchError on all
says: barrier | after the load
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
if rank == 0:
    dist.barrier(name="after the load")  # rank 0
else:
    dist.barrier()  # rank 1
