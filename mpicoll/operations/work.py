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
from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import CollectiveTimeoutError
from mpicoll.operations.failures import over, settle
from mpicoll.operations.request import Request
from mpicoll.runtime import handler_calls, signals, waiting
from mpicoll.runtime.settings import need_timedelta

_LOOK_EVERY = 0.005
"""Seconds between two checks whether a request that the program polls can ever complete."""


class _WorkFuture(Future[Any]):
    """A Future whose waits make progress, as no thread does."""

    def __init__(
        self, wait: Callable[..., None], poll: Callable[[], object], known: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._wait = wait
        self._poll = poll
        self._known = known  # notes that the program knows the outcome

    def done(self) -> bool:
        """Return whether the operation is complete or failed; make progress, and never wait.

        An operation that can never complete, or was polled for longer than its limit, is ended: ``result`` raises the reason.
        """
        if not self._is_over():
            self._poll()
        return self._is_over()

    def running(self) -> bool:
        """Return whether the operation is neither complete nor failed; make progress as :meth:`done`."""
        return not self.done()

    def _is_over(self) -> bool:
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the operation and return its list of output arrays.

        Args:
            timeout: seconds, after which concurrent.futures.TimeoutError is raised and the call stays pending; None: only the
                limit of the call holds.

        Raises: the error of the operation, as :meth:`Work.wait`.
        """
        self._drive(timeout)
        self._tell()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the operation and return its error, or None."""
        self._drive(timeout)
        self._tell()
        return super().exception(0)

    def wait(self) -> Any:
        """Wait for the operation and return its list of output arrays, as :meth:`result`."""
        return self.result()

    def value(self) -> Any:
        """Return the list of output arrays of a complete operation.

        Raises:
            RuntimeError: the operation is not done yet (as in torch).
        """
        if not self.done():
            raise RuntimeError("the operation is not done yet: call wait() before value()")
        self._tell()
        return super().result(0)

    def then(self, callback: Callable[[Any], Any]) -> _WorkFuture:
        """Return a Future of the value of ``callback(self)``, which is called when the operation is done."""
        later = _WorkFuture(self._drive, self.done)
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

    def _tell(self) -> None:
        if self._is_over():
            self._known()

    def _drive(self, within: float | None) -> None:
        if self._is_over():
            return
        end = None if within is None else time.monotonic() + within
        try:
            self._wait(within=within)
        except Exception:
            if not self._is_over():
                raise
        # Another thread may be about to set the result, or runs the callback of ``then``.
        while not self._is_over() and (end is None or time.monotonic() < end):
            with signals.guard:
                waiting.progress()
                waiting.serve()
            time.sleep(0.0002)


class Work:
    """The handle of a call made with ``async_op=True``, of ``isend`` and of ``irecv``.

    The library refers to the buffers of the call until the call is done. The program must not read or write the buffers before
    ``wait`` has returned.
    The program must wait for each Work. A Work dropped without ``wait`` gives a ResourceWarning. A Work that was never waited for
    is an error when its group is destroyed or the program ends.

    The call progresses in every wait of the library and in ``is_completed``; with ``MPICOLL_PROGRESS=thread`` also while the
    program computes (docs/performance.md, "Overlap").

    Memory that a pending operation writes must not be passed to another operation, nor memory that it reads to an operation that
    writes: with ``MPICOLL_CHECK=full`` that raises BufferInUseError at once, and ``wait`` finds writes of the program to the
    buffers, and of buffers above 64 KiB to a sample. Such a write is an error also if the library has already copied the data, as
    for small messages.

    Source: torch.distributed.Work.
    """

    __slots__ = ("__weakref__", "_claim", "_observed", "_request")

    def __init__(self, request: Request, claim: Claim | None = None) -> None:
        self._request = request
        self._observed = False
        self._claim = claim
        request.group.unwaited[id(request)] = request
        thread = waiting.progress_thread
        if thread is not None and thread.every and not request.done:
            thread.begun(request)

    def with_output(self, tensor: Any) -> Work:
        """Return this Work, whose only output is the object that the program passed."""
        self._request.outputs = [tensor]
        return self

    def with_claim(self, claim: Claim | None) -> Work:
        """Keep a claim on the memory of the operation until the program has waited."""
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
                self._claim = claim  # an exception of a signal handler
                raise

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the call is complete on this rank, and return True.

        Args:
            timeout: time limit of this wait; ``timedelta(0)`` means the limit of the call (in torch of the group).

        Raises:
            TypeError, ValueError: ``timeout`` is not a timedelta, or negative.
            CollectiveTimeoutError: the call was not complete within the limit; the group is broken.
            BufferInUseError: the program wrote a buffer of the call before the call was complete.
            PeerFailedError, PeerExitedError, DeadlockError, GroupBrokenError: as :func:`mpicoll.broadcast`.
            CollectiveMismatchError, DistBackendError: the members made different calls; MPI reported an error.
            DistError: an exception of a signal handler interrupted the call.
        """
        if not isinstance(timeout, timedelta) or timeout.days < 0:
            need_timedelta(timeout)
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
                self._request.is_known()
        if self._request.error is not None:
            raise self._request.error
        return True

    def is_completed(self) -> bool:
        """Return whether the call is complete, or has failed with an error that the program knows; make progress, and never wait.

        Raises:
            CollectiveMismatchError, BufferInUseError, DistBackendError: the call has failed, and the program has not been told
                the error, as ``wait`` raises it.
            PeerFailedError, PeerExitedError, GroupBrokenError: the call can never complete, as a necessary member has failed, has
                ended, or withdrew from a call of the group: a program that polls would never stop.
            CollectiveTimeoutError: the limit of the call has passed since the first ``is_completed``.
        """
        over = is_over(self)
        if over and not self._request.told:
            error = self._outcome()
            if error is not None:
                raise error
        return over

    def is_success(self) -> bool:
        """Return whether the call is complete without an error."""
        return is_over(self) and self._request.error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call; None if the call is pending, or complete without an error."""
        return self._outcome() if is_over(self) else None

    def result(self) -> list[Any]:
        """Return the output arrays of a completed call.

        Raises:
            RuntimeError: the call is not done yet (as in torch).
            Others as :meth:`wait`, for a call that failed.
        """
        if not is_over(self):
            raise RuntimeError(f"{self._request.call.op} is not completed: call wait() before result()")
        error = self._outcome()
        if error is not None:
            raise error
        return list(self._request.outputs)

    def get_future(self) -> Future[Any]:
        """Return a ``concurrent.futures.Future`` of the list of output arrays.

        ``result()`` and ``exception()`` of the Future wait and make progress; ``done()`` makes progress. Callbacks run on the
        thread that completes the call. Functions that only sleep until the Future is done make no progress, and need
        ``MPICOLL_PROGRESS=thread`` (``concurrent.futures.wait``, ``as_completed``, ``wrap_future`` of asyncio). As a
        ``torch.futures.Future`` it has ``wait()``, ``value()`` and ``then(callback)``; ``torch.futures.collect_all`` refuses it.
        """
        if self._claim is not None:
            self._claim.unawaited = True
        request = self._request
        self._observe()
        future: Future[Any] | None = request.future
        if request.done and future is not None:  # also in a callback of the future
            return future
        with request.still():
            if request.done:
                self._land()
            else:
                request.landing = self._land
            future = request.future
            if future is None:
                future = request.future = _WorkFuture(request.complete, partial(_poll, request), request.is_known)
                future.set_running_or_notify_cancel()
                if not request.told:
                    request.group.futures[id(request)] = request
                if request.done:
                    settle(future, request)
                elif request not in waiting.pending:
                    waiting.pending.append(request)
        return future

    def done(self) -> bool:
        """Return whether the call is done. (Coalesced calls of torch return a Future, with ``done``, ``value`` and ``then``.)"""
        return self.is_completed()

    def value(self) -> Any:
        """Return the list of output arrays of a complete call, as ``get_future().value()``."""
        return self.get_future().value()  # type: ignore[attr-defined]

    def then(self, callback: Callable[[Any], Any]) -> Future[Any]:
        """Return a Future of the value of ``callback``, called with the Future of this call: ``get_future().then(callback)``."""
        later: Future[Any] = self.get_future().then(callback)  # type: ignore[attr-defined]
        return later

    def source_rank(self) -> int:
        """Return the rank *in the group* of the sender, of a completed ``irecv`` (as in torch)."""
        source: int = self._request.returned
        return source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait for the call, as :meth:`wait`."""
        self.wait()

    def _outcome(self) -> BaseException | None:
        """Return the error of the call, which is over, to the program."""
        self._observe()
        self._request.is_known()
        error: BaseException | None = self._request.error
        return error

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
        if not getattr(self, "_observed", True) and id(self._request) in self._request.group.unwaited:
            warn_of_dropped(self._request.call, self)


def answer(work: Work | None, wrong: BaseException | None) -> None:
    """Answer a signal that was noted in a start. If that raises, the program gets no Work, and the call completes without it.

    Args:
        work: the Work of the start, if there is one.
        wrong: the exception of the start, or None.
    """
    try:
        signals.guard.answer(wrong)
    except BaseException:
        if work is not None:
            work.get_future()
        raise


def _poll(request: Request) -> tuple[bool, bool]:
    """Progress all requests; return whether ``request`` is over, and whether it was ended now, as it can never complete."""
    request.polled = request.polled or time.monotonic()
    with signals.guard:
        if not request.done:
            waiting.progress()
        if request.Test():
            waiting.drop(request)
            return True, False
        return False, _is_lost(request)


class _Attended:
    """A request that the progress thread progresses to its end, for a program that waits without calling the library.

    Attributes:
        broken: None also for a group that was given up: the thread must go on until the request has its error.
    """

    broken = None

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def group(self) -> _Attended:
        """What tells the thread whether to go on: this object."""
        return self

    @property
    def done(self) -> bool:
        """Whether the request is over."""
        return self._request.done

    @property
    def error(self) -> BaseException | None:
        """The error of the request."""
        return self._request.error

    def Test(self) -> bool:
        """Progress the request; end the request if it can never complete, or its limit has passed."""
        over, lost = _poll(self._request)
        if over or lost:
            _attended.discard(self)
        return over or lost


_attended: set[_Attended] = set()


def is_over(work: Work) -> bool:
    """Return whether the call of a Work is complete or failed; make progress, do not wait, and tell the program no error."""
    over = any(_poll(work._request))
    if over:
        work._land()
        if work._request.error is None:
            work._outcome()
    return over


# With the first and last instructions of what a program polls: a loop of polls spends some percent of its time in those.
handler_calls.waits.update(
    each.__code__
    for each in (
        _poll,
        is_over,
        Work.is_completed,
        Work.is_success,
        Work.exception,
        _WorkFuture.done,
        _WorkFuture.running,
    )
)


def attend(work: Work, thread: waiting.BackgroundProgress) -> None:
    """Let a thread progress a Work until its call is over, and watch its limit and its members, as ``is_completed`` does."""
    each = _Attended(work._request)
    _attended.add(each)
    thread.begun(each)


def _is_lost(request: Request) -> bool:
    now = time.monotonic()
    if now < request.next_look:
        return False
    request.next_look = now + _LOOK_EVERY
    policy = request.policy()
    error = over(policy, now - request.polled)
    if error is None or request.Test():
        return request.done
    if isinstance(error, CollectiveTimeoutError) and time.monotonic() < policy.stays_until:
        return False  # other members came meanwhile, and rely on this rank
    policy.withdraw(error)
    request.abandon(error)
    return True


def warn_of_dropped(call: CallDescription, work: Work) -> None:
    """Warn that a Work is deleted without ``wait``."""
    warnings.warn(
        f"{call.op} issued at {call.site} was dropped without wait()", ResourceWarning, stacklevel=3, source=work
    )
