"""On a grid one rank takes its column first where the others take their row: it still has an order.

ranks: 4
raises: nothing
"""

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
row, column = rows[rank // 2], columns[rank % 2]
x = np.ones(3)
for group in (column, row) if rank == 3 else (row, column):
    dist.all_reduce(x, group=group)
