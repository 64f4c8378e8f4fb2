"""Count the messages of searches for deadlocks while ranks of several nodes wait for one that computes.

    python benchmarks/searches.py [--seconds 30] [RANKS RANKS_PER_NODE ...]
    MPIR_CVAR_NOLOCAL=1 mpicoll run -n 8 benchmarks/searches.py

On one process all ranks are made up: the library's own searches and boards (``diagnosis.deadlock_search.DeadlockSearch``,
``diagnosis.board.Board``) with a clock and messages that this script keeps, so any number of ranks can be tried. On several
ranks the messages of a real job are counted, while the last rank sleeps for ten seconds; MPICH takes each rank for a node of
its own with that variable. Prints how many searches and messages there were (questions, and answers of the ranks that wait)
in the first second, in the next nine, and a second after that; of a real job also what a message of the board takes to
post and to read.
"""

from __future__ import annotations

import argparse
import heapq
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import mpi4py

import mpicoll as dist
from mpicoll.launch.environment import local_rank_hint

TICK = 0.005
LATENCY = 20e-6
KINDS = ("search", "state")


def made_up(size: int, node: int, seconds: float, lowest: int = 0) -> None:
    """Have ranks ``lowest`` to ``size - 2`` wait for the others, in nodes of ``node`` ranks, and print what they sent."""
    import mpicoll.diagnosis.board as boards
    from mpicoll.diagnosis import deadlock_search
    from mpicoll.diagnosis.deadlock import State

    clock = SimpleNamespace(now=0.0)
    boards.time = SimpleNamespace(monotonic=lambda: clock.now)  # type: ignore[attr-defined]
    deadlock_search.describe_state = lambda: State(0, free=True)  # what is waited for computes: nobody is held
    letters: list[list[tuple[float, int, str, Any]]] = [[] for _ in range(size)]
    sent: list[tuple[float, str]] = []

    class OneNode:
        """Shared memory of a node's ranks: who waits, and when each of them has searched."""

        def __init__(self, ranks: range) -> None:
            self.ranks = ranks
            self.when = dict.fromkeys(ranks, 0.0)
            self.stated: set[int] = set()
            self.changed = 0

        def of(self, rank: int) -> Any:
            return SimpleNamespace(
                ranks=self.ranks,
                searched=lambda other: self.when[other] * 1e9,
                searching=lambda: self.when.update({rank: clock.now}),
                write_state=lambda data: self.state(rank),
                waiting_below=lambda since=0: sum(other < rank for other in self.stated),
                changed=lambda: self.changed,
                read=lambda other, area: b"",
                confirm=lambda when: None,
            )

        def state(self, rank: int) -> None:
            self.stated.add(rank)
            self.changed += 1

    class MadeUp(boards.Board):
        """A board whose messages stay in this process."""

        def post(self, kind: str, payload: Any, ranks: Iterable[int]) -> None:
            for rank in ranks:
                sent.append((clock.now, kind))
                if lowest <= rank < size - 1:
                    letters[rank].append((clock.now + LATENCY, self.rank, kind, payload))

        def poll(self) -> None:
            mine = letters[self.rank]
            due = [letter for letter in mine if letter[0] <= clock.now]
            if due:
                mine[:] = [letter for letter in mine if letter[0] > clock.now]
            for _, rank, kind, payload in due:
                answer = self._read(kind, rank, payload)
                if answer is not None:
                    self.post(*answer, [rank])

    nodes = [OneNode(range(first, min(first + node, size))) for first in range(0, size, node)]
    waiting = []
    for rank in range(lowest, size - 1):
        comm: Any = SimpleNamespace(Get_rank=lambda rank=rank: rank, Get_size=lambda: size)
        board = MadeUp(comm, lambda group: (0, None))  # type: ignore[arg-type, return-value]
        board.state = deadlock_search.describe_state
        board.slots = nodes[rank // node].of(rank) if node > 1 else None
        search = deadlock_search.DeadlockSearch()
        search.epoch = 1
        known = SimpleNamespace(board=board, topology=SimpleNamespace(node=rank // node))
        waiting.append((known, search))
    began = [(rank * 7919 % size) / size * TICK for rank in range(len(waiting))]
    ticks = [(start, place) for place, start in enumerate(began)]
    heapq.heapify(ticks)
    while ticks[0][0] < seconds:
        clock.now, place = ticks[0]
        heapq.heapreplace(ticks, (clock.now + TICK, place))
        known, search = waiting[place]
        known.board.poll()
        waited = clock.now - began[place]
        if waited >= search.FIRST_AFTER:
            search._look(known, waited, clock.now)
    text = f"{size} ranks, {node} a node" + (f", of which {lowest} to {size - 2} wait" if lowest else "")
    remote = size - min(node, size)
    show(text, [(when, kind) for when, kind in sent if kind in KINDS], remote, seconds)


def show(text: str, sent: list[tuple[float, str]], remote: int, seconds: float) -> None:
    """Print how many searches and messages there were in each stretch of time."""
    parts = []
    for first, last in ((0.0, 1.0), (1.0, 10.0), (10.0, seconds)):
        if last > first:
            kinds = Counter(kind for when, kind in sent if first <= when < last)
            per = last - first if first >= 10.0 else 1.0
            searches = kinds["search"] / remote if remote else 0.0
            unit = " a second" if first >= 10.0 else ""
            parts.append(
                f"{first:g}-{last:g} s: {searches / per:.1f} searches, {kinds.total() / per:.0f} messages{unit}"
            )
    print(f"{text}: {'; '.join(parts)}", flush=True)


def real(seconds: float = 10.0) -> None:
    """Count what the boards of this job send while its last rank sleeps."""
    dist.init_process_group()
    from mpi4py import MPI

    from mpicoll.diagnosis.board import Board
    from mpicoll.groups import registry

    comm = MPI.COMM_WORLD.Dup()
    sent: list[tuple[float, str]] = []
    post = Board.post

    def counted(self: Board, kind: str, payload: Any, ranks: Iterable[int]) -> None:
        ranks = [rank for rank in ranks if rank != self.rank]
        sent.extend((time.monotonic() - start, kind) for _ in ranks)
        post(self, kind, payload, ranks)

    comm.Barrier()
    start = time.monotonic()
    Board.post = counted  # type: ignore[method-assign]
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(seconds)
        asleep = True
    else:
        asleep = False
    dist.barrier()
    Board.post = post  # type: ignore[method-assign]
    mine = [] if asleep else [item for item in sent if item[1] in KINDS and item[0] < seconds]
    told = comm.gather(mine, 0)
    if told is not None:
        remote = comm.Get_size() - len(registry.state().topology.local_ranks)
        every = [item for of_one in told for item in of_one]
        show(f"{comm.Get_size()} real ranks, {remote} on other nodes", every, remote, seconds)
    board = registry.state().board
    costs = message_cost(board, comm)
    if board.rank == 0:
        print(f"a message takes {costs[0] * 1e6:.1f} us to post and {costs[1] * 1e6:.1f} us to read", flush=True)
    dist.destroy_process_group()


def message_cost(board: Any, comm: Any, messages: int = 500, rounds: int = 9) -> tuple[float, float]:
    """Return the seconds that a message takes to post and to read, medians; between ranks 0 and 1."""
    posts, reads = [], []
    for _ in range(rounds):
        comm.Barrier()
        start = time.perf_counter()
        if board.rank == 0:
            for _ in range(messages):
                board.post("alive", None, [1])
            posts.append((time.perf_counter() - start) / messages)
        comm.Barrier()
        time.sleep(0.05)
        start, before = time.perf_counter(), board.balance
        board.poll()
        if board.rank == 1:
            reads.append((time.perf_counter() - start) / max(1, before - board.balance))
    read: float = comm.bcast(statistics.median(reads) if reads else 0.0, 1)
    return statistics.median(posts) if posts else 0.0, read


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the ranks wait (default: %(default)g)")
    parser.add_argument(
        "--lowest", type=int, default=0, help="ranks below this one compute, too (default: %(default)d)"
    )
    parser.add_argument(
        "sizes", type=int, nargs="*", default=[16, 4, 64, 4, 64, 16, 256, 16, 1024, 16], metavar="RANKS"
    )
    options = parser.parse_args()
    if local_rank_hint(os.environ) is not None:
        real()
        return
    mpi4py.rc.initialize = False
    for size, node in zip(options.sizes[::2], options.sizes[1::2], strict=True):
        made_up(size, node, options.seconds, options.lowest)


if __name__ == "__main__":
    main()
