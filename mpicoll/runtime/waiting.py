"""The only loop of the package that waits: clock, back-off, limit, signals, stall notice, progress of all pending requests.

The loop needs no MPI. A caller passes ``test``, a function that makes progress and returns whether the wait is over, and a
:class:`WaitPolicy` with the limit and the reactions.

Back-off: measured on two cores with five ranks beside a busy process. A loop that only yields takes 9 ms an operation, and a
loop that sleeps 0.1 ms takes 0.16 ms. Sleeps add up along the depth of the tree of a collective. So a sleep is always a small
part of the time already waited.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any, Protocol

from mpicoll.errors import DistError
from mpicoll.runtime.native import found as extension
from mpicoll.runtime.signals import Terminated, guard, shield

STALL = 0.05
"""Seconds after which a wait counts as stalled: if posting times spread by more than this, members agree again."""

GIVE_UP_AFTER = 2 * STALL
"""Seconds that a rank waits at least before it withdraws from a call that it has posted."""

SPIN_POLLS = 64
MOST_POLLS = 512
"""Polls for what ends a call without an operation: as many as take as long as an operation needs in addition (0.1 ms)."""
YIELD_FOR = 0.02
OVERSUBSCRIBED_POLLS = 100
OVERSUBSCRIBED_SLEEP = 5e-5
MOST_SLEEP = 0.01
SLEEP_SHARE = 1 / 500
SERVICE_EVERY = 0.005
TERMINATED_LOOKS = 0.05
"""Seconds for which a rank looks for a dead rank, after a signal of ``signals.ENDING`` in a wait, before it ends."""
SMALLEST_MOVING = 16 * 1024
SLOWEST_MOVING = 2e7
"""Bytes a second: a wait sleeps during transfers that take longer than at this speed."""


def pause(waited: float, polls: int, oversubscribed: bool) -> float | None:
    """Return what to do until the next poll: ``None`` spin, ``0.0`` yield, else seconds to sleep.

    Args:
        waited: seconds waited so far.
        polls: polls made so far.
        oversubscribed: ranks of this node share cores.
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
    """Limit and reactions of one wait.

    Attributes:
        limit: seconds until the error of :meth:`timed_out` is raised.
        stall_warn: seconds until :meth:`stalled` is called.
        stays_until: time.monotonic() before which this rank does not withdraw, neither for the limit nor for a signal.
    """

    limit: float
    stall_warn: float

    @property
    def stays_until(self) -> float: ...

    def check(self, waited: float) -> BaseException | None:
        """Return an error if this wait can never end (a peer failed or left, a deadlock); called every few milliseconds."""

    def stalled(self, waited: float) -> None:
        """Print, once, which ranks are missing."""

    def timed_out(self, waited: float) -> BaseException:
        """Return the error of a wait that passed its limit."""

    def withdraw(self, reason: BaseException) -> None:
        """Withdraw from the call: inform the peers, and mark the group broken."""


class Pollable(Protocol):
    """A request that every wait of the process progresses."""

    def Test(self) -> bool:
        """Make progress without blocking; return whether nothing is left to do."""


Steps = Generator[Pollable, None, Any]
"""A task of several steps: yields the request that has to complete next."""


class Condition:
    """A condition that can be waited for."""

    __slots__ = ("Test",)

    def __init__(self, test: Callable[[], bool]) -> None:
        self.Test = test


pending: list[Pollable] = []
"""All requests of this process that are not complete; every wait progresses them."""


def drop(item: Pollable) -> None:
    """Remove an item from :data:`pending`, if another thread has not removed it."""
    if item in pending:
        try:
            pending.remove(item)
        except ValueError:
            pass


class BackgroundProgress(Protocol):
    """Progresses requests while the program computes (:mod:`mpicoll.runtime.progress`).

    Attributes:
        every: whether every request is added that was started and is not over; else only those that nothing else progresses.
    """

    every: bool

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this thread, as in a callback of the program."""

    def begun(self, operation: Any) -> None:
        """Add a request that was started; never wait."""

    def resting(self) -> AbstractContextManager[object]:
        """Return a context manager, inside whose block the thread progresses no request."""

    def stop(self) -> None:
        """End the thread, until a request is started again."""


progress_thread: BackgroundProgress | None = None
"""The progress thread of this process; None if MPICOLL_PROGRESS does not ask for it, and nothing else has needed it."""

_services: list[Callable[[], None]] = []


def add_service(service: Callable[[], None]) -> None:
    """Call ``service`` every few milliseconds in every long wait (a service answers questions of other ranks)."""
    if service not in _services:
        _services.append(service)


def remove_service(service: Callable[[], None]) -> None:
    """Remove a service."""
    if service in _services:
        _services.remove(service)


_MOST_AT_ONCE = 128
_next_window = 0


def _to_advance() -> tuple[Pollable, ...]:
    """Return the pending requests to progress now: all, or of very many the first ones and a window of the rest.

    Most requests wait for earlier ones. If each poll tested all of them, the total time would grow as their square.
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
    """Progress pending requests, and drop those that are complete."""
    for item in _to_advance():
        if item.Test():
            drop(item)


def serve() -> None:
    """Run every service once."""
    for service in tuple(_services):
        service()


_transfers_until = 0.0


def transfer_hint(nbytes: int) -> None:
    """Record that a transfer of ``nbytes`` was posted: while it may last, waits only yield.

    A nonblocking transfer goes on in steps, one or a few a poll. A sleep that grows with the time waited would stretch each
    step by the time of all earlier steps. Open MPI 5.0's Ireduce of 64 MiB on two ranks takes 0.1 s if it is polled without
    a sleep. With sleeps of a five-hundredth of the time waited it had not ended after 10 s.
    """
    global _transfers_until
    if nbytes > SMALLEST_MOVING:
        _transfers_until = max(_transfers_until, time.monotonic() + 0.05 + nbytes / SLOWEST_MOVING)


def transfers_until() -> float:
    """Return until when a transfer of :func:`transfer_hint` may be pending (time.monotonic)."""
    return _transfers_until


calling: set[int] = set()
"""Threads in which callbacks of the program run now: they may do anything, like the program's own threads."""


@contextmanager
def callbacks() -> Iterator[None]:
    """Run callbacks of the program inside the block."""
    ident = get_ident()
    outermost = ident not in calling
    calling.add(ident)
    try:
        yield
    finally:
        if outermost:
            calling.discard(ident)


oversubscribed = False
"""Whether ranks of this node share cores."""


def set_oversubscribed(value: bool) -> None:
    """Set :data:`oversubscribed`, once the node is known; then polls of the extension yield the core, too."""
    global oversubscribed
    oversubscribed = value
    if extension is not None:
        extension.set_yields(value)


def comes_soon(test: Callable[[], bool], most: int = SPIN_POLLS) -> bool:
    """Poll for a moment, and return whether ``test()`` is true. Ranks that share cores yield the core between the polls.

    Args:
        most: number of polls of a rank that shares no core.
    """
    for _ in range(SPIN_POLLS if oversubscribed else most):
        if test():
            return True
        give_way()
    return False


def has_others(item: Pollable) -> bool:
    """Return whether other requests than ``item`` are pending."""
    first = pending[:2]  # another thread may drop requests meanwhile
    return len(first) > 1 or (bool(first) and first[0] is not item)


def give_way() -> None:
    """Yield the core if ranks share cores."""
    if oversubscribed:
        os.sched_yield()


def wait(test: Callable[[], bool], policy: WaitPolicy) -> None:
    """Wait until ``test()`` is true; raise the error of ``policy`` if that is impossible, or takes too long.

    Args:
        test: makes progress, and returns whether the wait is over; its failures raise :class:`DistError`.
        policy: the limit and the reactions of this wait.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; the call is withdrawn first.
        BaseException: an exception of a signal handler of the program, after the withdrawal; the error of ``policy``.
    """
    reason: BaseException | None = None
    try:
        for _ in range(SPIN_POLLS):
            if not test():
                progress()
                give_way()
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
    """Wait after the first polls: back off, serve, and watch the limit.

    Args:
        reason: the exception for which this rank already wants to withdraw.
    """
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
    start = now = clock()
    next_service = start
    waited, polls = 0.0, 0
    warned = False
    while True:
        try:
            now = clock()
            waited = now - start
            shield.deliver()
            reason = guard.pop() or reason
            if test():
                break  # also if this rank wants to withdraw: once a round is complete, other ranks enter the transfer
            if reason is not None and waited >= GIVE_UP_AFTER and now >= policy.stays_until:
                if isinstance(reason, Terminated):
                    reason = policy.check(waited) or reason  # a launcher ends the job if a rank has died
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
                    guard.arm()  # each time: a wait inside this wait, in a callback, disarms it
                if waited > SERVICE_EVERY:
                    serve()
                if reason is None:
                    reason = _verdict(test, policy, waited, now, clock)
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
            # Of a signal handler, between any two lines: raised once the rank may withdraw.
            if exception is reason:
                raise
            if reason is not None and waited >= max(policy.limit, GIVE_UP_AFTER) and now >= policy.stays_until:
                policy.withdraw(exception)  # the test raises each time
                raise
            reason = exception
    if reason is not None:
        guard.noted = reason  # the call is complete after all: raised when it returns


def _verdict(
    test: Callable[[], bool], policy: WaitPolicy, waited: float, now: float, clock: Callable[[], float]
) -> BaseException | None:
    failure = policy.check(waited)
    if failure is None and waited >= policy.limit and waited >= GIVE_UP_AFTER and now >= policy.stays_until:
        failure = policy.timed_out(waited)  # takes a while, in which other ranks may have come
        if test() or clock() < policy.stays_until:
            return None
    elif failure is not None and test():
        return None
    return failure
