"""Work: the handle that a program holds on a request, and its future."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

from mpicoll.checks.memory_in_use import Claim, claims
from mpicoll.diagnosis.call import Call
from mpicoll.errors import DistError
from mpicoll.operations.failures import over, settle
from mpicoll.operations.request import Request
from mpicoll.runtime import signals, waiting

_LOOK_EVERY = 0.005
"""Seconds: a request that a program polls is checked so often for whether it can ever complete."""


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


class Work:
    """The handle of a call made with ``async_op=True``, of ``isend`` and of ``irecv``.

    The library refers to the buffers of the call until the call is done. They must not be read or written before ``wait`` has
    returned.
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

    __slots__ = ("__weakref__", "_claim", "_observed", "_request")

    def __init__(self, request: Request, claim: Claim | None = None) -> None:
        self._request = request
        self._observed = False
        self._claim = claim
        request.group.unwaited[id(request)] = request
        if waiting.progress_thread is not None and not request.done:
            waiting.progress_thread.begun(request)

    def with_claim(self, claim: Claim | None) -> Work:
        """Keep the operation's memory from others until it has been waited for."""
        if claim is not None:
            request = self._request
            claim.over, claim.advance = lambda: request.done, request.Test
            self._claim = claim
            claims.add(claim)
        return self

    def _land(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            try:
                if self._request.error is None:
                    self._request.error = claim.verdict()
                claims.remove(claim)
            except BaseException:
                self._claim = claim  # out of a signal handler
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
        complete = self._request.finish()
        self._observe()
        if complete:
            self._claim = None
            return True
        try:
            self._request.complete(timeout.total_seconds() or None)
        finally:
            self._land()
        if self._request.error is not None:
            raise self._request.error
        return True

    def is_completed(self) -> bool:
        """Whether the call is done, well or not; makes progress and never waits.

        Raises:
            PeerFailedError, PeerExitedError, GroupBrokenError: it can never complete, as a member that it needs has failed,
                has ended or gave the group up: a program that polls would do so for good.
            CollectiveTimeoutError: the limit of the call has passed since this was first asked.
        """
        done, lost = _poll(self._request)
        if done or lost:
            self._observe()
            self._land()
        if lost and self._request.error is not None:
            raise self._request.error
        return done or lost

    def is_success(self) -> bool:
        """Whether the call is done and ended well."""
        try:
            return self.is_completed() and self._request.error is None
        except DistError:
            return False

    def exception(self) -> BaseException | None:
        """Return what the call ended with, or None while it is under way or when it ended well."""
        try:
            return self._request.error if self.is_completed() else None
        except DistError as error:
            return error

    def result(self) -> list[Any]:
        """Return the output arrays of a completed call.

        Raises:
            RuntimeError: the call is not done yet (as torch); wait for it first.
        """
        if not self.is_completed():
            raise RuntimeError(f"{self._request.call.op} is not completed: call wait() before result()")
        if self._request.error is not None:
            raise self._request.error
        return list(self._request.outputs)

    def get_future(self) -> Future[Any]:
        """Return a ``concurrent.futures.Future`` of the list of output arrays.

        Its ``result()`` and ``exception()`` wait, they and ``done()`` make progress, and its callbacks run on the thread that
        happens to make it. What only sleeps until the future is done (``concurrent.futures.wait``, ``as_completed``, asyncio's
        ``wrap_future``) makes none: it needs ``MPICOLL_PROGRESS=thread``. Note that torch gives a ``torch.futures.Future``, whose
        ``wait()``, ``value()`` and ``then(callback)`` it has, too; ``torch.futures.collect_all`` takes none but its own.
        """
        if self._claim is not None:
            self._claim.unawaited = True
        request = self._request
        self._observe()
        future: Future[Any] | None = request.future
        if request.done and future is not None:  # in a callback of its own, too
            return future
        with request.still():
            if request.done:
                self._land()
            else:
                request.landing = self._land
            future = request.future
            if future is None:
                future = request.future = _WorkFuture(request.complete, partial(_poll, request))
                future.set_running_or_notify_cancel()
                if request.done:
                    settle(future, request)
                elif request not in waiting.pending:
                    waiting.pending.append(request)
        return future

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
        source: int = self._request.returned
        return source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait for the call (for host memory the same as ``wait``)."""
        self.wait()

    def _observe(self) -> None:
        if not self._observed:
            self._observed = True
            self._request.group.unwaited.pop(id(self._request), None)

    def __repr__(self) -> str:
        request = self._request
        state = "under way" if not request.done else "failed" if request.error else "completed"
        return f"<Work {request.call.op} issued at {request.call.site}: {state}>"

    def __del__(self) -> None:
        claim = getattr(self, "_claim", None)
        if claim is not None:
            claims.drop(claim)
        if not getattr(self, "_observed", True):
            warn_of_dropped(self._request.call, self)


def _poll(request: Request) -> tuple[bool, bool]:
    """Progress all requests; return whether this one is over, and whether it has just been ended because it never can be."""
    with signals.guard:
        if not request.done:
            waiting.progress()
        if request.Test():
            waiting.drop(request)
            return True, False
        return False, _is_lost(request)


def _is_lost(request: Request) -> bool:
    now = time.monotonic()
    if now < request.next_look:
        return False
    request.polled = request.polled or now
    request.next_look = now + _LOOK_EVERY
    policy = request.policy()
    error = over(policy, now - request.polled)
    if error is None or request.Test():
        return request.done
    policy.withdraw(error)
    request.abandon(error)
    return True


def warn_of_dropped(call: Call, work: Work) -> None:
    """Warn of a handle that nobody has waited for, as it goes."""
    warnings.warn(
        f"{call.op} issued at {call.site} was dropped without wait()", ResourceWarning, stacklevel=3, source=work
    )
