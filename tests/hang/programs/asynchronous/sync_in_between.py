"""One rank slips a synchronous reduction between two asynchronous ones.

ranks: 2
raises: CollectiveMismatchError on all
says: all_reduce | [1] | [50]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
first, second, norm = np.ones(50), np.ones(50), np.ones(1)
works = [dist.all_reduce(first, async_op=True)]
if rank == 1:
    dist.all_reduce(norm)  # rank 1
works.append(dist.all_reduce(second, async_op=True))  # rank 0
for work in works:
    work.wait()
