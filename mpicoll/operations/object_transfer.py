"""The steps in which objects that pickle can serialize move between the members of a group.

The members agree on the call, and learn the sizes of the largest object and of the largest head. One transfer of equal blocks
carries the heads (see ``memory.pickled``): small objects are complete then. The rest of long heads and the buffers move
directly from the memory of the sender to the memory of the object on the receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.report.entries import name_ranks
from mpicoll.errors import CollectiveMismatchError, DistError
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.memory import pickled
from mpicoll.memory.pickled import IncomingObject, Packed, WireError
from mpicoll.operations import composed
from mpicoll.operations.schedules import open_memory
from mpicoll.runtime import waiting
from mpicoll.runtime.waiting import Pollable, Steps
from mpicoll.transports.base import EAGER_BYTES, Kind, Movement
from mpicoll.transports.control import Agreed
from mpicoll.transports.mpi.collectives import AllRequests, Post, library_tag, post_all

FIRST_BYTES = 16 * 1024
"""Heads up to this size move whole in the first transfer, each padded to the largest."""

SHORT_BYTES = 512
"""Bytes of each head in the first transfer if one head is larger."""

SHARED_BYTES = 192 * 1024
"""Most bytes of the objects of a member that shared memory moves, at the next such call."""

PEERS = 8
"""Members with which an all-gather exchanges buffers at a time."""

FAILED = 1 << 62
"""With the rank of the member: the detail of a round to which a member brings an object that cannot be pickled."""

_TAG = 3

_Sends = dict[int, tuple[Packed, Any]]
_Pieces = list[tuple[int, list[Any]]]


@dataclass(slots=True)
class ObjectTransfer:
    """This rank's part in one call with right arguments.

    Attributes:
        packed: objects to send.
        weights_only: the objects of other ranks are loaded if they hold data only.
        failed: exception of pickling, if the round carries it as a detail and not as an error.
        arrived: received objects by rank, not unpickled yet.
        whole, whole_heads: the first transfer carries all objects, or all heads.
        largest: bytes of the largest object of all members, as they know after the round.
        moves: how the first transfer moves.
    """

    group: ProcessGroup
    call: CallDescription
    root: int
    packed: list[Packed]
    weights_only: bool
    failed: Exception | None = None
    arrived: dict[int, IncomingObject] = field(default_factory=dict)
    whole: bool = False
    whole_heads: bool = False
    largest: int = 0
    kind, moves = b"?", Kind.BROADCAST

    def steps(self, agreed: Agreed) -> Steps:
        """Move the objects: a generator for ``operations.composed.run``."""
        if agreed.most >= FAILED:
            if self.failed is not None:
                self.call.error = self.failed
                raise self.failed
            odd = self.group.ranks[agreed.most - FAILED]
            raise CollectiveMismatchError(
                f"{self.call.op} on group {self.group.display}, at {self.call.site}: an object of {name_ranks([odd])} could not "
                "be pickled, and that rank raised the error of pickle"
            )
        node = self.group.pair.through(self.moves, SHARED_BYTES)
        if node is not None and EAGER_BYTES < self.room_for(agreed.block_bytes) <= SHARED_BYTES:
            yield from open_memory(self.group, node)  # for the next such call
        first = _first_bytes(agreed.most)
        self.largest = agreed.block_bytes
        self.whole = agreed.block_bytes <= first
        self.whole_heads = agreed.most <= first
        wire_error = WireError  # at the end of the interpreter the module's names are deleted before generators
        try:
            yield from self.move(agreed, first)
        except wire_error as error:
            raise self.refused(error) from error

    @property
    def parts(self) -> int:
        """The number of objects that a member sends, if it sends any."""
        return self.group.size() if self.moves is Kind.SCATTER else 1

    def room_for(self, largest: int) -> int:
        """Return the bytes that the objects of a member may take in shared memory, if the largest one has ``largest``."""
        return largest * self.parts

    def move(self, agreed: Agreed, first: int) -> Steps:
        """Move the objects; ``first`` is the number of bytes of each head in the first transfer."""
        raise NotImplementedError

    def refused(self, error: WireError) -> DistError:
        """Return the error for bytes that are no object of this call: the members make different calls."""
        group, call = self.group, self.call
        hint = "" if group.level == "full" else ": run with MPICOLL_CHECK=full to see which ranks made different calls"
        return DistError(
            f"{call.describe()} on group {group.display}, rank {group.ranks[group.rank()]}, at {call.site}: the received bytes "
            f"are no object of this call, since {error}{hint}"
        )

    def prefix(self, packed: Packed) -> Any:
        return packed.prefix(self.kind, self.call.seq)

    def incoming(self, block: Any, agreed: Agreed) -> IncomingObject:
        """Return the object whose first block was received."""
        header = pickled.read_header(block, self.kind, self.call.seq, agreed.block_bytes, agreed.most)
        return IncomingObject(block, header)

    def first_movement(self, agreed: Agreed, move: Movement, first: int) -> Steps:
        """Move one block of ``first`` bytes for each member, without blocking."""
        transport = self.group.pair.native
        if agreed.nonblocking:
            yield transport.nonblocking(move)
            return
        key = ("objects", move.kind, move.root, first)
        plan = self.group.plan(self.group.plans, key, partial(transport.plan, move))
        yield plan.start(move)
        plan.finish(move)

    def exchange(self, sends: _Pieces, receives: _Pieces, meanwhile: Callable[[], None]) -> Steps:
        """Send pieces to and receive pieces from ranks of the group, and call ``meanwhile`` while they move."""
        control, tag = self.group.pair.control, library_tag(_TAG)
        posts: list[Post] = [(control.Irecv, piece, peer, tag) for peer, pieces in receives for piece in pieces]
        posts += [(control.Isend, piece, peer, tag) for peer, pieces in sends for piece in pieces]
        if posts:
            requests = AllRequests(post_all(posts))
            waiting.transfer_hint(sum(piece.nbytes for _, piece, _, _ in posts))
            yield from self.beside(requests, meanwhile)
        else:
            meanwhile()

    def beside(self, requests: AllRequests, meanwhile: Callable[[], None]) -> Steps:
        """Call ``meanwhile`` while messages move; wait for the messages even if it raises."""
        failed: Exception | None = None
        try:
            meanwhile()
        except Exception as error:
            failed = error
        yield requests
        if failed is not None:
            raise failed

    def exchange_all(self, sends: _Sends, receives: dict[int, IncomingObject], first: int) -> Steps:
        """Exchange the rest of the heads, then the buffers, with some ranks of the group at a time.

        Args:
            sends: object and prefix for each destination.
            receives: object of each source.
            first: bytes of each head that were received.
        """
        me, size = self.group.rank(), self.group.size()
        if self.whole:  # nothing else moves on any rank
            size = 1
            for incoming in receives.values():
                incoming.open()
        for at in range(1, size, PEERS):
            to = [(me + d) % size for d in range(at, min(at + PEERS, size))]
            of = [(me - d) % size for d in range(at, min(at + PEERS, size))]
            if not self.whole_heads:
                yield from self.exchange(
                    [(peer, sends[peer][0].rest(sends[peer][1], first)) for peer in to if peer in sends],
                    [(peer, receives[peer].rest(first)) for peer in of if peer in receives],
                    _nothing,
                )
            for peer in of:
                if peer in receives:
                    receives[peer].open()
            yield from self.exchange(
                [(peer, pickled.pieces(sends[peer][0].parts)) for peer in to if peer in sends],
                [(peer, pickled.pieces(receives[peer].parts)) for peer in of if peer in receives],
                self.copy_own if at == 1 else _nothing,
            )
        self.copy_own()
        self.arrived.update(receives)

    def copy_own(self) -> None:
        """Copy the object that this rank gets from itself, unless it was copied before."""
        me = self.group.rank()
        if self.root in (-1, me) and me not in self.arrived:
            self.arrived[me] = self.packed[me % len(self.packed)].copied()  # a scatter has one for each member

    def found(self) -> list[IncomingObject]:
        """Return the received objects in the order of the ranks."""
        return [self.arrived[rank] for rank in sorted(self.arrived)]


class Broadcast(ObjectTransfer):
    kind, moves = b"B", Kind.BROADCAST

    def move(self, agreed: Agreed, first: int) -> Steps:
        """Broadcast the first bytes, the rest of the head, and each buffer."""
        block = np.empty(first, np.uint8)
        incoming: IncomingObject | None = None
        if self.packed:
            packed = self.packed[0]
            prefix = self.prefix(packed)
            packed.block(prefix, block)
        yield from self.first_movement(agreed, Movement(Kind.BROADCAST, recv=block, root=self.root), first)
        moved = 0
        if self.packed:
            rest = packed.rest(prefix, first)
        else:
            incoming = self.incoming(block, agreed)
            rest = incoming.rest(first)
        for piece in rest:
            moved = yield from self.broadcast(agreed, piece, moved)
        if incoming is not None:
            incoming.open()
        for piece in pickled.pieces(packed.parts if incoming is None else incoming.parts):
            moved = yield from self.broadcast(agreed, piece, moved)
        if incoming is not None:
            self.arrived[self.root] = incoming

    def broadcast(self, agreed: Agreed, piece: Any, moved: int) -> Generator[Pollable, None, int]:
        """Broadcast memory in place."""
        move = Movement(Kind.BROADCAST, recv=piece, root=self.root)
        return (yield from composed.move_once(self.group, self.call, agreed, move, moved))


class Gather(ObjectTransfer):
    kind, moves = b"G", Kind.GATHER

    def move(self, agreed: Agreed, first: int) -> Steps:
        """Gather the first bytes, on the root or on all members; then each member sends the rest."""
        me, root, everywhere = self.group.rank(), self.root, self.root < 0
        packed, here = self.packed[0], everywhere or me == root
        prefix, mine = self.prefix(packed), np.empty(first, np.uint8)
        packed.block(prefix, mine)
        blocks = np.empty((self.group.size() if here else 0, first), np.uint8)
        kind = Kind.ALL_GATHER if everywhere else Kind.GATHER
        move = Movement(kind, send=mine, recv=blocks.reshape(-1) if here else None, root=root)
        yield from self.first_movement(agreed, move, first)
        others = [peer for peer in range(self.group.size()) if peer != me]
        receives = {peer: self.incoming(blocks[peer], agreed) for peer in others if here}
        sends = dict.fromkeys([peer for peer in others if everywhere or peer == root], (packed, prefix))
        yield from self.exchange_all(sends, receives, first)


class AllGather(Gather):
    kind, moves = b"A", Kind.ALL_GATHER


class Scatter(ObjectTransfer):
    kind, moves = b"S", Kind.SCATTER

    def move(self, agreed: Agreed, first: int) -> Steps:
        """Scatter the first bytes; then the root sends the rest to each member."""
        me, size = self.group.rank(), self.group.size()
        block = np.empty(first, np.uint8)
        prefixes = [self.prefix(packed) for packed in self.packed]
        blocks = np.empty((len(prefixes), first), np.uint8)
        for packed, prefix, into in zip(self.packed, prefixes, blocks, strict=True):
            packed.block(prefix, into)
        move = Movement(Kind.SCATTER, send=blocks.reshape(-1) if prefixes else None, recv=block, root=self.root)
        yield from self.first_movement(agreed, move, first)
        if prefixes:
            sends = {peer: (self.packed[peer], prefixes[peer]) for peer in range(size) if peer != me}
            yield from self.exchange_all(sends, {}, first)
        else:
            yield from self.exchange_all({}, {self.root: self.incoming(block, agreed)}, first)
            self.arrived[me] = self.arrived.pop(self.root)


def _first_bytes(largest: int) -> int:
    """Return the bytes of each head in the first transfer: a power of two, so that few plans serve all calls."""
    return max(64, 1 << (largest - 1).bit_length()) if largest <= FIRST_BYTES else SHORT_BYTES


def _nothing() -> None:
    """Do nothing."""
