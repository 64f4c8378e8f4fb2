"""A ring of large messages, every rank receiving before it sends, from its irecv.

ranks: 4
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
left, right = (rank - 1) % size, (rank + 1) % size
block, incoming = np.full(500_000, float(rank)), np.empty(500_000)
for _ in range(size):
    work = dist.irecv(incoming, left)
    dist.send(block, right)
    work.wait()
    block, incoming = incoming, block
assert (block == rank).all()
