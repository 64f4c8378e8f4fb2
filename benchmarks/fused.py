"""Time many small arrays averaged in one call beside a loop of `all_reduce`, in one run.

    mpicoll run -n 2 benchmarks/fused.py [ARRAYS BYTES]

300 arrays of 1 KiB unless told otherwise. Loop and fused call alternate; stretches that a shared machine disturbs are left out
(``quiet.py``). Prints milliseconds for the whole list, median and quartiles: the loop, `average_gradients`,
`all_reduce_coalesced`, and one `all_reduce` of as many bytes in one array, which no fused call can beat; then how many times as
long the loop takes, the median of the ratios side by side.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from quiet import middle, rounds

import mpicoll as dist
from mpicoll import ReduceOp

ROUNDS = 12
SECONDS = 0.25


def main() -> None:
    """Measure and print."""
    dist.init_process_group()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    arrays, nbytes = (int(word) for word in sys.argv[1:3] or (300, 1024))
    xs = [np.ones(nbytes // 4, np.float32) for _ in range(arrays)]
    whole = np.ones(arrays * (nbytes // 4), np.float32)

    def loop() -> None:
        for x in xs:
            dist.all_reduce(x, ReduceOp.AVG)

    ways: dict[str, Callable[[], object]] = {
        "loop": loop,
        "average_gradients": lambda: dist.average_gradients(xs),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(xs, ReduceOp.AVG),
        "one array": lambda: dist.all_reduce(whole, ReduceOp.AVG),
    }

    def time_of(way: Callable[[], object]) -> float:
        way()
        comm.Barrier()
        start = time.perf_counter()
        way()
        return (time.perf_counter() - start) * 1e3

    def one_round() -> list[tuple[Any, ...]]:
        found = []
        end = time.perf_counter() + SECONDS
        while comm.bcast(time.perf_counter() < end, 0):
            found.append(tuple(time_of(way) for way in ways.values()))
        return found

    found = list(itertools.chain(*rounds(comm, one_round, ROUNDS)))
    if dist.get_rank() == 0:
        library = MPI.Get_library_version().replace("\0", "").splitlines()[0].split(",")[0].strip()
        print(f"{dist.get_world_size()} ranks, {arrays} arrays of {nbytes} bytes, {library}")
        columns = list(zip(*found, strict=True))
        for name, times in zip(ways, columns, strict=True):
            ratio = middle([one / other for one, other in zip(columns[0], times, strict=True)], 1)
            print(f"{name:22}{middle(times, 3):>28} ms   the loop takes {ratio} times as long", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
