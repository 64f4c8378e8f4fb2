"""The final evaluation on rank 0 contains a reduction, when the others have ended.

ranks: 3
raises: PeerExitedError on 0
says: reduce | ended
names: 0
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
score = np.array([0.7])
dist.all_reduce(score)
if rank == 0:
    dist.reduce(score, dst=0)  # rank 0
    print("final score", score[0] / size)
