"""A late log line after destroy_process_group, on all ranks.

ranks: 2
raises: ValueError on all
says: has not been initialized | The last one was destroyed at | used_after_the_end.py:15
names:
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
dist.barrier()
dist.destroy_process_group()
dist.all_reduce(np.ones(1))
