"""An extension module crashes on one rank.

ranks: 2
raises: PeerFailedError or report on 1
says: barrier
names: 0
"""

import ctypes

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
dist.barrier()
if rank == 0:
    ctypes.string_at(0)
dist.barrier()  # rank 1
