"""A large list of objects is sent to a rank that has left.

ranks: 2
raises: PeerExitedError on 0
says: send_object_list | rank 1
names: 1
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
if rank == 0:
    dist.send_object_list([np.ones(100_000)], dst=1)  # rank 0
