"""Schedules of prepared operations: how the data of a call moves if all members make the call as this member does.

A schedule follows from facts that all members know, so all members choose the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpicoll.checks.memory_in_use import written
from mpicoll.checks.memory_ranges import differ, is_sampled, seal
from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import DistError
from mpicoll.memory.arithmetic import without_warnings
from mpicoll.memory.layouts import joined, may_share, one_buffer
from mpicoll.memory.scratch import concatenated, scratch
from mpicoll.operations.failures import BlockingCall
from mpicoll.runtime import waiting
from mpicoll.runtime.output import say
from mpicoll.runtime.waiting import Steps
from mpicoll.transports.base import Kind, Movement
from mpicoll.transports.selection import NEVER

if TYPE_CHECKING:
    from mpicoll.transports.control import Round


class Prepared(Protocol):
    """A prepared operation (:mod:`mpicoll.operations.prepared`)."""

    def describe(self, request: Any) -> CallDescription:
        """Return the description of one start."""

    def steps(self, request: Any) -> Steps:
        """Return the steps that move the data the general way."""

    def poll(self, made: Round) -> bool:
        """Poll a round for a limited time; return whether it is over."""


def movement(request: Any, may_stand_apart: bool = False) -> Movement:
    """Return the movement of a start of a prepared operation.

    Args:
        may_stand_apart: the data moves through shared memory, where the arrays of a list may stand apart, whatever their size.
    """
    move: Movement
    move, request.unpack = prepared_movement(request.prepared, request.send, request.recv, may_stand_apart)
    request.move = move
    return move


def prepared_movement(
    prepared: Any, send: Any, recv: Any, may_stand_apart: bool = False
) -> tuple[Movement, Callable[[], None] | None]:
    """Return the movement, and the function that copies its result to ``recv``, or None."""
    kind, apart = prepared.kind, 0 if may_stand_apart and not prepared.mpi_op else prepared.apart
    if kind is Kind.BARRIER:
        return Movement(kind), None
    send, recv = None if prepared.send_shapes is None else send, None if prepared.recv_shapes is None else recv
    if kind is Kind.ALL_REDUCE and isinstance(recv, list):
        whole = joined(recv)
        flat = concatenated([each.reshape(-1) for each in recv]) if whole is None else whole
        return Movement(kind, recv=flat, op=prepared.mpi_op), partial(_unpack, flat, recv) if whole is None else None
    if kind in (Kind.ALL_REDUCE, Kind.BROADCAST) or (kind is Kind.REDUCE and recv is not None):
        flat = _flat(send if recv is None else recv)
        return Movement(kind, recv=flat, op=prepared.mpi_op, root=prepared.root), None
    sizes = [[each.size for each in given] for given in (send, recv) if kind is Kind.ALL_TO_ALL and prepared.uneven]
    after = senddispls = recvdispls = None
    into: Any = None if recv is None or isinstance(recv, list) else _flat(recv)
    if isinstance(recv, list):
        into, recvdispls = one_buffer(recv, (), apart, not may_stand_apart)
        if into is None:
            into = scratch(sum(each.size for each in recv), prepared.dtype)
            after = partial(_unpack, into, recv)
    results = recv if recvdispls else [] if into is None else [into]
    if isinstance(send, list):
        whole, senddispls = one_buffer(send, results, apart, not may_stand_apart)
        send = concatenated([each.reshape(-1) for each in send]) if whole is None else whole
    elif send is not None:
        send = _flat(send)
        send = send.copy() if may_share(send, results) else send  # MPI forbids that its buffers overlap
    counts: Any = None
    if prepared.uneven and not sizes:
        counts = [prod(shape) for shape in (prepared.recv_shapes if kind is Kind.ALL_GATHER else prepared.send_shapes)]
    elif not sizes and (kind is Kind.ALL_TO_ALL or senddispls or recvdispls):
        counts = [prepared.nbytes // prepared.dtype.itemsize] * prepared.agreement.comm.Get_size()
    move = Movement(
        kind,
        send=send,
        recv=into,
        sendcounts=sizes[0] if sizes else None if prepared.uneven and kind is Kind.ALL_GATHER else counts,
        recvcounts=sizes[1] if sizes else None if prepared.uneven and kind is Kind.REDUCE_SCATTER else counts,
        senddispls=senddispls,
        recvdispls=recvdispls,
        op=prepared.mpi_op,
        root=prepared.root,
        vector=prepared.uneven and not sizes,
        apart=isinstance(recv, list) and kind is not Kind.GATHER,
    )
    return move, after


def _flat(array: Any) -> Any:
    return array if array.ndim == 1 else array.reshape(-1)


def _unpack(packed: Any, arrays: list[Any]) -> None:
    at = 0
    for each in arrays:
        each.reshape(-1)[...] = packed[at : at + each.size]
        at += each.size


def finish(request: Any) -> None:
    """Put the result, divided for an average, into the arrays of the program; raise what ``note_writes`` has found."""
    if request.wrong is not None:
        raise request.wrong
    move: Movement = request.move
    if request.prepared.average and move.recv is not None:
        without_warnings(np.divide, move.recv, request.group.size(), out=move.recv)
    if request.unpack is not None:
        request.unpack()


def note_writes(request: Any) -> None:
    """Note whether the program has written arrays that are about to move in place. The request raises that in the end."""
    if request.wrong is None and request.before and _is_changed(request):
        request.wrong = written(request.call.name, request.call.site, request.group.display)


def check(request: Any) -> None:
    """Raise BufferInUseError if the program has written its arrays since the start."""
    if _is_changed(request):
        raise written(request.call.name, request.call.site, request.group.display)


def _is_changed(request: Any) -> bool:
    before = request.before
    return differ(request.arrays, before) if isinstance(before, bytes) else bool(before.is_changed())


def _changed(request: Any) -> DistError:
    """Return the error of a call whose arrays have other dtypes or shapes now. It concerns this rank only."""
    call = request.call
    call.error = DistError(f"{call.op} at {call.site}: its arrays were changed while it waited for the other members")
    return call.error  # type: ignore[no-any-return]


def seal_result(request: Any) -> None:
    """Record the contents of the result, unless the program is waiting for the call: then it can write nothing in between."""
    if request.before and not request.awaited:
        request.after = seal(request.arrays)


def land(request: Any) -> None:
    """Copy the result to the arrays of the program, and record their contents. An error concerns this rank only."""
    try:
        if request.spread is not None:
            request.spread()
        seal_result(request)
    except Exception as error:
        request.call.error = error
        raise


def move_into_copies(request: Any) -> None:
    """Let the result of an asynchronous call move into memory of the library if all its bytes are compared until the end.

    The program may write its arrays until then. A write of other arrays is noted now, as they move where they stand.
    """
    recv = request.recv
    if request.spread is not None:
        return
    if not request.before or is_sampled(request.arrays):
        note_writes(request)
        return
    own: Any = [each.copy() for each in recv] if isinstance(recv, list) else recv.copy()
    request.send, request.recv, request.into = own if request.send is recv else request.send, own, recv


def finish_copies(request: Any) -> None:
    """Finish and land the result of a call that began with :func:`move_into_copies`. An error concerns this rank only."""
    try:
        finish(request)
        own, into = request.recv, request.into
        if request.before and (into is not None or request.spread is not None):
            check(request)
        if into is not None:
            for array, moved in zip(into, own, strict=True) if isinstance(own, list) else ((into, own),):
                array[...] = moved
            request.recv = into
    except Exception as error:
        request.call.error = error
        raise
    land(request)


class Sealed:
    """What a request waits for, until the next test: that compares the arrays, which the program may have written meanwhile."""

    def __init__(self, request: Any) -> None:
        self._request, self._waits_for = request, request._current
        request.before = seal(request.arrays)

    def Test(self) -> bool:
        """Compare the arrays; progress what the request waits for, and return whether that is complete."""
        note_writes(self._request)
        self._request._current = self._waits_for
        return bool(self._waits_for.Test())


class Schedule:
    """Moves the data of a prepared operation if, by the round, all members make the call as this member does.

    This class itself serves a barrier: the round is the barrier.

    Attributes:
        at_once: ``serves`` moves the data: if it returns True, the result is there.
        blocking_form: the data moves by blocking or persistent calls of MPI, which do not match nonblocking calls.
    """

    at_once = False
    blocking_form = False

    def put(self, request: Any, number: int) -> None:
        """Write the data that comes with the round of that number."""

    def serves(self, request: Any, made: Any) -> bool | None:
        """Return whether the data may move in this way, the same on all members; None: the round is not complete."""
        if not made.Test():
            return None
        usual = made.unanimous(request.words) and not made.stalled
        return usual and not (self.blocking_form and made.nonblocking)

    def start(self, request: Any) -> Any:
        """Move the data, and return None; or return the request, or set ``request.steps``, that moves the data."""
        return None

    def finish(self, request: Any) -> None:
        """Put the result into the arrays of the program."""


class _Eager(Schedule):
    """The data comes with the round: the extension writes the data of this rank, and reads the data of other members."""

    def put(self, request: Any, number: int) -> None:
        """Write the data of this rank beside the record of its round, or into the segment."""
        prepared: Any = request.prepared
        prepared.later.write(number, request.send, request.recv)

    def serves(self, request: Any, made: Any) -> bool | None:
        """Return whether all members make the call; then the data of all members is there."""
        state = request.prepared.shared.state(request.number, made.number, 0)
        if state:
            return bool(state == 1)
        made.Test()  # lets MPI progress at some of the calls
        return None

    def start(self, request: Any) -> Any:
        """Read the data of all members."""
        prepared: Any = request.prepared
        made: Any = request.round
        segment = prepared.segment
        if segment is not None:
            segment.advance()  # also if an error of this rank follows: the other members go on
        step, in_pieces = made.number if segment is None else segment.step, bool(prepared.width) and request.waited
        apart = None if in_pieces else prepared.shared.apart(step)
        if apart is not None:
            note_writes(request)  # the other members wait for the parts of this rank
        elif request.before:
            check(request)
        if not in_pieces:
            try:
                prepared.later.read(step, request.recv)
            except ValueError:
                if apart is not None:
                    raise
                raise _changed(request) from None
        if apart is not None and not request.waited:
            waiting.transfer_hint(apart[0])
            node = request.group.pair.through(prepared.kind, NEVER)
            request.steps = node.exchange_apart(request.send, request.recv, *apart)
            return None
        if in_pieces or apart is not None:
            prepared.shared.run_rest(request.group, prepared, request.send, request.recv, request)
        return None

    def finish(self, request: Any) -> None:
        """Land the result, unless the program has written the arrays before parts of them moved from where they stand."""
        if request.wrong is not None:
            raise request.wrong
        land(request)


class _AtOnce(_Eager):
    """All data comes with the round, in one piece: the extension compares the records and reads the data in one step."""

    at_once = True

    def serves(self, request: Any, made: Any) -> bool | None:
        """Read the data of all members, if all members make the call."""
        prepared: Any = request.prepared
        found = prepared.later.complete(request.number, made.number, request.recv, request.before)
        if found == 1:
            land(request)
            return True
        if found == 2:
            return False
        if found == 3:
            raise written(request.call.name, request.call.site, request.group.display)
        if found == 4:
            raise _changed(request)
        made.poke()
        return None


class _InSharedMemory(Schedule):
    """The data moves through a segment, in several steps, in the same way whether members wait at once or later."""

    def start(self, request: Any) -> Any:
        """Give the request the steps."""
        prepared: Any = request.prepared
        node = request.group.pair.through(prepared.kind, prepared.nbytes)
        assert node is not None
        if not request.waited:
            waiting.transfer_hint(prepared.nbytes)
            note_writes(request)
        request.steps = node.steps(movement(request, True), prepared.nbytes)
        return None

    def finish(self, request: Any) -> None:
        """Finish the result."""
        finish(request)
        seal_result(request)


class _ThroughPlan(_InSharedMemory):
    """A small call through MPI: the request of a plan, which all members have made at the same call."""

    blocking_form = True

    def start(self, request: Any) -> Any:
        """Start the request of the plan."""
        plans, key = self.plans(request)
        plans.move_to_end(key)
        request.plan = plans[key]
        return request.plan.start(movement(request))

    def plans(self, request: Any) -> tuple[Any, Any]:
        """Return the plans of the members, and the key of the plan of the call."""
        return request.group.plans, request.prepared.plan_key

    def finish(self, request: Any) -> None:
        """Copy the result from the memory of the plan, and finish the result."""
        request.plan.finish(request.move)
        finish(request)


class _Uncompared(_ThroughPlan):
    """A small call that makes no round: the request of a plan of this rank, by the nonblocking call of MPI."""

    def plans(self, request: Any) -> tuple[Any, Any]:
        """Return the plans of this rank, and the key of the plan of the call."""
        return request.group.own_plans, request.prepared.plan_key[:2]


class _Blocking(_InSharedMemory):
    """A large call through MPI: one blocking call."""

    blocking_form = True

    def put(self, request: Any, number: int) -> None:
        """Prepare the movement, before the other members wait for it."""
        movement(request)

    def start(self, request: Any) -> Any:
        """Move all data."""
        group = request.group
        with BlockingCall(group, request, request.limit):
            group.pair.native.blocking(request.move)
        return None


class _Nonblocking(Schedule):
    """One nonblocking call of MPI, whether members wait at once or later."""

    def start(self, request: Any) -> Any:
        """Post the call of MPI. Unless this rank waits, the next call of the group may move its data from now on."""
        prepared, pair, made = request.prepared, request.group.pair, request.round
        made.release()  # later calls of the group may use the place of the round
        request.round = None
        move_into_copies(request)
        waiting.transfer_hint(prepared.nbytes * (1 if prepared.root < 0 and prepared.mpi_op else request.group.size()))
        moving = pair.native.nonblocking(movement(request))
        if not request.waited:
            pair.agreement.order.pass_on(request.number)
        return moving

    def finish(self, request: Any) -> None:
        """Finish the result."""
        finish_copies(request)


MEETING, EAGER, AT_ONCE, NONBLOCKING = Schedule(), _Eager(), _AtOnce(), _Nonblocking()
IN_SHARED_MEMORY, THROUGH_PLAN, BLOCKING = _InSharedMemory(), _ThroughPlan(), _Blocking()
UNCOMPARED = _Uncompared()


def plan_key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key of a call without the name that the program gives the call, as names may hold numbers of steps."""
    named = bool(key) and isinstance(key[-1], tuple) and key[-1][0] == "name"
    return key[:-1] if named else key


_told: list[str] = []


def open_memory(group: Any, node: Any) -> Steps:
    """Make the shared memory of a group, if no call has used it before; print once why there is none.

    All members call this function, and are known to.
    """
    if node.ready:
        return
    yield from node.prepare()
    if not node.usable and node.why and not _told:
        _told.append(node.why)
        say(
            f"mpicoll: rank {group.ranks[group.rank()]}: no shared memory for group {group.display}: {node.why}; "
            "data of this group moves through MPI\n"
        )
