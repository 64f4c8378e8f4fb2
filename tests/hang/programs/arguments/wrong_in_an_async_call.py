"""One rank starts an asynchronous reduction of None: its model has a layer without a gradient.

ranks: 3
raises: TypeError on 2; CollectiveMismatchError on 0, 1
says: all_reduce | TypeError
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
gradients = [np.ones(3), np.ones(4) if rank < 2 else None]
works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]  # all ranks
for work in works:
    work.wait()
