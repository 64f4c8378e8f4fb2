"""A wrong configuration is found by one rank, which leaves with its own exit code.

ranks: 3
raises: PeerFailedError on 1, 2
says: broadcast | failed: sys.exit(3) (at sys_exit_with_a_code.py:20)
names: 0
code: 3
"""

import sys

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
if rank == 0:
    print("no configuration")
    sys.exit(3)  # rank 0
config = np.empty(4)
dist.broadcast(config, src=0)  # ranks 1-2
