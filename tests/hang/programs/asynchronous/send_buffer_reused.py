"""The next sample is written over one that is still being sent.

ranks: 2
raises: BufferInUseError on 0
says: isend | tensor
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
sample = np.zeros(40)
if rank == 0:
    work = dist.isend(sample, dst=1)  # rank 0
    sample[:] = 1
    work.wait()
else:
    time.sleep(0.5)
    dist.recv(sample, src=0)
dist.barrier()
