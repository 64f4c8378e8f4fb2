"""A plan is started once more behind the loop, and nobody waits for it.

ranks: 2
raises: report on all
says: all_reduce | waited
names:
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
loss = np.ones(1)
plan = dist.all_reduce_init(loss)
assert plan is not None
for _ in range(3):
    plan.start()
    plan.wait()
plan.start()  # all ranks
dist.barrier()
