"""Two receives into one buffer: what is there in the end is anybody's guess.

ranks: 3
raises: BufferInUseError on 0
says: irecv
names: 0
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.full(5, rank, np.float64)
if rank == 0:
    works = [dist.irecv(x, src=1), dist.irecv(x, src=2)]  # rank 0
    for work in works:
        work.wait()
else:
    dist.send(x, dst=0)
