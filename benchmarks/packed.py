"""Calls whose arrays the library packs or converts, as multiples of raw MPI's call of contiguous float64.

    mpicoll run -n 2 benchmarks/packed.py [KiB of a block ...]

Lists of separate arrays, blocks of unequal lengths, arrays that are not contiguous, and float16 of as many bytes. MPI gets
one contiguous array in each case, so a call without a copy would take about as long. Medians of alternating rounds.
"""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI
from mpi_calls import print_ratios

import mpicoll as dist


def measure(kib: int) -> None:
    """Measure and print the calls of one size."""
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    count, repeats = kib * 128, max(2, min(60, 4096 // kib))
    one, all_, result = np.ones(count), np.ones(size * count), np.ones(size * count)
    parts, others = [np.ones(count) for _ in range(size)], [np.ones(count) for _ in range(size)]
    uneven = [np.ones(count + 100 * each) for each in range(size)]
    counts = [each.size for each in uneven]
    own, joined = uneven[rank].copy(), np.ones(sum(counts))
    halves, strided = np.ones(4 * count, np.float16), np.ones((count, 2))[:, 0]
    root = rank == 0
    for name, ours, theirs in (
        ("all_gather, a list", lambda: dist.all_gather(parts, one), lambda: comm.Allgather(one, result)),
        (
            "all_gather, unequal",
            lambda: dist.all_gather(uneven, own),
            lambda: comm.Allgatherv(own, [joined, counts]),
        ),
        (
            "gather, a list",
            lambda: dist.gather(one, parts if root else None, 0),
            lambda: comm.Gather(one, result, 0),
        ),
        (
            "scatter, a list",
            lambda: dist.scatter(one, parts if root else None, 0),
            lambda: comm.Scatter(all_, one, 0),
        ),
        ("all_to_all, lists", lambda: dist.all_to_all(others, parts), lambda: comm.Alltoall(all_, result)),
        (
            "reduce_scatter, a list",
            lambda: dist.reduce_scatter(one, parts),
            lambda: comm.Reduce_scatter_block(all_, one),
        ),
        ("all_reduce, not contiguous", lambda: dist.all_reduce(strided), lambda: comm.Allreduce(MPI.IN_PLACE, one)),
        ("all_reduce, float16", lambda: dist.all_reduce(halves), lambda: comm.Allreduce(MPI.IN_PLACE, one)),
    ):
        for array in (one, all_, result, strided, halves):
            array.fill(1)
        print_ratios(f"{name}, {kib} KiB", theirs, {"mpicoll": ours}, repeats)


def main(sizes: tuple[int, ...]) -> None:
    """Measure and print."""
    dist.init_process_group()
    for kib in sizes:
        measure(kib)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tuple(int(each) for each in sys.argv[1:]) or (256, 2048, 16384))
