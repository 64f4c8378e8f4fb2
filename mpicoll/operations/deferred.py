"""Small calls of members on one node that ride, and are waited for later: what is begun here, others compute beside.

The elements are written beside the record of the round, as in :mod:`mpicoll.operations.riding`, and those of the others
are read when the round is over. In between nothing is under way but the others' records, so what was begun stands itself
among what every wait of the process moves on. Whatever is not as usual (somebody's elements are not there, somebody makes
another call) becomes an Operation.

A plan (:mod:`mpicoll.api.persistent`) is one of these for good. An ``all_reduce`` with ``async_op=True`` takes one that is at
rest, and its :class:`Later` gives it back when it has been waited for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from datetime import timedelta
from functools import partial
from types import CodeType, FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.checks.memory_in_use import Flight, claims, span, written
from mpicoll.diagnosis.call import Call
from mpicoll.diagnosis.wait_policy import CallWait, local_wait
from mpicoll.errors import BufferInUseError, DistError
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.memory.arithmetic import without_warnings
from mpicoll.memory.dtypes import dtype_name, is_native, resolve_reduction
from mpicoll.memory.reduce_op import RedOpType
from mpicoll.operations import execution
from mpicoll.operations.failures import guarded, wrap
from mpicoll.operations.repeating import Repeated
from mpicoll.operations.request import Operation, Request, due, over
from mpicoll.operations.riding import MOST, Ride
from mpicoll.operations.work import Work, warn_of_dropped
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import Site
from mpicoll.runtime.mpi_library import retain_frames
from mpicoll.transports.base import Kind, Movement
from mpicoll.transports.base import Request as Pollable

Steps = Generator[Pollable, None, None]

_ident = threading.get_ident
_guard = signals.guard
_threads = signals.threads
_pending = waiting.pending
_flights = claims.flights
_forked = False

MOST_AT_REST = 16
"""How many of the same call are kept that nobody waits for."""


class Deferred:
    """A call that rides; it is begun, waited for, and begun again. One thread uses it at a time.

    Args:
        ride: the call.
        flat: the array, input and output; None: it is given by :meth:`begin`.
        place: its function's name, and where the program makes it.

    Attributes:
        group: its group.
    """

    __slots__ = (
        "__weakref__",
        "_calls",
        "_done",
        "_error",
        "_flat",
        "_flight",
        "_landed",
        "_lock",
        "_moving",
        "_number",
        "_operation",
        "_place",
        "_ride",
        "_round",
        "_sent",
        "_site",
        "_started",
        "group",
        "next_look",
        "polled",
    )

    def __init__(self, group: ProcessGroup, ride: Ride | None, flat: Any, place: tuple[str, CodeType, int]) -> None:
        self.group = group
        self._ride = ride
        self._flat = flat
        self._place = place
        self._site = Site(place[1], place[2])
        self._lock = threading.RLock()  # held while it is moved on
        self._moving = False
        self._started = False
        self._done = False  # what rode has come to its end, or goes the long way
        self._operation: Request | None = None
        self._error: BaseException | None = None
        self._sent = self._landed = b""
        self._number = self._calls = 0
        self.polled = self.next_look = 0.0
        self._round: Any = None
        self._flight: Flight | None = None
        if ride is not None and group.compares:
            writes = [np.empty(1, np.uint8) if flat is None else flat]
            self._flight = Flight(place[0], self._site, writes=writes, gone=group.gone, group=group.display)

    @property
    def call(self) -> Call:
        """What was begun last."""
        return _call(self._ride, self._site, self._calls)

    def begin(self, frame: FrameType) -> bool:
        """Begin the call with what the array holds now; False, and nothing done, where it cannot ride now. It never waits.

        Args:
            frame: of the program's call.
        """
        group, ride, flight = self.group, self._ride, self._flight
        if ride is None or _forked or group.broken is not None or group.destroyed or group.turn is not None:
            return False
        code, at = frame.f_code, frame.f_lasti
        op, known_code, known_at = self._place
        if known_code is not code or known_at != at:
            self._place = op, code, at
            self._site = Site(code, at)
            if flight is not None:
                flight.site = self._site
        if flight is not None and _flights:
            try:
                claims.check(flight)
            except BufferInUseError:
                return False  # the long way raises it, on all members
        wrong: BaseException | None = None
        try:
            with group.lock:
                agreement, order = ride.agreement, ride.agreement.order
                call = order.issued
                if not agreement.may_post(call):
                    return False
                self._started = True
                self._operation = self._error = None
                self.polled = self.next_look = 0.0
                _threads.add(_ident())
                self._number = call
                order.issued = call + 1
                ride.shared.write(order.round + 1, self._flat)
                self._round = made = agreement.fill(ride.body)
                order.calls = self._calls = order.calls + 1
                group.last = self._place
                if flight is not None:
                    self._sent = self._flat.tobytes()
                    claims.lend(flight)
                group.unwaited[id(self)] = self
                made.Start()  # from here on the others may go on
                order.posted = call + 1
                _pending.append(self)
                self._done = False  # only now: from here on every wait of the process, in any thread, moves it on
                return True
        except BaseException as error:
            wrong = error
            retain_frames(error)
            if self._started:
                self._lose(error)
                self.rest()
            raise
        finally:
            if _guard.noted is not None:
                _guard.answer(wrong)

    def finish(self, limit: float | None) -> None:
        """Wait until the call is complete on this rank, and raise its error; then this can be begun again.

        Args:
            limit: seconds; None: that of the group.
        """
        if _forked:
            execution.enter(self.group, self._place[0])
        ride = self._ride
        assert ride is not None
        wrong: BaseException | None = None
        try:
            if not self._done:
                self._round.poll(ride.poll_ns)
                self.Test()
                if not self._done:
                    self._wait_long(limit)
            if self._operation is not None:
                self._operation.complete(limit)
            elif self._error is not None:
                raise self._error
            if self._landed and self._flat.tobytes() != self._landed:
                raise written(self._place[0], self._site, self.group.display)
        except BaseException as error:
            wrong = error
            operation = self._operation
            if operation is not None and not operation.done:  # out of a handler of the program's, as below
                operation.abandon(error)
                self._lose(error)
            elif not self._done:
                self._lose(error)
            raise
        finally:
            self.rest()
            if _guard.noted is not None:
                _guard.answer(wrong)

    def _wait_long(self, limit: float | None) -> None:
        group, call = self.group, self.call
        local_wait(guarded(self.looked, group, call), CallWait(group, call, limit or group.timeout))

    def looked(self) -> bool:
        """Move it on; whether what rode has come to its end, or goes the long way."""
        self.Test()
        return self._done

    def poll(self) -> bool:
        """Move it on; whether it is over, well or not. Never waits.

        Raises:
            PeerFailedError, PeerExitedError, GroupBrokenError, CollectiveTimeoutError: as :meth:`mpicoll.Work.is_completed`.
        """
        with signals.guard:
            waiting.progress()
            self.Test()
            operation = self._operation
            done = self._done and (operation is None or operation.Test())
        if done:
            self.group.unwaited.pop(id(self), None)
            if self._landed and self._flat.tobytes() != self._landed:
                self._error = written(self._place[0], self._site, self.group.display)
            self._landed = b""
            if self._flight is not None:
                claims.take_back(self._flight)  # the program may use its memory again
        elif self._is_lost() and self._error is not None:
            self.group.unwaited.pop(id(self), None)
            raise self._error
        return done

    def _is_lost(self) -> bool:
        """Look, every few milliseconds, whether it can no longer complete, as a wait would, and give it up then."""
        polled = due(self)
        if polled is None:
            return False
        operation = self._operation
        if operation is not None:
            lost = operation.poll()[1]
            self._error = operation.error
            return lost
        patience = CallWait(self.group, self.call, self.group.timeout)
        error = over(patience, polled)
        if error is None or self.looked():
            return False
        patience.withdraw(error)
        self._lose(error)
        return True

    def Test(self) -> bool:
        """Move on what rides, without waiting; for the waits of the process. It leaves their list by itself: False.

        Were it taken out by who has moved it on, another thread could have begun it again by then.
        """
        if self._done or not self._lock.acquire(blocking=False):
            return False  # or another thread is at it
        # A handler of the program's that raises just here leaves the lock taken: by this thread, which can take it again.
        try:
            if not self._moving:  # else this is a handler's, or a callback's, in the middle of it
                self._moving = True
                try:
                    self._look()
                finally:
                    self._moving = False
        finally:
            self._lock.release()
        return False

    def _look(self) -> None:
        """Take the others' elements, if they are there."""
        try:
            ride = self._ride
            if (
                not self._done
                and ride is not None
                and ride.agreement.order.moving == self._number
                and self._round.Test()
            ):
                self._settle(ride)
        except MPI.Exception as error:
            self._lose(wrap(error, self.group, self.call))
        except BaseException as error:  # out of a handler of the program's, or the memory ran out
            retain_frames(error)
            self._lose(error)
            raise

    def _settle(self, ride: Ride) -> None:
        """Take the others' elements: the round is over."""
        made, flat = self._round, self._flat
        if not made.unanimous(ride.body):
            self._go_on(ride, made)
            return
        if self._flight is not None and flat.tobytes() != self._sent:
            self._error = written(self._place[0], self._site, self.group.display)
        else:
            ride.shared.read(made.number, flat)
            if self._flight is not None:
                self._landed = flat.tobytes()
        made.release()
        ride.agreement.order.moving = self._number + 1
        self._end()

    def _go_on(self, ride: Ride, made: Any) -> None:
        """Go the long way: somebody's elements are not there, or somebody makes another call."""
        call, own = self.call, self._flat.copy()
        agreed = made.agreed()
        made.release()
        after = partial(self._finish_long, ride, call, own)
        move = Movement(Kind.ALL_REDUCE, recv=own.reshape(-1), op=ride.again.mpi_op)
        operation = execution.resume(self.group, call, move, self._number, agreed, after, [self._flat])
        self._operation = operation
        if not operation.done:
            _pending.append(operation)
        self._end()

    def _finish_long(self, ride: Ride, call: Call, own: Any) -> None:
        flat, watched = self._flat, self._flight is not None
        if watched and flat.tobytes() != self._sent:
            raise written(self._place[0], call.site, self.group.display)
        if ride.again.average:
            without_warnings(np.divide, own, self.group.size(), out=own)
        flat[...] = own
        if watched:
            self._landed = flat.tobytes()

    def _end(self) -> None:
        self._done = True
        try:
            _pending.remove(self)
        except ValueError:  # it was struck before it came to be there
            pass

    def _lose(self, error: BaseException) -> None:
        """End what the library or something foreign struck; the group is given up."""
        if self.group.broken is None:
            CallWait(self.group, self.call, self.group.timeout).withdraw(error)
        self._error = error if isinstance(error, DistError) else self.struck(error)
        self._end()

    def struck(self, error: BaseException) -> DistError:
        """Return what is said of a call that something foreign struck."""
        return DistError(f"{self._place[0]} issued at {self._site} was interrupted: {type(error).__name__}: {error}")

    @property
    def resting(self) -> bool:
        """Whether nothing is under way that has not been waited for."""
        return not self._started

    def outcome(self) -> BaseException | None:
        """Return the error of what is over, if it has one."""
        return self._error if self._error is not None or self._operation is None else self._operation.error

    def rest(self) -> None:
        """Be ready to be begun again."""
        self.group.unwaited.pop(id(self), None)
        if self._flight is not None:
            claims.take_back(self._flight)
        self._started = False


def _call(ride: Ride | None, site: Site, calls: int) -> Call:
    assert ride is not None
    again = ride.again
    return Call(again.op, again.key, site, seq=calls, asynchronous=True, block_bytes=again.nbytes, print=ride.body[0])


class _Pooled(Deferred):
    """One that serves one array after the other."""

    __slots__ = ()

    def bind(self, array: Any) -> None:
        """Give it the array of the next call."""
        self._flat, flight = array, self._flight
        if flight is not None:
            (mine,) = flight.ranges
            mine.array = array
            mine.start, mine.end = span(array)

    def free(self) -> None:
        """Let go of the array, and be at rest for the next one."""
        self._flat = self._operation = None
        flight, ride = self._flight, self._ride
        if flight is not None:
            flight.ranges[0].array = _nothing
        self._sent = self._landed = b""
        if ride is not None and len(ride.idle) < MOST_AT_REST:
            ride.idle.append(self)

    def follow(self) -> Operation:
        """Return an Operation that is over when this is, and ends as it does."""
        call = self.call
        known = self.group.unwaited.pop(id(self), None)
        operation = Operation(self.group, call, self._following(), [self._flat], self.group.timeout, held=self)
        if known is not None:
            self.group.unwaited[id(operation)] = operation
        if self._flight is not None:
            self._flight.over, self._flight.advance = lambda: operation.done, operation.Test
        if not operation.done:
            _pending.append(operation)
        return operation

    def _following(self) -> Steps:
        if not self._done:
            yield waiting.Condition(self.looked)
        operation, flight = self._operation, self._flight
        if operation is not None and not operation.done:
            yield waiting.Condition(operation.Test)
        error = self._error if operation is None else operation.error
        if error is not None:
            raise error
        if flight is not None:
            if self._landed and self._flat.tobytes() != self._landed:
                raise written(self._place[0], self._site, self.group.display)
            flight.seal_results()

    def leave(self) -> None:
        """Nobody waits for it any more: its memory is in use until it is over."""
        flight = self._flight
        if flight is not None:
            flight.over, flight.advance = self._over, self.looked
            claims.drop(flight)

    def _over(self) -> bool:
        return self._done and (self._operation is None or self._operation.done)


_nothing = np.empty(1, np.uint8)


def later(group: Any, op: RedOpType, array: Any, frame: FrameType) -> Later | None:
    """Begin a small ``all_reduce`` of an array of NumPy's that is waited for later; None, and nothing done, where it cannot ride.

    Args:
        group: what the program gave, or its default.
        frame: of the program's call.
    """
    try:
        ride = group.rides.get((op, array.dtype, array.shape))
    except (AttributeError, TypeError):  # no group, or not a member
        return None
    if waiting.progress_thread is not None or _forked or not array.flags.carray or Site.inside(frame.f_code):
        return None
    if ride is None:
        ride = _learn(group, op, array)
    if ride is None or ride.shared is None or ride.segment is not None:
        return None
    if not array.size or array.dtype is not ride.dtype:  # int64 has two, which are equal: the extension takes its own
        return None
    try:
        found = ride.idle.pop()
    except IndexError:
        found = _Pooled(group, ride, None, ("all_reduce", frame.f_code, frame.f_lasti))
    found.bind(array)
    if not found.begin(frame):
        found.free()
        return None
    return Later(found, array)


def _learn(group: Any, op: RedOpType, array: Any) -> Ride | None:
    """Return the call as it is kept for the next time; None where it does not ride, or something is wrong with it."""
    if (
        type(group) is not ProcessGroup
        or group.gone()
        or not group.pair.agreement.channel.carries_data
        or not array.size
    ):
        return None
    if not is_native(array.dtype):
        return None
    try:
        reduction = resolve_reduction("all_reduce", op, array.dtype, "")
    except Exception:  # said where it is raised on all members
        return None
    if reduction.factor is not None:
        return None
    key = (str(reduction.op), dtype_name(array.dtype), ("elements", array.size))
    again = Repeated(
        "all_reduce", key, Kind.ALL_REDUCE, array.nbytes, mpi_op=reduction.mpi_op, average=reduction.average
    )
    if len(group.rides) >= MOST:
        group.rides.clear()
    ride = group.rides[op, array.dtype, array.shape] = Ride(group, again, array.dtype, array, array)
    return ride


_turning = threading.RLock()
"""Held while a handle passes from what rides to an Operation, or to its end."""


class Later(Work):
    """The handle of a call that rides; an Operation is made only for who asks for more than ``wait`` and ``is_completed``.

    What rides serves one thread at a time, which takes the ``_turn`` of the handle; others ask the Operation.
    """

    __slots__ = ("_array", "_deferred", "_ended", "_made", "_turn")

    def __init__(self, deferred: _Pooled, array: Any) -> None:
        self._deferred: _Pooled | None = deferred
        self._array = array
        self._ended: _Ended | None = None
        self._made: Request | None = None
        self._turn = [None]
        self._observed = False
        self._flight = None

    @property
    def _request(self) -> Request:  # type: ignore[override]
        """The call, as what all handles have."""
        with _turning:
            if self._made is None:
                deferred, ended = self._deferred, self._ended
                if deferred is not None:
                    self._made = deferred.follow()
                    self._flight, self._deferred = deferred._flight, None
                    if self._observed:  # somebody waits already
                        deferred.group.unwaited.pop(id(self._made), None)
                else:
                    assert ended is not None
                    self._made = ended.operation(self._array)
            return self._made

    def _end(self, deferred: _Pooled, error: BaseException | None) -> None:
        """Note how the call has ended that rode; what it rode with serves others, unless an Operation follows it."""
        with _turning:
            if self._deferred is None:
                return
            self._ended = _Ended(deferred, error)
            self._deferred = None
            if error is None:
                deferred.free()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As :meth:`mpicoll.Work.wait`."""
        if not isinstance(timeout, timedelta):
            raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout!r}")
        try:
            self._turn.pop()
        except IndexError:  # another thread waits, or this is a handler in the middle of it
            return super().wait(timeout)
        deferred: _Pooled | None = None
        try:
            deferred = self._deferred
            if deferred is None:
                return super().wait(timeout)
            self._observed = True
            deferred.finish(timeout.total_seconds() or None)
        except DistError as error:
            if deferred is not None:
                self._end(deferred, error)
            raise
        except BaseException as error:
            if deferred is not None and deferred.resting:  # else it is under way, and can be waited for again
                self._end(deferred, None if deferred.group.broken is None else deferred.struck(error))
            raise
        else:
            self._end(deferred, None)
        finally:
            self._turn.append(None)
        return True

    def is_completed(self) -> bool:
        """As :meth:`mpicoll.Work.is_completed`."""
        try:
            self._turn.pop()
        except IndexError:
            return super().is_completed()
        try:
            deferred = self._deferred
            if deferred is None:
                return super().is_completed()
            try:
                done = deferred.poll()
            except DistError as error:
                self._observed = True
                self._end(deferred, error)
                raise
            if done:
                self._observed = True
                outcome = deferred.outcome()
                deferred.rest()
                self._end(deferred, outcome)
            return done
        finally:
            self._turn.append(None)

    def get_future(self) -> Any:
        """As :meth:`mpicoll.Work.get_future`."""
        self._request  # noqa: B018  its memory is adrift from now on
        return super().get_future()

    def __del__(self) -> None:
        deferred = getattr(self, "_deferred", None)
        if deferred is None:
            if getattr(self, "_made", None) is not None:
                super().__del__()
            return
        deferred.leave()
        if not self._observed:
            warn_of_dropped(deferred.call, self)


class _Ended:
    """How a call has ended that rode."""

    __slots__ = ("_calls", "_error", "_group", "_ride", "_site")

    def __init__(self, deferred: _Pooled, error: BaseException | None) -> None:
        self._group, self._ride, self._site, self._calls = (
            deferred.group,
            deferred._ride,
            deferred._site,
            deferred._calls,
        )
        self._error = error

    def operation(self, array: Any) -> Operation:
        """Return it as what all handles have."""
        call = _call(self._ride, self._site, self._calls)
        return Operation(self._group, call, self._steps(), [array], self._group.timeout)

    def _steps(self) -> Steps:
        if self._error is not None:
            raise self._error
        return
        yield


_guard.inside.update((Deferred.begin.__code__, Deferred.finish.__code__))


def _in_child() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_in_child)
