"""The library's own communicators: made without blocking unguarded, pooled when their group is destroyed.

Every live group has a pair: one communicator for control, one for data. The user's communicator is only ever duplicated.
Nothing is freed from garbage collection.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from mpi4py import MPI

from mpicoll.checks.agreement import Agreement, Closing
from mpicoll.errors import DistBackendError
from mpicoll.runtime.settings import Level, Settings
from mpicoll.transports.base import SMALL_BYTES, Engine, Kind, Request
from mpicoll.transports.mpi.collectives import MpiTransport
from mpicoll.transports.mpi.matching import Receiver
from mpicoll.transports.selection import DEFAULT, Choice, Ranges
from mpicoll.transports.shm.control import MOST_MEMBERS, PART, RingControl, make_ring
from mpicoll.transports.shm.transport import Budget, SharedMemoryTransport
from mpicoll.transports.topology import Topology

MpiError = MPI.Exception
"""An error of MPI. It stays here at the end of the interpreter, when the names of ``MPI`` are gone."""


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
        on_node: there is more than one, and all are on this node.
        agreement: its rounds.
        ring: the control channel through shared memory, if there is one.
        closing: the comparison of the last group's calls that was made when it was destroyed.
        sent, received: messages of the last group that used it, by rank in the group.
        last: the name of that group.
    """

    ranks: tuple[int, ...]
    control: MPI.Intracomm
    data: MPI.Intracomm
    index: int = 0
    idle: bool = False
    spoiled: bool = False
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    last: str = ""
    closing: Closing | None = None
    node: SharedMemoryTransport | None = None
    on_node: bool = False
    ring: RingControl | None = None
    choice: Choice = field(default_factory=Choice)
    agreement: Agreement = field(init=False)
    native: Engine = field(init=False)
    receiver: Receiver = field(init=False)

    def __post_init__(self) -> None:
        self.agreement = Agreement(self.control)
        self.native = MpiTransport(self.data)
        self.receiver = Receiver(self.control, self.data)

    def through(self, kind: Kind, nbytes: int) -> SharedMemoryTransport | None:
        """Return the node engine where it moves a call with blocks of up to ``nbytes``; the same answer on all members."""
        node = self.node
        return node if node is not None and node.usable and self.choice.node(kind, nbytes) else None

    def at_rest(self) -> bool:
        """Whether no group uses it, and what the last one did on it is over and was right."""
        return self.idle and not self.spoiled and self.closing is None

    def sweep(self) -> Generator[Request, None, tuple[str, set[int], set[int]]]:
        """Receive and drop what the last group sent and did not receive; all members do it, and are known to.

        A generator: it yields what has to complete before it goes on.

        Returns:
            The last group's name, and the global ranks that have received all that this one sent there, and from which this one
            has received all: both know it, and need not keep their counts.

        Raises:
            CollectiveMismatchError: the members' calls on the last group differed (check level "roll").
        """
        if self.closing is not None:
            closing, self.closing = self.closing, None
            yield closing
            if closing.error is not None:
                self.spoiled = True  # what the members have made unequal numbers of does not fit together any more
                raise closing.error
        everybody = range(len(self.ranks))
        said = np.array([(self.sent.get(peer, 0), self.received.get(peer, 0)) for peer in everybody], np.int64)
        told = np.empty_like(said)
        yield self.data.Ialltoall(said, told)
        yield from self.receiver.drop((told[:, 0] - said[:, 1]).tolist())
        arrived, taken = (said[:, 0] == told[:, 1]).tolist(), (told[:, 0] == said[:, 1]).tolist()
        self.sent, self.received = {}, {}
        ranks = self.ranks
        return self.last, {ranks[i] for i in everybody if arrived[i]}, {ranks[i] for i in everybody if taken[i]}

    def free(self) -> None:
        """Give back to MPI, and to the groups that are made later, all that it has; all members do it, after a sweep."""
        self.agreement.free()
        if self.node is not None:
            self.node.close()
        self.node = self.ring = None
        for comm in (self.control, self.data):
            comm.Free()


MOST_MADE = 600
"""Pairs that the ranks of a world make together before they free those that no group uses."""

_MORE = 100

MOST_PAIRS = 32_000 if MPI.get_vendor()[0] == "Open MPI" else sys.maxsize
"""Pairs that a process may have: Open MPI 5.0.11 numbers communicators with 16 bits, and hangs when there is no number left."""


class Pool:
    """Pairs of destroyed groups, to be used again when all members agree that theirs is idle.

    Those that the ranks of a world made together, as ``new_group`` does, are known to all of them by their number. When there are
    many, all ranks agree which of them no group uses, and their members free them: MPICH has about 2,000 communicators.

    Attributes:
        profile: what was measured on this machine; the same on all ranks.
    """

    def __init__(self) -> None:
        self._together: dict[int, Pair | None] = {}  # by number; None where this rank is not a member
        self._numbers = 0
        self._added = 0
        self._full_at = 0
        self._everybody: MPI.Intracomm | None = None
        self._pairs: dict[tuple[int, ...], list[Pair | None]] = {}  # None: was freed
        self._floor: dict[tuple[int, ...], int] = {}
        self._budget: Budget | None = None
        self.profile: Mapping[Kind, Ranges] | None = None
        self.extension = False  # all ranks have the C extension: without it there is no shared memory

    def add(self, pair: Pair) -> None:
        """Take in a new pair, in use."""
        made = self._pairs.setdefault(pair.ranks, [])
        self._added += 1
        pair.index = len(made)
        made.append(pair)

    def check_room(self, ranks: tuple[int, ...]) -> None:
        """Raise DistBackendError where a pair of these members would be more than this MPI can have."""
        if self._added >= MOST_PAIRS and len(self.all()) >= MOST_PAIRS and self.candidate(ranks) < 0:
            raise DistBackendError(_out_of_communicators(f"this process has {2 * MOST_PAIRS}"))

    def furnish(self, pair: Pair, topology: Topology, settings: Settings, level: Level) -> None:
        """Give a pair that comes into use what moves its data; all members of a group have the same settings."""
        pair.choice = Choice(settings.engine, 1 if level == "full" else SMALL_BYTES + 1, self.profile or DEFAULT)
        if self._budget is None:
            self._budget = Budget((settings.shm_mb << 20) // len(topology.local_ranks))
        nodes = {topology.node_of[rank] for rank in pair.ranks}
        pair.on_node = len(nodes) == 1 and len(pair.ranks) > 1
        if pair.node is None and pair.on_node and self.extension:
            pair.node = SharedMemoryTransport(pair.data, self._budget, topology.oversubscribed)

    def meet(self, pair: Pair) -> Generator[Request, None, None]:
        """Have the members of a pair that comes into use make their rounds where that is fastest.

        A generator: it yields what has to complete before it goes on. All members call it, and are known to.
        """
        budget = self._budget
        wanted = pair.node is not None and len(pair.ranks) <= MOST_MEMBERS and pair.choice.mode != "mpi"
        if not wanted or budget is None:
            pair.agreement.use(None)
            return
        if pair.ring is None:
            why = "" if budget.take(PART) else "the groups of this process use what MPICOLL_SHM_MB gives"
            made = yield from make_ring(pair.data, why)
            if isinstance(made, str):
                if not why:
                    budget.take(-PART)
                return
            pair.ring = made
        pair.agreement.use(pair.ring)
        pair.choice = replace(pair.choice, least=1)  # whatever is compared, each call makes a round

    def made_together(self, pair: Pair | None) -> None:
        """Number a pair that all ranks of the world know to have been made; None on those that are no members, or have failed."""
        self._numbers += 1
        self._together[self._numbers] = pair

    def full(self) -> bool:
        """Whether it is time to free pairs; the same on all ranks of the world."""
        return len(self._together) >= max(self._full_at, MOST_MADE)

    def meet_all(self, parent: MPI.Intracomm, tag: int) -> None:
        """Make what :meth:`shrink` needs, once; all ranks of the world are known to call it, so it may block.

        Args:
            parent: of all ranks.
            tag: of nothing else that is made of the parent now.
        """
        if self._everybody is None:
            everybody = parent.Get_group()
            try:
                self._everybody = parent.Create_group(everybody, tag)
            finally:
                everybody.Free()
            self._everybody.Set_errhandler(MPI.ERRORS_RETURN)

    def shrink(self) -> Generator[Request, None, list[tuple[str, set[int], set[int]]]]:
        """Free the pairs that were made together and that no group uses any more; all ranks of the world do it, and are known to.

        A generator: it yields what has to complete before it goes on.

        Returns:
            What :meth:`Pair.sweep` returns, of each that was freed.
        """
        assert self._everybody is not None
        known = tuple(self._together.items())
        mine = np.array([pair is None or pair.at_rest() for _, pair in known], np.int8)
        agreed = np.empty_like(mine)
        yield self._everybody.Iallreduce(mine, agreed, MPI.MIN)
        settled = []
        for (number, pair), unused in zip(known, agreed.tolist(), strict=True):
            if unused:
                if pair is not None:
                    settled.append((yield from pair.sweep()))
                    if pair.ring is not None and self._budget is not None:
                        self._budget.take(-PART)
                    pair.free()
                    self._pairs[pair.ranks][pair.index] = None
                del self._together[number]
        self._full_at = len(self._together) + _MORE
        return settled

    def close(self) -> None:
        """Free every communicator; nothing is under way on any of them."""
        for pair in self.all():
            pair.agreement.free()
            pair.control.Free()
            pair.data.Free()
        if self._everybody is not None:
            self._everybody.Free()

    def candidate(self, ranks: tuple[int, ...]) -> int:
        """Return the index of the first idle pair of these members, or -1."""
        for pair in self._pairs.get(ranks, ()):
            if pair is not None and pair.idle and not pair.spoiled and pair.index >= self._floor.get(ranks, 0):
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
        assert pair is not None
        pair.idle = False
        return pair

    def all(self) -> list[Pair]:
        """Return every pair that is there."""
        return [pair for made in self._pairs.values() for pair in made if pair is not None]


def duplicate(comm: MPI.Intracomm) -> Generator[MPI.Request, None, MPI.Intracomm]:
    """Duplicate ``comm`` without blocking: the request that is yielded is over when it is gone on with.

    Raises:
        DistBackendError: MPI refused.
    """
    try:
        copy, request = comm.Idup()
        yield request
    except MPI.Exception as error:
        raise DistBackendError(_out_of_communicators(mpi_text(error).splitlines()[-1])) from error
    copy.Set_errhandler(MPI.ERRORS_RETURN)
    return copy


def make_pair(parent: MPI.Intracomm, ranks: tuple[int, ...], tag: int) -> Pair:
    """Make the pair of a group inside ``parent``; every member calls it, and all are known to.

    Source: MPI_Comm_create_group (MPI-4.1 section 7.4.2), which involves the members alone.
    """
    everybody = parent.Get_group()
    members = everybody.Incl(list(ranks))
    control = MPI.COMM_NULL
    try:
        control = parent.Create_group(members, tag)
        data = control.Dup()
    except MPI.Exception as error:
        # Of the two the second was refused, to all members. Open MPI 5.0.11 crashes where the first is freed then.
        if control != MPI.COMM_NULL and MPI.get_vendor()[0] != "Open MPI":
            control.Free()
        raise DistBackendError(_out_of_communicators(mpi_text(error).splitlines()[-1])) from error
    finally:
        members.Free()
        everybody.Free()
    for comm in (control, data):
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    return Pair(ranks, control, data)


def _out_of_communicators(why: str) -> str:
    return (
        f"MPI could not make a communicator: {why}. A process may have about 2,000 with MPICH and "
        "65,000 with Open MPI, the program's own among them, and each group takes two. Destroy groups that are no longer "
        "needed (destroy_process_group): new ones of the same ranks take over what they had"
    )
