"""Two ranks exchange something by mpi4py itself, while the third waits for one of them.

ranks: 3
raises: nothing
"""

import time

import numpy as np
from mpi4py import MPI

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.ones(3)
if rank == 0:
    dist.recv(x, src=1)
elif rank == 1:
    assert MPI.COMM_WORLD.recv(source=2) == "late"
    dist.send(x, dst=0)
else:
    time.sleep(1.5)
    MPI.COMM_WORLD.send("late", dest=1)
dist.barrier()
