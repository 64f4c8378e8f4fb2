"""Send blocks around a ring until each rank has seen all of them: `isend`, `irecv`, `Work.wait`.

    mpicoll run -n 4 examples/ring.py

Every rank has a block of numbers, and computes the distance of each of its numbers to the nearest number of all ranks.
No rank gathers all blocks. In each step a rank sends its current block to the next rank and receives a block from the
rank before, while it works on the current block. There are as many steps as ranks, and never more than two blocks in memory.
"""

import sys

import numpy as np

import mpicoll as dist

COUNT = 50

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
every = [
    np.random.default_rng(r).uniform(0, 1000, COUNT) for r in range(size)
]  # the blocks of other ranks only serve to check the result
mine = every[rank]


def nearest(block, own):
    """Return the distance of each number of this rank to the nearest other number of a block."""
    distance = np.abs(mine[:, None] - block[None, :])
    if own:
        np.fill_diagonal(distance, np.inf)
    return distance.min(axis=1)


best = np.full(COUNT, np.inf)
held = mine.copy()
for step in range(size):
    works, coming = [], np.empty(COUNT)
    if step < size - 1:
        works = [dist.irecv(coming, (rank - 1) % size), dist.isend(held, (rank + 1) % size)]
    best = np.minimum(best, nearest(held, own=step == 0))  # while the next block moves
    for work in works:
        work.wait()
    held = coming

everything = np.concatenate(every)
distance = np.abs(mine[:, None] - everything[None, :])
distance[np.arange(COUNT), rank * COUNT + np.arange(COUNT)] = np.inf
if not np.array_equal(best, distance.min(axis=1)):
    sys.exit(f"rank {rank}: a nearest number is wrong")
print(f"rank {rank}: the nearest number is {best.mean():.3f} away, on average", flush=True)
dist.destroy_process_group()
