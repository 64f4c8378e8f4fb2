"""A halo is received into what is being sent.

ranks: 2
raises: BufferInUseError on all
names: 0
says: isend | irecv
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
field = np.full(10, rank, np.float64)
other = 1 - rank
works = [
    dist.isend(field[1:], other),  # all ranks
    dist.irecv(field[:-1], other),  # all ranks
]
for work in works:
    work.wait()
