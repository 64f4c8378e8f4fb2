"""The object's class exists on its source only.

ranks: 3
raises: AttributeError on 1, 2; PeerFailedError on 0
says: barrier | AttributeError | Settings
names: 0
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
objects = [None]
if rank == 0:

    class Settings:
        seed = 5

    objects = [Settings()]
dist.broadcast_object_list(objects, src=0)  # ranks 1-2
dist.barrier()  # rank 0
