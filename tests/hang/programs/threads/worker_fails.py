"""A thread that prefetches and reduces fails on one rank; the others wait for its part.

ranks: 3
raises: ValueError on 1; PeerFailedError on 0, 2
says: all_reduce | ValueError | no more samples
names: 1
"""

import threading

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()


def prefetch():
    for step in range(4):
        if (rank, step) == (1, 2):
            raise ValueError("no more samples")  # rank 1
        dist.all_reduce(np.ones(7))  # ranks 0, 2


worker = threading.Thread(target=prefetch)
worker.start()
worker.join()
