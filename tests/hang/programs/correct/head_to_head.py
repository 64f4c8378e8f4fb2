"""Both sides send large messages to each other, in one batch.

ranks: 2
raises: nothing
"""

import time

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
mine, theirs = np.full(1_000_000, float(rank)), np.empty(1_000_000)
ops = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
time.sleep(0.5 * rank)
for work in dist.batch_isend_irecv(ops):
    work.wait()
assert (theirs == 1 - rank).all()
