"""Where the time of a small call goes: an all_reduce of 8 bytes by two ranks of one node.

    mpicoll run -n 2 benchmarks/overhead.py
    MPICOLL_EXTENSION=off mpicoll run -n 2 benchmarks/overhead.py   # without the extension: through MPI

Medians of alternating rounds, with the quartiles in brackets.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import numpy as np
from quiet import few, middle, rounds

import mpicoll as dist

ROUNDS = 15
REPEATS = few(5_000)


def main() -> None:
    """Measure and print."""
    dist.init_process_group()
    from mpi4py import MPI

    comm, x = MPI.COMM_WORLD.Dup(), np.ones(1)
    if comm.Get_size() != 2:
        raise SystemExit("overhead.py is for two ranks")

    def nothing() -> None:
        pass

    def time_of(call: Callable[[], object]) -> float:
        comm.Barrier()
        many = max(1, REPEATS // 10) if call is asynchronous else REPEATS
        return timeit.timeit(call, number=many) / many * 1e6

    def whole() -> None:
        dist.all_reduce(x, dist.ReduceOp.MAX)

    def raw() -> None:
        comm.Allreduce(MPI.IN_PLACE, x, MPI.MAX)

    plan = dist.all_reduce_init(x, dist.ReduceOp.MAX)
    assert plan is not None

    def planned() -> None:
        plan.start()
        plan.wait()

    def asynchronous() -> None:
        work = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        work.wait()

    others = {"a plan, started and waited for": planned, "asynchronous, and waited for": asynchronous}
    calls = {"MPI's own": raw, **others, "the call": whole}
    for _ in range(10):
        whole()
    found = rounds(comm, lambda: tuple(time_of(call) - time_of(nothing) for call in calls.values()), ROUNDS)
    columns = list(zip(*found, strict=True))
    if dist.get_rank() == 0:
        for name, column in zip(calls, columns, strict=True):
            print(f"{name:>40}  {middle(column)} us")


if __name__ == "__main__":
    main()
