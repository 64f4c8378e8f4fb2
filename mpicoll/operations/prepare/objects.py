"""Collectives of objects that pickle can serialize: their arguments, and how such a call is made again.

``operations.object_transfer`` moves objects of any size. On one node the extension makes a call that the members have made
before (:class:`PreparedObjects`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpicoll.checks.memory_in_use import check_read
from mpicoll.diagnosis.call import CallDescription, fingerprint
from mpicoll.errors import ARGUMENT, DistError, wrong_argument
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import peer_rank
from mpicoll.memory.pickled import HEADER, Bytes, IncomingObject, Packed, joined, load, need_list, separated, stream_of
from mpicoll.operations import composed, execution
from mpicoll.operations.object_transfer import (
    FAILED,
    SHARED_BYTES,
    AllGather,
    Broadcast,
    Gather,
    ObjectTransfer,
    Scatter,
)
from mpicoll.operations.prepare.refusal import member
from mpicoll.operations.prepared import MOST, PreparedOperation
from mpicoll.operations.request import Request
from mpicoll.runtime import waiting
from mpicoll.runtime.call_site import CallSite, call_site, caller
from mpicoll.runtime.settings import need_bool
from mpicoll.runtime.waiting import Steps
from mpicoll.transports.base import EAGER_BYTES, Kind
from mpicoll.transports.control import NOTHING, Agreed, make_words
from mpicoll.transports.shm.transport import poll_ns

_BYTES = np.dtype(np.uint8)
_LENGTH = 8
"""Bytes of the length of a stream."""

_DEPTH = 3
"""Frames between :func:`_run` and the program."""

_PLAIN = frozenset((int, type(None)))

_Ready = tuple[tuple[Any, ...], int, list[Any]]
"""Checked arguments of this rank: the key of the call, its root (-1: none), and the objects to send."""


class _Found(NamedTuple):
    """What this rank has received in a call.

    Attributes:
        root: rank of the source or destination in the group; -1: none.
        objects: in the order of the ranks; bytes as of :func:`mpicoll.memory.pickled.joined`.
    """

    group: ProcessGroup
    root: int
    objects: list[bytes | IncomingObject]


def broadcast(
    object_list: list[Any], src: int | None, group: Any, group_src: int | None, weights_only: bool, name: str | None
) -> None:
    """Make a ``broadcast_object_list``."""

    def prepare(g: ProcessGroup) -> _Ready:
        root = peer_rank(g, src, group_src, "src", default=0)
        need_list(object_list, "object_list")
        key = (("root", g.ranks[root]), ("objects", len(object_list) if length == -1 else length))
        return key, root, [object_list] if g.rank() == root else []

    length = _length(object_list)  # now: pickling may run code that changes the list
    key = ("broadcast_object_list", src, group_src, length, weights_only)
    found = _run(key, group, (object_list,), prepare, weights_only, name, Broadcast)
    if found is not None and found.objects:
        whose = f"broadcast_object_list: the list of rank {found.group.ranks[found.root]}"
        object_list[:] = _load(found.objects[0], whose, weights_only)


def all_gather(object_list: list[Any], obj: Any, group: Any, weights_only: bool, name: str | None) -> None:
    """Make an ``all_gather_object``."""

    def prepare(g: ProcessGroup) -> _Ready:
        need_list(object_list, "object_list")
        if len(object_list) < g.size():
            raise ValueError(
                f"object_list must have one place for each of the {g.size()} ranks, got {len(object_list)}"
            )
        return (("objects", 1),), -1, [obj]

    key = ("all_gather_object", _length(object_list), weights_only)
    found = _run(key, group, (obj,), prepare, weights_only, name, AllGather)
    if found is not None:
        object_list[: len(found.objects)] = _load_all(found, key[0], weights_only)


def gather(
    obj: Any,
    into: list[Any] | None,
    dst: int | None,
    group: Any,
    group_dst: int | None,
    weights_only: bool,
    name: str | None,
) -> None:
    """Make a ``gather_object``."""

    def prepare(g: ProcessGroup) -> _Ready:
        root = peer_rank(g, dst, group_dst, "dst", default=0)
        _list_of_root(into, "object_gather_list", g, root, "destination")
        return (("root", g.ranks[root]), ("objects", 1)), root, [obj]

    key = ("gather_object", dst, group_dst, _length(into), weights_only)
    found = _run(key, group, (obj,), prepare, weights_only, name, Gather)
    if found is not None and found.objects:
        assert into is not None
        into[: len(found.objects)] = _load_all(found, key[0], weights_only)


def scatter(
    output: list[Any],
    inputs: list[Any] | None,
    src: int | None,
    group: Any,
    group_src: int | None,
    weights_only: bool,
    name: str | None,
) -> None:
    """Make a ``scatter_object_list``."""
    if type(inputs) is list:
        inputs = [*inputs]  # pickling may run code that changes the list of the program

    def prepare(g: ProcessGroup) -> _Ready:
        root = peer_rank(g, src, group_src, "src", default=0)
        if not isinstance(output, list) or not output:
            raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
        objects: list[Any] = []
        if g.rank() == root:
            _list_of_root(inputs, "scatter_object_input_list", g, root, "source")
            objects = list(inputs or ())
        return (("root", g.ranks[root]), ("objects", 1)), root, objects

    key = ("scatter_object_list", src, group_src, _length(inputs), min(_length(output) or -1, 1), weights_only)
    found = _run(key, group, inputs, prepare, weights_only, name, Scatter)
    if found is not None:
        output[0] = _load(found.objects[0], "scatter_object_list: the object for this rank", weights_only)


def _length(given: Any) -> int | None:
    """Return the length of a list, None for None, and -1 for all else, with which no call is prepared."""
    return len(given) if type(given) is list else None if given is None else -1


def _load(found: bytes | IncomingObject, whose: str, weights_only: bool) -> Any:
    if isinstance(found, IncomingObject):
        return found.load(whose, weights_only)
    stream, parts = separated(found)
    return load(stream, [part.copy() for part in parts], whose, weights_only)


def _load_all(found: _Found, op: str, weights_only: bool) -> list[Any]:
    ranks = found.group.ranks
    return [_load(each, f"{op}: the object of rank {ranks[at]}", weights_only) for at, each in enumerate(found.objects)]


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


class PreparedObjects(PreparedOperation):
    """A call of objects, prepared for a group on one node: the streams of the pickles come with the round.

    If the streams of a member are too long, or a member makes the call in another way, all members move them in the general
    way, and then know the size of the largest object: so they choose the same room for the next call.

    Attributes:
        room: most bytes of the streams of a member, and of their lengths.
        parts: streams that a member sends, if it sends any.
        sends, results: streams that this rank sends and receives.
        again: the signature of the call.
        transfer, weights_only: of the general way.
    """

    __slots__ = ("again", "parts", "results", "room", "sends", "transfer", "weights_only")

    def __init__(self, made: ObjectTransfer, again: tuple[Any, ...], room: int) -> None:
        group, call, root = made.group, made.call, made.root
        size, is_root = group.size(), root in (-1, group.rank())
        self.again, self.transfer, self.weights_only = again, type(made), made.weights_only
        self.room, self.parts = room, made.parts
        self.sends, self.results = {
            Kind.BROADCAST: (int(is_root), int(not is_root)),
            Kind.SCATTER: (size if is_root else 0, 1),
        }.get(made.moves, (1, size if is_root else 0))
        key = call.key[:-1] if call.key[-1][0] == "name" else call.key
        bound = _bound(room, made.parts)
        super().__init__(call.op, key, made.moves, bound, root=root, detail=bound, uneven=True)
        self.agreement, self._named, self.dtype = group.pair.agreement, (None, ()), _BYTES
        self.send_shapes, self.recv_shapes = [()] * self.sends or None, [()] * self.results or None
        self.segment, self.width, self.places = None, 0, None
        node = group.pair.through(self.kind, room)
        if room > EAGER_BYTES and node is not None:
            self.segment = node.in_one_step(self.kind, room)
        self.poll_ns = poll_ns(room, waiting.oversubscribed)
        print_ = execution.plain_print(group, self.op, fingerprint(self.op, key))
        # Members that do not compare calls may have different roots: these words differ, too.
        eager = (room + 1) * (size + 1) + root + 1
        self.words = self.eager_words = make_words(print_, bound, uneven=True, detail=bound, eager=eager)
        self.later = self.shared = self._operation(group)

    def _operation(self, group: ProcessGroup) -> Any:
        """Return the operation of the extension; None if there is no memory for its data."""
        if self.room > EAGER_BYTES and self.segment is None:
            return None
        gathers = self.kind in (Kind.ALL_GATHER, Kind.GATHER)
        result = "" if not self.results else "list" if gathers else "copied"
        more = {"offset": 0, "block": self.room, "parts": self.parts, "result": result}
        return self._shared(group, None, None, self.words, self.room, -1, **more)

    def _bytes_sent(self, size: int, send: Any) -> int:
        return self.room

    def make(
        self, group: ProcessGroup, pickles: list[tuple[bytes, list[Bytes]]], frame: Any, name: str | None
    ) -> _Found | None:
        """Make the call, and return what this rank has received; None, and nothing done, if that is impossible."""
        send: list[bytes] = []
        for stream, parts in pickles:
            if parts and sum(part.size for part in parts) > self.room:
                return None
            send.append(joined(stream, parts) if parts else stream)
        recv: Any = [None] * self.results or None
        more = () if name is None else (None, name, self.words_named(group, name))
        shared: Any = self.shared
        if not shared.run(group, self, send or None, recv, frame, *more):
            return None
        if recv is not None and None in recv:
            raise DistError(
                f"{self.op} on group {group.display}, at {CallSite(frame.f_code, frame.f_lasti)}: the received bytes are no "
                "object of this call, or there is no memory for them"
            )
        return _Found(group, self.root, recv or [])

    def describe(self, request: Request) -> CallDescription:
        """Return the description of one start."""
        call = super().describe(request)
        call.uneven = True
        return call

    def steps(self, request: Request) -> Steps:
        """Return the steps of the general way, whose results are objects with buffers."""
        group, packed = request.group, [Packed(*separated(message)) for message in request.send or ()]
        made = self.transfer(group, request.call, self.root, packed, self.weights_only)
        yield from composed.meet_and_move(group, request.call, made.steps, request.agreed)
        if request.recv is not None:
            request.recv[:] = made.found()
        _keep(made, self.again)


def _bound(room: int, parts: int) -> int:
    """Return the most bytes of one object, with a header, that moves in the room for the objects of a member."""
    return HEADER.size + room - _LENGTH * parts


def _run(
    again: tuple[Any, ...],
    given: Any,
    values: Any,
    prepare: Callable[[ProcessGroup], _Ready],
    weights_only: bool,
    name: str | None,
    transfer: type[ObjectTransfer],
) -> _Found | None:
    """Check arguments, pickle, agree, and move; return what this rank has received.

    Each object is pickled once, as that may run code of the program. The caller unpickles, when no other rank waits for this
    rank any more.

    Args:
        again: the function, and the arguments by which a call that is made again is found.
        given: the group as the program gave it; a rank outside of the group gets None.
        values: what this rank sends, if it sends anything.
    """
    pickles: list[tuple[bytes, list[Bytes]]] | None = None
    wrong: Exception | None = None
    known: Any = registry.default.world if given is None else given
    plain = type(weights_only) is bool and _PLAIN.issuperset(map(type, again[1:-1])) and -1 not in again[1:]
    prepared = known.prepared.get(again) if plain and type(known) is ProcessGroup else None
    if type(prepared) is PreparedObjects and (name is None or type(name) is str):
        frame = caller(_DEPTH)
        if not CallSite.inside(frame.f_code):
            try:
                pickles = [stream_of(value) for value in values] if prepared.sends else []
            except Exception as error:
                wrong = error  # raised below, on all members
            # Pickling may have run code of the program: this may be a forked child, or other calls were made meanwhile.
            if pickles is not None and known.prepared.get(again) is prepared:
                found: _Found | None = prepared.make(known, pickles, frame, name)
                if found is not None:
                    return found
    op: str = again[0]
    group = member(given, op)
    if group is None:
        return None
    site = call_site()
    execution.enter(group, op)
    packed: list[Packed] = []
    failed: Exception | None = None
    try:
        try:
            execution.check_name(name)
            weights_only = need_bool(weights_only, "weights_only")
            key, root, objects = prepare(group)
        except ValueError as error:
            raise wrong_argument(error) from None
        try:
            if wrong is not None:
                raise wrong
            packed = [Packed(*pickle) for pickle in (map(stream_of, objects) if pickles is None else pickles)]
        except Exception as error:
            if group.level == "full":
                raise
            setattr(error, ARGUMENT, True)
            failed = (
                error  # calls are not compared at this level, but the round is made, and its detail tells the failure
            )
        if group.compares:
            check_read(op, site, [part for each in packed for part in each.parts], group.gone, group.display)
    except Exception as error:
        setattr(error, ARGUMENT, True)
        composed.run(group, CallDescription(op, (), site, error=error), _no_steps)
        raise AssertionError("a call with wrong arguments always raises") from error
    key = (*key, ("weights_only", True)) if weights_only else key
    key = key if name is None else (*key, ("name", name))
    largest = max((each.head_bytes for each in packed), default=NOTHING)
    call = CallDescription(
        op,
        key,
        site,
        uneven=True,  # the detail is not compared: its maximum counts
        detail=largest if failed is None else FAILED + group.rank(),
        block_bytes=max([_needed(sum(each.nbytes for each in packed)), *(each.nbytes for each in packed)]),
    )
    made = transfer(group, call, root, packed, weights_only, failed)
    composed.run(group, call, made.steps)
    if plain:
        _keep(made, again)
    return _Found(group, root, list(made.found()))


def _needed(total: int) -> int:
    """Return bytes by which the others see that the objects of a member have no room: more than those of a prepared call."""
    return next((HEADER.size + room for room in (SHARED_BYTES, EAGER_BYTES) if total > room), 0)


def _keep(made: ObjectTransfer, again: tuple[Any, ...]) -> None:
    """Prepare the next such call, if its streams will have room in shared memory; all members choose the same room."""
    group, parts, most = made.group, made.parts, made.room_for(made.largest)
    if not group.pair.agreement.channel.carries_data or type(group) is not ProcessGroup or group.gone():
        return
    found = group.prepared.get(again)
    if made.largest in (_bound(EAGER_BYTES, parts), _bound(SHARED_BYTES, parts)):
        return  # of a member that has prepared the call: the size of its objects is not known
    room = EAGER_BYTES if most <= EAGER_BYTES else SHARED_BYTES
    if most > room or not registry.state().thread_multiple:
        group.prepared.pop(again, None)
    elif again not in group.unequal:  # some programs send lists of other lengths at each call
        group.keep_newest(group.unequal, again, None, MOST)
    elif found is None or found.room != room:
        prepared = PreparedObjects(made, again, room)
        if prepared.shared is not None:
            group.keep_newest(group.prepared, again, prepared, MOST)


def _no_steps(agreed: Agreed) -> Steps:
    raise AssertionError("nothing moves if arguments are wrong")
