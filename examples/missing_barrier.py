"""Rank 1 ends without a barrier: with most libraries rank 0 waits without end; here rank 0 gets an error that names rank 1.

    mpicoll run -n 2 examples/missing_barrier.py

Rank 0 raises PeerExitedError within a second of rank 1's end. The message names the barrier of rank 0, with its line, and the
last barrier of rank 1. The program does not catch the error, so the job ends with exit code 1, as intended.
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()

dist.barrier()
print(f"rank {rank}: past the first barrier", flush=True)
if rank != 1:
    dist.barrier()
    print(f"rank {rank}: past the second barrier", flush=True)
