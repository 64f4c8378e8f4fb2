"""Let rank 0 run a block before the other ranks run it: download, unpack, compile, fill a cache.

    mpicoll run -n 4 examples/rank0_first.py

Rank 0 writes a file while the other ranks wait in a barrier *before* the block. Rank 0 makes its barrier *after* the block, which
releases the other ranks. The calls are on different lines, but lines are not compared: each rank makes one barrier.
"""

import os
import sys
import tempfile
import time

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()

# All ranks use the same path: rank 0 chooses it.
paths = [os.path.join(tempfile.mkdtemp(), "data.txt") if rank == 0 else None]
dist.broadcast_object_list(paths, src=0)
path = paths[0]

if rank != 0:
    dist.barrier()

# The block: rank 0 runs it first, then all other ranks run it at the same time.
if os.path.exists(path):
    print(f"rank {rank}: found what rank 0 has prepared", flush=True)
    prepared_here = False
else:
    print(f"rank {rank}: preparing {path}", flush=True)
    time.sleep(0.5)
    with open(path, "w") as file:
        file.write("ready")
    prepared_here = True
with open(path) as file:
    content = file.read()

if rank == 0:
    dist.barrier()

if prepared_here != (rank == 0) or content != "ready":
    sys.exit(f"rank {rank}: the block did not run on rank 0 first")

dist.barrier()  # all ranks have read the file
if rank == 0:
    os.remove(path)
    os.rmdir(os.path.dirname(path))
dist.destroy_process_group()
