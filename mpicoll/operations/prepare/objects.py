"""Collectives of objects that pickle can serialize: their arguments, and how such a call is made again.

``operations.object_transfer`` moves objects of any size. On one node the extension makes a call that the members have made
before (:class:`PreparedObjects`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpicoll.checks.memory_in_use import check_read
from mpicoll.diagnosis.call import CallDescription, fingerprint
from mpicoll.errors import ARGUMENT, DistError, wrong_argument
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import peer_rank
from mpicoll.memory.pickled import HEADER, IncomingObject, Packed, load, need_list, stream_of
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

_Found = bytes | IncomingObject
"""An object that has arrived: the stream of a pickle, or a stream with buffers."""


def broadcast(
    object_list: list[Any], src: int | None, group: Any, group_src: int | None, weights_only: bool, name: str | None
) -> None:
    """Make a ``broadcast_object_list``."""

    def prepare(g: ProcessGroup) -> _Ready:
        root = peer_rank(g, src, group_src, "src", default=0)
        need_list(object_list, "object_list")
        key = (("root", g.ranks[root]), ("objects", len(object_list)))
        return key, root, [object_list] if g.rank() == root else []

    key = ("broadcast_object_list", src, group_src, _length(object_list), weights_only)
    found = _run(key, group, (object_list,), prepare, weights_only, name, Broadcast)
    if found:

        def whose() -> str:
            g = registry.need_member(group)
            return f"broadcast_object_list: the list of rank {g.ranks[peer_rank(g, src, group_src, 'src', default=0)]}"

        object_list[:] = _load(found[0], whose, weights_only)


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
    if found:
        object_list[: len(found)] = _load_all(found, key[0], group, weights_only)


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
    if found:
        assert into is not None
        into[: len(found)] = _load_all(found, key[0], group, weights_only)


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
    if found:
        output[0] = _load(found[0], lambda: "scatter_object_list: the object for this rank", weights_only)


def _length(given: Any) -> int | None:
    """Return the length of a list, None for None, and -1 for all else, with which no call is prepared."""
    return len(given) if type(given) is list else None if given is None else -1


def _load(found: _Found, whose: Callable[[], str], weights_only: bool) -> Any:
    if isinstance(found, bytes):
        return load(found, [], whose, weights_only)
    return found.load(whose, weights_only)


def _load_all(found: list[_Found], op: str, given: Any, weights_only: bool) -> list[Any]:
    def whose() -> str:
        return f"{op}: the object of rank {registry.need_member(given).ranks[len(loaded)]}"

    loaded: list[Any] = []
    for each in found:
        loaded.append(_load(each, whose, weights_only))
    return loaded


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
        self.room, self.parts = room, _parts(made)
        self.sends, self.results = {
            Kind.BROADCAST: (int(is_root), int(not is_root)),
            Kind.SCATTER: (size if is_root else 0, 1),
        }.get(made.moves, (1, size if is_root else 0))
        key = call.key[:-1] if call.key[-1][0] == "name" else call.key
        bound = HEADER.size + room - _LENGTH * self.parts  # of the head of one object
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

    def streams(self, values: Any) -> list[bytes] | None:
        """Return the pickles of what this rank sends; None if that is left to the general way."""
        try:
            pickles = [stream_of(value, self.room) for value in values] if self.sends else []
        except Exception:  # raised again where it is raised on all members
            return None
        return None if any(buffers for _, buffers in pickles) else [stream for stream, _ in pickles]

    def make(self, group: ProcessGroup, send: list[bytes], frame: Any, name: str | None) -> list[_Found] | None:
        """Make the call, and return what this rank has received; None, and nothing done, if that is impossible."""
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
        return recv or []

    def describe(self, request: Request) -> CallDescription:
        """Return the description of one start."""
        call = super().describe(request)
        call.uneven = True
        return call

    def steps(self, request: Request) -> Steps:
        """Return the steps of the general way, whose results are objects with buffers."""
        group, packed = request.group, [Packed(stream, []) for stream in request.send or ()]
        made = self.transfer(group, request.call, self.root, packed, self.weights_only)
        yield from composed.meet_and_move(group, request.call, made.steps, request.agreed)
        if request.recv is not None:
            request.recv[:] = made.found()
        _keep(made, self.again)


def _parts(made: ObjectTransfer) -> int:
    return made.group.size() if made.moves is Kind.SCATTER else 1


def _run(
    again: tuple[Any, ...],
    given: Any,
    values: Any,
    prepare: Callable[[ProcessGroup], _Ready],
    weights_only: bool,
    name: str | None,
    transfer: type[ObjectTransfer],
) -> list[_Found] | None:
    """Check arguments, pickle, agree, and move; return what this rank has received, in the order of the ranks.

    The caller unpickles, when no other rank waits for this rank any more.

    Args:
        again: the function, and the arguments by which a call that is made again is found.
        given: the group as the program gave it; a rank outside of the group gets None.
        values: what this rank sends, if it sends anything.
    """
    streams: list[bytes] | None = None
    known: Any = registry.default.world if given is None else given
    plain = type(weights_only) is bool and _PLAIN.issuperset(map(type, again[1:-1])) and -1 not in again[1:]
    prepared = known.prepared.get(again) if plain and type(known) is ProcessGroup else None
    if type(prepared) is PreparedObjects and (name is None or type(name) is str):
        frame = caller(_DEPTH)
        streams = None if CallSite.inside(frame.f_code) else prepared.streams(values)
        found = None if streams is None else prepared.make(known, streams, frame, name)
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
            pickles = map(stream_of, objects) if streams is None else [(stream, []) for stream in streams]
            packed = [Packed(*pickle) for pickle in pickles]
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
        block_bytes=max((each.nbytes for each in packed), default=0),
    )
    made = transfer(group, call, root, packed, weights_only, failed)
    composed.run(group, call, made.steps)
    if plain:
        _keep(made, again)
    return list(made.found())


def _keep(made: ObjectTransfer, again: tuple[Any, ...]) -> None:
    """Prepare the next such call, if its streams will have room in shared memory; all members choose the same room."""
    group = made.group
    if not group.pair.agreement.channel.carries_data or type(group) is not ProcessGroup or group.gone():
        return
    found, most = group.prepared.get(again), (made.largest - HEADER.size + _LENGTH) * _parts(made)
    room = EAGER_BYTES if most <= EAGER_BYTES else SHARED_BYTES
    if most <= room and registry.state().thread_multiple:
        if found is not None and found.room == room:
            return
        prepared = PreparedObjects(made, again, room)
        if prepared.shared is not None:
            group.keep_newest(group.prepared, again, prepared, MOST)
            return
    group.prepared.pop(again, None)


def _no_steps(agreed: Agreed) -> Steps:
    raise AssertionError("nothing moves if arguments are wrong")
