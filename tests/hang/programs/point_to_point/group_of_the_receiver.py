"""A message sent on the world is looked for on a group of the same ranks.

ranks: 2
raises: DeadlockError on all
says: recv | barrier | it has sent tag 0 on group WORLD | pass the same group=
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
pipe = dist.new_group([0, 1])
x = np.ones(3)
if rank == 0:
    dist.send(x, dst=1)
    dist.barrier()  # rank 0
else:
    dist.recv(x, src=0, group=pipe)  # rank 1
    dist.barrier()
