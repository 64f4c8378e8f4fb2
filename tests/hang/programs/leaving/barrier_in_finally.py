"""Rank 1 fails, and meets the others in the barrier of a ``finally``.

ranks: 3
raises: ValueError on 1; CollectiveMismatchError or PeerFailedError on 0, 2
says: all_reduce | barrier
names: 0-2
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
x = np.ones(4)
try:
    for step in range(4):
        if dist.get_rank() == 1 and step == 2:
            raise ValueError("bad batch")
        dist.all_reduce(x)  # ranks 0, 2
finally:
    dist.barrier()  # rank 1
    dist.destroy_process_group()
