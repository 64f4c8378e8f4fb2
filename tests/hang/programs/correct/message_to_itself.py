"""isend and irecv may be of one rank.

ranks: 2
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x, y = np.full(3, float(rank)), np.empty(3)
works = [dist.isend(x, dst=rank), dist.irecv(y, src=rank)]
for work in works:
    work.wait()
assert (y == rank).all()
