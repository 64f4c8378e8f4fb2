"""The receiver expects fewer objects than what is sent.

ranks: 2
raises: CollectiveMismatchError on 1; PeerFailedError on 0
says: recv_object_list | send_object_list | 2 | 3
"""

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
if rank == 0:
    dist.send_object_list(["a", "b", "c"], dst=1)  # rank 0
else:
    dist.recv_object_list([None, None], src=0)  # rank 1
dist.barrier()  # rank 0
