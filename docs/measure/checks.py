"""Time small and large all_reduce and barrier at every check level beside raw mpi4py, in one run: what the checks cost.

    mpicoll run -n 2 docs/measure/checks.py

Prints one line a call: microseconds, raw and at each level, each the median of rounds that alternate between them, and
the ratios to raw. "polled" is the same collective as a nonblocking one that is polled, through the library's waiting:
what the interruptible wait costs without any check.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

import mpicoll as dist

ROUNDS = 7
SIZES = (8, 64 * 1024, 1 << 20)
LEVELS = ("off", "roll", "full")


def main() -> None:
    """Measure and print."""
    dist.init_process_group()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    rank = dist.get_rank()
    dist.destroy_process_group()

    def seconds(call: Callable[[], object], repeats: int) -> float:
        for _ in range(20):
            call()
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats

    def polled(post: Callable[[], MPI.Request]) -> None:
        request = post()
        while not request.Test():
            pass

    arrays = {size: np.ones(size // 8) for size in SIZES}
    times: dict[tuple[str, str], list[float]] = {}

    def note(what: str, how: str, call: Callable[[], object], size: int) -> None:
        repeats = max(30, min(3000, 200_000_000 // (size * 50 + 50_000)))
        times.setdefault((what, how), []).append(seconds(call, repeats))

    for _ in range(ROUNDS):
        for size, x in arrays.items():
            what = f"all_reduce of {size} bytes"
            note(what, "raw", lambda x=x: comm.Allreduce(MPI.IN_PLACE, x, MPI.MAX), size)
            note(what, "polled", lambda x=x: polled(lambda: comm.Iallreduce(MPI.IN_PLACE, x, MPI.MAX)), size)
        note("barrier", "raw", comm.Barrier, 8)
        note("barrier", "polled", lambda: polled(comm.Ibarrier), 8)
        for level in LEVELS:
            dist.init_process_group(check=level)
            for size, x in arrays.items():
                note(f"all_reduce of {size} bytes", level, lambda x=x: dist.all_reduce(x, dist.ReduceOp.MAX), size)
            note("barrier", level, dist.barrier, 8)
            dist.destroy_process_group()

    for what in [f"all_reduce of {size} bytes" for size in SIZES] + ["barrier"]:
        middle = {how: statistics.median(times[what, how]) * 1e6 for how in ("raw", "polled", *LEVELS)}
        texts = [f"{how} {value:.2f} ({value / middle['raw']:.2f} times)" for how, value in middle.items()]
        if rank == 0:
            print(f"{what:>28}: {', '.join(texts)} us", flush=True)


if __name__ == "__main__":
    main()
