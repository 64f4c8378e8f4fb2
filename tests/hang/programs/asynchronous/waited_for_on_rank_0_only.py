"""Only rank 0 waits, in the branch that prints.

ranks: 3
raises: report on 1, 2
says: all_reduce | waited
names:
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
total = np.ones(1)
work = dist.all_reduce(total, async_op=True)  # ranks 1-2
if rank == 0:
    work.wait()
    print(total)
dist.barrier()
