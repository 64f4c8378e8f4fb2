"""A rank fails while the others compute for a long time and wait for nobody.

ranks: 3
raises: RuntimeError on 1
says: RuntimeError: out of cheese
"""

import time

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
dist.barrier()
if rank == 1:
    raise RuntimeError("out of cheese")
time.sleep(60)
