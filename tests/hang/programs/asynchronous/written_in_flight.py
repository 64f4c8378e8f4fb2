"""Gradients are scaled while they are still being reduced.

ranks: 2
raises: BufferInUseError on 1
says: all_reduce | tensor
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
gradient = np.ones(64)
if rank == 0:
    time.sleep(0.5)
work = dist.all_reduce(gradient, async_op=True)  # rank 1
if rank == 1:
    gradient *= 0.5
work.wait()
dist.barrier()
