"""A large message is started and waited for; its receiver went to the barrier.

ranks: 2
raises: DeadlockError on all
says: isend | barrier
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
field = np.ones(1_000_000)
if rank == 0:
    work = dist.isend(field, dst=1)  # rank 0
    work.wait()
dist.barrier()  # rank 1
