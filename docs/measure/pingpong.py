"""Time messages there and back beside raw mpi4py Send and Recv, in one run: what the envelope costs.

    mpicoll run -n 2 docs/measure/pingpong.py [BYTES ...]

Rounds of a few messages alternate between raw and ours, many of them, so that some fall between the disturbances of a shared
machine. Prints one line a size: microseconds there and back, lowest and median, with the quartiles in brackets, and the
ratio of the lowest and of the medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import mpicoll as dist

ROUNDS = 300
SIZES = (8, 1024, 16 * 1024, 64 * 1024, 1 << 20, 16 << 20)


def main() -> None:
    """Measure and print."""
    dist.init_process_group()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    rank = dist.get_rank()
    other = 1 - rank

    def time_of(send: Callable[[], object], recv: Callable[[], object], count: int) -> float:
        first, second = (send, recv) if rank == 0 else (recv, send)
        for _ in range(3):
            first()
            second()
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            first()
            second()
        return (time.perf_counter() - start) / count * 1e6

    for nbytes in [int(word) for word in sys.argv[1:]] or SIZES:
        x, y = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        if nbytes % 8 == 0:
            x, y = x.view(np.float64), y.view(np.float64)
        rounds = max(20, min(ROUNDS, (1 << 29) // nbytes))
        count = max(2, min(40, (2 << 20) // nbytes))
        raw, ours = [], []
        for _ in range(rounds):
            raw.append(time_of(lambda x=x: comm.Send(x, other), lambda y=y: comm.Recv(y, other), count))
            ours.append(time_of(lambda x=x: dist.send(x, other), lambda y=y: dist.recv(y, other), count))
        if rank == 0:
            print(
                f"{nbytes:9d} bytes: raw {_spread(raw)}, mpicoll {_spread(ours)} us there and back, "
                f"{min(ours) / min(raw):.2f} and {statistics.median(ours) / statistics.median(raw):.2f} times",
                flush=True,
            )
    dist.destroy_process_group()


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{min(values):.2f}, {middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
