"""Time calls of raw MPI beside each other, by which ``transports/mpi/collectives.py`` chooses among them.

    mpicoll run -n 2 benchmarks/mpi_calls.py
    mpicoll run -n 4 benchmarks/mpi_calls.py

First the nonblocking form of each collective with its wait, as a multiple of the blocking call, for blocks of so many KiB of
float64. Then an all-gather of four pieces of each block, which stand apart in the result, as a multiple of one Allgather. Medians
of alternating rounds. The library itself is used for nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

ROUNDS = 5
KIB = (64, 256, 512, 4096, 16384)
PIECES = 4


def time_of(call: Callable[[], object], repeats: int) -> float:
    """Return the microseconds of one call."""
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats * 1e6


def print_ratios(
    title: str, first: Callable[[], object], others: Mapping[str, Callable[[], object]], repeats: int
) -> None:
    """Print the median time of the first call, and those of the others as multiples."""
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, call in {"": first, **others}.items():
            times.setdefault(name, []).append(time_of(call, repeats))
    if MPI.COMM_WORLD.Get_rank() == 0:
        base = statistics.median(times.pop(""))
        multiples = ", ".join(f"{name} {statistics.median(taken) / base:.2f}" for name, taken in times.items())
        print(f"{title:34s}{base:12,.0f} us   {multiples}", flush=True)


def measure(kib: int) -> None:
    """Measure and print the calls of one size."""
    comm = MPI.COMM_WORLD
    size = comm.Get_size()
    count, repeats = kib * 128, max(3, min(100, 16384 // kib))
    one, all_, result = np.ones(count), np.ones(size * count), np.ones(size * count)
    counts, places = [count] * size, [count * rank for rank in range(size)]
    vector = (counts, places)
    calls: dict[str, tuple[Any, ...]] = {
        "Bcast": (one, 0),
        "Allreduce": (MPI.IN_PLACE, one, MPI.MAX),
        "Reduce": (all_[:count], one, MPI.MAX, 0),
        "Allgather": (one, result),
        "Allgatherv": (one, [result, vector, MPI.DOUBLE]),
        "Gather": (one, result, 0),
        "Gatherv": (one, [result, vector, MPI.DOUBLE], 0),
        "Scatter": (all_, one, 0),
        "Scatterv": ([all_, vector, MPI.DOUBLE], one, 0),
        "Alltoall": (all_, result),
        "Alltoallv": ([all_, vector, MPI.DOUBLE], [result, vector, MPI.DOUBLE]),
        "Reduce_scatter_block": (all_, one, MPI.MAX),
        "Reduce_scatter": (all_, one, counts, MPI.MAX),
    }
    for name, arguments in calls.items():
        blocking, nonblocking = getattr(comm, name), getattr(comm, "I" + name.lower())
        print_ratios(
            f"{name}, {kib} KiB",
            lambda call=blocking, given=arguments: call(*given),
            {"nonblocking": lambda call=nonblocking, given=arguments: call(*given).Wait()},
            repeats,
        )
    step = count // PIECES
    cuts = [
        (one[at : at + step], [result, ([step] * size, [place + at for place in places]), MPI.DOUBLE])
        for at in range(0, count, step)
    ]
    print_ratios(
        f"Allgather, {kib} KiB",
        lambda: comm.Allgather(one, result),
        {
            f"{PIECES} pieces": lambda: [comm.Allgatherv(*cut) for cut in cuts],
            "nonblocking": lambda: [comm.Iallgatherv(*cut).Wait() for cut in cuts],
        },
        repeats,
    )


def main(sizes: tuple[int, ...]) -> None:
    """Measure and print."""
    if MPI.COMM_WORLD.Get_rank() == 0:
        print(MPI.Get_library_version().split("\n")[0].split(",")[0], f"{MPI.COMM_WORLD.Get_size()} ranks")
    for kib in sizes:
        measure(kib)


if __name__ == "__main__":
    main(tuple(int(each) for each in sys.argv[1:]) or KIB)
