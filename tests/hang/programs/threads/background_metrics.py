"""A background thread on rank 0 reduces its metrics amid the training of all.

ranks: 2
raises: CollectiveMismatchError on all
says: all_reduce | [1] | [10]
"""

import threading

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()


def publish():
    dist.all_reduce(np.array([0.5]))  # rank 0


x = np.ones(10)
dist.all_reduce(x)
if rank == 0:
    thread = threading.Thread(target=publish)
    thread.start()
    thread.join()
dist.all_reduce(x)  # rank 1
