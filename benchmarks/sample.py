"""Time asynchronous calls with and without the sample of large arrays that finds writes before ``wait()``, in one run.

    mpicoll run -n 2 benchmarks/sample.py [--rounds 15] [--cold]

Calls with the sample and without alternate one by one, as a shared machine changes within milliseconds. "Without" reads both ends
of an array only. Prints the microseconds of a call without the sample, and what the sample adds, in percent of them: medians
over the rounds, with the quartiles in brackets. With ``--cold`` each call has another array, which is in no cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from quiet import few, middle, rounds

import mpicoll as dist

KIB = 1024
SIZES = "72,128,256,512,1024,8192,65536"
TARGET = 2.0
"""Percent that the sample may add."""
ORDER = "with", "without", "without", "with"
CACHES = 160 * KIB * KIB
"""More bytes than there are in the caches."""


def calls(nbytes: int, arrays: int) -> dict[str, Callable[[int], Any]]:
    """Return functions that start a call on arrays of so many bytes together; each has several arrays, and gets a number."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = [np.full(nbytes // 8, rank + 1.0) for _ in range(arrays)]
    into = [np.zeros((ranks, nbytes // 8)) for _ in range(arrays)]
    lists = [[list(np.ones((ranks, nbytes // 8 // ranks))) for _ in range(2)] for _ in range(arrays)]
    return {
        "all_reduce": lambda i: dist.all_reduce(whole[i % arrays], dist.ReduceOp.MAX, async_op=True),
        "broadcast": lambda i: dist.broadcast(whole[i % arrays], 0, async_op=True),
        "all_gather_single": lambda i: dist.all_gather_single(into[i % arrays], whole[i % arrays], async_op=True),
        "all_to_all (lists)": lambda i: dist.all_to_all(*lists[i % arrays], async_op=True),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="rounds, at least 5 (default: %(default)s)")
    parser.add_argument("--sizes", default=SIZES, help="KiB (default: %(default)s)")
    parser.add_argument("--cold", action="store_true", help="arrays that are in no cache")
    given = parser.parse_args()
    dist.init_process_group()
    from mpi4py import MPI

    from mpicoll.checks import memory_ranges

    comm, usual = MPI.COMM_WORLD.Dup(), memory_ranges.PLACES
    ways = {"with": usual, "without": ()}
    if comm.Get_rank() == 0:
        library = MPI.Get_library_version().split(",")[0].splitlines()[0]
        print(f"{comm.Get_size()} ranks, {library}, median (quartiles) of {max(5, given.rounds)} rounds", flush=True)
    for nbytes in [int(size) * KIB for size in given.sizes.split(",")]:
        arrays = -(-CACHES // nbytes) if given.cold else 1
        for name, start in calls(nbytes, arrays).items():
            repeats = max(4, few(min(2000, 400_000 * KIB // nbytes)))

            def one_round(start: Callable[[int], Any] = start, repeats: int = repeats) -> dict[str, float]:
                took: dict[str, list[float]] = {way: [] for way in ways}
                comm.Barrier()
                for number in range(2 * repeats):
                    way = ORDER[number % len(ORDER)]
                    memory_ranges.set_places(ways[way])
                    began = time.perf_counter()
                    start(number).wait()
                    took[way].append(time.perf_counter() - began)
                memory_ranges.set_places(usual)
                return {way: statistics.median(times) * 1e6 for way, times in took.items()}

            found = rounds(comm, one_round, max(5, given.rounds))
            adds = [(each["with"] / each["without"] - 1) * 100 for each in found]
            if comm.Get_rank() == 0:
                alone = middle([each["without"] for each in found], 1)
                verdict = "met" if statistics.median(adds) <= TARGET else "missed"
                print(f"{nbytes // KIB:>6} KiB {name:>18} {alone:>28} us {middle(adds):>24} %: {verdict}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
