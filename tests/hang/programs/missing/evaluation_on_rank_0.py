"""Evaluation runs on rank 0 only, and averages its metric; the others train on.

ranks: 2
raises: CollectiveMismatchError on all
says: all_reduce | float32 | float64 | [64] | [2]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()


def evaluate():
    metric = np.array([0.9, 1.0])
    dist.all_reduce(metric)  # rank 0
    return metric[0] / metric[1]


gradient = np.ones(64, np.float32)
for step in range(1, 5):
    dist.all_reduce(gradient)  # rank 1
    if step % 2 == 0 and rank == 0:
        evaluate()
