"""Signals and the time limit, answered by all ranks of a group at the same step.

A signal reaches some ranks, each at a moment of its own. It is only noted there (``runtime.signals.notes``). Every now
and then the ranks tell each other, by one agreement as other calls make it: the largest of what they have noted is what all of
them know then, and how many calls of ``should_stop`` come before the next time, which is the least that one of them asks for.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from mpicoll.diagnosis.call import Call
from mpicoll.errors import ARGUMENT
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import member_or_warn
from mpicoll.operations import execution
from mpicoll.runtime.call_site import Site, call_site
from mpicoll.runtime.signals import notes
from mpicoll.training import time_limit
from mpicoll.transports.base import Kind, Movement
from mpicoll.transports.control import Agreed

MOST_CALLS = 16
"""Calls of ``should_stop`` from one agreement to the next, at most."""

AIM = 1.0
"""Seconds from one agreement to the next, where the calls come slowly."""

DEFAULT = (signal.SIGTERM, signal.SIGUSR1)

# What a rank brings to an agreement; the largest counts. Above it: 1 + the number of a signal.
_NOTHING, _TIME = 0, 1


def calls_until_next(seconds: float, before: int) -> int:
    """Return after how many calls this rank wants the next agreement.

    Args:
        seconds: that a call of ``should_stop`` and all that is between it and the next have taken of late.
        before: calls from the last agreement to this one. It grows to twice that at most: the first steps may be quick.
    """
    fit = MOST_CALLS if seconds <= 0 else int(min(AIM / seconds, MOST_CALLS))
    return max(1, min(fit, 2 * before))


class OnSignal:
    """What answers signals on one group: the handler, and what its ranks have agreed on (see :func:`on_signal`).

    As a context manager it is removed at the end of the block.

    Attributes:
        group: the group.
        signals: their numbers.
        stopped: one of them, or the end of the time, is known to all ranks.
    """

    def __init__(
        self, group: ProcessGroup, handler: Callable[[int], Any] | None, signals: tuple[int, ...], *, free: bool
    ) -> None:
        self.group = group
        self.signals = signals
        self.stopped = False
        self.passes = 0  # calls of should_stop that only return ``stopped``, before one that agrees
        self._handler = handler
        self._held = notes.start(signals, free=free)
        self._done: set[int] = set()
        self._between = 1
        self._agreed_at = math.nan
        self._due = 0

    def remove(self) -> None:
        """Remove it, and give the signals the handlers that they had before; on all members at the same place."""
        notes.stop(self._held)
        self._held = ()
        if self.group.stopping is self:
            self.group.stopping = None

    def replaced(self) -> None:
        """Remove it where another one has taken its place, which answers anew what this one has answered."""
        notes.renew(self._done)
        self.remove()

    def __enter__(self) -> OnSignal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def brings(self, before: float | None = None) -> int:
        """Return what this rank brings to an agreement (of several signals the largest: the others come next)."""
        came = [1 + number for number in self.signals if number in notes.came and number not in self._done]
        if before is not None:
            left = time_limit.clock.left(ask=self.group.rank() == 0)
            came.append(_TIME if left is not None and left < before else _NOTHING)
        return max(came, default=_NOTHING)

    def wants(self, now: float) -> int:
        """Return after how many calls this rank wants the next agreement; ``now``: time.monotonic."""
        if math.isnan(self._agreed_at):
            return 1
        return calls_until_next((now - self._agreed_at) / self._between, self._between)

    def learn(self, brought: int, calls: int) -> None:
        """Take what all ranks now know: the largest of what they brought, and the least calls that one wants."""
        self._between, self._agreed_at = calls, time.monotonic()
        self.passes = calls - 1
        self.take(brought)

    def take(self, brought: int) -> None:
        """Take the largest of what the ranks brought, as all of them do at this call."""
        if brought:
            self.stopped = True
            self.passes, self._between = 0, 1
        if brought > _TIME:
            self._done.add(brought - 1)
            notes.agreed(brought - 1)
            self._due = brought - 1

    def carried(self, agreed: Agreed) -> Movement:
        """Take what the round of a barrier has carried, and return what the barrier moves.

        Where a member is asynchronous it is not taken: each of them sees the end of the round at another time.
        """
        if not agreed.nonblocking:
            self.take(agreed.signal)
        return Movement(Kind.BARRIER)

    def deliver(self) -> None:
        """Call the handler where a signal has been agreed on just now."""
        number, self._due = self._due, 0
        if number and self._handler is not None:
            self._handler(number)


def on_signal(
    handler: Callable[[int], Any] | None,
    signals: Iterable[int] = DEFAULT,
    *,
    group: Any = None,
) -> OnSignal | None:
    """Have a signal that reaches any rank answered on all ranks, at the same step.

    Called by all members, with the same ``signals``; in the main thread. From then on these signals only leave a note. The next
    :func:`should_stop` at which the ranks agree, or the next :func:`barrier` of the group, calls ``handler(number)`` on every
    rank before it returns, in the thread that calls, once for each signal number; there it may make collectives.
    :func:`should_stop` is true from then on.

    Args:
        handler: called with the number of the signal; None: what answered before is removed, and the signals get the handlers
            back that they had (as with the handle's ``remove()``, or by ``destroy_process_group``).
        signals: which ones; default SIGTERM and SIGUSR1.
        group: the group; default the world.

    Returns:
        A handle with ``remove()``, which is a context manager; None without a handler.

    SIGTERM does not end the process then: it is answered at the next step. One that comes more than two seconds after another
    ends it, and so does one that no step has answered within the limit of the group. A program that has a handler of its own
    for one of the signals has it replaced until the removal. Barriers with ``async_op`` answer nothing.

    Raises:
        TypeError: ``handler`` is not callable, ``signals`` not numbers of signals; ValueError: a signal that cannot be
            handled, or none; RuntimeError: not in the main thread. All members raise.
        CollectiveMismatchError: the members named different signals.

    Example:
        >>> def save(number):
        ...     print("rank", dist.get_rank(), "saves at step", step)
        >>> dist.on_signal(save)
        >>> for step in range(1000):
        ...     if dist.should_stop():
        ...         break

    Source: sbatch(1), --signal.
    """
    found = member_or_warn(group, "on_signal")
    if found is None:
        return None
    if handler is None:
        if found.stopping is not None:
            found.stopping.remove()
        return None
    error: Exception | None = None
    numbers: tuple[int, ...] = ()
    try:
        _main_thread("on_signal")
        if not callable(handler):
            raise TypeError(f"handler must be callable or None, not {type(handler).__name__}")
        numbers = _numbers(signals)
    except Exception as wrong:
        setattr(wrong, ARGUMENT, True)
        error = wrong
    names = tuple(signal.Signals(number).name if number in set(signal.Signals) else str(number) for number in numbers)
    key = () if error is not None else (("signals", names),)
    # Noted from before the agreement on: once it returns on one rank, a signal may be sent to any.
    registered = OnSignal(found, handler, numbers, free=False) if error is None else None
    try:
        execution.agree(found, Call("on_signal", key, call_site(), error=error), found.timeout)
    except BaseException:
        if registered is not None:
            registered.remove()
        raise
    before, found.stopping = found.stopping, registered
    if isinstance(before, OnSignal):  # held by the new one already: what came and has not been answered is not lost
        before.replaced()
    return registered


def should_stop(group: Any = None, *, before: float | None = None) -> bool:
    """Return whether the program should come to its end: the same on all members, at the same call.

    Called by all members, once a step. It is true from the call on at which the ranks have agreed that a signal has reached one
    of them, or that the time is up. Without :func:`on_signal` before it, the first call has SIGTERM and SIGUSR1 noted, as far as
    nobody handles them.

    Args:
        group: the group; default the world.
        before: seconds: true, too, when less than that is left until the time limit of the job (:func:`time_left`, which
            here the first rank of the group asks for). The same on all members.

    The ranks agree at every 16th call at most; where calls take longer than a sixteenth of a second, so often that it happens
    about once a second, as the slowest rank measures it; and at barriers. In between a call returns what was agreed last, and
    costs a comparison. When they agree it is a collective like others: a rank that leaves it out is named.

    Raises:
        TypeError, ValueError: ``before`` is not a positive number. All members raise, when they next agree.
        RuntimeError: the first call is not made in the main thread, and there was no :func:`on_signal`. All members raise.
        Others: as :func:`barrier`, and what the handler raises.

    Example:
        >>> while not dist.should_stop(before=120):
        ...     train_one_step()
    """
    found = registry.default.world if group is None else None
    if found is None:
        found = member_or_warn(group, "should_stop")
        if found is None:
            return False
    stopping = found.stopping
    if stopping is not None and stopping.passes and found.broken is None and found.turn is None:
        stopping.passes -= 1
        return bool(stopping.stopped)
    return _agree(found, stopping, before, call_site())


def _agree(group: ProcessGroup, stopping: Any, before: float | None, site: Site) -> bool:
    first = stopping is None
    error: Exception | None = None
    try:
        if first:
            _main_thread("should_stop")
            stopping = OnSignal(group, None, DEFAULT, free=True)
        _check_before(before)
    except Exception as wrong:
        setattr(wrong, ARGUMENT, True)
        error = wrong
    call = Call("should_stop", (("before", before),) if before is not None and error is None else (), site, error=error)
    if error is None:
        # Of both words the largest counts, and neither has to be the same.
        call.uneven, call.signal, call.detail = True, stopping.brings(before), -stopping.wants(time.monotonic())
    try:
        agreed = execution.agree(group, call, group.timeout)
    except BaseException:
        if first and stopping is not None:
            stopping.remove()
        raise
    group.stopping = stopping
    stopping.learn(agreed.signal, -agreed.most)
    stopping.deliver()
    return bool(stopping.stopped)


def _main_thread(operation: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(f"{operation}: only the main thread can handle signals: call on_signal() there first")


def _check_before(before: Any) -> None:
    if before is None:
        return
    if not isinstance(before, (int, float)) or isinstance(before, bool):
        raise TypeError(f"before must be a number of seconds or None, not {type(before).__name__}")
    if not before > 0 or math.isinf(before):
        raise ValueError(f"before must be a positive number of seconds, got {before!r}")


def _numbers(signals: Any) -> tuple[int, ...]:
    """Return the numbers of signals, sorted."""
    try:
        given = list(signals)
    except TypeError:
        raise TypeError(f"signals must be a sequence of signals, not {type(signals).__name__}") from None
    for each in given:
        if not isinstance(each, int) or isinstance(each, bool):
            raise TypeError(f"signals must be numbers such as signal.SIGTERM, not {type(each).__name__}")
        if each not in signal.valid_signals() or each in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"signal {int(each)} is none that a program can handle")
    if not given:
        raise ValueError("signals must not be empty: on_signal(None) removes the handler")
    return tuple(sorted({int(each) for each in given}))
