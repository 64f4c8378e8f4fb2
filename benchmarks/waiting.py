"""Time small all_reduces beside raw mpi4py, quiet and beside a busy process: the figures of docs/waiting.md.

    mpicoll run -n 3 benchmarks/waiting.py

Prints two lines, quiet and beside a busy process: the microseconds of one call, raw and ours, and how many times as long ours
takes; each the median of rounds that alternate between the two, with the quartiles in brackets.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from quiet import few, middle, rounds

import mpicoll as dist

ROUNDS = 11


def main() -> None:
    """Measure and print."""
    dist.init_process_group()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    x = np.zeros(1)

    def time_of(call: Callable[[], object], seconds: float = 0.15) -> float:
        comm.Barrier()
        start, count = time.perf_counter(), 0
        # The number of calls must be the same on all ranks: rank 0 decides it from a few first ones.
        for _ in range(5):
            call()
        count = comm.bcast(max(5, int(seconds / max(1e-7, (time.perf_counter() - start) / 5))), 0)
        count = min(count, few(20_000))
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count * 1e6

    def compare(what: str, *children: int) -> None:
        def one_round() -> tuple[float, float]:
            return time_of(lambda: comm.Allreduce(MPI.IN_PLACE, x)), time_of(lambda: dist.all_reduce(x))

        raw, ours = zip(*rounds(comm, one_round, ROUNDS, children=children), strict=True)
        if dist.get_rank() == 0:
            ratio = middle([a / b for a, b in zip(ours, raw, strict=True)], 1)
            print(
                f"{dist.get_world_size()} ranks, {what}: raw {middle(raw, 1)}, mpicoll {middle(ours, 1)} us, {ratio} times",
                flush=True,
            )

    compare("quiet")
    busy = None
    if dist.get_rank() == 0:
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        comm.Barrier()
        compare("beside a busy process", *([] if busy is None else [busy.pid]))
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
