"""Rank 1 leaves out a barrier and ends: with most libraries rank 0 waits for ever; here it is told who is missing.

    mpicoll run -n 2 examples/missing_barrier.py

Rank 0 gets PeerExitedError within a second of rank 1's end. The message names the barrier that it waits in and where, and
the one after which rank 1 ended. Nothing catches it here, so the job ends with exit code 1: this is how it should end.
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()

dist.barrier()
print(f"rank {rank}: past the first barrier", flush=True)
if rank != 1:
    dist.barrier()
    print(f"rank {rank}: past the second barrier", flush=True)
