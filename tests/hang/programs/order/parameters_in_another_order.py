"""Gradients are averaged in the order of a dictionary that rank 1 filled in another order.

ranks: 2
raises: CollectiveMismatchError on all
says: all_reduce | [10] | [4]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
names = ["bias", "weight"] if rank == 1 else ["weight", "bias"]
shapes = {"weight": (5, 2), "bias": (4,)}
gradients = {name: np.ones(shapes[name], np.float32) for name in names}
for gradient in gradients.values():
    dist.all_reduce(gradient, dist.ReduceOp.AVG)  # ranks 0-1
