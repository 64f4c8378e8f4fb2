"""Communicators of the library: a pair for each group, which returns to a pool when the group is destroyed.

A pair is one communicator for control and one for data. The communicator of the program is only duplicated. The garbage
collector frees no communicator.
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
from mpicoll.runtime.waiting import Pollable
from mpicoll.transports.base import SMALL_BYTES, Engine, Kind
from mpicoll.transports.mpi.collectives import MpiTransport
from mpicoll.transports.mpi.matching import Receiver
from mpicoll.transports.selection import DEFAULT, Ranges, Selection, single_copy_from
from mpicoll.transports.shm.control import MOST_MEMBERS, PART, RingControl, make_ring
from mpicoll.transports.shm.transport import Budget, SharedMemoryTransport
from mpicoll.transports.topology import Topology

is_finalized = MPI.Is_finalized

MpiError = MPI.Exception
"""An error of MPI. The name stays here at the end of the interpreter, when Python clears the names of ``MPI``."""


def mpi_text(error: MPI.Exception) -> str:
    """Return MPI's text of an error."""
    return str(error.Get_error_string()).strip()


@dataclass(eq=False)
class CommunicatorPair:
    """The communicators of one group.

    Attributes:
        ranks: members as ranks of the world, in the order of the group.
        index: number of earlier pairs of exactly these members (the same on all members).
        native: the MPI transport, which can move every call.
        node: the shared-memory transport, which moves the calls that :attr:`selection` names; None if there is none.
        idle: no live group uses the pair.
        spoiled: a call on the pair was withdrawn, so that the pair cannot be used again.
        on_node: the pair has several members, all on this node.
        agreement: agreement on the calls of the group.
        ring: control channel through shared memory, if there is one.
        closing: last comparison of the calls of the last group, which was made when that group was destroyed.
        sent, received: counts of messages of the last group, by rank in the group.
        last: name of the last group.
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
    selection: Selection = field(default_factory=Selection)
    agreement: Agreement = field(init=False)
    native: Engine = field(init=False)
    receiver: Receiver = field(init=False)

    def __post_init__(self) -> None:
        self.agreement = Agreement(self.control)
        self.native = MpiTransport(self.data)
        self.receiver = Receiver(self.control, self.data)

    def through(self, kind: Kind, nbytes: int) -> SharedMemoryTransport | None:
        """Return the shared-memory transport if it moves calls with blocks of ``nbytes``; the same answer on all members."""
        node = self.node
        return node if node is not None and node.usable and self.selection.node(kind, nbytes) else None

    def is_unused(self) -> bool:
        """Return whether no group uses the pair, and all calls of the last group are over and were compared."""
        return self.idle and not self.spoiled and self.closing is None

    def sweep(self) -> Generator[Pollable, None, tuple[str, set[int], set[int]]]:
        """Receive and drop messages that the last group sent and did not receive. All members have agreed to call the method.

        A generator that yields the requests to complete.

        Returns:
            The name of the last group, the global ranks that have received all messages of this rank, and the global ranks
            whose messages this rank has all received. Both sides know these ranks, and can drop their counts.

        Raises:
            CollectiveMismatchError: the members' calls on the last group differed (check level "roll").
        """
        if self.closing is not None:
            closing, self.closing = self.closing, None
            yield closing
            if closing.error is not None:
                self.spoiled = True  # the members have made unequal numbers of calls
                raise closing.error
        peers = range(len(self.ranks))
        mine = np.array([(self.sent.get(peer, 0), self.received.get(peer, 0)) for peer in peers], np.int64)
        theirs = np.empty_like(mine)
        yield self.data.Ialltoall(mine, theirs)
        yield from self.receiver.drop((theirs[:, 0] - mine[:, 1]).tolist())
        arrived, received = (mine[:, 0] == theirs[:, 1]).tolist(), (theirs[:, 0] == mine[:, 1]).tolist()
        self.sent, self.received = {}, {}
        ranks = self.ranks
        return self.last, {ranks[i] for i in peers if arrived[i]}, {ranks[i] for i in peers if received[i]}

    def free(self) -> None:
        """Free the communicators and the shared memory. All members call this method, after :meth:`sweep`."""
        self.agreement.free()
        if self.node is not None:
            self.node.close()
        self.node = self.ring = None
        for comm in (self.control, self.data):
            comm.Free()


MOST_MADE = 600
"""Number of pairs that the ranks of a world make together before they free unused pairs."""

_MORE = 100

MOST_PAIRS = 32_000 if MPI.get_vendor()[0] == "Open MPI" else sys.maxsize
"""Most pairs of a process: Open MPI 5.0.11 numbers communicators with 16 bits, and hangs if no number is left."""


class Pool:
    """All pairs of a process. A new group uses an idle pair if all its members agree that the pair is idle.

    Pairs that the ranks of a world made together, as in ``new_group``, have a number that all ranks know. When there are many,
    all ranks agree which pairs no group uses, and the members free these: MPICH has about 2,000 communicators.

    Attributes:
        profile: limits measured on this machine; the same on all ranks.
        extension: all ranks have the C extension; otherwise there is no shared memory.
        single_copy: all ranks can read and write the memory of the ranks of their nodes.
    """

    def __init__(self) -> None:
        self._together: dict[int, CommunicatorPair | None] = {}  # by number; None if this rank is not a member
        self._numbers = 0
        self._added = 0
        self._full_at = 0
        self._world: MPI.Intracomm | None = None
        self._pairs: dict[tuple[int, ...], list[CommunicatorPair | None]] = {}  # None: the pair was freed
        self._floor: dict[tuple[int, ...], int] = {}
        self._budget: Budget | None = None
        self.profile: Mapping[Kind, Ranges] | None = None
        self.extension = self.single_copy = False

    def add(self, pair: CommunicatorPair) -> None:
        """Add a new pair, which is in use."""
        made = self._pairs.setdefault(pair.ranks, [])
        self._added += 1
        pair.index = len(made)
        made.append(pair)

    def check_room(self, ranks: tuple[int, ...]) -> None:
        """Raise DistBackendError if this MPI cannot have one more pair of these members."""
        if self._added >= MOST_PAIRS and len(self.all()) >= MOST_PAIRS and self.candidate(ranks) < 0:
            raise DistBackendError(_out_of_communicators(f"this process has {2 * MOST_PAIRS}"))

    def open_transports(self, pair: CommunicatorPair, topology: Topology, settings: Settings, level: Level) -> None:
        """Set the transports of a pair for a new group; all members have the same settings."""
        least = 1 if level == "full" else SMALL_BYTES + 1
        once = single_copy_from(topology.oversubscribed) if self.single_copy else {}
        pair.selection = Selection(settings.engine, least, self.profile or DEFAULT, once)
        if self._budget is None:
            self._budget = Budget((settings.shm_mb << 20) // len(topology.local_ranks))
        nodes = {topology.node_of[rank] for rank in pair.ranks}
        pair.on_node = len(nodes) == 1 and len(pair.ranks) > 1
        if pair.node is None and pair.on_node and self.extension:
            pair.node = SharedMemoryTransport(pair.data, self._budget, topology.oversubscribed, once)

    def open_channel(self, pair: CommunicatorPair) -> Generator[Pollable, None, None]:
        """Set the control channel of a pair for a new group: shared memory if possible, otherwise MPI.

        A generator that yields the requests to complete. All members have agreed to call the method.
        """
        budget = self._budget
        wanted = pair.node is not None and len(pair.ranks) <= MOST_MEMBERS and pair.selection.mode != "mpi"
        if not wanted or budget is None:
            pair.agreement.use(None)
            return
        if pair.ring is None:
            why = "" if budget.take(PART) else "the groups of this process use all memory that MPICOLL_SHM_MB allows"
            made = yield from make_ring(pair.data, why)
            if isinstance(made, str):
                if not why:
                    budget.take(-PART)
                return
            pair.ring = made
        pair.agreement.use(pair.ring)
        pair.selection = replace(pair.selection, least=1)  # each call makes a round, at every check level

    def made_together(self, pair: CommunicatorPair | None) -> None:
        """Number a pair that all ranks of the world know of; None if this rank is not a member, or has failed to make it."""
        self._numbers += 1
        self._together[self._numbers] = pair

    def full(self) -> bool:
        """Return whether unused pairs must be freed; the same on all ranks of the world."""
        return len(self._together) >= max(self._full_at, MOST_MADE)

    def make_world(self, parent: MPI.Intracomm, tag: int) -> None:
        """Make the communicator for :meth:`shrink`, once. All ranks of the world have agreed to call the method: it may block.

        Args:
            parent: communicator of all ranks.
            tag: a tag that no other communicator made from the parent uses now.
        """
        if self._world is None:
            all_ranks = parent.Get_group()
            try:
                self._world = parent.Create_group(all_ranks, tag)
            finally:
                all_ranks.Free()
            self._world.Set_errhandler(MPI.ERRORS_RETURN)

    def shrink(self) -> Generator[Pollable, None, list[tuple[str, set[int], set[int]]]]:
        """Free numbered pairs that no group uses. All ranks of the world have agreed to call the method.

        A generator that yields the requests to complete.

        Returns:
            The results of :meth:`CommunicatorPair.sweep` for each freed pair.
        """
        assert self._world is not None
        known = tuple(self._together.items())
        mine = np.array([pair is None or pair.is_unused() for _, pair in known], np.int8)
        agreed = np.empty_like(mine)
        yield self._world.Iallreduce(mine, agreed, MPI.MIN)
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
        """Free all communicators, on which no call is pending."""
        for pair in self.all():
            pair.agreement.free()
            pair.control.Free()
            pair.data.Free()
        if self._world is not None:
            self._world.Free()

    def candidate(self, ranks: tuple[int, ...]) -> int:
        """Return the index of the first idle pair of these members, or -1."""
        for pair in self._pairs.get(ranks, ()):
            if pair is not None and pair.idle and not pair.spoiled and pair.index >= self._floor.get(ranks, 0):
                return pair.index
        return -1

    def disagreed(self, ranks: tuple[int, ...], most: int) -> None:
        """Record that the members found different pairs idle: pairs before the last of these are not proposed again.

        Otherwise a pair that is spoiled on one member only would be proposed by other members each time.
        """
        self._floor[ranks] = max(self._floor.get(ranks, 0), most)

    def take(self, ranks: tuple[int, ...], index: int) -> CommunicatorPair:
        """Return a pair for use by a new group; all members have agreed on the pair."""
        pair = self._pairs[ranks][index]
        assert pair is not None
        pair.idle = False
        return pair

    def all(self) -> list[CommunicatorPair]:
        """Return all pairs that are not freed."""
        return [pair for made in self._pairs.values() for pair in made if pair is not None]


def duplicate(comm: MPI.Intracomm) -> Generator[MPI.Request, None, MPI.Intracomm]:
    """Duplicate ``comm`` without blocking: the caller completes the yielded request before it continues the generator.

    Raises:
        DistBackendError: MPI could not make the communicator.
    """
    try:
        copy, request = comm.Idup()
        yield request
    except MPI.Exception as error:
        raise DistBackendError(_out_of_communicators(mpi_text(error).splitlines()[-1])) from error
    copy.Set_errhandler(MPI.ERRORS_RETURN)
    return copy


def make_pair(parent: MPI.Intracomm, ranks: tuple[int, ...], tag: int) -> CommunicatorPair:
    """Make the pair of a group inside ``parent``. All members have agreed to call the function.

    Source: MPI_Comm_create_group (MPI-4.1 section 7.4.2), which only the members call.
    """
    all_ranks = parent.Get_group()
    members = all_ranks.Incl(list(ranks))
    control = MPI.COMM_NULL
    try:
        control = parent.Create_group(members, tag)
        data = control.Dup()
    except MPI.Exception as error:
        # If MPI refuses the second communicator, it does so on all members. Open MPI 5.0.11 crashes if the first is then freed.
        if control != MPI.COMM_NULL and MPI.get_vendor()[0] != "Open MPI":
            control.Free()
        raise DistBackendError(_out_of_communicators(mpi_text(error).splitlines()[-1])) from error
    finally:
        members.Free()
        all_ranks.Free()
    for comm in (control, data):
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    return CommunicatorPair(ranks, control, data)


def _out_of_communicators(why: str) -> str:
    return (
        f"MPI could not make a communicator: {why}. A process may have about 2,000 with MPICH and "
        "65,000 with Open MPI, the program's own among them, and each group takes two. Destroy groups that are no longer "
        "needed (destroy_process_group): new groups of the same ranks use their communicators"
    )
