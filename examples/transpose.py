"""Transpose a matrix whose rows are spread over the ranks, by one all-to-all: `all_to_all_single`.

    mpicoll run -n 4 examples/transpose.py

Each rank has some rows of a matrix of ROWS by COLUMNS, and afterwards the same share of the rows of its transpose. A
rank sends to each rank the block of its own rows and the other rank's columns. The blocks are views: the program copies
no data. The shares need not be equal: split sizes give the number of elements for each rank.
"""

import sys

import numpy as np

import mpicoll as dist

ROWS, COLUMNS = 10, 7


def share(length, rank, size):
    """Return a rank's range of `length` rows; the first ranks have one more if the rows cannot be divided evenly."""
    few, more = divmod(length, size)
    start = rank * few + min(rank, more)
    return range(start, start + few + (rank < more))


dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
rows, columns = share(ROWS, rank, size), share(COLUMNS, rank, size)
mine = np.array([[100 * i + j for j in range(COLUMNS)] for i in rows], float).reshape(len(rows), COLUMNS)

# The columns of a rank are consecutive in the transpose of this rank's rows.
sends = [len(share(COLUMNS, r, size)) * len(rows) for r in range(size)]
takes = [len(columns) * len(share(ROWS, r, size)) for r in range(size)]
arrived = np.empty(sum(takes))
dist.all_to_all_single(arrived, mine.T.reshape(-1), takes, sends)

# Each rank has sent a block: the columns of this rank, as rows of the transpose, of the sender's rows.
blocks = np.split(arrived, np.cumsum(takes)[:-1])
transposed = np.hstack([block.reshape(len(columns), -1) for block in blocks])

expected = np.array([[100 * i + j for i in range(ROWS)] for j in columns], float).reshape(len(columns), ROWS)
if not np.array_equal(transposed, expected):
    sys.exit(f"rank {rank}: these are not my rows of the transpose:\n{transposed}")
print(f"rank {rank}: rows {list(columns)} of the transpose, {transposed.shape[0]} x {transposed.shape[1]}", flush=True)
dist.destroy_process_group()
