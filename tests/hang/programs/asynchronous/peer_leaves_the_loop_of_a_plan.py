"""One rank's loop is a step shorter: it starts its plan once less, and ends.

ranks: 3
raises: PeerExitedError or PeerFailedError on 0, 1
says: all_reduce | ended
names: 2
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
loss = np.ones(1)
plan = dist.all_reduce_init(loss)
assert plan is not None
for _ in range(20 if rank == 2 else 21):
    plan.start()
    plan.wait()  # ranks 0-1
