"""Calls that are made again and waited for: as ``execution.run`` makes them, with little between the program and MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.checks.agreement import is_usual
from mpicoll.checks.levels import EVERY
from mpicoll.diagnosis.call import Call, MadeFields, fingerprint
from mpicoll.diagnosis.job_state import hopeless
from mpicoll.diagnosis.wait_policy import CallWait, local_wait
from mpicoll.errors import AGREED, CollectiveMismatchError
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.memory.arithmetic import without_warnings
from mpicoll.operations import execution
from mpicoll.operations.failures import BlockingCall, guarded, wrap
from mpicoll.runtime import signals, waiting, watchdog
from mpicoll.runtime.call_site import NOWHERE, Site
from mpicoll.runtime.mpi_library import retain_for_ever, retain_frames
from mpicoll.transports.base import SMALL_BYTES, Kind, Movement, Request
from mpicoll.transports.control import NOTHING, Agreed, Round, Words, make_words
from mpicoll.transports.mpi.collectives import persistent_collectives
from mpicoll.transports.shm.transport import SharedMemoryTransport

REPEATED_BYTES = execution.NATIVE_BYTES
"""What one native call moves may be made again in short."""

_MOST_POLLS = 4096


class Repeated:
    """A call, prepared once: made again with the same arguments it costs little beside MPI.

    Attributes:
        op, key, alias, detail: of the call; ``plan_key`` and ``uncompared_key`` of its plans.
        kind, mpi_op, root: of the movement.
        nbytes: of the largest block that this rank moves to or from one peer.
        passes: whether it may move without a comparison where it is small.
        average: divide the result by the number of members.
        transfer, inside: of a large one on the group that it was prepared for: the call of its engine, and what the watchdog
            sees of it.
    """

    __slots__ = (
        "_words",
        "alias",
        "average",
        "detail",
        "fingerprint",
        "inside",
        "key",
        "kind",
        "mpi_op",
        "nbytes",
        "op",
        "passes",
        "plan_key",
        "root",
        "transfer",
        "uncompared_key",
    )

    def __init__(
        self,
        op: str,
        key: tuple[Any, ...],
        kind: Kind,
        nbytes: int = 0,
        *,
        mpi_op: str = "",
        root: int = -1,
        average: bool = False,
        detail: int = NOTHING,
        alias: str = "",
    ) -> None:
        self.op = op
        self.key = key
        self.alias = alias
        self.detail = detail
        self.plan_key = (op, key, detail)
        self.uncompared_key = (op, key)
        self.fingerprint = fingerprint(op, key)
        self._words = make_words(self.fingerprint, nbytes, detail=detail)
        self.kind = kind
        self.nbytes = nbytes
        self.mpi_op = mpi_op
        self.passes = kind in execution.UNCOMPARED
        self.root = root
        self.average = average
        self.transfer: tuple[Callable[..., object], Callable[[Movement], tuple[Any, ...]]] | None = None
        self.inside: _Inside | None = None

    def words(self, print_: int, signal: int = 0) -> Words:
        """Return the words of its rounds, kept for the usual fingerprint."""
        words = self._words  # other threads make the same call on other groups, with other fingerprints
        if signal or print_ != words[0]:
            words = make_words(print_, self.nbytes, detail=self.detail, signal=signal)
            if not signal:
                self._words = words
        return words

    def call(self, group: ProcessGroup, frame: FrameType) -> Call:
        """Return what the reports need to know of it."""
        call = Call(self.op, self.key, Site(frame.f_code, frame.f_lasti), seq=group.calls, block_bytes=self.nbytes)
        call.detail, call.alias = self.detail, self.alias
        return call


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


def repeat(group: ProcessGroup, known: Repeated, move: Movement, frame: FrameType) -> None:
    """Make a call again that is waited for: as ``execution.run``, with as little as possible between the program and MPI.

    Args:
        move: what to move, of the kind and sizes that the call was prepared for.
        frame: the frame of the program's call.
    """
    execution.enter(group, known.op)
    if group.turn is not None:
        site = Site(frame.f_code, frame.f_lasti)
        raise group.turn.refuse(Call(known.op, known.key, site).describe(), site)
    with signals.guard, group.lock:
        number = None
        try:  # from the first on, as a signal handler may raise between any two lines
            group.calls += 1
            group.last = known.op, frame.f_code, frame.f_lasti
            agreement = group.pair.agreement
            node = group.pair.through(known.kind, known.nbytes)
            if node is not None:
                number = agreement.order.issue()
                _repeat_on_node(group, known, move, frame, number, node)
            else:
                large = known.nbytes > SMALL_BYTES
                at_once = agreement.channel.carries_data or persistent_collectives()
                idle = large and at_once and not waiting.pending and agreement.is_idle()
                number = agreement.order.issue()
                if not idle or not _repeat_large(group, known, move, frame, number):
                    if large:
                        with signals.shield:
                            _repeat_round(group, known, move, frame, number)
                    else:
                        _repeat_round(group, known, move, frame, number)
        except CollectiveMismatchError:
            raise
        except MPI.Exception as error:
            patience = patience_of(group, known, frame)
            patience.withdraw(error)
            raise wrap(error, group, patience.call) from error
        except BaseException as error:
            retain_frames(error)
            if group.broken is None and not getattr(error, AGREED, False):
                patience_of(group, known, frame).withdraw(error)
            raise
        finally:
            if number is not None:
                group.pair.agreement.order.pass_on(number)
        if known.average and move.recv is not None:
            without_warnings(np.divide, move.recv, group.size(), out=move.recv)


def outcome(made: Round, words: Words) -> Agreed | None:
    """Return what a complete round says, None if all is as usual, and free its slot."""
    agreed = None if is_usual(made, words) else made.agreed()
    made.release()
    return agreed


def _finish_polling(group: ProcessGroup, known: Repeated, frame: FrameType, request: Request, nbytes: int) -> None:
    """Poll for about as long as the others may take, and then wait as every call does."""
    test = request.Test
    for _ in range(2 if waiting.oversubscribed else waiting.SPIN_POLLS + min(nbytes >> 9, _MOST_POLLS)):
        if test():
            return
    finish_request(group, known, frame, request)


def _repeat_on_node(
    group: ProcessGroup, known: Repeated, move: Movement, frame: FrameType, number: int, node: SharedMemoryTransport
) -> None:
    """Make a call again that the node engine moves."""
    print_, made = _print_again(group, known, frame)
    nbytes = known.nbytes
    agreement, agreed = group.pair.agreement, None
    if node.ready and not waiting.pending and agreement.may_post(number) and agreement.order.may_move(number):
        words = known.words(print_)
        made_round = agreement.post(words)
        _finish_polling(group, known, frame, made_round, nbytes)
        agreed = outcome(made_round, words)
        if agreed is None:
            for late in node.steps(move, nbytes):
                _finish_polling(group, known, frame, late, nbytes)
            return
    call = known.call(group, frame)
    call.print, call.made = print_, made
    if agreed is None:
        execution.issue(group, call, move, number, [move.recv], False, group.timeout)
    else:
        execution.go_on(group, call, move, number, agreed)


def patience_of(group: ProcessGroup, known: Repeated, frame: FrameType) -> CallWait:
    """Return what a wait in a call that is made again is for."""
    return CallWait(group, known.call(group, frame), group.timeout)


def _repeat_large(group: ProcessGroup, known: Repeated, move: Movement, frame: FrameType, number: int) -> bool:
    """Make a large call again where nothing else is under way; False, and nothing done, where it has no short form.

    A rank that does not enter a transfer that the others have been promised leaves them inside MPI. So what has been posted is
    known exactly, whenever a handler of the program's raises: each of the two calls of MPI is made, and noted, within one
    instruction of the interpreter, after which a handler may run but not in it.
    """
    transfer = known.transfer
    if transfer is None:
        transfer = known.transfer = group.pair.native.transfer(move)
        if transfer is None:
            return False
        known.inside = _Inside(group, known)
    inside = known.inside
    assert inside is not None
    print_, made = _print_again(group, known, frame)
    call, arguments = transfer
    these = [(each,) for each in arguments(move)]
    posted: list[object] = []
    agreement, words = group.pair.agreement, known.words(print_)
    made_round: Any = None
    try:
        made_round = agreement.fill(words)
        posted.extend(map(*made_round.starting))
        agreement.order.posted += 1
        # The others may come out of a transfer before as much later as that takes.
        _finish_polling(group, known, frame, made_round, known.nbytes)
        agreed = outcome(made_round, words)
        if agreed is None:
            ident = threading.get_ident()
            inside.limit = group.timeout
            inside.since = time.monotonic()
            watchdog.active[ident] = inside
            try:
                posted.extend(map(call, *these))
            finally:
                watchdog.active.pop(ident, None)
            return True
    except MPI.Exception:
        raise
    except BaseException as error:
        if not posted or group.broken is not None:
            raise
        signals.guard.noted = error  # out of a handler of the program's: raised when the call is over
        watchdog.active.pop(threading.get_ident(), None)
        if len(posted) == 2:
            return True
    with signals.shield:
        _end_large(group, known, move, frame, number, made_round, print_, made)
    return True


def _end_large(
    group: ProcessGroup,
    known: Repeated,
    move: Movement,
    frame: FrameType,
    number: int,
    made_round: Any,
    print_: int,
    made: list[MadeFields],
) -> None:
    """Go on with a large call whose round is posted."""
    order = group.pair.agreement.order
    if order.posted == number:
        order.posted += 1
    if not made_round.Test():
        finish_request(group, known, frame, made_round)
    agreed = outcome(made_round, known.words(print_))
    call = known.call(group, frame)
    call.print, call.made = print_, made
    if agreed is not None:
        execution.go_on(group, call, move, number, agreed)
        return
    with BlockingCall(group, call, group.timeout):
        group.pair.native.blocking(move)


def _repeat_round(group: ProcessGroup, known: Repeated, move: Movement, frame: FrameType, number: int) -> None:
    """Make a call again that MPI moves."""
    moves, large = known.kind is not Kind.BARRIER, known.nbytes > SMALL_BYTES
    stopping = None if moves else group.stopping
    signal = 0 if stopping is None else stopping.brings()
    agreement = group.pair.agreement
    passes = group.level != "full" and known.passes and not large
    if passes and not agreement.channel.carries_data and (group.level == "off" or group.calls % EVERY):
        _note_again(group, known, frame)
        _repeat_uncompared(group, known, move, frame, number)
        return
    print_, made = _print_again(group, known, frame)
    plan = group.plans.get(known.plan_key)
    agreed: Agreed | None = None
    ready = agreement.may_post(number) and agreement.order.may_move(number)
    if (plan is not None or large or not moves) and not waiting.pending and ready:
        words = known.words(print_, signal)
        made_round = agreement.post(words)
        _finish_polling(group, known, frame, made_round, 0)
        agreed = outcome(made_round, words)
        if agreed is None:
            if large:
                with BlockingCall(group, known.call(group, frame), group.timeout):
                    group.pair.native.blocking(move)
                return
            if plan is None:  # a barrier is its round
                if stopping is not None:
                    stopping.take(signal)
                return
            group.plans.move_to_end(known.plan_key)
            _finish_polling(group, known, frame, plan.start(move), 0)
            plan.finish(move)
            return
    call = known.call(group, frame)
    call.print, call.made, call.signal = print_, made, signal
    what = move if stopping is None else stopping.carried
    if agreed is None:
        execution.issue(group, call, what, number, [move.recv], False, group.timeout)
    else:
        execution.go_on(group, call, what, number, agreed)


def _repeat_uncompared(group: ProcessGroup, known: Repeated, move: Movement, frame: FrameType, number: int) -> None:
    """Make a call again that makes no round."""
    plan = group.own_plans.get(known.uncompared_key)
    agreement = group.pair.agreement
    if plan is None or waiting.pending or not agreement.may_pass(number) or not agreement.order.may_move(number):
        call = known.call(group, frame)
        call.passes = True
        execution.issue(group, call, move, number, [move.recv], False, group.timeout)
        return
    group.own_plans.move_to_end(known.uncompared_key)
    agreement.order.posted += 1
    started = plan.start(move)
    for _ in range(2 if waiting.oversubscribed else waiting.SPIN_POLLS):
        if started.Test():
            break
    else:
        finish_request(group, known, frame, started, passes=True)
    plan.finish(move)


def _print_again(group: ProcessGroup, known: Repeated, frame: FrameType) -> tuple[int, list[MadeFields]]:
    """Return what the round of a call that is made again compares, and the calls since the last comparison."""
    if group.level == "roll" and not group.pair.agreement.channel.carries_data:
        _note_again(group, known, frame)
        return group.pair.agreement.rolling.cut()
    return execution.plain_print(group, known.op, known.fingerprint), []


def _note_again(group: ProcessGroup, known: Repeated, frame: FrameType) -> None:
    if group.level == "roll":
        made = group.pair.agreement.rolling.made
        made.append((group.calls, known.fingerprint, known.op, known.key, frame.f_code, frame.f_lasti))


def go_on(group: ProcessGroup, known: Repeated, move: Movement, frame: FrameType, number: int, agreed: Agreed) -> None:
    """Go on with a call that is made again after a round that says that something is not as usual."""
    call = known.call(group, frame)
    call.print = execution.plain_print(group, known.op, known.fingerprint)
    with signals.shield:
        execution.go_on(group, call, move, number, agreed)


def finish_request(
    group: ProcessGroup, known: Repeated, frame: FrameType, request: Request, *, passes: bool = False
) -> None:
    """Wait for a part of a call that is made again."""
    call = known.call(group, frame)
    call.passes = passes
    try:
        local_wait(guarded(request.Test, group, call), CallWait(group, call, group.timeout))
    except BaseException:
        retain_for_ever(request)
        raise
