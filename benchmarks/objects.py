"""Time all_gather_object beside mpi4py's allgather of the same objects, in one run.

    mpicoll run -n 2 benchmarks/objects.py [BYTES ...]

The object is a dict with an array of that many bytes and a few small things (1 MiB; 0: only the small things). A few calls of
theirs and a few of ours alternate, many times; rounds that a shared machine disturbs are left out (``quiet.py``). Prints one
line a size: microseconds a call, the lowest, and the median with the quartiles in brackets; then how many times as fast ours
is: the ratio of the lowest, and the median of the ratios side by side.
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

ROUNDS = 12
SECONDS = 0.25
SIZES = (0, 64 * 1024, 1 << 20, 16 << 20)


def main() -> None:
    """Measure and print."""
    dist.init_process_group()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    rank, size = dist.get_rank(), dist.get_world_size()

    def time_of(call: Callable[[], object], count: int) -> float:
        call()
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count * 1e6

    for nbytes in [int(word) for word in sys.argv[1:]] or SIZES:
        obj = {"rank": rank, "names": ["loss", "step"], "array": np.full(nbytes // 8, float(rank))}
        gathered: list[Any] = [None] * size
        count = max(2, min(20, (8 << 20) // (nbytes + 1)))

        def ours(obj: Any = obj, gathered: list[Any] = gathered) -> None:
            dist.all_gather_object(gathered, obj)

        def theirs(obj: Any = obj) -> list[Any]:
            return comm.allgather(obj)

        def one_round(theirs: Any = theirs, ours: Any = ours, count: int = count) -> tuple[list[float], list[float]]:
            found: tuple[list[float], list[float]] = ([], [])
            end = time.perf_counter() + SECONDS
            while comm.bcast(time.perf_counter() < end, 0):
                found[0].append(time_of(theirs, count))
                found[1].append(time_of(ours, count))
            return found

        found = rounds(comm, one_round, ROUNDS)
        for value, wanted in zip(gathered, theirs(), strict=True):
            assert (value["array"] == wanted["array"]).all()
            assert value["rank"] == wanted["rank"]
        slow, fast = (list(itertools.chain(*column)) for column in zip(*found, strict=True))
        if rank == 0:
            ratios = [a / b for a, b in zip(slow, fast, strict=True)]
            print(
                f"{nbytes:9d} bytes: mpi4py {min(slow):.1f}, {middle(slow, 1)}, mpicoll {min(fast):.1f}, {middle(fast, 1)} us, "
                f"{min(slow) / min(fast):.2f} and {middle(ratios)} times as fast",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
