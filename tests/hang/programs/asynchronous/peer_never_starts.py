"""One rank's hook does not fire: it issues one operation less, and ends.

ranks: 3
raises: PeerExitedError or PeerFailedError on 0, 1
says: all_reduce | ended
names: 2
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
layers = [np.ones(4) for _ in range(3)]
if rank == 2:
    layers.pop()
works = [dist.all_reduce(layer, async_op=True) for layer in layers]  # ranks 0-1
for work in works:
    work.wait()
