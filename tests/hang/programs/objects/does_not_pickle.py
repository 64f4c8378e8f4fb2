"""One rank's object holds a function that no pickle can hold.

ranks: 3
raises: PicklingError or AttributeError or TypeError on 1; CollectiveMismatchError on 0, 2
says: all_gather_object | pickle
"""

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
report = {"rank": rank, "scale": (lambda x: x) if rank == 1 else 1.0}
reports = [None] * size
dist.all_gather_object(reports, report)  # all ranks
