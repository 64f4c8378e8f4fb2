"""A master takes results from anybody; the workers send unequal numbers of them.

ranks: 4
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
result = np.array([float(rank)])
if rank == 0:
    senders = [dist.recv(result) for _ in range(1 + 2 + 3)]
    assert sorted(senders) == [1, 2, 2, 3, 3, 3]
else:
    for _ in range(rank):
        time.sleep(0.2)
        dist.send(result, dst=0)
