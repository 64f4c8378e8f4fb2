"""Where the time of a small call goes: an all_reduce of 8 bytes by two ranks of one node.

    mpicoll run -n 2 benchmarks/overhead.py
    MPICOLL_EXTENSION=off mpicoll run -n 2 benchmarks/overhead.py   # in Python, and in its parts

The parts are lines of ``mpicoll.operations.riding``, timed alone in one process that plays both members; the whole is the call.
Medians of alternating rounds, with the quartiles in brackets.
"""

from __future__ import annotations

import mmap
import sys
import threading
import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
from quiet import middle, rounds

import mpicoll as dist
from mpicoll.groups import registry

ROUNDS = 15
REPEATS = 5_000


def parts() -> dict[str, Callable[[], object]]:
    """Return the parts, ready to be timed."""
    from mpicoll.memory.arithmetic import quiet_runner
    from mpicoll.transports.shm.control import PART

    x, out = np.ones(1), np.ones(1)
    known: dict[Any, int] = {(dist.ReduceOp.MAX, x.dtype, x.shape): 1}
    world = registry.default
    lock, run, now = threading.RLock(), quiet_runner(), time.monotonic_ns
    memory = mmap.mmap(-1, 2 * PART)
    words: Any = memoryview(memory).cast("q")
    mine, theirs = words[1:11], words[17:27]
    body: Any = memoryview(np.zeros(10, np.int64)).cast("B").cast("q")  # type: ignore[arg-type]
    own = np.frombuffer(memory, np.float64, 1, 2048)
    other = np.frombuffer(memory, np.float64, 1, 4096)

    def look_up() -> None:
        if x.__class__ is np.ndarray:
            _ = world.world
            _ = known[dist.ReduceOp.MAX, x.dtype, x.shape]
            _ = x.flags.carray

    def place() -> None:
        frame = sys._getframe(1)
        _ = ("all_reduce", frame.f_code, frame.f_lasti)

    def locked() -> None:
        with lock:
            pass

    def post() -> None:
        mine[:] = body
        words[11] = now()
        words[0] = 0

    def look() -> None:
        while words[16] < 0:
            pass
        if theirs != body:
            raise RuntimeError("the records are not what they were made")

    def copy() -> None:
        own[...] = x

    def reduce() -> None:
        run(np.maximum, out, other, out=out)

    return {
        "find the call that was made before": look_up,
        "note where the program makes it": place,
        "take and give the lock of the group": locked,
        "copy the elements in": copy,
        "write the record": post,
        "look at the other's record": look,
        "reduce": reduce,
    }


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
        many = REPEATS // 10 if call is asynchronous else REPEATS
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
    in_python = not registry.state().pool.extension
    calls = {"MPI's own": raw, **others, "the call": whole, **(parts() if in_python else {})}
    for _ in range(10):
        whole()
    found = rounds(comm, lambda: tuple(time_of(call) - time_of(nothing) for call in calls.values()), ROUNDS)
    columns = list(zip(*found, strict=True))
    if dist.get_rank() == 0:
        for name, column in zip(calls, columns, strict=True):
            print(f"{name:>40}  {middle(column)} us")
        if not in_python:
            return
        rest = [row[3] - sum(row[4:]) for row in found]
        print(f"{'the rest: other lines, and the wait':>40}  {middle(rest)} us")


if __name__ == "__main__":
    main()
