"""In a halo exchange by batches one side believes in a halo of two cells, the other in one.

ranks: 2
raises: CollectiveMismatchError or PeerFailedError on all
says: irecv | 2 elements | 1 element
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
width = 1 + rank
line, halo = np.full(8, float(rank)), np.empty(width)
ops = [
    dist.P2POp(dist.isend, line[:width], 1 - rank),
    dist.P2POp(dist.irecv, halo, 1 - rank),
]
for work in dist.batch_isend_irecv(ops):  # all ranks
    work.wait()
