"""The failing rank is deep in its own code while the others wait for its gradient.

ranks: 4
raises: IndexError on 3; PeerFailedError on 0-2
says: all_reduce | IndexError
names: 3
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()


def load(index):
    return [0.1, 0.2, 0.3][index]  # rank 3


gradient = np.full(1000, load(rank))
dist.all_reduce(gradient, dist.ReduceOp.AVG)  # ranks 0-2
