"""Two ranks fail in different ways at the same time, the third waits.

ranks: 3
raises: KeyError on 0; TypeError on 1; PeerFailedError on 2
says: barrier
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
dist.barrier()
if rank == 0:
    {}["learning_rate"]
elif rank == 1:
    len(3)
dist.barrier()  # rank 2
