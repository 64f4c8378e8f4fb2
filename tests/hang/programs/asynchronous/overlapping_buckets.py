"""Two buckets of gradients share elements, and both are reduced at once.

ranks: 2
raises: BufferInUseError on all
names: 0
says: all_reduce
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
gradients = np.ones(100)
first = dist.all_reduce(gradients[:60], async_op=True)  # all ranks
second = dist.all_reduce(gradients[50:], async_op=True)  # all ranks
first.wait()
second.wait()
