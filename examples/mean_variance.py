"""Mean and variance of a data set of which each rank has a share, in one pass: `all_gather_object`, `all_reduce`.

    mpicoll run -n 4 examples/mean_variance.py

The shares have different sizes, and each rank reads its share in pieces, so the whole set is never in memory. The formula of
Chan, Golub and LeVeque (1979) joins the results of pieces and ranks. The data are small changes of large numbers: the
difference of the sum of squares and the square of the sum would lose digits.
"""

import sys

import numpy as np

import mpicoll as dist

FEATURES, PIECE = 3, 1000


def read(rank):
    """Yield the share of a rank in pieces, as from a file."""
    for piece in range(2 + rank % 3):
        yield 1e6 + np.random.default_rng([rank, piece]).normal(0.0, 1.0 + rank, (PIECE + 10 * rank, FEATURES))


def join(one, other):
    """Return count, mean and sum of squared deviations of the union of two sets, from those of each set."""
    count = one[0] + other[0]
    if not count:
        return one
    gap = other[1] - one[1]
    mean = one[1] + gap * (other[0] / count)
    return count, mean, one[2] + other[2] + gap**2 * (one[0] * other[0] / count)


dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()

mine = 0, np.zeros(FEATURES), np.zeros(FEATURES)
for data in read(rank):
    mean = data.mean(axis=0)
    mine = join(mine, (len(data), mean, ((data - mean) ** 2).sum(axis=0)))

shares = [None] * size
dist.all_gather_object(shares, mine)
whole = 0, np.zeros(FEATURES), np.zeros(FEATURES)
for each in shares:
    whole = join(whole, each)
count, mean, variance = whole[0], whole[1], whole[2] / whole[0]

# Check: another way to the number of rows, and the result from all data at once.
total = np.array([mine[0]])
dist.all_reduce(total)
everything = np.concatenate([data for r in range(size) for data in read(r)])
right = np.allclose(mean, everything.mean(axis=0), rtol=1e-12) and np.allclose(
    variance, everything.var(axis=0), rtol=1e-9
)
if total[0] != count or count != len(everything) or not right:
    sys.exit(f"rank {rank}: mean {mean} and variance {variance} of {count} rows are wrong")
if rank == 0:
    print(f"{count} rows: mean {mean.round(3)}, variance {variance.round(3)}", flush=True)
dist.destroy_process_group()
