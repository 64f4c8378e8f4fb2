"""The object collectives: any picklable Python object, moved without a copy of the arrays inside it.

A call agrees as every call does, and learns there how large the largest object and the largest head are. Then one movement
of equal blocks carries the heads (see ``memory.pickled``), which is all there is of small objects. What is left, the rest
of long heads and the buffers, goes from the memory that it has at its sender to the memory that it keeps at its receiver.

A pickle from another rank of the same job is trusted as that rank's program is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpicoll.checks.memory_in_use import look_at
from mpicoll.diagnosis.call import Call, name_ranks
from mpicoll.errors import ARGUMENT, CollectiveMismatchError, DistError, wrong_argument
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import member_or_warn, peer_rank
from mpicoll.memory import pickled
from mpicoll.memory.pickled import Arriving, Packed, WireError, need_list
from mpicoll.operations import execution
from mpicoll.runtime import waiting
from mpicoll.runtime.call_site import call_site
from mpicoll.transports.base import Kind, Movement, Request
from mpicoll.transports.control import NOTHING, Agreed
from mpicoll.transports.mpi.collectives import Post, Together, library_tag, post_all

FIRST_BYTES = 16 * 1024
"""Heads up to this size move whole in the first movement, each padded to the largest."""

SHORT_BYTES = 512
"""What the first movement carries of each head when one of them is larger."""

PEERS = 8
"""Members that an all-gather exchanges buffers with at a time."""

_TAG = 3
_FAILED = 1 << 62

Steps = Generator[Request, None, None]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    *,
    name: str | None = None,
) -> None:
    """Copy the objects of one rank's list into the list of all members.

    Called by all members with the same source and lists of the same length. The objects may be of any kind and size. Arrays
    inside them are received into memory of their own, each for itself, and can be written unless they were read-only.

    Args:
        object_list: on the source what is sent, on the others a list whose elements are replaced.
        src: global rank of the source (default 0); or ``group_src``, its rank in the group.
        group: the group; default the world.
        device: taken and ignored, as objects travel through host memory.
        name: as in :func:`mpicoll.broadcast`.

    Raises:
        TypeError: not a list.
        Exception: what pickle raises for an object that cannot be pickled, on the source, while the other members raise
            CollectiveMismatchError; what it raises for one that cannot be unpickled, on that rank alone, whose list stays
            as it was. The group is good in both cases.
        DistError: what came is no object of this call, as ranks made different calls that were not compared.
        Others as :func:`mpicoll.broadcast`.

    Source: torch.distributed.broadcast_object_list.
    """
    found = member_or_warn(group, "broadcast_object_list")
    if found is None:
        return

    def prepare(g: ProcessGroup) -> _Ready:
        root = peer_rank(g, src, group_src, "src", default=0)
        need_list(object_list, "object_list")
        key = (("root", g.ranks[root]), ("objects", len(object_list)))
        return _Ready(key, root, [object_list] if g.rank() == root else [])

    transfer = _run("broadcast_object_list", found, prepare, name, _Broadcast)
    for rank, arrived in transfer.arrived.items():
        object_list[:] = arrived.load(f"broadcast_object_list: the list of rank {found.ranks[rank]}")


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, *, name: str | None = None) -> None:
    """Gather one object of every member into ``object_list`` on all of them.

    Called by all members, with lists of a place for each of them. The objects may be of any kind and size; each rank gets
    a copy of its own, too. Arrays inside them are as in :func:`broadcast_object_list`.

    Args:
        object_list: a list with a place for each member, by rank in the group; these elements are replaced, and those behind
            them stay.
        obj: this rank's object.
        group: the group; default the world.
        name: as in :func:`mpicoll.broadcast`.

    Raises:
        TypeError, ValueError: not a list, or too short.
        Others as :func:`broadcast_object_list`.

    Source: torch.distributed.all_gather_object.
    """
    found = member_or_warn(group, "all_gather_object")
    if found is None:
        return

    def prepare(g: ProcessGroup) -> _Ready:
        need_list(object_list, "object_list")
        if len(object_list) < g.size():
            raise ValueError(
                f"object_list must have one place for each of the {g.size()} ranks, got {len(object_list)}"
            )
        return _Ready((("objects", 1),), -1, [obj])

    transfer = _run("all_gather_object", found, prepare, name, _AllGather)
    object_list[: found.size()] = _load_all(transfer, found, "all_gather_object")


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    *,
    name: str | None = None,
) -> None:
    """Gather one object of every member into ``object_gather_list`` on the rank ``dst``.

    Called by all members with the same destination. The objects may be of any kind and size; arrays inside them are as in
    :func:`broadcast_object_list`.

    Args:
        obj: this rank's object.
        object_gather_list: on the destination a list with a place for each member, by rank in the group, which is replaced
            (elements behind them stay); elsewhere None or [].
        dst: global rank of the destination (default 0); or ``group_dst``, its rank in the group.
        group: the group; default the world.
        name: as in :func:`mpicoll.broadcast`.

    Raises:
        TypeError, ValueError: not a list, too short, missing on the destination or given elsewhere.
        Others as :func:`broadcast_object_list`.

    Source: torch.distributed.gather_object.
    """
    found = member_or_warn(group, "gather_object")
    if found is None:
        return

    def prepare(g: ProcessGroup) -> _Ready:
        root = peer_rank(g, dst, group_dst, "dst", default=0)
        _list_of_root(object_gather_list, "object_gather_list", g, root, "destination")
        return _Ready((("root", g.ranks[root]), ("objects", 1)), root, [obj])

    transfer = _run("gather_object", found, prepare, name, _Gather)
    if transfer.arrived:
        assert object_gather_list is not None
        object_gather_list[: found.size()] = _load_all(transfer, found, "gather_object")


def _load_all(transfer: _Transfer, group: ProcessGroup, op: str) -> list[Any]:
    return [
        transfer.arrived.pop(rank).load(f"{op}: the object of rank {group.ranks[rank]}") for rank in range(group.size())
    ]


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    *,
    name: str | None = None,
) -> None:
    """Send one object of ``scatter_object_input_list`` on the rank ``src`` to each member.

    Called by all members with the same source. The objects may be of any kind and size; the source gets a copy, too. Arrays
    inside them are as in :func:`broadcast_object_list`.

    Args:
        scatter_object_output_list: a list of at least one place; this rank's object replaces its first element.
        scatter_object_input_list: on the source one object for each member, by rank in the group; elsewhere it is ignored
            (as in torch).
        src: global rank of the source (default 0); or ``group_src``, its rank in the group.
        group: the group; default the world.
        name: as in :func:`mpicoll.broadcast`.

    Raises:
        TypeError, ValueError: no lists, no place for the output, not one input for each member.
        Others as :func:`broadcast_object_list`.

    Source: torch.distributed.scatter_object_list.
    """
    found = member_or_warn(group, "scatter_object_list")
    if found is None:
        return

    def prepare(g: ProcessGroup) -> _Ready:
        root = peer_rank(g, src, group_src, "src", default=0)
        if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
            raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
        objects: list[Any] = []
        if g.rank() == root:
            _list_of_root(scatter_object_input_list, "scatter_object_input_list", g, root, "source")
            objects = list(scatter_object_input_list or ())
        return _Ready((("root", g.ranks[root]), ("objects", 1)), root, objects)

    transfer = _run("scatter_object_list", found, prepare, name, _Scatter)
    scatter_object_output_list[0] = transfer.arrived[found.rank()].load("scatter_object_list: the object for this rank")


def _list_of_root(values: Any, name: str, group: ProcessGroup, root: int, role: str) -> None:
    if values is not None:
        need_list(values, name)
    if group.rank() != root:
        if values:
            raise ValueError(f"Argument ``{name}`` must NOT be specified on non-{role} ranks.")
    elif not values:
        raise ValueError(f"Argument ``{name}`` must be specified on {role} rank.")
    elif len(values) < group.size() or (role == "source" and len(values) > group.size()):
        raise ValueError(f"{name} must have one place for each of the {group.size()} ranks, got {len(values)}")


@dataclass(slots=True)
class _Ready:
    """What the checks of one rank's arguments came to: the key of the call, its root (-1: none), the objects to send."""

    key: tuple[Any, ...]
    root: int
    objects: list[Any]


@dataclass(slots=True)
class _Transfer:
    """One rank's part in one call, after its arguments were found right.

    Attributes:
        packed: what it sends.
        failed: why its objects could not be pickled, where that was not told in the agreement.
        arrived: the objects that this rank gets, by their rank, not loaded yet.
        whole, whole_heads: the first movement carries all there is, or all heads.
    """

    group: ProcessGroup
    call: Call
    root: int
    packed: list[Packed]
    failed: Exception | None = None
    arrived: dict[int, Arriving] = field(default_factory=dict)
    whole: bool = False
    whole_heads: bool = False
    kind = b"?"

    def steps(self, agreed: Agreed) -> Steps:
        """Move the objects: the generator that ``operations.execution.conduct`` drives."""
        if agreed.most >= _FAILED:
            if self.failed is not None:
                self.call.error = self.failed
                raise self.failed
            odd = self.group.ranks[agreed.most - _FAILED]
            raise CollectiveMismatchError(
                f"{self.call.op} on group {self.group.display}: what {name_ranks([odd])} passed could not be pickled there"
            )
        first = _first_bytes(agreed.most)
        self.whole = agreed.block_bytes <= first
        self.whole_heads = agreed.most <= first
        wire_error = WireError  # at the end of the interpreter the module's names are gone before kept generators
        try:
            yield from self.move(agreed, first)
        except wire_error as error:
            raise self.refused(error) from error

    def move(self, agreed: Agreed, first: int) -> Steps:
        """Move them; ``first``: bytes of each head that the first movement carries."""
        raise NotImplementedError

    def refused(self, error: WireError) -> DistError:
        """Return the error for something that is no object of this call; the members are no longer in step."""
        group, call = self.group, self.call
        hint = "" if group.level == "full" else ": run with MPICOLL_CHECK=full to see which ranks made other calls"
        return DistError(
            f"{call.describe()} on group {group.display}, rank {group.ranks[group.rank()]}, at {call.site}: what came is no "
            f"object of this call, since {error}{hint}"
        )

    def prefix(self, packed: Packed) -> Any:
        return packed.prefix(self.kind, self.call.seq)

    def arriving(self, block: Any, agreed: Agreed) -> Arriving:
        """Return what a first block announces."""
        return Arriving(block, pickled.read_header(block, self.kind, self.call.seq, agreed.block_bytes, agreed.most))

    def first_movement(self, agreed: Agreed, move: Movement, first: int) -> Steps:
        """Move one block of ``first`` bytes for each member, in polled steps."""
        engine = self.group.pair.native
        if agreed.nonblocking:
            yield engine.nonblocking(move)
            return
        key = ("objects", move.kind, move.root, first)
        plan = self.group.plan(self.group.plans, key)
        if plan is None:
            plan = engine.plan(move)
            self.group.keep_plan(self.group.plans, key, plan)
        yield plan.start(move)
        plan.finish(move)

    def exchange(
        self, sends: list[tuple[int, list[Any]]], receives: list[tuple[int, list[Any]]], meanwhile: Callable[[], None]
    ) -> Steps:
        """Send memory to, and receive memory from, ranks of the group, piece by piece."""
        control, tag = self.group.pair.control, library_tag(_TAG)
        posts: list[Post] = [(control.Irecv, piece, peer, tag) for peer, pieces in receives for piece in pieces]
        posts += [(control.Isend, piece, peer, tag) for peer, pieces in sends for piece in pieces]
        if posts:
            requests = Together(post_all(posts))
            waiting.transfer_hint(sum(piece.nbytes for _, piece, _, _ in posts))
            yield from self.beside(requests, meanwhile)
        else:
            meanwhile()

    def beside(self, requests: Together, meanwhile: Callable[[], None]) -> Steps:
        """Do something while messages move; they are waited for even if it fails."""
        failed: Exception | None = None
        try:
            meanwhile()
        except Exception as error:
            failed = error
        yield requests
        if failed is not None:
            raise failed

    def exchange_all(self, sends: dict[int, tuple[Packed, Any]], receives: dict[int, Arriving], first: int) -> Steps:
        """Exchange the rest of the heads, then the buffers, with some ranks of the group at a time.

        Args:
            sends: what goes to whom, with its prefix.
            receives: what comes from whom.
            first: bytes of the heads that are there.
        """
        me, size = self.group.rank(), self.group.size()
        if self.whole:  # nothing else moves, on any rank
            size = 1
            for arriving in receives.values():
                arriving.open()
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
                self.keep_own if at == 1 else _nothing,
            )
        self.keep_own()
        self.arrived.update(receives)

    def keep_own(self) -> None:
        """Copy what this rank gets from itself."""


class _Broadcast(_Transfer):
    kind = b"B"

    def move(self, agreed: Agreed, first: int) -> Steps:
        """By broadcasts: of the first bytes, the rest of the head, each buffer."""
        block = np.empty(first, np.uint8)
        arriving: Arriving | None = None
        if self.packed:
            packed = self.packed[0]
            prefix = self.prefix(packed)
            packed.block(prefix, block)
        yield from self.first_movement(agreed, Movement(Kind.BROADCAST, recv=block, root=self.root), first)
        moved = 0
        if self.packed:
            rest = packed.rest(prefix, first)
        else:
            arriving = self.arriving(block, agreed)
            rest = arriving.rest(first)
        for piece in rest:
            moved = yield from self.broadcast(agreed, piece, moved)
        if arriving is not None:
            arriving.open()
        for piece in pickled.pieces(packed.parts if arriving is None else arriving.parts):
            moved = yield from self.broadcast(agreed, piece, moved)
        if arriving is not None:
            self.arrived[self.root] = arriving

    def broadcast(self, agreed: Agreed, piece: Any, moved: int) -> Generator[Request, None, int]:
        """Broadcast memory in place."""
        move = Movement(Kind.BROADCAST, recv=piece, root=self.root)
        return (yield from execution.move_once(self.group, self.call, agreed, move, moved))


class _AllGather(_Transfer):
    kind = b"A"

    def move(self, agreed: Agreed, first: int) -> Steps:
        """By an all-gather of the first bytes; each pair exchanges the rest."""
        me, size = self.group.rank(), self.group.size()
        packed = self.packed[0]
        prefix = self.prefix(packed)
        mine, blocks = np.empty(first, np.uint8), np.empty((size, first), np.uint8)
        packed.block(prefix, mine)
        move = Movement(Kind.ALL_GATHER, send=mine, recv=blocks.reshape(-1))
        yield from self.first_movement(agreed, move, first)
        others = [peer for peer in range(size) if peer != me]
        receives = {peer: self.arriving(blocks[peer], agreed) for peer in others}
        yield from self.exchange_all(dict.fromkeys(others, (packed, prefix)), receives, first)

    def keep_own(self) -> None:
        """Copy this rank's object, unless that is done."""
        me = self.group.rank()
        if me not in self.arrived:
            self.arrived[me] = self.packed[0].copied()


class _Gather(_Transfer):
    kind = b"G"

    def move(self, agreed: Agreed, first: int) -> Steps:
        """By a gather of the first bytes; each member sends the rest to the root."""
        me, size = self.group.rank(), self.group.size()
        packed = self.packed[0]
        prefix = self.prefix(packed)
        mine, at_root = np.empty(first, np.uint8), me == self.root
        packed.block(prefix, mine)
        blocks = np.empty((size if at_root else 0, first), np.uint8)
        move = Movement(Kind.GATHER, send=mine, recv=blocks.reshape(-1) if at_root else None, root=self.root)
        yield from self.first_movement(agreed, move, first)
        receives = {peer: self.arriving(blocks[peer], agreed) for peer in range(len(blocks)) if peer != me}
        yield from self.exchange_all({} if at_root else {self.root: (packed, prefix)}, receives, first)

    def keep_own(self) -> None:
        """Copy the root's object, unless that is done."""
        me = self.group.rank()
        if me == self.root and me not in self.arrived:
            self.arrived[me] = self.packed[0].copied()


class _Scatter(_Transfer):
    kind = b"S"

    def move(self, agreed: Agreed, first: int) -> Steps:
        """By a scatter of the first bytes; the root sends each member the rest."""
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
            yield from self.exchange_all({}, {self.root: self.arriving(block, agreed)}, first)
            self.arrived[me] = self.arrived.pop(self.root)

    def keep_own(self) -> None:
        """Copy the root's object, unless that is done."""
        me = self.group.rank()
        if me == self.root and me not in self.arrived:
            self.arrived[me] = self.packed[me].copied()


def _first_bytes(largest: int) -> int:
    """Return what the first movement carries of each head: a power of two, so that few plans serve all calls."""
    return max(64, 1 << (largest - 1).bit_length()) if largest <= FIRST_BYTES else SHORT_BYTES


def _nothing() -> None:
    """Do nothing."""


def _run(
    op: str,
    group: ProcessGroup,
    prepare: Callable[[ProcessGroup], _Ready],
    name: str | None,
    transfer: type[_Transfer],
) -> _Transfer:
    """Check, pickle, agree and move; what arrived is loaded by the caller, when nobody waits for this rank any more."""
    site = call_site()
    execution.enter(group, op)
    packed: list[Packed] = []
    failed: Exception | None = None
    try:
        try:
            execution.check_name(name)
            ready = prepare(group)
        except ValueError as error:
            raise wrong_argument(error) from None
        try:
            packed = [pickled.pack(value) for value in ready.objects]
        except Exception as error:
            if group.level == "full":
                raise
            setattr(error, ARGUMENT, True)
            failed = error  # the calls are not compared, but the round is made: it tells the others
        if group.compares:
            look_at(op, site, [part for each in packed for part in each.parts], group.gone, group.display)
    except Exception as error:
        setattr(error, ARGUMENT, True)
        execution.conduct(group, Call(op, (), site, error=error), _no_steps)
        raise AssertionError("a call with wrong arguments always raises") from error
    key = ready.key if name is None else (*ready.key, ("name", name))
    largest = max((each.head_bytes for each in packed), default=NOTHING)
    call = Call(
        op,
        key,
        site,
        uneven=True,  # the detail is not compared then: its maximum is what counts
        detail=largest if failed is None else _FAILED + group.rank(),
        block_bytes=max((each.nbytes for each in packed), default=0),
    )
    made = transfer(group, call, ready.root, packed, failed)
    execution.conduct(group, call, made.steps)
    return made


def _no_steps(agreed: Agreed) -> Steps:
    raise AssertionError("nothing moves where arguments are wrong")
