"""The six classic collectives, each in three lines.

    mpicoll run -n 4 examples/collectives.py

Prints each rank's data after each collective; with 4 ranks:

    operation   rank 0        rank 1        rank 2        rank 3
    broadcast   [2]           [2]           [2]           [2]
    scatter     [1]           [2]           [3]           [4]
    reduce      [4]           -             -             -
    all_reduce  [4]           [4]           [4]           [4]
    gather      [1, 2, 3, 4]  -             -             -
    all_gather  [1, 2, 3, 4]  [1, 2, 3, 4]  [1, 2, 3, 4]  [1, 2, 3, 4]
"""

import sys

import numpy as np

import mpicoll as dist

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
numbers = [float(r + 1) for r in range(world)]
held: dict[str, list[float] | None] = {}  # None: the result is on rank 0 only

tensor = np.full(1, 2.0 if rank == 0 else 0.0)
dist.broadcast(tensor, src=0)
held["broadcast"] = tensor.tolist()

tensor = np.zeros(1)
dist.scatter(tensor, [np.array([x]) for x in numbers] if rank == 0 else [], src=0)
held["scatter"] = tensor.tolist()

tensor = np.ones(1)
dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
held["reduce"] = tensor.tolist() if rank == 0 else None

tensor = np.ones(1)
dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
held["all_reduce"] = tensor.tolist()

blocks = [np.empty(1) for _ in numbers] if rank == 0 else []
dist.gather(np.array([rank + 1.0]), blocks, dst=0)
held["gather"] = np.concatenate(blocks).tolist() if rank == 0 else None

blocks = [np.empty(1) for _ in numbers]
dist.all_gather(blocks, np.array([rank + 1.0]))
held["all_gather"] = np.concatenate(blocks).tolist()

# Show it, and check it.
everybodys: list[dict[str, list[float] | None]] = [{}] * world
dist.all_gather_object(everybodys, held)
if rank == 0:
    rows = [["operation", *(f"rank {r}" for r in range(world))]]
    for name in held:
        values = [of_rank[name] for of_rank in everybodys]
        rows.append([name, *("-" if v is None else "[" + ", ".join(f"{x:g}" for x in v) + "]" for v in values)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)

expected = {
    "broadcast": [2.0],
    "scatter": [rank + 1.0],
    "reduce": [float(world)] if rank == 0 else None,
    "all_reduce": [float(world)],
    "gather": numbers if rank == 0 else None,
    "all_gather": numbers,
}
if held != expected:
    sys.exit(f"rank {rank}: expected {expected}, got {held}")
dist.destroy_process_group()
