"""The library's own communicators: made without blocking unguarded, pooled when their group is destroyed.

Every live group has a pair: one communicator for control, one for data. The user's communicator is only ever duplicated.
Nothing is freed from garbage collection.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from mpicoll.checks.agreement import Closing, Lane
from mpicoll.engines.base import SMALL_BYTES, Engine, Kind, Request
from mpicoll.engines.choice import DEFAULT, Choice, Ranges
from mpicoll.engines.mpi import MpiEngine
from mpicoll.engines.node import Budget, NodeEngine
from mpicoll.engines.segment import ORDERED
from mpicoll.errors import DistBackendError
from mpicoll.matching import Receiver
from mpicoll.settings import Level, Settings
from mpicoll.topology import Topology

__all__ = ["Pair", "Pool", "duplicate", "make_pair", "mpi_text"]


def mpi_text(error: MPI.Exception) -> str:
    """Return MPI's own words for an error."""
    return str(error.Get_error_string()).strip()


@dataclass(eq=False)
class Pair:
    """The communicators of one group.

    Attributes:
        ranks: its members as ranks of the world, in the order of the group.
        index: how many pairs of just these members were made before it (the same on all of them).
        native: what moves its data through MPI; it serves every call.
        node: what moves the data of members on one node where :attr:`choice` says so; None where there is no such thing.
        idle: no live group uses it.
        spoiled: a call on it was given up, so it can never be used again.
        closing: the comparison of the last group's calls that was made when it was destroyed.
        sent, received: messages of the last group that used it, by rank in the group.
    """

    ranks: tuple[int, ...]
    control: MPI.Intracomm
    data: MPI.Intracomm
    index: int = 0
    idle: bool = False
    spoiled: bool = False
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    closing: Closing | None = None
    node: NodeEngine | None = None
    choice: Choice = field(default_factory=Choice)
    lane: Lane = field(init=False)
    native: Engine = field(init=False)
    receiver: Receiver = field(init=False)

    def __post_init__(self) -> None:
        self.lane = Lane(self.control, self.data)
        self.native = MpiEngine(self.data)
        self.receiver = Receiver(self.control, self.data)

    def through(self, kind: Kind, nbytes: int) -> NodeEngine | None:
        """Return the node engine where it moves a call with blocks of up to ``nbytes``; the same answer on all members."""
        node = self.node
        return node if node is not None and node.usable and self.choice.node(kind, nbytes) else None

    def sweep(self) -> Generator[Request, None, None]:
        """Receive and drop what the last group sent and did not receive; all members do it, and are known to.

        A generator: it yields what has to complete before it goes on.

        Raises:
            CollectiveMismatchError: the members' calls on the last group differed (check level "roll").
        """
        if self.closing is not None:
            closing, self.closing = self.closing, None
            yield closing
            if closing.error is not None:
                self.spoiled = True  # what the members have made unequal numbers of does not fit together any more
                raise closing.error
        sends = np.zeros(len(self.ranks), np.int64)
        for peer, count in self.sent.items():
            sends[peer] = count
        told = np.empty_like(sends)
        yield self.data.Ialltoall(sends, told)
        yield from self.receiver.drop([count - self.received.get(peer, 0) for peer, count in enumerate(told.tolist())])
        self.sent, self.received = {}, {}


class Pool:
    """Pairs of destroyed groups, to be used again when all members agree that theirs is idle.

    Attributes:
        profile: what was measured on this machine; the same on all ranks.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, ...], list[Pair]] = {}
        self._floor: dict[tuple[int, ...], int] = {}
        self._budget: Budget | None = None
        self.profile: Mapping[Kind, Ranges] | None = None

    def add(self, pair: Pair) -> None:
        """Take in a new pair, in use."""
        made = self._pairs.setdefault(pair.ranks, [])
        pair.index = len(made)
        made.append(pair)

    def furnish(self, pair: Pair, topology: Topology, settings: Settings, level: Level) -> None:
        """Give a pair that comes into use what moves its data; all members of a group have the same settings."""
        pair.choice = Choice(settings.engine, 1 if level == "full" else SMALL_BYTES + 1, self.profile or DEFAULT)
        nodes = {topology.node_of[rank] for rank in pair.ranks}
        if pair.node is not None or len(nodes) > 1 or len(pair.ranks) < 2:
            return
        if not ORDERED and settings.engine != "node":
            return  # untested on processors of other kinds: only where it is asked for
        here = len(topology.local_ranks)
        if self._budget is None:
            self._budget = Budget((settings.shm_mb << 20) // here)
        pair.node = NodeEngine(pair.data, self._budget, topology.crowded)

    def candidate(self, ranks: tuple[int, ...]) -> int:
        """Return the index of the first idle pair of these members, or -1."""
        for pair in self._pairs.get(ranks, ()):
            if pair.idle and not pair.spoiled and pair.index >= self._floor.get(ranks, 0):
                return pair.index
        return -1

    def disagreed(self, ranks: tuple[int, ...], most: int) -> None:
        """Note that the members found different pairs idle: those before the last of them are not proposed again.

        One that is spoiled on one rank alone would be proposed by the others for ever.
        """
        self._floor[ranks] = max(self._floor.get(ranks, 0), most)

    def take(self, ranks: tuple[int, ...], index: int) -> Pair:
        """Put a pair to use that all members agreed upon."""
        pair = self._pairs[ranks][index]
        pair.idle = False
        return pair

    def all(self) -> list[Pair]:
        """Return every pair ever made."""
        return [pair for made in self._pairs.values() for pair in made]


def duplicate(comm: MPI.Intracomm, wait: Callable[[MPI.Request], None]) -> MPI.Intracomm:
    """Duplicate ``comm`` without blocking: ``wait`` polls the request, with its limit.

    Raises:
        DistBackendError: MPI refused.
    """
    try:
        copy, request = comm.Idup()
        wait(request)
    except MPI.Exception as error:
        raise DistBackendError(_out_of_communicators(error)) from error
    copy.Set_errhandler(MPI.ERRORS_RETURN)
    return copy


def make_pair(parent: MPI.Intracomm, ranks: tuple[int, ...], tag: int) -> Pair:
    """Make the pair of a group inside ``parent``; every member calls it, and all are known to.

    Source: MPI_Comm_create_group (MPI-4.1 section 7.4.2), which involves the members alone.
    """
    everybody = parent.Get_group()
    members = everybody.Incl(list(ranks))
    try:
        control = parent.Create_group(members, tag)
        data = control.Dup()
    except MPI.Exception as error:
        raise DistBackendError(_out_of_communicators(error)) from error
    finally:
        members.Free()
        everybody.Free()
    for comm in (control, data):
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    return Pair(ranks, control, data)


def _out_of_communicators(error: MPI.Exception) -> str:
    return (
        f"MPI could not make a communicator: {mpi_text(error)}. MPICH has about 2,000 a process and each live group "
        "takes two: destroy groups that are no longer needed (destroy_process_group)"
    )
