"""Send an array from one rank to another: first with blocking calls, then with work between start and wait.

    mpicoll run -n 2 examples/send_recv.py

Both ranks print 1.0, twice. (Ranks from 2 on, if there are any, do nothing.)
"""

import sys

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
if world < 2:
    sys.exit("send_recv.py needs two ranks: mpicoll run -n 2 examples/send_recv.py")

# 1. Blocking: the calls return when the array may be written again (send), or read (recv).
tensor = np.zeros(1)
if rank == 0:
    tensor += 1
    dist.send(tensor, dst=1)
elif rank == 1:
    dist.recv(tensor, src=0)
if rank < 2:
    print(f"rank {rank} holds {tensor[0]} after send and recv", flush=True)
blocking = tensor[0]

# 2. Immediate: the calls return at once; the array belongs to the library until wait() has returned.
tensor = np.zeros(1)
work = None
if rank == 0:
    tensor += 1
    work = dist.isend(tensor, dst=1)
elif rank == 1:
    work = dist.irecv(tensor, src=0)
# ... compute something else here ...
if work is not None:
    work.wait()
    print(f"rank {rank} holds {tensor[0]} after isend, irecv and wait", flush=True)

if rank < 2 and (blocking, tensor[0]) != (1.0, 1.0):
    sys.exit(f"rank {rank}: expected 1.0 twice")
dist.destroy_process_group()
