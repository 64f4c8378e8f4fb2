"""Barriers: all ranks wait until the last rank has reached the barrier; in a barrier on a group only its members wait.

    mpicoll run -n 4 examples/hello_barrier.py

No rank prints goodbye before all ranks have printed hello. Then all ranks but the last make a barrier on a group of
their own, and leave it while the last rank sleeps.
"""

import sys
import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()


def moments_of_all(moment: float) -> np.ndarray:
    """Gather one moment of each rank (time.monotonic is one clock for all processes of a machine)."""
    moments = np.empty(world)
    dist.all_gather_into_tensor(moments, np.array([moment]))
    return moments


# 1. All ranks.
time.sleep(0.1 * rank)
print(f"rank {rank} of {world}: hello", flush=True)
hello = time.monotonic()
dist.barrier()
goodbye = time.monotonic()
print(f"rank {rank} of {world}: goodbye", flush=True)
if moments_of_all(hello).max() > moments_of_all(goodbye).min():
    sys.exit(f"rank {rank}: a rank said goodbye before all ranks had said hello")

# 2. Some ranks. Every rank calls new_group, also a rank that is not in the group.
early_birds = list(range(max(1, world - 1)))
group = dist.new_group(early_birds)
if rank in early_birds:
    dist.barrier(group)
else:
    time.sleep(1.0)
done = moments_of_all(time.monotonic())
if world > 1 and done[early_birds].max() > done[-1]:
    sys.exit(f"rank {rank}: the group's barrier waited for a rank that is not in the group")
if rank == 0:
    print(f"ranks {early_birds} met in their own barrier", flush=True)

dist.destroy_process_group()
