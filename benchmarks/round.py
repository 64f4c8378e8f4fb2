"""Time the round in which the members of a group agree, alone: the constants of the cost model in docs/order-checks.md.

    mpicoll run -n 1 benchmarks/round.py
    mpicoll run -n 2 benchmarks/round.py

On one rank nothing travels, so what a round takes there is the constant of the model: Python and the calls into MPI. On two
ranks the difference to that is one step. Prints the medians of alternating rounds, with the quartiles in brackets, and beside
them MPI's own all-reduce of the same twelve words, polled from Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from quiet import few, middle, rounds

import mpicoll as dist
from mpicoll.checks.agreement import is_usual
from mpicoll.groups import registry
from mpicoll.transports.control import SAID, make_words

ROUNDS = 15
REPEATS = few(20_000)


def main() -> None:
    """Measure and print."""
    dist.init_process_group()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    agreement = registry.state().world.pair.agreement
    agreement.use(None)  # the round through MPI, as members on several nodes make it
    said = make_words(12345, 8)
    words, told = np.zeros(SAID + 2, np.int64), np.zeros(SAID + 2, np.int64)

    def agree() -> None:
        """Make the round of a prepared call (``operations.request``)."""
        number = agreement.order.issue()
        if not (agreement.may_post(number) and agreement.order.may_move(number)):
            raise RuntimeError("a call is under way")
        made = agreement.post(said)
        while not made.Test():
            pass
        is_usual(made, said)  # on a busy machine a member may be late: such a round counts, too
        made.release()
        agreement.order.pass_on(number)

    def polled() -> None:
        request = comm.Iallreduce(words, told, MPI.MAX)
        while not request.Test():
            pass

    def time_of(call: Callable[[], None]) -> float:
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(REPEATS):
            call()
        return (time.perf_counter() - start) / REPEATS * 1e6

    found = rounds(comm, lambda: (time_of(agree), time_of(polled)), ROUNDS)
    ours, bare = (middle(column) for column in zip(*found, strict=True))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: a round {ours}, MPI's polled all-reduce {bare} us", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
