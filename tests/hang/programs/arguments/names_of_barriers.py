"""Named barriers: one rank is an epoch behind.

ranks: 3
raises: CollectiveMismatchError on all
says: barrier | epoch 1 | epoch 2
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
epoch = 1 if rank == 2 else 2
dist.barrier(name=f"epoch {epoch}")  # all ranks
