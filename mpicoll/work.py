"""Operations under way, and Work: the handle that the user holds on one."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpicoll import waiting
from mpicoll.checks.call import Call
from mpicoll.checks.inflight import Flight, registry
from mpicoll.engines.base import Request
from mpicoll.errors import DistError
from mpicoll.kept import keep, keep_of

if TYPE_CHECKING:
    from mpicoll.groups import ProcessGroup

__all__ = ["Operation", "Work"]


class Operation:
    """One call under way: a generator that yields what has to complete next.

    It keeps the buffers alive, is moved on by every wait of the process, and ends with a value or an error. The library
    holds it until it is done; what the user holds is a :class:`Work`.
    """

    __slots__ = (
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
        "outputs",
        "peer",
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

    def advance(self) -> bool:
        """Move on as far as possible without waiting; return whether it is done."""
        if self.done:
            return True
        if not self._lock.acquire(blocking=False):
            return False  # another thread is at it
        try:
            if self.done:
                return True
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
            self._end(None)
        except DistError as error:
            self._end(error)
        except BaseException as error:
            if error is self.call.error:  # this rank's own arguments, known to all
                self._end(error)
                return True
            # Out of a signal handler, or the memory ran out: the call is lost, and MPI may still write into its buffers.
            self._keep()
            keep_of(error)
            self._end(
                DistError(f"{self.call.op} issued at {self.call.site} was interrupted: {type(error).__name__}: {error}")
            )
            self._give_up(self, error)
            raise
        finally:
            self._lock.release()
        return True

    def _keep(self) -> None:
        keep(self._current, self.outputs, self.held, self._steps)

    def abandon(self, error: BaseException) -> None:
        """End it with ``error``; what was posted to MPI stays posted, so the buffers are kept for good."""
        if self._withdraw is not None:
            self._withdraw()
        self._keep()
        if not self.done:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.error = error
        self.done = True
        if self.landing is not None:
            self.landing()
        future = self.future
        if future is not None:
            _settle(future, self)


def _settle(future: Future[Any], operation: Operation) -> None:
    if operation.error is not None:
        future.set_exception(operation.error)
    else:
        future.set_result(operation.outputs)


class _WorkFuture(Future[Any]):
    """A Future whose waits make progress: there is no thread behind it that would."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

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

    def _drive(self, timeout: float | None) -> None:
        if timeout is not None:
            # As with every Future a limit that passes changes nothing: the call stays under way.
            end = time.monotonic() + timeout
            while not self.done() and time.monotonic() < end:
                with waiting.guard:
                    waiting.progress()
                    waiting.serve()
                time.sleep(0.0002)
        elif not self.done():
            try:
                self._wait()
            except Exception:
                if not self.done():
                    raise


class Work:
    """The handle of a call made with ``async_op=True``, of ``isend`` and of ``irecv``.

    The buffers of the call are kept alive until it is done and must not be read or written before ``wait`` has returned.
    Each Work has to be waited for: one that is dropped without gives a ResourceWarning, and one that nobody ever waits
    for is an error when its group is destroyed or the program ends.

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

    def fly(self, flight: Flight | None) -> Work:
        """Keep the operation's memory from others until it has been waited for."""
        if flight is not None:
            operation = self._operation
            flight.over = lambda: operation.done
            self._flight = flight
            registry.add(flight)
        return self

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            registry.remove(flight)
            if self._operation.error is None:
                self._operation.error = flight.verdict()

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
        """Whether the call is done, well or not; makes progress and never waits."""
        with waiting.guard:
            done = self._poll()
        if done:
            self._observe()
            self._land()
        return done

    def is_success(self) -> bool:
        """Whether the call is done and ended well."""
        return self.is_completed() and self._operation.error is None

    def exception(self) -> BaseException | None:
        """Return what the call ended with, or None while it is under way or when it ended well."""
        return self._operation.error if self.is_completed() else None

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

        Its ``result()`` and ``exception()`` wait and make progress; its callbacks run on the thread that happens to make
        the progress. Note that torch gives a ``torch.futures.Future``.
        """
        if self._flight is not None:
            self._flight.adrift = True
        operation = self._operation
        self._observe()
        if operation.done:
            self._land()
        else:
            operation.landing = self._land
        if operation.future is None:
            operation.future = _WorkFuture(lambda: self._wait(operation, None))
            operation.future.set_running_or_notify_cancel()
            if operation.done:
                _settle(operation.future, operation)
            elif operation not in waiting.pending:
                waiting.pending.append(operation)
        return operation.future

    def source_rank(self) -> int:
        """Return the rank *in the group* that a completed ``irecv`` received from (as torch)."""
        return self._operation.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait for the call (for host memory the same as ``wait``)."""
        self.wait()

    def _poll(self) -> bool:
        if not self._operation.done:
            waiting.progress()
        return self._operation.done or self._operation.advance()

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
            registry.drop(flight)
        if not getattr(self, "_observed", True):
            call = self._operation.call
            warnings.warn(
                f"{call.op} issued at {call.site} was dropped without wait()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
