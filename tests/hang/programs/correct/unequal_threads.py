"""One rank reduces from its main thread, the other from a worker thread.

ranks: 2
raises: nothing
"""

import threading

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()


def reduce():
    x = np.ones(5)
    dist.all_reduce(x)
    assert x[0] == 2


if rank == 0:
    reduce()
else:
    worker = threading.Thread(target=reduce)
    worker.start()
    worker.join()
dist.barrier()
