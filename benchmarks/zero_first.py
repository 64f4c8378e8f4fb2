"""Time blocks that one rank runs first, and count what they move: the figures of docs/zero-first.md.

    for check in off roll full; do MPICOLL_CHECK=$check mpicoll run -n 4 benchmarks/zero_first.py; done

Prints what one block moves, then blocks a second: median and quartiles of rounds, each timed from a barrier to the end of the
last block on rank 0. The blocks are empty, so this is what they cost beyond the work. Beside them an `all_reduce` of eight
bytes of the same library, and two barriers of MPI, which is what most helpers of this kind are made of.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import mpicoll as dist

ROUNDS, BLOCKS = 21, 50


def moved_by(block: Callable[[], object]) -> str:
    """Return what one block moves through the group's engine on this rank, apart from agreements."""
    from mpicoll.transports.mpi.collectives import EagerMpiSchedule, MpiTransport

    seen: list[str] = []
    start, blocking = EagerMpiSchedule.start, MpiTransport.blocking

    def note(move: Any) -> None:
        buffer = move.recv if move.recv is not None else move.send
        seen.append(f"{move.kind.value} of {buffer.nbytes if buffer is not None else 0} bytes")

    def counted_start(self: EagerMpiSchedule, move: Any) -> Any:
        note(move)
        return start(self, move)

    def counted_blocking(self: MpiTransport, move: Any) -> None:
        note(move)
        blocking(self, move)

    EagerMpiSchedule.start, MpiTransport.blocking = counted_start, counted_blocking  # type: ignore[method-assign]
    try:
        block()
    finally:
        EagerMpiSchedule.start, MpiTransport.blocking = start, blocking  # type: ignore[method-assign]
    return ", ".join(seen) or "nothing"


def main() -> None:
    """Measure and print."""
    dist.init_process_group()
    from mpi4py import MPI

    from mpicoll.groups.registry import state

    comm = MPI.COMM_WORLD.Dup()
    x = np.zeros(1)

    def world() -> None:
        with dist.zero_first():
            pass

    def no_meeting() -> None:
        with dist.zero_first(rejoin=False):
            pass

    def node() -> None:
        with dist.zero_first(scope="node"):
            pass

    def two_barriers() -> None:
        comm.Barrier()
        comm.Barrier()

    blocks: dict[str, Callable[[], object]] = {
        "zero_first()": world,
        "zero_first(rejoin=False)": no_meeting,
        'zero_first(scope="node")': node,
        "run_first(os.getpid)": lambda: dist.run_first(os.getpid),
        "all_reduce, 8 bytes": lambda: dist.all_reduce(x),
        "two barriers of MPI": two_barriers,
    }
    speaks = dist.get_rank() == 0
    if speaks:
        library = MPI.Get_library_version().replace("\0", "").splitlines()[0].split(",")[0].strip()
        print(f"{dist.get_world_size()} ranks, check={state().world.level}, {library}")
        print(f"{'':26}{'a second':>10}{'quartiles':>18}   moves")
    for name, block in blocks.items():
        for _ in range(5):
            block()
        moved = moved_by(block) if "first" in name else ""
        rates = []
        for _ in range(ROUNDS):
            comm.Barrier()
            began = time.perf_counter()
            for _ in range(BLOCKS):
                block()
            rates.append(BLOCKS / (time.perf_counter() - began))
        low, middle, high = statistics.quantiles(rates, n=4)
        if speaks:
            print(f"{name:26}{middle:10.0f}{f'{low:.0f} to {high:.0f}':>18}   {moved}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
