"""Time small all_reduces beside raw mpi4py, quiet and beside a busy process: the figures of docs/waiting.md.

    mpicoll run -n 3 docs/measure/waiting.py

Prints one line: ranks, then for quiet and busy the microseconds of one call, raw and ours, each the median of rounds that
alternate between the two.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

import mpicoll as dist

ROUNDS = 7


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
        count = min(count, 20_000)
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count * 1e6

    def compare() -> tuple[float, float]:
        raw, ours = [], []
        for _ in range(ROUNDS):
            raw.append(time_of(lambda: comm.Allreduce(MPI.IN_PLACE, x)))
            ours.append(time_of(lambda: dist.all_reduce(x)))
        return statistics.median(raw), statistics.median(ours)

    quiet = compare()
    busy_process = None
    if dist.get_rank() == 0:
        busy_process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    comm.Barrier()
    busy = compare()
    if busy_process is not None:
        busy_process.kill()
        busy_process.wait()
        print(
            f"{dist.get_world_size()} ranks: quiet raw {quiet[0]:.1f}, mpicoll {quiet[1]:.1f} us; "
            f"beside a busy process raw {busy[0]:.1f}, mpicoll {busy[1]:.1f} us",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
