"""One call from agreement to result: waited for on the spot, or as a Work."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import groups, waiting, watchdog
from mpicoll.buffers.quiet import quietly
from mpicoll.checks.agreement import Flags, Ticket, When, agree_or_raise, explain
from mpicoll.checks.call import NOTHING, NOWHERE, Call, Site, fingerprint
from mpicoll.checks.levels import EVERY, Kept
from mpicoll.communicators import mpi_text
from mpicoll.engines import large
from mpicoll.engines.base import SMALL_BYTES, Kind, Movement, Request, block_bytes, pieces
from mpicoll.engines.node import NodeEngine
from mpicoll.errors import (
    CollectiveMismatchError,
    DistBackendError,
)
from mpicoll.groups import ProcessGroup
from mpicoll.kept import keep, keep_of
from mpicoll.patience import CallWait, hopeless, local_wait
from mpicoll.work import Operation, Work

__all__ = [
    "agree",
    "begun",
    "call_limit",
    "check_name",
    "collective",
    "conduct",
    "enter",
    "finish_waiting",
    "guarded",
    "lost",
    "move_once",
    "native",
    "repeat",
    "run",
    "sending",
    "wrap",
]

NATIVE_BYTES = 32 * 1024 * 1024
"""Bytes that one blocking native call moves at most, so that it ends within about half a second."""


def call_limit(group: ProcessGroup, timeout: Any) -> float:
    """Return the limit in seconds of a call: its own ``timeout=``, or the group's.

    Raises:
        TypeError: not a timedelta (as torch).
    """
    if timeout is None:
        return group.timeout
    if not isinstance(timeout, timedelta):
        raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout!r}")
    return timeout.total_seconds() or group.timeout


def check_name(name: Any) -> None:
    """Raise TypeError unless ``name=`` is a string or None."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string or None, not {type(name).__name__}")


def collective(
    group: ProcessGroup,
    call: Call,
    move: Movement | Callable[[Flags], Movement] | None,
    ticket: Ticket,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
    limit: float,
) -> Generator[Request, None, None]:
    """Agree, move and finish one collective; yields what has to complete before it goes on.

    Args:
        move: what to move, or what says it when the agreement is known; None where this rank's arguments are wrong.
        before: run when all members are known to make this call, just before data moves.
        after: run when this rank's part has moved.
    """
    mpi_error = MPI.Exception  # at the end of the interpreter the module's names are gone before kept generators
    try:
        if call.passes:
            assert isinstance(move, Movement)
            yield from _uncompared(group, call, move, ticket, before, after)
            return
        flags = yield from agree_or_raise(ticket, call, group.display, group.ranks, group.rank())
        assert move is not None
        yield from _agreed(group, call, move, ticket, flags, before, after, limit)
    except mpi_error as error:
        raise wrap(error, group, call) from error
    finally:
        ticket.pass_on()
        if call.apart:
            group.give_up("its ranks made unequal numbers of calls")


def _agreed(
    group: ProcessGroup,
    call: Call,
    move: Movement | Callable[[Flags], Movement],
    ticket: Ticket,
    flags: Flags,
    before: Callable[[], None] | None,
    after: Callable[[], None] | None,
    limit: float,
) -> Generator[Request, None, None]:
    """Move and finish one collective that all members are known to make."""
    rank, size, lane = group.rank(), group.size(), group.pair.lane
    engine = group.pair.native
    fixed = isinstance(move, Movement)
    if not isinstance(move, Movement):
        move = move(flags)
    if not ticket.Test():
        yield ticket
    if flags.stalled:
        # Somebody may have withdrawn after posting: such a rank never joins a second round.
        yield lane.data.Ibarrier()
    if flags.uneven and move.kind is Kind.ALL_TO_ALL:
        yield from _check_splits(group, call, move, ticket)
        move = replace(move, vector=True)
    if before is not None:
        before()
    if move.kind is not Kind.BARRIER and not move.more and not flags.native:
        node = group.pair.through(move.kind, flags.block_bytes)
        if node is not None:
            if not node.ready:
                yield from node.prepare()
                _say_why_not(group, node)
            if node.usable:
                waiting.moving(flags.block_bytes * (1 if move.root < 0 and move.op else size))
                yield from node.steps(move, flags.block_bytes)
                _finish(call, after)
                return
    beyond = large.beyond(move, size, flags.block_bytes)
    if move.kind is Kind.BARRIER:
        pass  # the round itself was one: nobody sees its end before everybody has posted it
    elif flags.nonblocking and not beyond:
        requests = [engine.nonblocking(part) for part in move.parts]
        ticket.pass_on()
        waiting.moving(flags.block_bytes * len(requests) * (1 if move.root < 0 and move.op else size))
        yield from requests
    elif flags.block_bytes <= SMALL_BYTES and not beyond:
        if move.vector or move.more or not fixed:
            yield from [engine.nonblocking(part) for part in move.parts]
        else:
            key = (call.op, call.key, flags.detail)
            plan = group.plan(group.plans, key)
            if plan is None:
                plan = engine.plan(move)
                group.keep_plan(group.plans, key, plan)
            yield plan.start(move)
            plan.finish(move)
    else:
        most = min(NATIVE_BYTES, large.COUNT_LIMIT)
        for number, piece in enumerate(pieces(move, rank, size, flags.block_bytes, most)):
            if flags.nonblocking:  # one behind the other, and the data of later calls behind the last
                waiting.moving(most)
                yield engine.nonblocking(piece)
                continue
            if number:
                yield lane.data.Ibarrier()  # every further native call is preceded by a wait that can be left
            with native(group, call, limit):
                engine.blocking(piece)
    _finish(call, after)


def _say_why_not(group: ProcessGroup, node: NodeEngine) -> None:
    if not node.usable and node.why and not _said_why_not:
        _said_why_not.append(node.why)
        sys.stderr.write(
            f"mpicoll: rank {group.ranks[group.rank()]}: no shared memory for group {group.display}: {node.why}; "
            "its data moves through MPI\n"
        )


_said_why_not: list[str] = []


def _finish(call: Call, after: Callable[[], None] | None) -> None:
    if after is not None:
        try:
            after()
        except Exception as error:
            call.error = error  # all has moved: this concerns this rank alone, and the group is still good
            raise


class native:
    """Have the watchdog look at a blocking MPI call (a context manager)."""

    __slots__ = ("_call", "group", "limit", "since")

    def __init__(self, group: ProcessGroup, call: Call, limit: float) -> None:
        self.group = group
        self.limit = limit
        self.since = 0.0
        self._call = call

    def describe(self) -> str:
        """Return what the call is."""
        return f"{self._call.describe()} on group {self.group.display} at {self._call.site}"

    def hopeless(self, inside: float) -> str:
        """Return why it can never end, or "", given the seconds that it has taken."""
        return hopeless(self.group, inside)

    def __enter__(self) -> None:
        self.since = time.monotonic()
        watchdog.active[threading.get_ident()] = self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        del watchdog.active[threading.get_ident()]


class _Inside:
    """The transfer of a call that is made again: made once, and shown to the watchdog in each."""

    __slots__ = ("_known", "group", "limit", "since")

    def __init__(self, group: ProcessGroup, known: Repeated) -> None:
        self.group = group
        self.limit = 0.0
        self.since = 0.0
        self._known = known

    def describe(self) -> str:
        """Return what the call is."""
        call = Call(self._known.op, self._known.key, NOWHERE, seq=self.group.calls)
        return f"{call.describe()} on group {self.group.display} at {self.group.last_call().rpartition(' at ')[2]}"

    def hopeless(self, inside: float) -> str:
        """Return why it can never end, or "", given the seconds that it has taken."""
        return hopeless(self.group, inside)


def _check_splits(group: ProcessGroup, call: Call, move: Movement, ticket: Ticket) -> Generator[Request, None, None]:
    """Exchange how much each member sends to each, so that a split that nobody expects raises instead of corrupting."""
    assert move.send is not None
    assert move.recv is not None
    size, data = group.size(), group.pair.lane.data

    def counts(buffer: Any, given: Any) -> Any:
        return np.asarray([buffer.size // size] * size if given is None else given, np.int64)

    sends, expects = counts(move.send, move.sendcounts), counts(move.recv, move.recvcounts)
    told = np.empty(size, np.int64)
    yield data.Ialltoall(sends, told)
    wrong = np.flatnonzero(told != expects)
    if wrong.size:
        peer = int(wrong[0])
        call.error = ValueError(
            f"{call.op}: rank {group.ranks[peer]} sends {told[peer]} elements to rank {group.ranks[group.rank()]}, "
            f"which expects {expects[peer]}: output split sizes here do not fit the input split sizes there"
        )
    bad = np.array([wrong.size], np.int64)
    yield data.Iallreduce(MPI.IN_PLACE, bad, MPI.MAX)
    if bad[0]:
        yield from explain(ticket.lane, call, group.display, group.ranks, group.rank())


def wrap(error: MPI.Exception, group: ProcessGroup, call: Call) -> DistBackendError:
    """Return MPI's error as ours: operation, group, this rank, MPI's own text."""
    group.give_up(f"MPI reported an error in {call.op}")
    hint = (
        ""
        if group.level == "full"
        else (f". At check level {group.level!r} different calls may end so: run with MPICOLL_CHECK=full to see which")
    )
    return DistBackendError(
        f"{call.describe()} on group {group.display}, rank {group.ranks[group.rank()]}, at {call.site}: {mpi_text(error)}{hint}"
    )


def run(
    group: ProcessGroup,
    call: Call,
    move: Movement | Callable[[Flags], Movement] | None,
    *,
    outputs: list[Any],
    async_op: bool = False,
    limit: float | None = None,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Work | None:
    """Make one collective call: return its Work with ``async_op``, else wait for it and return None.

    The caller has asked :func:`enter` whether the group can be used.
    """
    limit = group.timeout if limit is None else limit
    if group.turn is not None:
        raise group.turn.refuse(call.describe(), call.site)
    if call.error is not None and group.level != "full":
        raise call.error  # the others do not compare, so nobody asks what was wrong here
    with waiting.guard, group.lock:
        try:
            group.calls += 1
            call.seq = group.calls
            group.last = call.op, call.site.code, call.site.instruction
            if isinstance(move, Movement):
                call.block_bytes = block_bytes(move, group.size())
            _print(group, call, compares=not _passes(group, call, move))
            ticket = group.pair.lane.ticket()
            return _issue(group, call, move, ticket, outputs, async_op, limit, before, after)
        except BaseException as error:
            _leave_begun(group, call, limit, error)
            raise


def _leave_begun(group: ProcessGroup, call: Call, limit: float, error: BaseException) -> None:
    """Give the group up when a call that this rank has begun ends by an error that is no outcome of it.

    A signal handler of the program's may raise between any two lines: with the call counted and nothing posted, or with its
    place in the order taken and nobody there to pass it on. The other members make the call, so there is no way back.
    """
    if group.broken is None and error is not call.error and not isinstance(error, CollectiveMismatchError):
        (call.patience or CallWait)(group, call, limit).give_up(error)


class begun:
    """Where a message is posted: an exception of anybody else's in between gives the group up (a context manager).

    A signal handler of the program's may raise between any two lines: with the message posted and not counted, or counted and
    nobody there to wait for it.

    Args:
        held: the memory that MPI may use then, kept for good.
    """

    __slots__ = ("_call", "_group", "_held", "_limit", "_peer", "_tag")

    def __init__(self, group: ProcessGroup, call: Call, limit: float, held: Any, *, peer: int, tag: int) -> None:
        self._group, self._call, self._limit, self._held, self._peer, self._tag = group, call, limit, held, peer, tag

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        keep(self._held)
        keep_of(error)
        if isinstance(error, MPI.Exception):
            raise wrap(error, self._group, self._call) from error
        if self._group.broken is None:
            CallWait(self._group, self._call, self._limit, self._peer, self._tag).give_up(error)


UNCOMPARED = frozenset(Kind) - {Kind.BARRIER, Kind.ALL_TO_ALL}
"""What may move without a comparison: where every member knows from its own arguments how large the blocks are."""


def _passes(group: ProcessGroup, call: Call, move: Movement | Callable[[Flags], Movement] | None) -> bool:
    """Whether a call makes no round; the same on all members that make the same calls."""
    return (
        group.level != "full"
        and isinstance(move, Movement)
        and move.kind in UNCOMPARED
        and not (call.uneven or move.vector or move.more)
        and call.block_bytes <= SMALL_BYTES
        and not large.beyond(move, group.size(), call.block_bytes)
        and not (group.level == "roll" and (call.compared or group.calls % EVERY == 0))
    )


def _print(group: ProcessGroup, call: Call, compares: bool) -> None:
    """Set what the round of a call compares, and note a call that makes none."""
    if group.level == "full":
        call.print = fingerprint(call.op, call.key)
    elif group.level == "roll":
        rolling, print_ = group.pair.lane.rolling, fingerprint(call.op, call.key)
        rolling.made.append((call.seq, print_, call.op, call.key, call.site.code, call.site.instruction))
        if compares:
            call.print, call.made = rolling.cut()
    call.passes = not compares


def _uncompared(
    group: ProcessGroup,
    call: Call,
    move: Movement,
    ticket: Ticket,
    before: Callable[[], None] | None,
    after: Callable[[], None] | None,
) -> Generator[Request, None, None]:
    """Move a small call whose members have not compared it; by the nonblocking call, as some may be asynchronous."""
    if not ticket.may_pass():
        yield When(ticket.may_pass)
    ticket.lane.pass_by()
    if not ticket.Test():
        yield ticket
    if before is not None:
        before()
    engine = group.pair.native
    if call.asynchronous:
        request = engine.nonblocking(move)
        ticket.pass_on()
        yield request
    else:
        key = (call.op, call.key)
        plan = group.plan(group.own_plans, key)
        if plan is None:
            plan = engine.plan(move, persistent=False)
            group.keep_plan(group.own_plans, key, plan)
        yield plan.start(move)
        plan.finish(move)
    _finish(call, after)


def _issue(
    group: ProcessGroup,
    call: Call,
    move: Movement | Callable[[Flags], Movement] | None,
    ticket: Ticket,
    outputs: list[Any],
    async_op: bool,
    limit: float,
    before: Callable[[], None] | None,
    after: Callable[[], None] | None,
) -> Work | None:
    call.asynchronous = async_op or _collectives_pending()
    steps = collective(group, call, move, ticket, before=before, after=after, limit=limit)
    try:
        if not call.asynchronous:
            with waiting.shield:
                drive(group, call, steps, limit)
            return None
        operation = Operation(group, call, steps, outputs, limit, give_up=lost, held=move)
        if not operation.done:
            waiting.pending.append(operation)
    except BaseException:
        if getattr(steps, "gi_frame", None) is not None:  # not at its end: MPI may still write there
            keep(steps)
        raise
    if async_op:
        return Work(operation, finish_waiting)
    finish_waiting(operation, limit)
    return None


REPEATED_BYTES = NATIVE_BYTES
"""What one native call moves may be made again in short."""


class Repeated:
    """A call in one buffer, prepared once: made again with the same arguments it costs little beside MPI.

    Attributes:
        op, key: of the call; ``plan_key`` of its plan.
        kind, mpi_op, root: of the movement.
        average: divide the result by the number of members.
        transfer, inside: of a large one on the group that it was prepared for: the call of its engine, and what the watchdog
            sees of it.
    """

    __slots__ = (
        "average",
        "fingerprint",
        "inside",
        "key",
        "kind",
        "mpi_op",
        "op",
        "plan_key",
        "root",
        "transfer",
        "uncompared_key",
    )

    def __init__(
        self, op: str, key: tuple[Any, ...], kind: Kind, *, mpi_op: str = "", root: int = -1, average: bool = False
    ) -> None:
        self.op = op
        self.key = key
        self.plan_key = (op, key, NOTHING)
        self.uncompared_key = (op, key)
        self.fingerprint = fingerprint(op, key)
        self.kind = kind
        self.mpi_op = mpi_op
        self.root = root
        self.average = average
        self.transfer: tuple[Callable[[Any], object], Callable[[Any], Any]] | None = None
        self.inside: _Inside | None = None


def repeat(group: ProcessGroup, known: Repeated, flat: Any, frame: FrameType) -> None:
    """Make a call again that is waited for: as :func:`run`, with as little as possible between the program and MPI.

    Args:
        flat: the buffer, contiguous and one-dimensional; input and output.
        frame: the frame of the program's call.
    """
    enter(group, known.op)
    if group.turn is not None:
        site = Site(frame.f_code, frame.f_lasti)
        raise group.turn.refuse(Call(known.op, known.key, site).describe(), site)
    with waiting.guard, group.lock:
        ticket = None
        try:  # from the first on, as a signal handler may raise between any two lines
            group.calls += 1
            group.last = known.op, frame.f_code, frame.f_lasti
            lane = group.pair.lane
            node = group.pair.through(known.kind, flat.nbytes)
            if node is not None:
                ticket = lane.ticket()
                _repeat_on_node(group, known, flat, frame, ticket, node)
            else:
                slot = lane.slot_at_rest() if flat.nbytes > SMALL_BYTES and not waiting.pending else None
                ticket = lane.ticket()
                if slot is None or not _repeat_large(group, known, flat, frame, ticket, slot):
                    _repeat(group, known, flat, frame, ticket)
        except CollectiveMismatchError:
            raise
        except MPI.Exception as error:
            patience = _patience(group, known, frame)
            patience.give_up(error)
            raise wrap(error, group, patience.call) from error
        except BaseException as error:
            keep_of(error)
            if group.broken is None:
                _patience(group, known, frame).give_up(error)
            raise
        finally:
            if ticket is not None:
                ticket.pass_on()
        if known.average:
            quietly(np.divide, flat, group.size(), out=flat)


def _repeat_on_node(
    group: ProcessGroup, known: Repeated, flat: Any, frame: FrameType, ticket: Ticket, node: NodeEngine
) -> None:
    """Make a call again that the node engine moves."""
    print_ = known.fingerprint
    made: list[Kept] = []
    if group.level != "full":
        print_ = 0
        if group.level == "roll":
            rolling = group.pair.lane.rolling
            rolling.made.append((group.calls, known.fingerprint, known.op, known.key, frame.f_code, frame.f_lasti))
            print_, made = rolling.cut()
    flags: Flags | None = None
    if node.ready and not waiting.pending and ticket.may_post() and ticket.Test():
        polls = 2 if waiting.crowded else waiting.SPIN_POLLS + min(flat.nbytes >> 9, _MOST_POLLS)
        slot, request = ticket.lane.post(print_, flat.nbytes)
        for _ in range(polls):
            if request.Test():
                break
        else:
            _finish_request(group, known, frame, request)
        flags = slot.plain(print_)
        if flags is None:
            for late in node.again(known.kind, flat, known.mpi_op, known.root):
                for _ in range(polls):
                    if late.Test():
                        break
                else:
                    _finish_request(group, known, frame, late)
            return
    call = Call(known.op, known.key, Site(frame.f_code, frame.f_lasti), seq=group.calls, block_bytes=flat.nbytes)
    call.print, call.made = print_, made
    move = Movement(known.kind, recv=flat, op=known.mpi_op, root=known.root)
    if flags is None:
        _issue(group, call, move, ticket, [flat], False, group.timeout, None, None)
    else:
        drive(group, call, _unusual(group, call, move, ticket, flags), group.timeout)


def _patience(group: ProcessGroup, known: Repeated, frame: FrameType) -> CallWait:
    call = Call(known.op, known.key, Site(frame.f_code, frame.f_lasti), seq=group.calls)
    return CallWait(group, call, group.timeout)


_MOST_POLLS = 4096
_START: Any = MPI.Prequest.Start


def _repeat_large(group: ProcessGroup, known: Repeated, flat: Any, frame: FrameType, ticket: Ticket, slot: Any) -> bool:
    """Make a large call again where nothing else is under way; False, and nothing done, where it has no short form.

    A rank that does not enter a transfer that the others have been promised leaves them inside MPI. So what has been posted is
    known exactly, whenever a handler of the program's raises: each of the two calls of MPI is made, and noted, within one
    instruction of the interpreter, after which a handler may run but not in it.
    """
    transfer = known.transfer
    if transfer is None:
        move = Movement(known.kind, recv=flat, op=known.mpi_op, root=known.root)
        transfer = known.transfer = group.pair.native.transfer(move)
        if transfer is None:
            return False
        known.inside = _Inside(group, known)
    inside = known.inside
    assert inside is not None
    print_ = known.fingerprint
    made: list[Kept] = []
    if group.level != "full":
        print_ = 0
        if group.level == "roll":
            rolling = group.pair.lane.rolling
            rolling.made.append((group.calls, known.fingerprint, known.op, known.key, frame.f_code, frame.f_lasti))
            print_, made = rolling.cut()
    call, argument = transfer
    this = (argument(flat),)
    posted: list[object] = []
    try:
        ticket.lane.fill(slot, print_, flat.nbytes)
        request = slot.request
        posted.extend(map(_START, (request,)))
        ticket.lane.posted += 1
        # The others may come out of a transfer before as much later as that takes.
        for _ in range(2 if waiting.crowded else waiting.SPIN_POLLS + min(flat.nbytes >> 9, _MOST_POLLS)):
            if request.Test():
                break
        else:
            _finish_request(group, known, frame, request)
        flags = slot.plain(print_)
        if flags is None:
            ident = threading.get_ident()
            inside.limit = group.timeout
            inside.since = time.monotonic()
            watchdog.active[ident] = inside
            try:
                posted.extend(map(call, this))
            finally:
                watchdog.active.pop(ident, None)
            return True
    except MPI.Exception:
        raise
    except BaseException as error:
        if not posted or group.broken is not None:
            raise
        waiting.guard.noted = error  # out of a handler of the program's: raised when the call is over
        watchdog.active.pop(threading.get_ident(), None)
        if len(posted) == 2:
            return True
    with waiting.shield:
        _end_large(group, known, flat, frame, ticket, slot, print_, made)
    return True


def _end_large(
    group: ProcessGroup,
    known: Repeated,
    flat: Any,
    frame: FrameType,
    ticket: Ticket,
    slot: Any,
    print_: int,
    made: list[Kept],
) -> None:
    """Go on with a large call whose round is posted."""
    if ticket.lane.posted == ticket.number:
        ticket.lane.posted += 1
    if not slot.request.Test():
        _finish_request(group, known, frame, slot.request)
    flags = slot.plain(print_)
    call = Call(known.op, known.key, Site(frame.f_code, frame.f_lasti), seq=group.calls, block_bytes=flat.nbytes)
    call.print, call.made = print_, made
    move = Movement(known.kind, recv=flat, op=known.mpi_op, root=known.root)
    if flags is not None:
        drive(group, call, _unusual(group, call, move, ticket, flags), group.timeout)
        return
    with native(group, call, group.timeout):
        group.pair.native.blocking(move)


def _repeat(group: ProcessGroup, known: Repeated, flat: Any, frame: FrameType, ticket: Ticket) -> None:
    if flat.nbytes > SMALL_BYTES:
        with waiting.shield:
            _repeat_round(group, known, flat, frame, ticket)
    else:
        _repeat_round(group, known, flat, frame, ticket)


def _repeat_round(group: ProcessGroup, known: Repeated, flat: Any, frame: FrameType, ticket: Ticket) -> None:
    moves = known.kind is not Kind.BARRIER
    stopping = None if moves else group.stopping
    block_bytes = flat.nbytes if stopping is None else stopping.brings()
    large = flat.nbytes > SMALL_BYTES
    print_ = known.fingerprint
    made: list[Kept] = []
    if group.level != "full":
        compares = large or not moves
        print_ = 0
        if group.level == "roll":
            rolling = group.pair.lane.rolling
            rolling.made.append((group.calls, known.fingerprint, known.op, known.key, frame.f_code, frame.f_lasti))
            if compares or group.calls % EVERY == 0:
                compares = True
                print_, made = rolling.cut()
        if not compares:
            _repeat_uncompared(group, known, flat, frame, ticket)
            return
    plan = group.plans.get(known.plan_key)
    request = None
    if (plan is not None or large or not moves) and not waiting.pending and ticket.may_post() and ticket.Test():
        slot, request = ticket.lane.post(print_, block_bytes)
        for _ in range(2 if waiting.crowded else waiting.SPIN_POLLS):
            if request.Test():
                break
        else:
            _finish_request(group, known, frame, request)
        flags = slot.plain(print_)
        if flags is None:
            if large:
                call = Call(known.op, known.key, Site(frame.f_code, frame.f_lasti), seq=group.calls)
                move = Movement(known.kind, recv=flat, op=known.mpi_op, root=known.root)
                with native(group, call, group.timeout):
                    group.pair.native.blocking(move)
                return
            if plan is None:  # a barrier is its round
                if stopping is not None:
                    stopping.take(slot.block_bytes())
                return
            group.plans.move_to_end(known.plan_key)
            started = plan.start_in_place(flat)
            for _ in range(2 if waiting.crowded else waiting.SPIN_POLLS):
                if started.Test():
                    break
            else:
                _finish_request(group, known, frame, started)
            plan.finish_in_place(flat)
            return
    call = Call(known.op, known.key, Site(frame.f_code, frame.f_lasti), seq=group.calls, block_bytes=block_bytes)
    call.print, call.made = print_, made
    plain = Movement(known.kind, recv=flat, op=known.mpi_op, root=known.root)
    what = plain if stopping is None else stopping.carried
    if request is None:
        _issue(group, call, what, ticket, [flat], False, group.timeout, None, None)
    else:
        drive(group, call, _unusual(group, call, what, ticket, slot.flags()), group.timeout)


def _repeat_uncompared(group: ProcessGroup, known: Repeated, flat: Any, frame: FrameType, ticket: Ticket) -> None:
    """Make a call again that makes no round."""
    plan = group.own_plans.get(known.uncompared_key)
    if plan is None or waiting.pending or not ticket.may_pass() or not ticket.Test():
        call = Call(known.op, known.key, Site(frame.f_code, frame.f_lasti), seq=group.calls, block_bytes=flat.nbytes)
        call.passes = True
        move = Movement(known.kind, recv=flat, op=known.mpi_op, root=known.root)
        _issue(group, call, move, ticket, [flat], False, group.timeout, None, None)
        return
    group.own_plans.move_to_end(known.uncompared_key)
    ticket.lane.posted += 1
    started = plan.start_in_place(flat)
    for _ in range(2 if waiting.crowded else waiting.SPIN_POLLS):
        if started.Test():
            break
    else:
        _finish_request(group, known, frame, started, passes=True)
    plan.finish_in_place(flat)


def _unusual(
    group: ProcessGroup, call: Call, move: Movement | Callable[[Flags], Movement], ticket: Ticket, flags: Flags
) -> Generator[Request, None, None]:
    """Go on after a round that says that something differs, or that somebody is late or asynchronous."""
    mpi_error = MPI.Exception  # at the end of the interpreter the module's names are gone before kept generators
    try:
        if not flags.same or flags.error:
            yield from explain(ticket.lane, call, group.display, group.ranks, group.rank(), flags.waited)
        yield from _agreed(group, call, move, ticket, flags, None, None, group.timeout)
    except mpi_error as error:
        raise wrap(error, group, call) from error
    finally:
        ticket.pass_on()
        if call.apart:
            group.give_up("its ranks made unequal numbers of calls")


def _finish_request(
    group: ProcessGroup, known: Repeated, frame: FrameType, request: Request, *, passes: bool = False
) -> None:
    call = Call(known.op, known.key, Site(frame.f_code, frame.f_lasti), seq=group.calls, passes=passes)
    try:
        local_wait(guarded(request.Test, group, call), CallWait(group, call, group.timeout))
    except BaseException:
        keep(request)
        raise


def agree(group: ProcessGroup, call: Call, limit: float) -> Flags:
    """Make the round of a call that moves no data, and return what all members now know.

    Raises:
        Exception: ``call.error`` here, CollectiveMismatchError on the other members.
    """
    enter(group, call.op)
    if group.turn is not None:
        raise group.turn.refuse(call.describe(), call.site)
    with waiting.guard, group.lock:
        try:
            group.calls += 1
            call.seq = group.calls
            group.last = call.op, call.site.code, call.site.instruction
            _print(group, call, compares=True)
            # What makes a group or the world is always compared.
            call.print = call.print or fingerprint(call.op, call.key)
            ticket = group.pair.lane.ticket()
            flags: Flags = drive(group, call, _conducted(group, call, ticket), limit)
            return flags
        except BaseException as error:
            _leave_begun(group, call, limit, error)
            raise


def conduct(group: ProcessGroup, call: Call, steps: Callable[[Flags], Generator[Request, None, None]]) -> None:
    """Make one collective call that moves its data in several steps, and wait for it.

    The caller has asked :func:`enter` whether the group can be used.

    Args:
        steps: given what all members know, yields what has to complete next. It may raise CollectiveMismatchError or
            ``call.error`` before it moves anything, if all members do.
    """
    if group.turn is not None:
        raise group.turn.refuse(call.describe(), call.site)
    if call.error is not None and group.level != "full":
        raise call.error  # the others do not compare, so nobody asks what was wrong here
    with waiting.guard, group.lock:
        try:
            group.calls += 1
            call.seq = group.calls
            group.last = call.op, call.site.code, call.site.instruction
            call.asynchronous = _collectives_pending()
            _print(group, call, compares=True)
            conducted = _conducted(group, call, group.pair.lane.ticket(), steps)
            with waiting.shield:
                drive(group, call, conducted, group.timeout)
        except BaseException as error:
            _leave_begun(group, call, group.timeout, error)
            raise


def _conducted(
    group: ProcessGroup,
    call: Call,
    ticket: Ticket,
    steps: Callable[[Flags], Generator[Request, None, None]] | None = None,
) -> Generator[Request, None, Flags]:
    mpi_error = MPI.Exception  # at the end of the interpreter the module's names are gone before kept generators
    try:
        flags = yield from agree_or_raise(ticket, call, group.display, group.ranks, group.rank())
        if not ticket.Test():
            yield ticket
        if flags.stalled:
            yield group.pair.lane.data.Ibarrier()
        if steps is not None:
            yield from steps(flags)
        return flags
    except mpi_error as error:
        raise wrap(error, group, call) from error
    finally:
        ticket.pass_on()
        if call.apart:
            group.give_up("its ranks made unequal numbers of calls")


def move_once(
    group: ProcessGroup, call: Call, flags: Flags, move: Movement, moved: int
) -> Generator[Request, None, int]:
    """Move a flat buffer within the steps of a conducted call: by blocking calls unless somebody is asynchronous.

    Args:
        move: of a kind whose blocks all members know to be equal.
        moved: what this returned for the movement before it in the call, or 0.

    Returns:
        Bytes moved since the last wait that can be left.
    """
    engine, lane = group.pair.native, group.pair.lane
    size, nbytes = group.size(), block_bytes(move, group.size())
    node = group.pair.through(move.kind, nbytes) if not flags.native else None
    if node is not None:
        if not node.ready:
            yield from node.prepare()
            _say_why_not(group, node)
        if node.usable:
            yield from node.steps(move, nbytes)
            return moved
    for piece in pieces(move, group.rank(), size, nbytes, NATIVE_BYTES):
        step = block_bytes(piece, size)
        if flags.nonblocking:
            waiting.moving(step)
            yield engine.nonblocking(piece)
            continue
        moved += step
        if moved > NATIVE_BYTES:
            moved = step
            yield lane.data.Ibarrier()  # as in _agreed
        with native(group, call, group.timeout):
            engine.blocking(piece)
    return moved


def sending(group: ProcessGroup, call: Call, request: Request) -> Generator[Request, None, int | None]:
    """Wait for what has been sent; the steps of an Operation."""
    mpi_error = MPI.Exception  # at the end of the interpreter the module's names are gone before kept generators
    try:
        yield request
    except mpi_error as error:
        raise wrap(error, group, call) from error
    return None


def lost(operation: Operation, reason: BaseException) -> None:
    """Give up a call that something foreign struck while it was moved on."""
    CallWait(operation.group, operation.call, operation.limit, operation.peer).give_up(reason)


def drive(group: ProcessGroup, call: Call, steps: Generator[Request, None, Any], limit: float) -> Any:
    """Run ``steps`` to their end, waiting for each; one limit for the whole call."""
    patience = (call.patience or CallWait)(group, call, limit)
    while True:
        try:
            request = next(steps)
        except StopIteration as stop:
            return stop.value
        except CollectiveMismatchError:
            raise  # all members raise it, and the group is still good
        except BaseException as error:
            if error is not call.error:
                # From here on the members are no longer in step: a signal handler raised, MPI or memory failed.
                keep(steps, call)
                keep_of(error)
                patience.give_up(error)
            raise
        try:
            test = guarded(request.Test, group, call)
            if not test():
                local_wait(test, patience)
        except BaseException:
            keep(steps, request)
            raise


def guarded(test: Callable[[], bool], group: ProcessGroup, call: Call) -> Callable[[], bool]:
    """Return ``test`` with MPI's errors as ours."""

    def wrapped() -> bool:
        try:
            return test()
        except MPI.Exception as error:
            raise wrap(error, group, call) from error

    return wrapped


def enter(group: ProcessGroup, operation: str) -> None:
    """Raise when this process or thread may not communicate, or the group cannot be used."""
    known = groups.state()
    if os.getpid() != known.pid:
        raise RuntimeError(
            f"{operation}: this is a forked child (process {os.getpid()}) of rank {known.world.rank()}: only the process "
            "that started MPI may communicate. Start workers with the spawn method, and let them return their results"
        )
    if not known.thread_multiple and threading.get_ident() != known.thread:
        raise RuntimeError(
            f"{operation}: this MPI gives no MPI_THREAD_MULTIPLE, so only the thread that initialised may communicate"
        )
    if MPI.Is_finalized():
        raise RuntimeError(f"{operation}: MPI has been finalised")
    group.usable(operation)


def finish_waiting(operation: Operation, limit: float | None) -> None:
    """Wait for an operation and raise its error."""
    if not operation.done:
        with waiting.guard:
            group, call = operation.group, operation.call
            limit = operation.limit if limit is None else limit
            special = call.patience
            patience = (
                special(group, call, limit) if special else CallWait(group, call, limit, operation.peer, operation.tag)
            )
            try:
                local_wait(operation.advance, patience)
            except BaseException as error:
                operation.abandon(error)
                raise
            finally:
                if operation.done and operation in waiting.pending:
                    waiting.pending.remove(operation)
    if operation.error is not None:
        raise operation.error


def _collectives_pending() -> bool:
    return any(isinstance(item, Operation) and item.peer is None for item in waiting.pending)
