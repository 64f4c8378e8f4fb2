"""Time how soon a mistake is an exception on every rank of a job, and tell how much is sent for it.

    mpicoll run -n 32 benchmarks/scale.py mismatch
    mpicoll run -n 32 benchmarks/scale.py cycle
    python benchmarks/scale.py table

``mismatch``: one rank calls all_reduce with another dtype. ``cycle``: each rank receives from the one before it. Prints the
seconds from a barrier before the call to the exception on the last rank, and the lines and characters of the report.
``table``: prints the bytes of what the ranks tell each other of a mismatch, for 4 to 100,000 ranks of which one is odd.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import mpicoll as dist


def main() -> int:
    """Make the mistake, and print."""
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "table":
        table()
        return 0
    if what not in ("mismatch", "cycle"):
        print(__doc__)
        return 2
    dist.init_process_group(on_failure="raise")
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    start = time.monotonic()
    try:
        if what == "mismatch":
            dist.all_reduce(np.ones(4, np.float32 if rank == size // 2 else np.float64))
        else:
            dist.recv(np.empty(4), (rank - 1) % size)
    except (dist.CollectiveMismatchError, dist.DeadlockError) as error:
        seconds, text = time.monotonic() - start, str(error)
    else:
        raise AssertionError("nothing was raised")
    told = comm.gather((seconds, len(text.splitlines()), len(text)), 0)
    if told is not None:
        late, lines, characters = (max(column) for column in zip(*told, strict=True))
        print(
            f"{what} on {size} ranks: raised on all after {late:.2f} s, {lines} lines of {characters} characters",
            flush=True,
        )
    return 0


def table() -> None:
    """Print how large the merged table of a mismatch is."""
    from mpicoll.diagnosis.report.entries import RankState, table_of

    for size in (4, 64, 1_000, 100_000):
        odd = size // 2
        runs = ((0, odd - 1), (odd + 1, size - 1))
        key = (("op", "SUM"), ("dtype", "float32"), ("elements", "1024"))
        usual = RankState(runs, "all_reduce", key, 41, "/home/ann/project/train.py:88")
        other = RankState(((odd, odd),), "barrier", (), 41, "/home/ann/project/train.py:91")
        print(f"{size} ranks, one of them odd: a table of {len(table_of([usual, other]).pack())} bytes")


if __name__ == "__main__":
    sys.exit(main())
