"""Schedules of prepared operations: how the data of a call moves if all members make the call as this member does.

A schedule is chosen from what the members know alike, so all of them choose the same.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpicoll.checks.agreement import is_usual
from mpicoll.checks.memory_in_use import written
from mpicoll.checks.memory_ranges import Snapshot, seal
from mpicoll.diagnosis.call import Call, MadeFields
from mpicoll.errors import DistError
from mpicoll.memory.arithmetic import without_warnings
from mpicoll.operations.failures import BlockingCall
from mpicoll.runtime.output import say
from mpicoll.runtime.waiting import Pollable, Steps
from mpicoll.transports.base import Movement

if TYPE_CHECKING:
    from mpicoll.transports.control import Round


class Schedule(Protocol):
    """What moves the data of a prepared operation if the round says that all is as this member says."""

    at_once: bool
    """If ``serves`` returns True, the data has moved, and the result is there."""

    def put(self, request: Any, number: int) -> None:
        """Write the data that comes with the round of that number."""

    def serves(self, request: Any, made: Round) -> bool | None:
        """Return whether the data may move in this way; None: the round is not complete. All members find the same."""

    def start(self, request: Any) -> Pollable | None:
        """Move the data, or start to; None: it has moved, or ``request.steps`` move it."""

    def finish(self, request: Any) -> None:
        """Put the result where the program wants it."""


class Prepared(Protocol):
    """A prepared operation (:mod:`mpicoll.operations.prepared`)."""

    def describe(self, request: Any) -> Call:
        """Return the description of one start."""

    def steps(self, request: Any) -> Steps:
        """Return what moves the data the general way."""

    def poll(self, made: Round) -> None:
        """Poll a round for a moment."""


class Start:
    """What a prepared operation knows of one start.

    Attributes:
        send, recv: the arrays that this rank sends from, and where its result goes.
        code, instruction: the place in the program.
        name: the name that the program gives the call.
        waited: the caller waits at once.
        seq: number of the call on its group.
        made: the calls since the last comparison, at level ``roll``.
        move, unpack, plan: what moves, once it does; what puts the result into the arrays of the program.
        arrays, spread: the arrays of the program that hold the result in the end, and what copies ``recv`` to them; None if these
            are ``recv``.
        before, after: what these arrays held at the start, and when the result was written; empty if nobody compares.
    """

    __slots__ = (
        "after",
        "arrays",
        "before",
        "code",
        "instruction",
        "made",
        "move",
        "name",
        "plan",
        "recv",
        "send",
        "seq",
        "spread",
        "unpack",
        "waited",
    )

    def __init__(self, send: Any, recv: Any, code: CodeType, instruction: int, name: str | None, waited: bool) -> None:
        self.send, self.recv = send, recv
        self.arrays = recv
        self.spread: Callable[[], None] | None = None
        self.code, self.instruction = code, instruction
        self.name = name
        self.waited = waited
        self.made: list[MadeFields] = []
        self.before: bytes | Snapshot = b""
        self.after: bytes | Snapshot = b""
        self.plan: Any = None
        self.seq = 0

    def movement(self, prepared: Any) -> Movement:
        """Return what moves."""
        move: Movement
        move, self.unpack = prepared.movement(self.send, self.recv)
        self.move = move
        return move

    def finish(self, request: Any) -> None:
        """Divide the result of an average, and put the result into the arrays of the program."""
        prepared: Any = request.prepared
        if prepared.average and self.move.recv is not None:
            without_warnings(np.divide, self.move.recv, request.group.size(), out=self.move.recv)
        if self.unpack is not None:
            self.unpack()

    def check(self, request: Any) -> None:
        """Raise BufferInUseError if the program has written its array since the start."""
        before = self.before
        if self.arrays.tobytes() != before if isinstance(before, bytes) else before.is_changed():
            raise written(request.call.op, request.call.site, request.group.display)

    def land(self, request: Any) -> None:
        """Copy the result to the arrays of the program, and note what these hold. An error concerns this rank only."""
        try:
            if self.spread is not None:
                self.spread()
            if self.before:
                self.after = seal(self.arrays)
        except Exception as error:
            request.call.error = error
            raise


class _Meeting:
    """A barrier: its round was one."""

    at_once = False

    def put(self, request: Any, number: int) -> None:
        """Write nothing."""

    def serves(self, request: Any, made: Any) -> bool | None:
        """Return whether all members make the call, and none is late or asynchronous."""
        return is_usual(made, request.words) if made.Test() else None

    def start(self, request: Any) -> Any:
        """Move nothing."""
        return None

    def finish(self, request: Any) -> None:
        """Do nothing."""


class _Eager(_Meeting):
    """The data comes with the round: the extension writes it, and reads that of the other members."""

    def put(self, request: Any, number: int) -> None:
        """Write the data of this rank beside the record of its round."""
        prepared: Any = request.prepared
        prepared.shared.write(number, request.start_of.send)

    def serves(self, request: Any, made: Any) -> bool | None:
        """Return whether all members make the call; the words say that the data of all is there."""
        state = request.prepared.shared.state(request.number, made.number, 0)
        if state:
            return bool(state == 1)
        made.Test()  # which lets MPI progress, now and then
        return None

    def start(self, request: Any) -> Any:
        """Read the data of all members."""
        prepared: Any = request.prepared
        start: Start = request.start_of
        made: Any = request.round
        if start.before:
            start.check(request)
        segment = prepared.segment
        if segment is not None:
            segment.advance()
        if prepared.width:
            prepared.shared.run_rest(request.group, prepared, start.send, start.recv, request)
        else:
            try:
                prepared.shared.read(made.number if segment is None else segment.step, start.recv)
            except ValueError as error:  # an array was changed meanwhile; all other members have the data
                request.call.error = error
                raise
        start.land(request)
        return None


class _AtOnce(_Eager):
    """All data comes with the round, in one piece: the extension compares the records and reads the data in one step."""

    at_once = True

    def serves(self, request: Any, made: Any) -> bool | None:
        """Read the data of all members, if all members make the call."""
        prepared: Any = request.prepared
        start: Start = request.start_of
        found = prepared.shared.complete(request.number, made.number, start.recv, start.before)
        if found == 1:
            start.land(request)
            return True
        if found == 2:
            return False
        if found == 3:
            raise written(request.call.op, request.call.site, request.group.display)
        if found == 4:
            call = request.call
            text = f"{call.op} at {call.site}: its arrays were changed while it waited for the other members"
            call.error = DistError(text)  # of this rank only: all other members have the data
            raise call.error
        made.poke()
        return None


class _InSharedMemory(_Meeting):
    """The data moves through a segment, in several steps."""

    def start(self, request: Any) -> Any:
        """Give the request the steps."""
        prepared: Any = request.prepared
        start: Start = request.start_of
        node = request.group.pair.through(prepared.kind, prepared.nbytes)
        assert node is not None
        request.steps = node.steps(start.movement(prepared), prepared.nbytes)
        return None

    def finish(self, request: Any) -> None:
        """Finish the result."""
        request.start_of.finish(request)


class _ThroughPlan(_InSharedMemory):
    """A small call through MPI: the request of a plan, which all members have made at the same call."""

    def start(self, request: Any) -> Any:
        """Start the request of the plan."""
        start: Start = request.start_of
        plans, key = self.plans(request)
        plans.move_to_end(key)
        start.plan = plans[key]
        return start.plan.start(start.movement(request.prepared))

    def plans(self, request: Any) -> tuple[Any, Any]:
        """Return the plans of the members, and the key of the plan of the call."""
        return request.group.plans, request.prepared.plan_key

    def finish(self, request: Any) -> None:
        """Copy the result out of the memory of the plan, and finish it."""
        start: Start = request.start_of
        start.plan.finish(start.move)
        start.finish(request)


class _Uncompared(_ThroughPlan):
    """A small call that makes no round: the request of a plan of this rank, by the nonblocking call of MPI."""

    def plans(self, request: Any) -> tuple[Any, Any]:
        """Return the plans of this rank, and the key of the plan of the call."""
        return request.group.own_plans, request.prepared.plan_key[:2]


class _Blocking(_InSharedMemory):
    """A large call through MPI: one blocking call."""

    def start(self, request: Any) -> Any:
        """Move all data."""
        group = request.group
        move = request.start_of.movement(request.prepared)
        with BlockingCall(group, request.call, request.limit):
            group.pair.native.blocking(move)
        return None


MEETING, EAGER, AT_ONCE = _Meeting(), _Eager(), _AtOnce()
IN_SHARED_MEMORY, THROUGH_PLAN, BLOCKING = _InSharedMemory(), _ThroughPlan(), _Blocking()
UNCOMPARED = _Uncompared()


def plan_key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key of a call without the name that the program gives it: programs put numbers of steps into names."""
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
            "its data moves through MPI\n"
        )
