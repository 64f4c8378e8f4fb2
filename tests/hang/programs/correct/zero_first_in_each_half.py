"""The first rank of each half prepares for its half, one of them slowly.

ranks: 4
raises: nothing
"""

import time

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
half = halves[rank // 2]
first = dist.get_rank(half) == 0
if not first:
    dist.barrier(half)
if first:
    time.sleep(0.1 + 0.5 * (rank == 2))
    dist.barrier(half)
