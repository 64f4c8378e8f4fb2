"""A large message is under way while both ranks pass a barrier.

ranks: 2
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
field = np.full(1_000_000, float(rank))
if rank == 0:
    work = dist.isend(field, dst=1)
    dist.barrier()
    work.wait()
else:
    time.sleep(0.5)
    dist.barrier()
    time.sleep(0.5)
    dist.recv(field, src=0)
    assert field.sum() == 0
