"""Time all_reduce and barrier at every check level beside raw mpi4py, in one run: what the checks cost.

    mpicoll run -n 2 benchmarks/checks.py [--rounds 15]

Every round measures each call raw, polled and ours right after one another, level by level; a round that a shared machine
disturbs is left out (``quiet.py``). Prints microseconds, the ratios to raw, and what is asked of the checks: medians over the
rounds, with the quartiles in brackets. "polled" is MPI's nonblocking call polled from Python: what any wait that can be left
costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from quiet import few, middle, rounds

import mpicoll as dist

SIZES = (8, 64 * 1024, 1 << 20)
LEVELS = ("off", "roll", "full")
BARRIER = "barrier"

Times = dict[tuple[str, str], list[float]]
"""(call, how it was made) -> microseconds in each round; raw and polled stand beside a level: "raw/full"."""


def name_of(size: int) -> str:
    """Return what an all_reduce of so many bytes is called in the table."""
    return f"all_reduce {size} bytes"


def measure(wanted: int) -> Times:
    """Return the times of this rank; all ranks call it."""
    dist.init_process_group()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    dist.destroy_process_group()
    this: dict[tuple[str, str], float] = {}

    def note(what: str, how: str, call: Callable[[], object], size: int) -> None:
        repeats = max(30, few(min(2000, 100_000_000 // (size * 50 + 50_000))))
        for _ in range(20):
            call()
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        this[what, how] = (time.perf_counter() - start) / repeats * 1e6

    def polled(post: Callable[[], MPI.Request]) -> None:
        request = post()
        while not request.Test():
            pass

    arrays = {size: np.ones(size // 8) for size in SIZES}

    def one_round() -> dict[tuple[str, str], float]:
        for level in LEVELS:
            dist.init_process_group(check=level)
            for size, x in arrays.items():
                what = name_of(size)
                note(what, f"raw/{level}", lambda x=x: comm.Allreduce(MPI.IN_PLACE, x, MPI.MAX), size)
                note(
                    what, f"polled/{level}", lambda x=x: polled(lambda: comm.Iallreduce(MPI.IN_PLACE, x, MPI.MAX)), size
                )
                note(what, level, lambda x=x: dist.all_reduce(x, dist.ReduceOp.MAX), size)
            note(BARRIER, f"raw/{level}", comm.Barrier, 8)
            note(BARRIER, f"polled/{level}", lambda: polled(comm.Ibarrier), 8)
            note(BARRIER, level, dist.barrier, 8)
            dist.destroy_process_group()
        return dict(this)

    found = rounds(comm, one_round, wanted)
    return {key: [each[key] for each in found] for key in this}


def compare(what: str, times: Times, one: str, other: str) -> list[float]:
    """Return, round by round, how many times as long one way to make a call takes as another."""
    return [a / b for a, b in zip(times[what, one], times[what, other], strict=True)]


def added(what: str, times: Times, one: str, other: str) -> list[float]:
    """Return, round by round, how many microseconds one way to make a call takes more than another."""
    return [a - b for a, b in zip(times[what, one], times[what, other], strict=True)]


def table(times: Times) -> list[str]:
    """Return the lines of both tables."""
    lines = []
    for what in [*map(name_of, SIZES), BARRIER]:
        for how in ("raw", "polled"):
            values = [value for level in LEVELS for value in times[what, f"{how}/{level}"]]
            lines.append(f"{what:>24} {how:>7} {middle(values):>30} us")
        for level in LEVELS:
            ratio = middle(compare(what, times, level, f"raw/{level}"))
            lines.append(f"{what:>24} {level:>7} {middle(times[what, level]):>30} us {ratio:>25} times raw")
    small, half, large = map(name_of, SIZES)
    asked = [
        ("full adds to an 8-byte all_reduce at off, us", 2.5, added(small, times, "full", "off")),
        ("full adds to a raw 8-byte Allreduce, us", 2.5, added(small, times, "full", "raw/full")),
        ("roll adds to an 8-byte all_reduce at off, us", 0.6, added(small, times, "roll", "off")),
        ("64 KiB at full, times raw", 1.2, compare(half, times, "full", "raw/full")),
        ("1 MiB at full, times raw", 1.05, compare(large, times, "full", "raw/full")),
        ("barrier at full, times that at off", 1.5, compare(BARRIER, times, "full", "off")),
        ("barrier at full, times a polled Ibarrier", 1.5, compare(BARRIER, times, "full", "polled/full")),
    ]
    for text, target, values in asked:
        verdict = "met" if statistics.median(values) <= target else "missed"
        lines.append(f"{text:>48}: {middle(values):>24}, target {target:g}: {verdict}")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="alternating rounds, at least 5 (default: %(default)s)")
    wanted = max(5, parser.parse_args().rounds)
    times = measure(wanted)
    dist.init_process_group()
    if dist.get_rank() == 0:
        from mpi4py import MPI

        library = MPI.Get_library_version().split(",")[0].splitlines()[0]
        print(f"{dist.get_world_size()} ranks, {library}, median (quartiles) of {wanted} alternating rounds")
        print("\n".join(table(times)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
