"""In a halo exchange by batches one edge believes in periodic boundaries.

ranks: 3
raises: DeadlockError on all
says: irecv | barrier | from rank 2
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
line = np.full(6, rank, np.float64)
ops = []
if rank > 0 or size == 3:
    ops.append(dist.P2POp(dist.irecv, line[:1], (rank - 1) % size))
if rank < size - 1:
    ops.append(dist.P2POp(dist.isend, line[-2:-1], rank + 1))
for work in dist.batch_isend_irecv(ops):  # rank 0
    work.wait()
dist.barrier()  # ranks 1-2
