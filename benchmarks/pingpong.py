"""Time messages beside raw mpi4py's, in one run: what the envelope costs, and what it costs not to wait.

    mpicoll run -n 2 benchmarks/pingpong.py [BYTES ...]              send and recv, there and back
    mpicoll run -n 2 benchmarks/pingpong.py --exchange [BYTES ...]   irecv, isend and both waits, on both ranks at once

A few messages raw and a few of ours alternate, many times; stretches that a shared machine disturbs are left out
(``quiet.py``). Prints one line a size: microseconds for both messages, the lowest, and the median with the quartiles in brackets;
then how many times as long ours takes: the ratio of the lowest, and the median of the ratios side by side.
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
SIZES = (8, 1024, 16 * 1024, 64 * 1024, 1 << 20, 16 << 20)


def main() -> None:
    """Measure and print."""
    dist.init_process_group()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    rank = dist.get_rank()
    other = 1 - rank

    def time_of(send: Callable[[], object], recv: Callable[[], object], count: int) -> float:
        first, second = (send, recv) if rank == 0 or exchange else (recv, send)
        for _ in range(3):
            first()
            second()
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            first()
            second()
        return (time.perf_counter() - start) / count * 1e6

    def raw_exchange(x: Any, y: Any) -> None:
        requests = [comm.Irecv(y, other), comm.Isend(x, other)]
        for request in requests:
            request.Wait()

    def our_exchange(x: Any, y: Any) -> None:
        works = [dist.irecv(y, other), dist.isend(x, other)]
        for work in works:
            assert work is not None
            work.wait()

    exchange = "--exchange" in sys.argv
    for nbytes in [int(word) for word in sys.argv[1:] if word != "--exchange"] or SIZES:
        x, y = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        if nbytes % 8 == 0:
            x, y = x.view(np.float64), y.view(np.float64)
        count = max(2, min(40, (2 << 20) // nbytes))

        def one_round(x: Any = x, y: Any = y, count: int = count) -> tuple[list[float], list[float]]:
            raw, ours = [], []
            end = time.perf_counter() + SECONDS
            while comm.bcast(time.perf_counter() < end, 0):
                if exchange:
                    raw.append(time_of(lambda: raw_exchange(x, y), lambda: None, count))
                    ours.append(time_of(lambda: our_exchange(x, y), lambda: None, count))
                    continue
                raw.append(time_of(lambda: comm.Send(x, other), lambda: comm.Recv(y, other), count))
                ours.append(time_of(lambda: dist.send(x, other), lambda: dist.recv(y, other), count))
            return raw, ours

        found = rounds(comm, one_round, ROUNDS)
        raw, ours = (list(itertools.chain(*column)) for column in zip(*found, strict=True))
        if rank == 0:
            ratios = [a / b for a, b in zip(ours, raw, strict=True)]
            print(
                f"{nbytes:9d} bytes: raw {min(raw):.2f}, {middle(raw)}, mpicoll {min(ours):.2f}, {middle(ours)} us, "
                f"{min(ours) / min(raw):.2f} and {middle(ratios)} times",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
