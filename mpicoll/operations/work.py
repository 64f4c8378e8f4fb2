"""Operations under way, and Work: the handle that the user holds on one."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from mpicoll.checks.memory_in_use import Flight, claims
from mpicoll.diagnosis.call import Call
from mpicoll.errors import DistError
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.mpi_library import retain_for_ever, retain_frames
from mpicoll.transports.base import Request

if TYPE_CHECKING:
    from mpicoll.groups.process_group import ProcessGroup


ASLEEP = 0.001
"""Seconds that who waits for an operation sleeps at a time while another thread moves it on."""

LOOK_EVERY = 0.005
"""Seconds between two looks, of a program that polls, at whether an operation can still complete."""

STILL_WITHIN = 1.0
"""Seconds after which it is taken for granted that no other thread moves an operation on any more."""


class Polled(Protocol):
    """What a program may ask again and again whether it is over (times of time.monotonic).

    Attributes:
        polled: when it was first asked for and not over; 0: not yet.
        next_look: when to look next at who is needed.
    """

    polled: float
    next_look: float


class Operation:
    """One call under way: a generator that yields what has to complete next.

    It keeps the buffers alive, is moved on by every wait of the process, and ends with a value or an error. The library
    holds it until it is done; what the user holds is a :class:`Work`.
    """

    __slots__ = (
        "__weakref__",
        "_current",
        "_give_up",
        "_lock",
        "_steps",
        "_withdraw",
        "call",
        "done",
        "error",
        "future",
        "group",
        "held",
        "landing",
        "limit",
        "next_look",
        "outputs",
        "peer",
        "polled",
        "source",
        "tag",
    )

    def __init__(
        self,
        group: ProcessGroup,
        call: Call,
        steps: Generator[Request, None, int | None],
        outputs: list[Any],
        limit: float,
        *,
        peer: int | None = None,
        tag: int = 0,
        withdraw: Callable[[], None] | None = None,
        give_up: Callable[[Operation, BaseException], None],
        held: Any = None,
    ) -> None:
        self.group = group
        self.call = call
        self.outputs = outputs
        self.held = held  # what has the memory that MPI uses
        self.limit = limit
        self.peer = peer
        self.tag = tag
        """Global rank at the other end of a point-to-point call (-1: any); None for a collective."""
        self.done = False
        self.polled = self.next_look = 0.0
        self.error: BaseException | None = None
        self.future: Future[Any] | None = None
        self.landing: Callable[[], None] | None = None  # run at its end, for those who only wait for the future
        self.source = -1
        self._steps = steps
        self._withdraw = withdraw
        self._give_up = give_up
        self._current: Request | None = None
        self._lock = threading.Lock()
        self.advance()

    def advance(self, asleep: float = 0.0) -> bool:
        """Move on as far as possible without waiting; return whether it is done.

        Args:
            asleep: seconds to sleep while another thread is at it, or until that is through.
        """
        if self.done:
            return True
        if not self._lock.acquire(blocking=False) and not (asleep and self._lock.acquire(timeout=asleep)):
            return False
        try:
            if self.done:
                return True
            if self._move():
                self._end(None)
            return self.done
        except DistError as error:
            self._end(error)
        except BaseException as error:
            if error is self.call.error:  # this rank's own arguments, known to all
                self._end(error)
                return True
            # Out of a signal handler, or the memory ran out: the call is lost, and MPI may still write into its buffers.
            self._keep()
            retain_frames(error)
            self._end(
                DistError(f"{self.call.op} issued at {self.call.site} was interrupted: {type(error).__name__}: {error}")
            )
            self._give_up(self, error)
            raise
        finally:
            self._lock.release()
        return True

    def _move(self) -> bool:
        """Move on as far as possible; whether it is over."""
        try:
            while True:
                if self._current is not None:
                    try:
                        if not self._current.Test():
                            return False
                    except Exception as error:
                        self._current = self._steps.throw(error)  # the steps know how to say it
                        continue
                self._current = next(self._steps)
        except StopIteration as stop:
            self.source = -1 if stop.value is None else stop.value
            return True

    def _keep(self) -> None:
        retain_for_ever(self._current, self.outputs, self.held, self._steps)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Have no other thread move it on meanwhile; one that does is not waited for long."""
        held = self._lock.acquire(timeout=STILL_WITHIN)
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def abandon(self, error: BaseException) -> None:
        """End it with ``error``; what was posted to MPI stays posted, so the buffers are kept for good."""
        with self.still():
            self._take_back()
            self._keep()
            if not self.done:
                self._end(error)

    def _take_back(self) -> None:
        """Withdraw what has not begun to move."""
        if self._withdraw is not None:
            self._withdraw()

    def _end(self, error: BaseException | None) -> None:
        self.error = error
        if self.landing is not None:
            self.landing()  # may find an error, too
        self.done = True
        future = self.future
        if future is not None:
            _settle(future, self)


def _settle(future: Future[Any], operation: Operation) -> None:
    ident = threading.get_ident()
    outermost = ident not in waiting.calling
    waiting.calling.add(ident)
    try:
        if operation.error is not None:
            future.set_exception(operation.error)
        else:
            future.set_result(operation.outputs)
    finally:
        if outermost:
            waiting.calling.discard(ident)


class _WorkFuture(Future[Any]):
    """A Future whose waits make progress: there is no thread behind it that would."""

    def __init__(self, wait: Callable[[], None], poll: Callable[[], object]) -> None:
        super().__init__()
        self._wait = wait
        self._poll = poll

    def done(self) -> bool:
        """Whether the operation is over, well or not; makes progress and never waits.

        One that can never complete, or has been asked for past its limit, is ended: its result raises why.
        """
        if not self._is_over():
            self._poll()
        return self._is_over()

    def running(self) -> bool:
        """Whether the operation is not over; makes progress as :meth:`done`."""
        return not self.done()

    def _is_over(self) -> bool:
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the operation and return its list of output arrays.

        Args:
            timeout: seconds, after which concurrent.futures.TimeoutError is raised and the call stays under way; None: the
                limit of the group.
        """
        self._drive(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the operation and return its error, or None."""
        self._drive(timeout)
        return super().exception(0)

    def wait(self) -> Any:
        """Wait for the operation and return its list of output arrays: :meth:`result` by torch's name."""
        return self.result()

    def value(self) -> Any:
        """Return the list of output arrays of an operation that is done.

        Raises:
            RuntimeError: it is not done yet (as torch).
        """
        if not self.done():
            raise RuntimeError("the operation is not done yet: call wait() before value()")
        return super().result(0)

    def then(self, callback: Callable[[Any], Any]) -> _WorkFuture:
        """Return a Future of what ``callback(self)`` returns, which is called when the operation is done."""
        later = _WorkFuture(self._finish, self.done)
        later.set_running_or_notify_cancel()

        def call(done: Any) -> None:
            try:
                later.set_result(callback(done))
            except BaseException as error:
                later.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        self.add_done_callback(call)
        return later

    def _finish(self) -> None:
        self._drive(None)

    def _drive(self, timeout: float | None) -> None:
        if timeout is not None:
            # As with every Future a limit that passes changes nothing: the call stays under way.
            end = time.monotonic() + timeout
            while not self._is_over() and time.monotonic() < end:
                with signals.guard:
                    waiting.progress()
                    waiting.serve()
                time.sleep(0.0002)
        elif not self._is_over():
            try:
                self._wait()
            except Exception:
                if not self._is_over():
                    raise
            while not self._is_over():  # another thread is about to say so, or in the callback whose value this is
                with signals.guard:
                    waiting.progress()
                    waiting.serve()
                time.sleep(0.0002)


def _no_look(operation: Operation, polled: float) -> bool:
    return False


look: Callable[[Operation, float], bool] = _no_look
"""Gives an operation up that can never complete, given the seconds for which the program has polled (:mod:`execution`)."""


def _ask(operation: Operation) -> tuple[bool, bool]:
    """Make progress; return whether an operation is done, and whether it has just been ended as it never can be.

    That is looked for every few milliseconds, as a wait would.
    """
    with signals.guard:
        if not operation.done:
            waiting.progress()
        if operation.done or operation.advance():
            waiting.drop(operation)
            return True, False
        polled = due(operation)
        return False, polled is not None and look(operation, polled)


def due(asked: Polled) -> float | None:
    """Return for how many seconds the program has polled, every few milliseconds, when it is time to look; else None."""
    now = time.monotonic()
    if now < asked.next_look:
        return None
    asked.polled = asked.polled or now
    asked.next_look = now + LOOK_EVERY
    return now - asked.polled


class Work:
    """The handle of a call made with ``async_op=True``, of ``isend`` and of ``irecv``.

    The buffers of the call are kept alive until it is done and must not be read or written before ``wait`` has returned.
    Each Work has to be waited for: one that is dropped without gives a ResourceWarning, and one that nobody ever waits
    for is an error when its group is destroyed or the program ends.

    It goes on whenever the library waits for anything, or is asked ``is_completed``; with ``MPICOLL_PROGRESS=thread`` also
    while the program computes (docs/performance.md, "Overlap").

    Memory that an operation under way writes must not be given to another one, nor memory that it reads to one that writes
    it: that raises BufferInUseError at once. With ``MPICOLL_CHECK=full`` a write of the program to such memory is noticed by
    ``wait``, in buffers of up to 64 KiB. It is an error even where the data had been copied away, as that of small messages
    is: with larger ones the program would be wrong.

    Source: torch.distributed.Work.
    """

    __slots__ = ("__weakref__", "_flight", "_observed", "_operation", "_wait")

    def __init__(self, operation: Operation, wait: Callable[[Operation, float | None], None]) -> None:
        self._operation = operation
        self._wait = wait
        self._observed = False
        self._flight: Flight | None = None
        operation.group.unwaited[id(operation)] = operation
        if waiting.progress_thread is not None and not operation.done:
            waiting.progress_thread.begun(operation)

    def fly(self, flight: Flight | None) -> Work:
        """Keep the operation's memory from others until it has been waited for."""
        if flight is not None:
            operation = self._operation
            flight.over, flight.advance = lambda: operation.done, operation.advance
            self._flight = flight
            claims.add(flight)
        return self

    def lend(self, flight: Flight) -> None:
        """As :meth:`fly`, for an operation that is made again and knows itself when it is over."""
        self._flight = flight
        claims.lend(flight)

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            try:
                if self._operation.error is None:
                    self._operation.error = flight.verdict()
                claims.remove(flight)
            except BaseException:
                self._flight = flight  # out of a signal handler
                raise

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the call is complete on this rank.

        Args:
            timeout: the limit of this wait; ``timedelta(0)`` means the limit of the group (as torch).

        Raises:
            TypeError: ``timeout`` is not a timedelta.
            CollectiveTimeoutError: the limit passed; the group is broken.
            BufferInUseError: a buffer of the call was written before it was complete.
            PeerFailedError, PeerExitedError, DeadlockError, GroupBrokenError: as :func:`mpicoll.broadcast`.
            DistError: what the call ended with: a mismatch, an error of MPI.
        """
        if not isinstance(timeout, timedelta):
            raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout!r}")
        self._observe()
        try:
            self._wait(self._operation, timeout.total_seconds() or None)
        finally:
            self._land()
        if self._operation.error is not None:
            raise self._operation.error
        return True

    def is_completed(self) -> bool:
        """Whether the call is done, well or not; makes progress and never waits.

        Raises:
            PeerFailedError, PeerExitedError, GroupBrokenError: it can never complete, as a member that it needs has failed,
                has ended or gave the group up: a program that polls would do so for good.
            CollectiveTimeoutError: the limit of the call has passed since this was first asked.
        """
        done, lost = _ask(self._operation)
        if done or lost:
            self._observe()
            self._land()
        if lost and self._operation.error is not None:
            raise self._operation.error
        return done or lost

    def is_success(self) -> bool:
        """Whether the call is done and ended well."""
        try:
            return self.is_completed() and self._operation.error is None
        except DistError:
            return False

    def exception(self) -> BaseException | None:
        """Return what the call ended with, or None while it is under way or when it ended well."""
        try:
            return self._operation.error if self.is_completed() else None
        except DistError as error:
            return error

    def result(self) -> list[Any]:
        """Return the output arrays of a completed call.

        Raises:
            RuntimeError: the call is not done yet (as torch); wait for it first.
        """
        if not self.is_completed():
            raise RuntimeError(f"{self._operation.call.op} is not completed: call wait() before result()")
        if self._operation.error is not None:
            raise self._operation.error
        return list(self._operation.outputs)

    def get_future(self) -> Future[Any]:
        """Return a ``concurrent.futures.Future`` of the list of output arrays.

        Its ``result()`` and ``exception()`` wait, they and ``done()`` make progress, and its callbacks run on the thread that
        happens to make it. What only sleeps until the future is done (``concurrent.futures.wait``, ``as_completed``, asyncio's
        ``wrap_future``) makes none: it needs ``MPICOLL_PROGRESS=thread``. Note that torch gives a ``torch.futures.Future``, whose
        ``wait()``, ``value()`` and ``then(callback)`` it has, too; ``torch.futures.collect_all`` takes none but its own.
        """
        if self._flight is not None:
            self._flight.adrift = True
        operation = self._operation
        self._observe()
        if operation.done and operation.future is not None:  # in a callback of its own, too
            return operation.future
        with operation.still():
            if operation.done:
                self._land()
            else:
                operation.landing = self._land
            if operation.future is None:
                operation.future = _WorkFuture(lambda: self._wait(operation, None), lambda: _ask(operation))
                operation.future.set_running_or_notify_cancel()
                if operation.done:
                    _settle(operation.future, operation)
                elif operation not in waiting.pending:
                    waiting.pending.append(operation)
        return operation.future

    def done(self) -> bool:
        """Whether the call is done; with ``value`` and ``then`` it is the Future that torch's coalesced calls return."""
        return self.is_completed()

    def value(self) -> Any:
        """Return the list of output arrays of a call that is done (as ``get_future().value()``)."""
        return self.get_future().value()  # type: ignore[attr-defined]

    def then(self, callback: Callable[[Any], Any]) -> Future[Any]:
        """Return a Future of what ``callback`` returns, given the Future of this call (as ``get_future().then(callback)``)."""
        later: Future[Any] = self.get_future().then(callback)  # type: ignore[attr-defined]
        return later

    def source_rank(self) -> int:
        """Return the rank *in the group* that a completed ``irecv`` received from (as torch)."""
        return self._operation.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait for the call (for host memory the same as ``wait``)."""
        self.wait()

    def _observe(self) -> None:
        if not self._observed:
            self._observed = True
            self._operation.group.unwaited.pop(id(self._operation), None)

    def __repr__(self) -> str:
        operation = self._operation
        state = "under way" if not operation.done else "failed" if operation.error else "completed"
        return f"<Work {operation.call.op} issued at {operation.call.site}: {state}>"

    def __del__(self) -> None:
        flight = getattr(self, "_flight", None)
        if flight is not None:
            claims.drop(flight)
        if not getattr(self, "_observed", True):
            warn_of_dropped(self._operation.call, self)


def warn_of_dropped(call: Call, work: Work) -> None:
    """Warn of a handle that nobody has waited for, as it goes."""
    warnings.warn(
        f"{call.op} issued at {call.site} was dropped without wait()", ResourceWarning, stacklevel=3, source=work
    )
