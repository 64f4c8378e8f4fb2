"""Calls that a loop makes again and again: a handle that is started, and waited for.

A small array of members on one node rides in the round of its call, as in :mod:`mpicoll.riding`: ``start`` writes the elements
beside the record, and ``wait`` reads those of the others. In between nothing is under way but the others' records, so the
handle itself stands among what every wait of the process moves on. Whatever is not as usual (somebody's elements are not
there, somebody makes another call) becomes an Operation, and all else is an asynchronous call as any other.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll import collectives, execution, groups, waiting
from mpicoll.buffers.array import AnyArray, Array, adapt
from mpicoll.buffers.dtypes import Reduction, resolve_reduction
from mpicoll.buffers.half import wide
from mpicoll.buffers.quiet import quietly
from mpicoll.buffers.reduce_op import RedOpType, ReduceOp
from mpicoll.checks.agreement import Ticket
from mpicoll.checks.call import Call, Site, call_site, caller
from mpicoll.checks.inflight import Flight, registry, written
from mpicoll.checks.rounds import MASK, RIDING_BYTES
from mpicoll.engines.base import Kind, Movement
from mpicoll.errors import ARGUMENT, BufferInUseError, DistError
from mpicoll.groups import ProcessGroup, member_or_warn
from mpicoll.kept import keep_of
from mpicoll.patience import CallWait, local_wait
from mpicoll.repeating import Repeated
from mpicoll.riding import Ride, collect
from mpicoll.work import Operation, Work, due

if TYPE_CHECKING:
    from collections.abc import Generator

    from mpicoll.checks.agreement import Flags
    from mpicoll.engines.base import Request

__all__ = ["Plan", "all_reduce_init"]

_OP = "all_reduce"
_now = time.monotonic_ns
_ident = threading.get_ident
_guard = waiting.guard
_threads = waiting.threads
_pending = waiting.pending
_flights = registry.flights
_forked = False


def all_reduce_init(tensor: AnyArray, op: RedOpType | ReduceOp = ReduceOp.SUM, group: Any = None) -> Plan | None:
    """Make a :class:`Plan`: an ``all_reduce`` of ``tensor`` that is started, and waited for, as often as the program likes.

    Called by all members with the same op, dtype and number of elements; it waits for them, and moves nothing::

        plan = dist.all_reduce_init(x)
        for step in range(1000):
            fill(x)
            plan.start()
            something_else()
            plan.wait()  # x holds the sum

    Args:
        tensor: input and output of every start, any array that :func:`mpicoll.all_reduce` takes. The plan stays with the memory
            that it has now, and keeps it alive.
        op: as in :func:`mpicoll.all_reduce`.
        group: the group; default the world. A rank that is not in it gets None, and a warning.

    Raises:
        TypeError, ValueError, RuntimeError: wrong arguments, as for :func:`mpicoll.all_reduce`. The other members raise
            CollectiveMismatchError, at every check level.
        CollectiveMismatchError: the members made different calls, or the arguments of one are wrong; the group is still good.
        CollectiveTimeoutError, PeerFailedError, PeerExitedError, DeadlockError, GroupBrokenError, DistBackendError: as
            :func:`mpicoll.broadcast`.

    Source: MPI-4.1 section 6.13 (MPI_Allreduce_init, MPI_Start, MPI_Wait).
    """
    found = member_or_warn(group, "all_reduce_init")
    if found is None:
        return None
    site = call_site()
    execution.enter(found, "all_reduce_init")
    key: tuple[Any, ...] = ()
    error: Exception | None = None
    plan: Plan | None = None
    try:
        memory = wide(adapt(tensor, "tensor", writable=True))
        reduction = resolve_reduction(_OP, op, memory.dtype, memory.named)
        key = (str(reduction.op), memory.name, ("elements", memory.flat.size))
        plain = memory.pack is None and not memory.named
        plan = Plan(found, memory.flat if plain else tensor, op, site, key, reduction if plain else None)
    except Exception as wrong:
        setattr(wrong, ARGUMENT, True)
        error = wrong
    execution.agree(found, Call("all_reduce_init", key, site, error=error), found.timeout)
    return plan


class Plan:
    """An ``all_reduce`` of one array, made once by :func:`all_reduce_init`, and started as often as the program likes.

    Every ``start`` counts as a call of ``all_reduce`` with ``async_op=True``: it is compared with what the other members
    call, who may start a plan of theirs or call ``all_reduce``. Between ``start`` and ``wait`` the program may compute and
    make other calls, in an order that is the same on all members of a group; the array must not be read or written.
    A plan that was started and never waited for is an error when its group is destroyed or the program ends. Nothing is to be
    freed. One thread uses it at a time.

    Source: MPI-4.1 section 6.13.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "_calls",
        "_done",
        "_error",
        "_flat",
        "_flight",
        "_key",
        "_landed",
        "_lock",
        "_number",
        "_op",
        "_operation",
        "_place",
        "_ride",
        "_sent",
        "_site",
        "_slot",
        "_started",
        "_work",
        "group",
        "next_look",
        "polled",
    )

    def __init__(
        self,
        group: ProcessGroup,
        array: Any,
        op: RedOpType | ReduceOp,
        site: Site,
        key: tuple[Any, ...],
        reduction: Reduction | None,
    ) -> None:
        self.group = group
        self._array = array
        self._op = op
        self._site = site
        self._key = key
        self._place: tuple[str, CodeType, int] = _OP, site.code, site.instruction
        self._lock = threading.Lock()  # held while it is moved on
        self._started = False
        self._done = False  # what rode has come to its end, or goes the long way
        self._work: Work | None = None
        self._operation: Operation | None = None
        self._error: BaseException | None = None
        self._sent = self._landed = b""
        self._number = self._calls = 0
        self.polled = self.next_look = 0.0
        self._slot: Any = None
        self._ride: Ride | None = None
        self._flight: Flight | None = None
        self._flat: Any = None
        if reduction is not None and reduction.factor is None:
            self._prepare(array, reduction)

    def _prepare(self, flat: Array, reduction: Reduction) -> None:
        """Have it ride, where it can."""
        group = self.group
        if flat.nbytes > RIDING_BYTES or group.pair.lane.shared is None or not groups.state().thread_multiple:
            return
        again = Repeated(
            _OP, self._key, Kind.ALL_REDUCE, flat.nbytes, mpi_op=reduction.mpi_op, average=reduction.average
        )
        self._flat = flat
        self._ride = Ride(group, again, flat.dtype, flat, flat)
        if group.compares:
            self._flight = Flight(_OP, self._site, writes=[flat], gone=group.gone, group=group.display)

    @property
    def call(self) -> Call:
        """What was started last."""
        print_ = 0 if self._ride is None else self._ride.body[0]
        nbytes = 0 if self._flat is None else self._flat.nbytes
        return Call(_OP, self._key, self._site, seq=self._calls, block_bytes=nbytes, print=print_)

    def start(self) -> None:
        """Begin an ``all_reduce`` of what the array holds now.

        Called by all members, or ``all_reduce`` with the same op, dtype and number of elements in its stead. It never waits.

        Raises:
            RuntimeError: it was started and not waited for; nothing was begun.
            BufferInUseError: an operation under way uses the same memory (of this the other members raise
                CollectiveMismatchError). At check level ``full`` alone.
            GroupBrokenError, ValueError: the group was given up, or destroyed.

        Source: MPI-4.1 section 3.9 (MPI_Start).
        """
        if self._started:
            raise RuntimeError(f"{self!r} was started and has not been waited for: call wait() before start()")
        group, ride, flight = self.group, self._ride, self._flight
        if ride is None or _forked or group.broken is not None or group.destroyed or group.turn is not None:
            self._start_long()
            return
        frame = caller()
        code, at = frame.f_code, frame.f_lasti
        _, known_code, known_at = self._place
        if known_code is not code or known_at != at:
            self._place = _OP, code, at
            self._site = Site(code, at)
            if flight is not None:
                flight.site = self._site
        if flight is not None and _flights:
            try:
                registry.check(flight)
            except BufferInUseError:
                self._start_long()  # it raises, on all members
                return
        wrong: BaseException | None = None
        try:
            with group.lock:
                lane = ride.lane
                call = lane.issued
                if lane.posted == call and lane.room():
                    self._started = True
                    _threads.add(_ident())
                    self._number = call
                    lane.issued = call + 1
                    lane.rounds = number = lane.rounds + 1
                    place = number & MASK
                    self._slot = slot = lane.slot(place)
                    slot.busy = True
                    slot.number = number
                    mine, where, clock, _, _ = ride.at[place]
                    mine[:] = ride.body
                    own, _ = ride.views[place] or ride.look(place)
                    own[...] = self._flat
                    group.calls = self._calls = group.calls + 1
                    group.last = self._place
                    if flight is not None:
                        self._sent = self._flat.tobytes()
                        registry.lend(flight)
                    group.unwaited[id(self)] = self
                    ride.counters[clock] = _now()
                    ride.counters[where] = number  # from here on the others may go on
                    lane.posted = call + 1
                    _pending.append(self)
                    self._done = False  # only now: from here on every wait of the process, in any thread, moves it on
                    return
        except BaseException as error:
            wrong = error
            keep_of(error)
            if self._started:
                self._lose(error)
                self._rest()
            raise
        finally:
            if _guard.noted is not None:
                _guard.answer(wrong)
        self._start_long()

    def _start_long(self) -> None:
        self._work = collectives.all_reduce(self._array, self._op, self.group, async_op=True)
        self._started = True

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the call that was started is complete on this rank: the array holds the result.

        Args:
            timeout: the limit of this wait; default that of the group.

        Raises:
            RuntimeError: it was not started.
            TypeError: ``timeout`` is not a timedelta.
            Others as :meth:`mpicoll.Work.wait`. It can be started again after a mismatch.

        Source: MPI-4.1 section 3.7.3 (MPI_Wait).
        """
        if not self._started:
            raise RuntimeError(f"{self!r} was not started: call start() before wait()")
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout!r}")
        if _forked:
            execution.enter(self.group, _OP)
        work, ride = self._work, self._ride
        wrong: BaseException | None = None
        if work is not None or ride is None:
            try:
                if work is not None:
                    work.wait(timeout or timedelta(0))
            except BaseException as error:
                wrong = error
                raise
            finally:
                self._work = None
                self._started = False
                if _guard.noted is not None:
                    _guard.answer(wrong)
            return
        limit = None if timeout is None else timeout.total_seconds() or None
        try:
            if not self._done:
                slot = self._slot
                counters, number, polls = ride.counters, slot.number, ride.polls
                for other in ride.at[slot.place][3]:
                    while True:
                        if counters[other] >= number or polls <= 0:
                            break
                        polls -= 1
                self.advance()
                if not self._done:
                    self._wait_long(limit)
            if self._operation is not None:
                execution.finish_waiting(self._operation, limit)
            elif self._error is not None:
                raise self._error
            if self._landed and self._flat.tobytes() != self._landed:
                raise written(_OP, self._site, self.group.display)
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
            self._rest()
            if _guard.noted is not None:
                _guard.answer(wrong)

    def _wait_long(self, limit: float | None) -> None:
        group, call = self.group, self.call
        local_wait(execution.guarded(self._looked, group, call), CallWait(group, call, limit or group.timeout))

    def _looked(self) -> bool:
        self.advance()
        return self._done

    def is_completed(self) -> bool:
        """Whether nothing is under way: the call that was started is done, well or not. Makes progress and never waits.

        A plan that was started needs its ``wait`` all the same before it is started again.

        Raises:
            PeerFailedError, PeerExitedError, GroupBrokenError, CollectiveTimeoutError: as :meth:`mpicoll.Work.is_completed`.
        """
        work = self._work
        if work is not None:
            return work.is_completed()
        if not self._started or self._ride is None:
            return True
        with waiting.guard:
            waiting.progress()
            self.advance()
            operation = self._operation
            done = self._done and (operation is None or operation.advance())
        if done:
            self.group.unwaited.pop(id(self), None)
            if self._landed and self._flat.tobytes() != self._landed:
                self._error = written(_OP, self._site, self.group.display)
            self._landed = b""
            if self._flight is not None:
                registry.take_back(self._flight)  # the program may use its memory again
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
            lost = execution.look(operation, polled)
            self._error = operation.error
            return lost
        patience = CallWait(self.group, self.call, self.group.timeout)
        error = execution.over(patience, polled)
        if error is None or self._looked():
            return False
        patience.give_up(error)
        self._lose(error)
        return True

    def advance(self) -> bool:
        """Move on what rides, without waiting; for the waits of the process. It leaves their list by itself: False.

        Were it taken out by who has moved it on, another thread could have started it again by then.
        """
        if self._done or not self._lock.acquire(blocking=False):
            return False  # or another thread is at it
        try:
            ride = self._ride
            if not self._done and ride is not None and ride.lane.turn == self._number and self._slot.Test():
                self._settle(ride)
        except MPI.Exception as error:
            self._lose(execution.wrap(error, self.group, self.call))
        except BaseException as error:  # out of a handler of the program's, or the memory ran out
            keep_of(error)
            self._lose(error)
            raise
        finally:
            self._lock.release()
        return False

    def _settle(self, ride: Ride) -> None:
        """Take the others' elements: the round is over."""
        slot, flat, lane = self._slot, self._flat, ride.lane
        place, body = slot.place, ride.body
        for theirs in ride.at[place][4]:
            if theirs != body:
                self._go_on(ride, slot)
                return
        if self._flight is not None and flat.tobytes() != self._sent:
            self._error = written(_OP, self._site, self.group.display)
        else:
            collect(self.group, ride, flat, place)
            if self._flight is not None:
                self._landed = flat.tobytes()
        slot.busy = False
        lane.turn = self._number + 1
        self._end()

    def _go_on(self, ride: Ride, slot: Any) -> None:
        """Go the long way: somebody's elements are not there, or somebody makes another call."""
        call, own = self.call, self._flat.copy()
        steps = self._steps(ride, call, Ticket(ride.lane, self._number), slot.flags(), own)
        operation = Operation(
            self.group, call, steps, [self._flat], self.group.timeout, give_up=execution.lost, held=own
        )
        self._operation = operation
        if not operation.done:
            _pending.append(operation)
        self._end()

    def _steps(
        self, ride: Ride, call: Call, ticket: Ticket, flags: Flags, own: Array
    ) -> Generator[Request, None, None]:
        again, flat, watched = ride.again, self._flat, self._flight is not None
        move = Movement(Kind.ALL_REDUCE, recv=own, op=again.mpi_op)
        yield from execution.unusual(self.group, call, move, ticket, flags)
        if watched and flat.tobytes() != self._sent:
            raise written(_OP, call.site, self.group.display)
        if again.average:
            quietly(np.divide, own, self.group.size(), out=own)
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
            CallWait(self.group, self.call, self.group.timeout).give_up(error)
        if isinstance(error, DistError):
            self._error = error
        else:
            self._error = DistError(f"{_OP} issued at {self._site} was interrupted: {type(error).__name__}: {error}")
        self._end()

    def _rest(self) -> None:
        """Be ready for the next start."""
        self.group.unwaited.pop(id(self), None)
        if self._flight is not None:
            registry.take_back(self._flight)
        self._operation = self._error = None
        self.polled = self.next_look = 0.0
        self._started = False

    def __repr__(self) -> str:
        state = "at rest"
        if self._started:
            operation = self._operation
            over = self._done and (operation is None or operation.done)
            state = "complete" if self._work is None and over else "under way"
            state += f", started at {self._site}" if self._work is None else ""
        name = Call(_OP, self._key, self._site).describe() if self._key else _OP
        return f"<Plan {name} on group {self.group.display}: {state}>"


_guard.inside.update((Plan.start.__code__, Plan.wait.__code__))


def _in_child() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_in_child)
