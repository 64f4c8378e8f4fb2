"""Gradients are cut into shards by a rule that one rank applies differently.

ranks: 2
raises: CollectiveMismatchError on all
says: reduce_scatter | 5 | 4
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
gradient = np.ones(9)
at = 5 if rank == 0 else 4
shards = [gradient[:at], gradient[at:]]
dist.reduce_scatter(np.empty(shards[rank].size), shards)  # all ranks
