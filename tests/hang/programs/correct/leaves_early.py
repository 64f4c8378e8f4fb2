"""A rank ends early, because nobody needs it any more.

ranks: 3
raises: nothing
"""

import sys
import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
pair = dist.new_group([0, 1])
dist.barrier()
if rank == 2:
    sys.exit(0)
for _ in range(4):
    time.sleep(0.3)
    dist.all_reduce(np.ones(2), group=pair)
