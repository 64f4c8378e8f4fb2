"""A message sent on the world is looked for on a group of the same ranks, and the sender's program is over.

ranks: 2
raises: PeerExitedError on 1
says: recv | rank 0 ended the program | Not received so far: tag 0 from rank 0 on group WORLD | pass the same group= to its
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
pipe = dist.new_group([0, 1])
x = np.ones(3)
if rank == 0:
    dist.send(x, dst=1)
else:
    dist.recv(x, src=0, group=pipe)  # rank 1
