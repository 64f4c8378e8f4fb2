"""Data-parallel training in its smallest form: every rank has its own part of the data, and the same model.

    mpicoll run -n 4 examples/average_gradients.py

The program fits a line through 1000 noisy points by gradient descent, and ends at a slope near 3 and an intercept near -1.
After every step all ranks have the same parameters, bit for bit, and the parameters of one process with all points, up to
rounding.
"""

import sys

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()

rng = np.random.default_rng(seed=0)  # every rank draws the same points ...
x = rng.uniform(-1, 1, size=1000)
points = np.column_stack([x, np.ones_like(x)])
values = points @ [3.0, -1.0] + rng.normal(scale=0.1, size=1000)
mine = slice(rank, None, world)  # ... and works on every world-th of them: 334, 333 and 333 on three ranks


def gradient(line: np.ndarray, points: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean squared error over these points."""
    return 2 * points.T @ (points @ line - values) / len(values)


line = np.zeros(2)  # slope and intercept
alone = np.zeros(2)  # the same, fitted by one process to all points
for step in range(100):
    # AVG gives every rank the same weight, so the gradient is scaled by the rank's number of points.
    averaged = gradient(line, points[mine], values[mine]) * (len(values[mine]) * world / len(values))
    dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
    line -= 0.3 * averaged

    alone -= 0.3 * gradient(alone, points, values)
    if not np.allclose(line, alone, rtol=1e-12, atol=1e-12):
        sys.exit(f"rank {rank}: in step {step} {world} ranks have {line}, one process has {alone}")
    lines = [np.empty(2) for _ in range(world)]
    dist.all_gather(lines, line)
    if any(other.tobytes() != line.tobytes() for other in lines):
        sys.exit(f"rank {rank}: in step {step} the ranks have different parameters: {lines}")

if rank == 0:
    print(f"{world} ranks agree on y = {line[0]:.3f} x {line[1]:+.3f}, and one process finds the same", flush=True)
if not np.allclose(line, [3.0, -1.0], atol=0.02):
    sys.exit(f"rank {rank}: {line} is not the line that the points were drawn from")
dist.destroy_process_group()
