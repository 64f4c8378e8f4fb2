"""On a grid of 2 x 2, half of the ranks reduce over their row first and half over their column.

ranks: 4
raises: DeadlockError on all
says: all_reduce | [3]
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
row, column = rows[rank // 2], columns[rank % 2]
x = np.ones(3)
first, second = (row, column) if rank in (0, 3) else (column, row)
dist.all_reduce(x, group=first)  # all ranks
dist.all_reduce(x, group=second)
