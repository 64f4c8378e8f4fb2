"""Activations and their lengths go over the same tag, in another order than they are received.

ranks: 2
raises: CollectiveMismatchError on 1; PeerFailedError on 0
says: recv | int64 | float32
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
lengths, activations = np.array([3, 4]), np.ones(7, np.float32)
if rank == 0:
    dist.send(lengths, dst=1)  # rank 0
    dist.send(activations, dst=1)
else:
    dist.recv(activations, src=0)  # rank 1
    dist.recv(lengths, src=0)
dist.barrier()  # rank 0
