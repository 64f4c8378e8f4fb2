"""A request: one start of a call, from its round to its result.

Every wait of the process progresses all pending requests. Only :meth:`Request.Test` advances a request, and only
:func:`mpicoll.operations.states.to` changes its state; but the extension posts and completes a small call in one step each
(``SharedOperation.begin``, ``RequestFields.finish``), if nobody observes the states.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from mpicoll.checks.agreement import words_of
from mpicoll.checks.mismatch import explain
from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.wait_policy import CallWait, local_wait
from mpicoll.errors import BufferInUseError, CollectiveMismatchError, DistError
from mpicoll.groups.communicators import MpiError
from mpicoll.operations import failures
from mpicoll.operations.failures import broken, settle, tells_why, wrap
from mpicoll.operations.schedules import Prepared, Schedule
from mpicoll.operations.states import (
    AGREED,
    COMPLETE,
    DISPUTED,
    FAILED,
    IDLE,
    MOVING,
    POSTED,
    QUEUED,
    RequestFields,
    State,
    through,
    to,
)
from mpicoll.runtime import handler_calls, signals, waiting
from mpicoll.runtime.mpi_library import retain_for_ever, retain_frames
from mpicoll.runtime.waiting import Steps

if TYPE_CHECKING:
    from mpicoll.groups.process_group import ProcessGroup
    from mpicoll.transports.control import Agreed, Round, Words

ASLEEP, STILL_WITHIN = 0.001, 1.0
"""Seconds that a wait sleeps at a time while another thread progresses the request, and that it waits for this thread at most."""


class Request(RequestFields):
    """One collective call that was started. The library refers to the request until it is over; users hold a ``Work``.

    Args:
        group, call: the group, and the description of the call; None for a prepared operation.
        outputs, limit, peer, tag, held, waited: fields of the request (``operations.states``).
    """

    __slots__ = ("__weakref__",)

    def __init__(
        self,
        group: ProcessGroup,
        call: CallDescription | None,
        outputs: list[Any],
        limit: float,
        *,
        peer: int | None = None,
        tag: int = 0,
        held: Any = None,
        waited: bool = False,
    ) -> None:
        self.group = group
        self._call = call
        self.outputs = outputs
        self.limit, self.peer, self.tag = limit, peer, tag
        self.held, self.waited = held, waited
        self.state = IDLE
        self.returned = -1
        # A handler that raises just after the lock was acquired leaves the lock to this thread, which can acquire it again.
        self._lock = threading.RLock()

    @property
    def call(self) -> CallDescription:
        """The description of the call; that of a prepared operation is made when it is needed."""
        if self._call is None:
            self._call = self.prepared.describe(self)
        return self._call  # type: ignore[no-any-return]

    def is_settled(self) -> bool:
        """Return whether the program waits for this request or looks at it, or has made a later call of the group."""
        looks = self.waited or self.awaited or self.polled or self.future is not None
        return bool(looks) or self.group.order.issued != self.number + 1

    def hold_back(self) -> bool:
        """Refuse later calls of the group until the program knows the error of this request; False if a later call was made.

        Such a call would pair off with the next call of another rank. A blocking call holds the lock of the group to its end.
        """
        group = self.group
        if group.waited is self or not group.lock.acquire(blocking=False):
            return group.waited is self  # else another thread makes a call
        try:
            alone: bool = group.order.issued == self.number + 1
            if alone and not self.waited:
                group.unknown_mismatch = self
        finally:
            group.lock.release()
        return alone

    def is_known(self) -> None:
        """Note that the program knows the outcome of this request, which is over."""
        self.told = True
        self.group.unwaited.pop(id(self), None)
        self.group.futures.pop(id(self), None)
        if not self.waited and self.group.unknown_mismatch is self:
            self.group.unknown_mismatch = None

    @property
    def done(self) -> bool:
        """Whether the request is over, well or not."""
        return self.state >= COMPLETE

    def start(self, number: int, transfer: Callable[[Any], Steps]) -> None:
        """Start the request.

        Args:
            number: of the call in the order of the group.
            transfer: returns what moves the data, given what all members know; None: the call makes no round.
        """
        self.number, self._transfer = number, transfer
        if not self.call.passes:
            self.words = words_of(self.call)
        to(self, QUEUED)
        if not self.waited:
            self.Test()

    def start_prepared(
        self,
        prepared: Prepared,
        number: int,
        words: Words | None,
        schedule: Schedule | None,
        posted: Round | None = None,
    ) -> None:
        """Start the request of a prepared operation; the caller tests it.

        Args:
            words: of the round; None: the call makes no round.
            schedule: moves the data if the round says that all is as this member says; None: the general way.
            posted: the round, if the extension has posted it.
        """
        self.prepared, self.number = prepared, number
        self.words, self.schedule = words, schedule
        to(self, QUEUED)
        if posted is not None:
            self.round = posted
            to(self, POSTED)

    def Test(self, asleep: float = 0.0) -> bool:
        """Advance through the states as far as possible without waiting; return whether the request is over.

        The error of the request is stored, not raised, since every wait of the process progresses every request. An exception
        of a signal handler of the program is raised. If the exception came after an effect on the other members and before the
        transition, the request fails, and its group is given up.

        Args:
            asleep: seconds to sleep while another thread progresses the request, or until that thread has ended.
        """
        if self.state >= COMPLETE:
            return True
        if not self._lock.acquire(blocking=False) and not (asleep and self._lock.acquire(timeout=asleep)):
            return False
        mine = False
        try:
            if self.state < COMPLETE and not self._advancing:  # else this is a handler, or a callback, inside of it
                self._advancing = mine = True
                self._advance()
        except BaseException as error:
            self._react(error)
        finally:
            if mine:
                self._advancing = False
            self._lock.release()
        return self.state >= COMPLETE

    def _advance(self) -> None:
        """Make all transitions that can be made now."""
        agreement, number = self.group.pair.agreement, self.number
        order = agreement.order
        while True:
            waits = self.state in (QUEUED, POSTED, AGREED) or (self.state is DISPUTED and self.steps is None)
            if waits and self.group.broken is not None and self.peer is None:
                if not tells_why(self.group):
                    self._keep()
                    self._fail(broken(self.group, self.call))
                return  # what the members have posted may pair off wrongly from here on: the wait ends with the reason
            if self.state is QUEUED:
                words = self.words
                if words is None:
                    if not agreement.may_pass(number):
                        return
                    self._in_effect = True
                    order.posted += 1
                    to(self, AGREED)
                else:
                    if not agreement.may_post(number):
                        return
                    self._in_effect = True
                    if self.schedule is not None:
                        self.schedule.put(self, order.round + 1)
                    self.round = agreement.post(words)
                    to(self, POSTED)
                self._in_effect = False
            elif self.state is POSTED:
                made = self.round
                assert made is not None
                schedule = self.schedule
                if schedule is None:
                    if not made.Test():
                        return
                    self._judge(made.agreed())
                    continue
                serves = schedule.serves(self, made)
                if serves is None:
                    return
                if not serves:
                    self._judge(made.agreed())
                elif schedule.at_once:
                    self._in_effect = True
                    through(self, AGREED, MOVING)
                    self._complete()
                    self._in_effect = False
                else:
                    to(self, AGREED)
            elif self.state is AGREED:
                if self.agreed is not None:
                    self._release_round()
                if not order.may_move(number):
                    return
                self._in_effect = True
                if self.schedule is not None and self.agreed is None:
                    self._current = self.schedule.start(self)
                elif self.prepared is not None:
                    self.steps = self.prepared.steps(self)
                else:
                    assert self._transfer is not None
                    self.steps = self._transfer(self.agreed)
                to(self, MOVING)
                self._in_effect = False
            elif self.state is MOVING:
                if self.steps is not None:
                    if not self._run_steps():
                        return
                elif self._current is not None:
                    self._in_effect = True
                    if not self._current.Test():
                        self._in_effect = False
                        return
                    self._current = None
                self._in_effect = True
                if self.schedule is not None and self.agreed is None:
                    self.schedule.finish(self)
                self._complete()
                self._in_effect = False
            elif self.state is DISPUTED:
                self._release_round()
                if not order.may_move(number):
                    return
                if self.steps is None:
                    assert self.agreed is not None
                    group = self.group
                    self.steps = explain(group.pair.control, self.call, group.display, group.ranks, self.agreed.waited)
                if not self._run_steps():
                    return
                raise AssertionError("the exchange after a mismatch always raises")
            else:
                return

    def _judge(self, agreed: Agreed) -> None:
        self.agreed = agreed
        self.call.issuer = self  # for an exchange here, or of sizes that do not fit, before the data
        to(self, AGREED if agreed.same and not agreed.error else DISPUTED)

    def _release_round(self) -> None:
        if self.round is not None:
            self.round.release()
            self.round = None

    def _run_steps(self) -> bool:
        """Run the steps as far as possible; return whether they are at their end."""
        steps = self.steps
        assert steps is not None
        self._in_effect = True
        try:
            while True:
                if self._current is not None and not self._current.Test():
                    break
                self._current = next(steps)
            self._in_effect = False
            return False
        except StopIteration as stop:
            self.steps = self._current = None
            self._in_effect = False
            self.returned = -1 if stop.value is None else stop.value
            return True

    def _complete(self) -> None:
        self._release_round()
        if self.landing is not None:
            self.landing()  # may find an error
        self._end(COMPLETE if self.error is None else FAILED)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        if self.landing is not None:
            self.landing()
        if self.state is not POSTED or self.group.broken is None:  # a round that is not over stays in its slot
            self._release_round()
        if self._call is not None and self._call.breaks:
            self.group.give_up(self._call.breaks)
        self._end(FAILED)

    def _end(self, state: State) -> None:
        if self.number >= 0 and self.group.broken is None:
            self.group.pair.agreement.order.pass_on(self.number)
        to(self, state)
        if self._call is not None:
            self._call.issuer = None  # the call and the request form no circle
        if self.future is not None:
            settle(self.future, self)

    def _react(self, error: BaseException) -> None:
        """End the request with an error of its own; raise an exception that is no outcome of the call.

        Such an exception is of a signal handler of the program, or the memory ran out.
        """
        if self.state >= COMPLETE:
            raise error
        call = self.call
        if error is call.error:  # the arguments of this rank are wrong, or its result could not be finished
            self._fail(error)
        elif isinstance(error, (DistError, MpiError)):
            outcome = error if isinstance(error, DistError) else wrap(error, self.group, call)
            own = isinstance(outcome, (CollectiveMismatchError, BufferInUseError))
            if self.peer is None and not own and (self.group.broken is None or outcome is not error):
                self._lose(outcome)  # the members are no longer in step
            self._fail(outcome)
        elif not (self._in_effect or self._has_read()):
            raise error  # the state is what it was: the next test goes on
        elif self.waited:
            self._lose(error)
            self._fail(error)
        else:
            self._lose(error)
            self._fail(DistError(f"{call.op} issued at {call.site} was interrupted: {type(error).__name__}: {error}"))
            raise error

    def _has_read(self) -> bool:
        """Return whether the data was read in one step, which passed the order on, and the state does not say so yet."""
        return self.state is POSTED and bool(self.group.pair.agreement.order.moving > self.number)

    def _lose(self, error: BaseException) -> None:
        """Give the group up. MPI may still write into the buffers of the request, so they are retained for ever."""
        self._keep()
        retain_frames(error)
        self.policy().withdraw(error)

    def _keep(self) -> None:
        getattr(self._current, "revoke", bool)()  # other members may write into the arrays
        given = self.outputs, self.held, self.send, self.recv, self.arrays
        retain_for_ever(self._current, self.steps, self.move, self.plan, *given)

    def expected(self) -> Any:
        """Return what must be in the array of the call when the program has waited; None: the array is not compared."""
        return self.after or None

    def unclaimed(self) -> None:
        """Forget the claim of memory: the program has waited, and the request, its claim and its array form no circle."""
        self.claim = None

    def policy(self, limit: float | None = None) -> CallWait:
        """Return the policy of a wait for this request.

        Args:
            limit: seconds; None: that of the request.
        """
        call, limit = self.call, self.limit if limit is None else limit
        if call.wait_policy is not None:
            return call.wait_policy(self.group, call, limit)  # type: ignore[no-any-return]
        return CallWait(self.group, call, limit, self.peer, self.tag)

    def complete(self, limit: float | None = None, within: float | None = None) -> None:
        """Wait until the request is over, and raise its error.

        Args:
            limit: seconds; None: that of the request.
            within: seconds after which the wait ends, and the request stays pending; None: only the limit holds.
        """
        wrong: BaseException | None = None
        try:
            if self.state < COMPLETE:
                if failures.forked:
                    raise failures.in_child(self.call.name)
                if handler_calls.inside and not self.waited:
                    failures.refuse_handler(f"wait() of {self.call.name}")
                signals.threads.add(threading.get_ident())
                self.awaited = True
                self.wait(limit, within)
                if self.state < COMPLETE:
                    return
            waiting.drop(self)
            if self.error is not None:
                self.is_known()
                raise self.error
        except BaseException as error:
            wrong = error
            raise
        finally:
            if signals.guard.noted is not None:
                signals.guard.answer(wrong)

    def wait(self, limit: float | None = None, within: float | None = None) -> None:
        """Wait until the request is over, inside a call of the library that answers signals at its end."""
        if not self._is_over_soon():
            test, policy = partial(self.Test, ASLEEP), self.policy(limit)
            policy.ends_itself = within is not None
            try:
                local_wait(test if within is None else failures.ends_within(within, test), policy)
            except BaseException as error:
                self.abandon(error)
                raise

    def _is_over_soon(self) -> bool:
        """Return whether the request is over after the first polls, as most small calls are: then no wait is noted anywhere."""
        try:
            for _ in range(waiting.SPIN_POLLS):
                if self.Test():
                    return True
                if self._is_late() or (not self.waited and waiting.has_others(self)):
                    break  # the wait progresses the other requests, too
                waiting.give_way()
        except BaseException as error:
            if self.state >= COMPLETE:
                raise
            if isinstance(error, (DistError, MpiError)):
                self._react(error)
                return True
            if not signals.guard.note(error):
                self.withdraw(error)
                raise
        return False

    def _is_late(self) -> bool:
        """Poll what the request waits for; return whether that is not over after the polls."""
        made = self.round if self.state is POSTED else self._current if self.state is MOVING else None
        if made is None or not self.waited:  # another thread may poll a request that is not waited for at once
            posted, prepared = self.round, self.prepared
            if prepared is None or prepared.shared is None or posted is None:
                return False
            return not prepared.poll(posted) and waiting.oversubscribed  # then the polls yielded the core
        if self.prepared is not None and made is self.round and self.prepared.poll(made):
            return False
        return not waiting.comes_soon(made.Test)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Prevent other threads from progressing the request inside the block; wait at most 1 s for a thread that does."""
        held = self._lock.acquire(timeout=STILL_WITHIN)
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def withdraw(self, reason: BaseException) -> None:
        """Leave a posted call: tell the members, give the group up, and end the request with ``reason``."""
        if self.group.broken is None:
            self.policy().withdraw(reason)
        self.abandon(reason)

    def abandon(self, error: BaseException) -> None:
        """End the request with ``error``. What was posted to MPI stays posted, so the buffers are retained for ever."""
        with self.still():
            self._take_back()
            self._keep()
            if self.state < COMPLETE:
                self._fail(error)
        waiting.drop(self)

    def _take_back(self) -> None:
        """Withdraw what has not begun to move."""


def collectives_are_pending() -> bool:
    """Return whether an asynchronous collective of any group is pending."""
    return any(isinstance(item, Request) and item.peer is None for item in tuple(waiting.pending))


signals.guard.inside.add(Request.complete.__code__)  # as `with guard`, which takes 0.5 us
