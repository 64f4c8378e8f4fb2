"""Stop requests: signals and the time limit, handled by all ranks of a group at the same step.

A signal reaches some ranks, each at its own moment, and these ranks only note the signal (``runtime.signals.notes``). From time
to time the ranks make an agreement, as other calls do. The agreement gives all ranks the largest word of the ranks, and the
number of calls of ``should_stop`` until the next agreement: the least number that a rank asks for.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import ARGUMENT
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.operations import composed
from mpicoll.operations.prepare.refusal import member
from mpicoll.runtime.call_site import call_site
from mpicoll.runtime.signals import notes
from mpicoll.training import time_limit
from mpicoll.transports.base import Kind, Movement
from mpicoll.transports.control import Agreed

MOST_CALLS = 16
"""The most calls of ``should_stop`` from one agreement to the next."""

AIM = 1.0
"""Seconds from one agreement to the next, if the calls are far apart."""

DEFAULT = (signal.SIGTERM, signal.SIGUSR1)

# The word of a rank in an agreement; the largest counts. Larger words are 1 + the number of a signal.
_NOTHING, _TIME = 0, 1


def calls_until_next(seconds: float, before: int) -> int:
    """Return the number of calls after which this rank wants the next agreement.

    Args:
        seconds: the recent time from one call of ``should_stop`` to the next.
        before: calls between the last two agreements. The result is at most twice as large: the first steps may be quick.
    """
    fit = MOST_CALLS if seconds <= 0 else int(min(AIM / seconds, MOST_CALLS))
    return max(1, min(fit, 2 * before))


class OnSignal:
    """The handler of signals on one group, with the agreed state of its ranks (see :func:`on_signal`).

    If the object is used as a context manager, the handler is removed at the end of the block.

    Attributes:
        group: the group.
        signals: numbers of the handled signals.
        stopped: whether all ranks know of a signal, or of the end of the time.
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
        self._agreed_at = -math.inf  # the next call agrees, too
        self._due = 0

    def remove(self) -> None:
        """Remove the handler and restore the earlier handlers of the signals. Called by all members at the same place."""
        notes.stop(self._held)
        self._held = ()
        if self.group.stopping is self:
            self.group.stopping = None

    def __enter__(self) -> OnSignal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def brings(self, before: float | None = None) -> int:
        """Return this rank's word for an agreement: of several signals the largest; the next agreements get the other signals."""
        words = [1 + number for number in self.signals if number in notes.came and number not in self._done]
        if before is not None:
            left = time_limit.clock.left(ask=self.group.rank() == 0)
            words.append(_TIME if left is not None and left < before else _NOTHING)
        return max(words, default=_NOTHING)

    def wants(self) -> int:
        """Return the number of calls after which this rank wants the next agreement."""
        return calls_until_next((time.monotonic() - self._agreed_at) / self._between, self._between)

    def take(self, word: int, calls: int = 0) -> None:
        """Store the outcome of an agreement. Called by all ranks at the same call of the program.

        Args:
            word: the largest word of the ranks.
            calls: the least number of calls that a rank wants until the next agreement; 0: no rank was asked (a barrier).
        """
        if calls:
            self._between, self._agreed_at, self.passes = calls, time.monotonic(), calls - 1
        if word:
            self.stopped = True
            self.passes, self._between = 0, 1
        if word > _TIME:
            self._done.add(word - 1)
            notes.agreed(word - 1)
            self._due = word - 1

    def carried(self, agreed: Agreed) -> Movement:
        """Store the word that the round of a barrier has agreed, and return the barrier's movement.

        If a member is asynchronous, the word is ignored: each member sees the end of the round at another time.
        """
        if not agreed.nonblocking:
            self.take(agreed.signal)
        return Movement(Kind.BARRIER)

    def deliver(self) -> None:
        """Call the handler if a signal has just been agreed."""
        number, self._due = self._due, 0
        if number and self._handler is not None:
            self._handler(number)


def on_signal(
    handler: Callable[[int], Any] | None,
    signals: Iterable[int] = DEFAULT,
    *,
    group: Any = None,
) -> OnSignal | None:
    """Register a handler that all ranks call at the same step when a signal has reached any rank.

    Called by all members, with the same ``signals``, in the main thread. From then on these signals are only noted. The next
    :func:`should_stop` with an agreement, or the next :func:`barrier` of the group, calls ``handler(number)`` on every rank
    before it returns. The handler runs in the calling thread, once for each signal number, and may make collectives.
    :func:`should_stop` is true from then on.

    Args:
        handler: called with the number of the signal; None: the registered handler is removed, and the earlier handlers of
            the signals are restored (as by the handle's ``remove()``, or by ``destroy_process_group``).
        signals: the signals; default SIGTERM and SIGUSR1.
        group: the group; default the world.

    Returns:
        A handle with ``remove()``, which is a context manager; None without a handler.

    SIGTERM does not end the process then, but is handled at the next step. A SIGTERM more than two seconds after another SIGTERM
    ends the process. So does a SIGTERM that no step has handled within the limit of the group. The program's own handlers of
    these signals are replaced until the removal. Barriers with ``async_op`` handle no signals.

    Raises:
        TypeError: ``handler`` is not callable, or ``signals`` are not numbers of signals. All members raise.
        ValueError: a signal cannot be handled, or ``signals`` is empty. All members raise.
        RuntimeError: the call is not made in the main thread. All members raise.
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
    found = member(group, "on_signal")
    if found is None:
        return None
    if handler is None:
        if found.stopping is not None:
            found.stopping.remove()
        return None
    call, registered = CallDescription("on_signal", (), call_site()), None
    try:
        _main_thread("on_signal")
        if not callable(handler):
            raise TypeError(f"handler must be callable or None, not {type(handler).__name__}")
        numbers = _numbers(signals)
        names = (signal.Signals(number).name if number in set(signal.Signals) else str(number) for number in numbers)
        call.key = (("signals", tuple(names)),)
        # Signals are noted before the agreement: once the call has returned on one rank, any rank may get a signal.
        registered = OnSignal(found, handler, numbers, free=False)
    except Exception as wrong:
        call.error = wrong
    _agree(found, call, registered)
    before = found.stopping
    _answer_signals(found, registered)
    if isinstance(before, OnSignal):  # the new handler already notes the signals, so no signal is lost
        notes.renew(before._done)
        before.remove()
    return registered


def should_stop(group: Any = None, *, before: float | None = None) -> bool:
    """Return whether the program should end: the same value on all members, at the same call.

    Called by all members, once a step. The value is True from the call at which the ranks have agreed that a signal has reached
    a rank, or that the time is over. Without an earlier :func:`on_signal`, the first call notes SIGTERM and SIGUSR1, if the
    program does not handle these signals.

    The ranks agree at least at every 16th call, and at barriers. If a step takes longer than a sixteenth of a second, the ranks
    agree about once a second, measured by the slowest rank. Calls in between return the last agreed value, and cost a comparison.
    A call with an agreement is a collective: errors name the ranks that do not make the call.

    Args:
        group: the group; default the world.
        before: seconds, the same on all members: the value is also True if less time is left until the time limit of the job
            (:func:`time_left`, called by the first rank of the group).

    Raises:
        TypeError, ValueError: ``before`` is not a positive number. All members raise at their next agreement.
        RuntimeError: the first call is not made in the main thread, and there was no :func:`on_signal`. All members raise.
        Others: as :func:`barrier`, and exceptions of the handler.

    Example:
        >>> while not dist.should_stop(before=120):
        ...     train_one_step()
    """
    found = registry.default.world if group is None else None
    if found is None:
        found = member(group, "should_stop")
        if found is None:
            return False
    stopping: Any = found.stopping
    if stopping is not None and stopping.passes and found.broken is None and not found.order.closed:
        stopping.passes -= 1
        return bool(stopping.stopped)
    call, made = CallDescription("should_stop", (), call_site()), None
    try:
        if stopping is None:
            _main_thread("should_stop")
            stopping = made = OnSignal(found, None, DEFAULT, free=True)
        _check_before(before)
        call.key = () if before is None else (("before", before),)
        # With uneven blocks the words need not be equal: the largest of each counts.
        call.uneven, call.signal, call.detail = True, stopping.brings(before), -stopping.wants()
    except Exception as wrong:
        call.error = wrong
    agreed = _agree(found, call, made)
    _answer_signals(found, stopping)
    stopping.take(agreed.signal, -agreed.most)
    stopping.deliver()
    return bool(stopping.stopped)


def _answer_signals(group: ProcessGroup, stopping: OnSignal | None) -> None:
    """Answer signals on the group from now on, on all members alike."""
    group.stopping = stopping
    group.prepared.pop("barrier", None)  # a prepared barrier carries no signals


def _agree(group: ProcessGroup, call: CallDescription, made: OnSignal | None) -> Agreed:
    """Make the agreement of a call; if it fails, remove the handler that the call has made."""
    if call.error is not None:
        setattr(call.error, ARGUMENT, True)
    try:
        return composed.agree(group, call)
    except BaseException:
        if made is not None:
            made.remove()
        raise


def _main_thread(operation: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"{operation}: only the main thread can handle signals: call on_signal() in that thread first"
        )


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
            raise ValueError(f"a program cannot handle signal {int(each)}")
    if not given:
        raise ValueError("signals must not be empty: on_signal(None) removes the handler")
    return tuple(sorted({int(each) for each in given}))
