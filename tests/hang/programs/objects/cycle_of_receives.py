"""Everybody first receives the object of the left.

ranks: 3
raises: DeadlockError on all
says: recv_object_list | needs rank
"""

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
left, right = (rank - 1) % size, (rank + 1) % size
theirs = [None]
dist.recv_object_list(theirs, src=left)  # all ranks
dist.send_object_list([rank], dst=right)
