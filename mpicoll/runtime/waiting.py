"""The one waiting loop: clock, back-off, limit, signals, stall notice, and progress of everything else that is pending.

Nothing here knows MPI. A caller hands in ``test``, a function that makes progress and says whether the wait is over,
and a :class:`WaitPolicy` that knows the limit and what to do when it passes.

Back-off. Measured on two cores with five ranks beside a busy process, a loop that only yields costs 9 ms an operation,
one that sleeps 0.1 ms costs 0.16 ms; and sleeping multiplies with the depth of the tree that a collective walks, so a
sleep may only ever be a small part of the time already waited.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from mpicoll.errors import DistError
from mpicoll.runtime.signals import Terminated, guard, shield

STALL = 0.05
"""Seconds after which a wait counts as stalled: posting times that spread more than this make members agree again."""

GIVE_UP_AFTER = 2 * STALL
"""Seconds that a rank waits at least before it may withdraw from a call that it has posted."""

SPIN_POLLS = 64
YIELD_FOR = 0.02
OVERSUBSCRIBED_POLLS = 100
OVERSUBSCRIBED_SLEEP = 5e-5
MOST_SLEEP = 0.01
SLEEP_SHARE = 1 / 500
SERVICE_EVERY = 0.005
TERMINATED_LOOKS = 0.05
"""Seconds that a rank that such a signal has reached in a wait looks for another that has died, before it ends."""
SMALLEST_MOVING = 16 * 1024
SLOWEST_MOVING = 2e7
"""Bytes a second below which a transfer that is under way may be slept through."""


def pause(waited: float, polls: int, oversubscribed: bool) -> float | None:
    """Return how to pass the time until the next poll: ``None`` spin, ``0.0`` yield, else seconds to sleep.

    Args:
        waited: seconds waited so far.
        polls: polls made so far.
        oversubscribed: more ranks than cores share this node.
    """
    if polls < SPIN_POLLS and not oversubscribed:
        return None
    if oversubscribed:
        if polls < OVERSUBSCRIBED_POLLS:
            return 0.0
        return max(OVERSUBSCRIBED_SLEEP, min(MOST_SLEEP, waited * SLEEP_SHARE))
    if waited < YIELD_FOR:
        return 0.0
    return min(MOST_SLEEP, waited * SLEEP_SHARE)


class WaitPolicy(Protocol):
    """What one wait is for: its limit and its reactions."""

    limit: float
    stall_warn: float

    def check(self, waited: float) -> BaseException | None:
        """Return an error when this wait can never end (a peer failed or left); called every few milliseconds."""

    def stalled(self, waited: float) -> None:
        """Say once who is missing."""

    def timed_out(self, waited: float) -> BaseException:
        """Return the error for a wait that passed its limit."""

    def withdraw(self, reason: BaseException) -> None:
        """Withdraw from the call: tell the peers, mark the group broken."""


class Pollable(Protocol):
    """Something that can be moved on while its owner waits for something else."""

    def advance(self) -> bool:
        """Make progress; return True when there is nothing left to do."""


class Condition:
    """A condition that can be waited for."""

    __slots__ = ("Test",)

    def __init__(self, test: Callable[[], bool]) -> None:
        self.Test = test


pending: list[Pollable] = []
"""Every operation of this process that is not done yet; each wait moves all of them on."""


def drop(item: Pollable) -> None:
    """Take something out of :data:`pending`, if it is there: another thread may be faster."""
    if item in pending:
        try:
            pending.remove(item)
        except ValueError:
            pass


class BackgroundProgress(Protocol):
    """What moves operations on while the program computes (:mod:`mpicoll.runtime.progress`)."""

    def begun(self, operation: Any) -> None:
        """Take over one that has been issued; never waits."""

    def resting(self) -> AbstractContextManager[object]:
        """Have it do nothing meanwhile."""

    def stop(self) -> None:
        """End it, until an operation is begun again."""


progress_thread: BackgroundProgress | None = None
"""The one of this process; none unless MPICOLL_PROGRESS asks for it."""

_services: list[Callable[[], None]] = []


def add_service(service: Callable[[], None]) -> None:
    """Have ``service`` called every few milliseconds from every wait that lasts (questions are answered there)."""
    if service not in _services:
        _services.append(service)


def remove_service(service: Callable[[], None]) -> None:
    """Take a service out again."""
    if service in _services:
        _services.remove(service)


_MOST_AT_ONCE = 128
_next_window = 0


def _to_advance() -> tuple[Pollable, ...]:
    """Return the pending operations to move on now: all, or where there are very many the first ones and some others in turn.

    What many wait for are those before them. To look at all in each poll would make the time for all grow as their square.
    """
    global _next_window
    if len(pending) <= _MOST_AT_ONCE:
        return tuple(pending)
    half = _MOST_AT_ONCE // 2
    if _next_window < half or _next_window >= len(pending):
        _next_window = half
    start, _next_window = _next_window, _next_window + half
    return (*pending[:half], *pending[start : start + half])


def progress() -> None:
    """Move pending operations on, and drop those that are done."""
    for item in _to_advance():
        if item.advance():
            drop(item)


def serve() -> None:
    """Run every service once."""
    for service in tuple(_services):
        service()


_transfers_until = 0.0


def transfer_hint(nbytes: int) -> None:
    """Note that ``nbytes`` have been posted and move while this process polls: for as long as they may take it only yields.

    A nonblocking transfer goes on in steps, one or a few a poll. Sleeping by the time waited would stretch each step by what
    all before it have taken: Open MPI 5.0's Ireduce of 64 MiB on two ranks takes 0.1 s when polled without a sleep, and had
    not ended after 10 s with sleeps of a five-hundredth.
    """
    global _transfers_until
    if nbytes > SMALLEST_MOVING:
        _transfers_until = max(_transfers_until, time.monotonic() + 0.05 + nbytes / SLOWEST_MOVING)


def transfers_until() -> float:
    """Return until when something may move that was told to :func:`transfer_hint` (time.monotonic)."""
    return _transfers_until


calling: set[int] = set()
"""Threads in which callbacks of the program's run just now: they may do anything, as any other of its threads."""

oversubscribed = False
"""More ranks than cores on this node; set when the node is known."""


def wait(test: Callable[[], bool], policy: WaitPolicy) -> None:
    """Return when ``test()`` is true; raise what ``policy`` says when that can no longer be, or takes too long.

    Args:
        test: makes progress and says whether the wait is over; its own failures are :class:`DistError`.
        policy: the limit and the reactions of this wait.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; the call is withdrawn first.
        BaseException: whatever a signal handler of the program raised, after withdrawing; what ``policy`` returned.
    """
    reason: BaseException | None = None
    try:
        for _ in range(2 if oversubscribed else SPIN_POLLS):
            if not test():
                continue
            return
    except DistError as error:
        policy.withdraw(error)
        raise
    except BaseException as exception:
        reason = exception
    wait_long(test, policy, reason)


def wait_long(
    test: Callable[[], bool],
    policy: WaitPolicy,
    reason: BaseException | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait past the first polls: back off, serve, and watch the limit. ``reason``: why this rank already wants to leave."""
    try:
        _wait_long(test, policy, reason, clock, sleep)
    finally:
        guard.disarm()


def _wait_long(
    test: Callable[[], bool],
    policy: WaitPolicy,
    reason: BaseException | None,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    start = clock()
    next_service = start
    polls = 0
    warned = False
    while True:
        try:
            now = clock()
            waited = now - start
            shield.deliver()
            reason = guard.pop() or reason
            if test():
                break  # also for a rank that wants to leave: others go on into the transfer once a round is complete
            if reason is not None and waited >= GIVE_UP_AFTER:
                if isinstance(reason, Terminated):
                    reason = policy.check(waited) or reason  # a launcher ends the job when a rank has died
                if not isinstance(reason, Terminated) or time.monotonic() > reason.at + TERMINATED_LOOKS:
                    policy.withdraw(reason)
                    if isinstance(reason, Terminated):
                        guard.end(reason)
                    raise reason
            polls += 1
            if pending:
                progress()
            if now >= next_service:
                next_service = now + SERVICE_EVERY
                if waited > YIELD_FOR:
                    guard.arm()  # again, too: a wait inside this one, out of a callback, has disarmed it
                if waited > SERVICE_EVERY:
                    serve()
                if reason is None:
                    reason = _verdict(test, policy, waited)
                    if reason is not None:
                        policy.withdraw(reason)
                        raise reason
                    if not warned and waited >= policy.stall_warn:
                        warned = True
                        policy.stalled(waited)
            nap = 0.0 if now < _transfers_until else pause(waited, polls, oversubscribed)
            if nap is not None:
                if nap == 0.0:
                    os.sched_yield()
                else:
                    sleep(nap)
        except DistError as error:
            if error is not reason:
                policy.withdraw(error)
            raise
        except BaseException as exception:
            # Out of a signal handler, between any two lines: kept until the rank may withdraw.
            if exception is reason:
                raise
            reason = exception
    if reason is not None:
        guard.noted = reason  # the call is complete after all: raised when it returns


def _verdict(test: Callable[[], bool], policy: WaitPolicy, waited: float) -> BaseException | None:
    failure = policy.check(waited)
    if failure is None and waited >= policy.limit and waited >= GIVE_UP_AFTER:
        failure = policy.timed_out(waited)
    if failure is not None and test():
        return None
    return failure
