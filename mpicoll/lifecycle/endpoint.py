"""State of a communicator that all default groups made on it share, over any number of initialisations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicoll.diagnosis.board import EARLIER_TAGS
from mpicoll.groups import process_group, registry
from mpicoll.transports.topology import node_communicator

if TYPE_CHECKING:
    from mpicoll.diagnosis.board import Board
    from mpicoll.groups.communicators import Pool

MOST_REMEMBERED = 1000
"""Most destroyed groups whose counters are remembered (the last ones): other ranks may still wait in a call on them."""

MOST_TAGS = 32
"""Most tags for which an ending rank reports the number of messages separately."""

Counts = dict[tuple[int, int], int]
"""Messages by (rank, tag)."""


@dataclass(eq=False)
class JobEndpoint:
    """This rank's endpoint of a job.

    Attributes:
        again: the communicator on which the ranks agree on an idle pair when the default group is made again.
        calls, sent, received, last: of destroyed groups, by name: the number of calls, the messages to and from each
            (rank, tag), the last call.
        displays, places: names of destroyed groups in messages to users, and call sites of messages to each (rank, tag).
        job: whether a default group on the communicator had ``on_failure="job"``.
        failure_posted: whether this rank has sent its failure to the other ranks.
    """

    board: Board
    pool: Pool
    again: MPI.Intracomm
    calls: dict[str, int]
    topology: Any = None
    job: bool = False
    failure_posted: bool = False
    node: MPI.Intracomm | None = field(default=None, init=False)
    sent: dict[str, Counts] = field(default_factory=dict, init=False)
    received: dict[str, Counts] = field(default_factory=dict, init=False)
    last: dict[str, str] = field(default_factory=dict, init=False)
    displays: dict[str, str] = field(default_factory=dict, init=False)
    places: dict[str, dict[tuple[int, int], str]] = field(default_factory=dict, init=False)

    def node_communicator(self, parent: MPI.Intracomm) -> MPI.Intracomm:
        """Return the communicator of this node's ranks; all of them call this method at the first use, which makes it."""
        if self.node is None:
            self.node = node_communicator(self.topology, parent)
        return self.node

    def remember(self, group: process_group.ProcessGroup) -> None:
        """Record the counters of a group that is destroyed."""
        for table in (self.calls, self.last):
            while len(table) >= MOST_REMEMBERED:
                del table[next(iter(table))]
        self.calls[group.group_name] = group.calls
        self.last[group.group_name] = group.last_call()
        if group.sent or group.received:
            self.sent[group.group_name] = group.by_rank(group.sent)
            self.received[group.group_name] = group.by_rank(group.received)
            self.displays[group.group_name] = group.display
            self.places[group.group_name] = group.by_rank(group.known_sites.places)

    def settle(self, name: str, to: set[int], by: set[int]) -> None:
        """Forget messages on a destroyed group: to ranks that have received all, and from ranks whose messages all arrived.

        The other ranks forget the same messages, so the sums over all ranks still show whether a message is left.
        """
        for table, ranks in ((self.sent, to), (self.received, by)):
            if name in table:
                left = {(rank, tag): count for (rank, tag), count in table.pop(name).items() if rank not in ranks}
                if left:
                    table[name] = left
        if name not in self.sent and name not in self.received:
            self.displays.pop(name, None)
            self.places.pop(name, None)

    def live_groups(self) -> list[process_group.ProcessGroup]:
        """Return the groups on this endpoint that are not destroyed."""
        known = registry.current()
        return list(known.groups.values()) if known is not None and known.board is self.board else []

    def all_sent(self) -> dict[str, Counts]:
        """Return the messages to each (rank, tag) on each group, destroyed groups included."""
        return {**self.sent, **{group.group_name: group.by_rank(group.sent) for group in self.live_groups()}}

    def all_received(self) -> dict[str, Counts]:
        """Return the messages from each (rank, tag) on each group, destroyed groups included."""
        return {**self.received, **{group.group_name: group.by_rank(group.received) for group in self.live_groups()}}

    def balance(self) -> int:
        """Return the messages that this rank has sent on all groups, less the messages that it has received."""
        sent = sum(sum(there.values()) for there in self.all_sent().values())
        return sent - sum(sum(here.values()) for here in self.all_received().values())

    def spoiled(self) -> bool:
        """Return whether MPI may still write to memory of a call on any communicator."""
        return any(pair.spoiled for pair in self.pool.all())

    def counters(self, rank: int) -> tuple[dict[str, int], dict[str, dict[int, int]], dict[str, str]]:
        """Return the calls made on every group, the messages sent to ``rank`` on each by tag, and the last call on each."""
        calls, last = dict(self.calls), dict(self.last)
        sent = {name: _by_tag(there, rank) for name, there in self.sent.items()}
        for group in self.live_groups():
            calls[group.group_name] = group.calls
            last[group.group_name] = group.last_call()
            if rank in group.ranks:
                sent[group.group_name] = _by_tag(group.sent, group.ranks.index(rank))
        return calls, sent, {name: text for name, text in last.items() if text}


def _by_tag(sent: Counts, peer: int) -> dict[int, int]:
    """Return the messages to a rank by tag: of the last MOST_TAGS tags, and of all earlier tags under -1."""
    counts = [(tag, n) for (to, tag), n in sent.items() if to == peer]
    before = sum(n for _, n in counts[:-MOST_TAGS])
    return dict(counts[-MOST_TAGS:]) | ({EARLIER_TAGS: before} if before else {})


endpoints: list[JobEndpoint] = []


def endpoint_of(board: Board) -> JobEndpoint:
    """Return the endpoint of a board."""
    return next(endpoint for endpoint in endpoints if endpoint.board is board)
