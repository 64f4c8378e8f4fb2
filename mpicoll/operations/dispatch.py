"""Find the prepared operation of a call that the program makes again, and start it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import CodeType, FrameType
from typing import Any

import numpy as np

from mpicoll.checks.agreement import is_usual
from mpicoll.checks.memory_in_use import RequestClaim, claims
from mpicoll.checks.memory_ranges import seal
from mpicoll.diagnosis.wait_policy import local_wait
from mpicoll.errors import DistError
from mpicoll.groups import registry
from mpicoll.groups.communicators import MpiError, is_finalized
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import default as _default
from mpicoll.memory.arithmetic import without_warnings
from mpicoll.operations import execution
from mpicoll.operations.failures import guarded, wrap
from mpicoll.operations.prepared import LARGEST, MOST, PreparedOperation, prepared_of
from mpicoll.operations.request import Request
from mpicoll.operations.schedules import (
    AT_ONCE,
    EAGER,
    IN_SHARED_MEMORY,
    MEETING,
    THROUGH_PLAN,
    Sealed,
    prepared_movement,
)
from mpicoll.operations.states import COMPLETE, MOVING, POSTED, observers
from mpicoll.operations.work import Work, answer
from mpicoll.runtime import handler_calls, signals, waiting
from mpicoll.runtime.call_site import CallSite, caller
from mpicoll.runtime.mpi_library import retain_frames
from mpicoll.runtime.native import found as extension
from mpicoll.runtime.settings import has_type
from mpicoll.transports.base import Kind
from mpicoll.transports.control import Words

_active = claims.active
_guard = signals.guard
_ndarray = np.ndarray
_pending = waiting.pending
_inside = handler_calls.inside
_threads = signals.threads
_ident = threading.get_ident


def cache(
    group: ProcessGroup, key: Any, prepared: PreparedOperation, dtype: np.dtype[Any], send: Any, recv: Any
) -> None:
    """Keep a call of plain arrays that the program of this member makes just now, for the next time.

    Args:
        key: the signature; None if the call is not to be cached.
        prepared: the call.
        dtype, send, recv: of the arrays, what this member passes, and where its result goes.
    """
    if key is None or group.gone() or prepared.nbytes * group.size() > LARGEST or not registry.state().thread_multiple:
        return
    node = group.pair.through(prepared.kind, prepared.nbytes)
    if node is not None and not node.ready:
        return  # this call makes its memory: the next call is cached
    if prepared.uneven and (key, prepared.key) not in group.unequal:  # many programs have other sizes at each call
        group.keep_newest(group.unequal, (key, prepared.key), None, MOST)
        return
    bound = prepared.bind(group, dtype, send, recv)
    if bound.fits(send, recv):
        group.keep_newest(group.prepared, key, bound, MOST)


def again(
    group: Any,
    key: Any,
    send: Any,
    recv: Any,
    depth: int = 2,
    timeout: timedelta | None = None,
    name: str | None = None,
    async_op: Any = False,
    outputs: Any = (),
    spread: Callable[[], None] | None = None,
    claimed: tuple[Any, Any] | None = None,
) -> Work | bool:
    """Make a prepared call: wait and return True, or return its Work; return False, with nothing done, if that is impossible.

    Args:
        group: as the program gave it.
        key: the signature.
        send, recv: as for :func:`cache`; arrays that are not in lists are plain ones of the shape and dtype in the key.
        depth: frames between this function and the program.
        timeout, name, async_op: as the program gave them.
        outputs: the output, or the list of outputs, as the program gave them, for ``Work.result``.
        spread: copies the result of an asynchronous call to arrays of the program; None: the result goes to ``recv`` only.
        claimed: the input and the output of the program, in an asynchronous call of other memory.
    """
    known: Any = _default.world if group is None else group
    try:
        found = known.prepared[key]
    except Exception:  # not made before, no group, or of a signal handler
        found = prepared_of(known, key)
    if found is None or _inside:  # inside a handler the general way raises
        return False
    frame = caller(depth)
    limit = None
    if timeout is not None or name is not None:
        if (name is not None and type(name) is not str) or not has_type(timeout, timedelta, type(None)):
            return False
        if timeout is not None and timeout.days < 0:  # negative, which the general way refuses on all members
            return False
        limit = None if timeout is None else execution.call_limit(known, timeout)
    if async_op is not False:
        # Its truth may raise, which the general way tells all members; in the second case the general way finds the place.
        if async_op is not True or CallSite.inside(frame.f_code):
            return False
        place = frame.f_code, frame.f_lasti
        return begin(known, found, send, recv, *place, limit, name, outputs, spread, claimed) or False
    return run_waited(known, found, send, recv, frame, limit, name)


def run_waited(
    group: ProcessGroup,
    prepared: PreparedOperation,
    send: Any,
    recv: Any,
    frame: FrameType,
    limit: float | None,
    name: str | None,
) -> bool:
    """Make a prepared call and wait for its end; return False, with nothing done, if that is impossible.

    Args:
        frame: of the program, or of the function that made the call.
        limit: seconds; None: the limit of the group.
    """
    if prepared.shared is not None:
        plain = limit is None and name is None
        more = () if plain else (limit, name, None if name is None else prepared.words_named(group, name))
        if prepared.shared.run(group, prepared, send, recv, frame, *more):
            return True
    elif group.order.issued != group.order.moving:
        group.warn_of_threads()
    if not prepared.fits(send, recv):
        return False
    if prepared.at_once and start_and_complete(group, prepared, send, recv, frame, limit, name):
        return True
    return run(group, prepared, send, recv, frame, limit, name)


def run(
    group: ProcessGroup,
    prepared: PreparedOperation,
    send: Any,
    recv: Any,
    frame: FrameType,
    limit: float | None = None,
    name: str | None = None,
) -> bool:
    """Start a prepared operation and wait for it; False, and nothing done, if its memory may be in use."""
    order = group.order
    if is_finalized() or (order.issued != order.moving and handler_calls.found()):
        return False
    if _active and group.compares and claims.conflict_once(prepared.claim(send, recv)):
        return False  # the general way raises on all members
    code, instruction = frame.f_code, frame.f_lasti
    with _guard, group.lock:
        if order.closed:
            return False
        request: Request | None = None
        try:
            request = prepared.begin(group, send, recv, code, instruction, waited=True, limit=limit, name=name)
            with signals.shield:  # if the members differ in sizes, even a small call may enter a blocking call of MPI
                request.wait()
            if request.error is not None:
                raise request.error
        except BaseException as error:
            _lose(group, prepared, frame, request, error)
            raise
    return True


def start_and_complete(
    group: ProcessGroup,
    prepared: PreparedOperation,
    send: Any,
    recv: Any,
    frame: FrameType,
    limit: float | None,
    name: str | None,
) -> bool:
    """Make a small call over MPI, as its request would; False, and nothing done, if anything else is pending.

    A shortcut over the states, for calls that end within the first polls. With 8 bytes, MPICH and two ranks the same call takes
    17 to 21 us by this function, and 38 to 47 us as a request. A call that does not end so goes on as a request.
    """
    agreement, order = prepared.agreement, prepared.agreement.order
    request: Request | None = None
    wrong: BaseException | None = None
    words = prepared.words if name is None else prepared.words_named(group, name)
    began = False
    try:
        with group.lock:
            number, moves = order.issued, prepared.kind is not Kind.BARRIER
            if not agreement.is_idle() or _pending or _active or order.closed or is_finalized():
                return False
            plan = group.plans.get(prepared.plan_key) if moves else None
            if moves and plan is None:
                return False
            _threads.add(_ident())
            began = True
            order.issued = number + 1
            order.calls += 1
            # The last call is let go when this call is over: its end may run code of the program.
            _before, group.last = group.last, (prepared.op, frame.f_code, frame.f_lasti)
            made = agreement.post(words)
            test = made.Test
            for _ in range(waiting.SPIN_POLLS):
                if not test():
                    waiting.give_way()
                    continue
                break
            if not test() or not is_usual(made, words):
                request = _describe(group, prepared, frame, limit, name, words)
                request.send, request.recv = send, recv
                request.start_prepared(prepared, number, words, THROUGH_PLAN if moves else MEETING, made)
                with signals.shield:
                    request.complete()
                return True
            made.release()
            if plan is not None:
                group.plans.move_to_end(prepared.plan_key)
                move = unpack = None
                if prepared.in_place:
                    result = recv.reshape(-1)
                    test = plan.start_in_place(result).Test
                else:
                    move, unpack = prepared_movement(prepared, send, recv)
                    result = move.recv
                    test = plan.start(move).Test
                if not waiting.comes_soon(test):
                    request = _describe(group, prepared, frame, limit, name, words)
                    local_wait(guarded(test, group, request.call), request.policy())
                if move is None:
                    plan.finish_in_place(result)
                else:
                    plan.finish(move)
                if prepared.average and result is not None:
                    without_warnings(np.divide, result, group.size(), out=result)
                if unpack is not None:
                    unpack()
            order.moving = number + 1
            return True
    except BaseException as error:
        wrong = error
        if isinstance(error, MpiError):
            failed = _describe(group, prepared, frame, limit, name, words)
            failed.policy().withdraw(error)
            raise wrap(error, group, failed.call) from error
        if began and not isinstance(error, DistError):
            _lose(group, prepared, frame, request, error, limit, name, words)
        raise
    finally:
        if _guard.noted is not None:
            _guard.answer(wrong)


def _lose(
    group: ProcessGroup,
    prepared: PreparedOperation,
    place: FrameType | CallSite,
    request: Request | None,
    error: BaseException,
    *given: Any,
) -> None:
    """Give a call up that an exception of a signal handler has left before its end."""
    if request is not None and request.done:
        return
    retain_frames(error)
    if request is None:
        request = _describe(group, prepared, place, *given)
    request.withdraw(error)


def _describe(
    group: ProcessGroup,
    prepared: PreparedOperation,
    place: FrameType | CallSite,
    limit: float | None = None,
    name: str | None = None,
    words: Words | None = None,
) -> Request:
    """Return a request that stands for the call that the group made last, for reports."""
    request = Request(group, None, [], group.timeout if limit is None else limit, waited=True)
    request.prepared = prepared
    request.words = words or prepared.eager_words
    site = place if isinstance(place, CallSite) else CallSite(place.f_code, place.f_lasti)
    request.code, request.instruction, request.name, request.seq = site.code, site.instruction, name, group.calls
    return request


def begin(
    group: ProcessGroup,
    prepared: PreparedOperation,
    send: Any,
    recv: Any,
    code: CodeType,
    instruction: int,
    limit: float | None,
    name: str | None,
    outputs: Any,
    spread: Callable[[], None] | None = None,
    claimed: tuple[Any, Any] | None = None,
) -> Work | None:
    """Start a prepared operation, for a wait later; None, and nothing done, if that is impossible now.

    Args:
        spread, claimed: as for :func:`again`.
    """
    reads, arrays = (send, recv) if claimed is None else claimed
    request: Request | None = None
    work: Work | None = None
    claim: Any = None
    wrong: BaseException | None = None
    began, issued, thread = False, group.order.issued, waiting.progress_thread
    try:
        if (thread is not None and thread.every) or group.broken is not None or group.destroyed:
            return None
        places, shared = prepared.places, prepared.later  # type: Any, Any
        # The claim reads the memory of what is in a list, which may be no arrays.
        if places is not None and claimed is None and (not prepared.lists or shared.accepts(send, recv)):
            seconds = group.timeout if limit is None else limit
            words = None if name is None else prepared.words_named(group, name, True)
            if group.level == "full":  # a claim of one array is made by the extension, which takes less time
                simple = prepared.recv_shapes is not None and (send is recv or send is None)
                claim = True if simple else prepared.claim(reads, arrays).with_snapshot()
            request = shared.begin(
                group, prepared, send, recv, code, instruction, seconds, outputs, places, name, words, claim
            )
            if request is not None:
                work = Work(request, request.claim)
                return work
        if not prepared.fits(send, recv):
            return None
        if prepared.shared is None or prepared.segment is not None:
            if prepared.lists and not prepared.moves_lists(send, recv):
                return None
            execution.enter(group, prepared.op)
        with group.lock:
            if group.order.closed:
                return None
            before: Any = b""
            if group.compares:
                if not isinstance(claim, RequestClaim):
                    claim = prepared.claim(reads, arrays).with_snapshot()
                if _active and claims.conflicts(claim):
                    return None  # the general way raises on all members
                before = seal(claim.array)
            _threads.add(_ident())
            began = True
            request = prepared.begin(
                group, send, recv, code, instruction, before, arrays, spread, limit=limit, name=name
            )
            request.outputs = list(outputs) if type(outputs) is list else [outputs]
            if claim is not None:
                request.claim = claim
                claim.request = request
            is_over = request.round is None and request.Test()  # a round that has just been posted is not over
            may_seal = not group.pair.selection.copies_once(prepared.kind, prepared.nbytes)  # other members may write
            if request.state is MOVING and before and request.schedule is IN_SHARED_MEMORY and may_seal:
                request._current = Sealed(request)  # before another thread can test the request
            if not is_over:
                _pending.append(request)
            work = Work(request, claim)
            if claim is not None:
                claims.claim(claim)
    except BaseException as error:
        wrong = error
        request = request or _orphan(group, recv, issued)
        if began or request is not None:
            _lose(group, prepared, CallSite(code, instruction), request, error)
        if request is not None and request.claim is not None:
            claims.drop(request.claim)
        raise
    finally:
        if work is None and isinstance(claim, RequestClaim) and (request is None or request.claim is not claim):
            claim.clear()  # the claim and its ranges refer to each other, and hold the arrays
        if _guard.noted is not None:
            answer(work, wrong)
    return work


def _orphan(group: ProcessGroup, recv: Any, issued: int) -> Request | None:
    """Return the request of a call that the extension has posted and that has no Work; None if there is none.

    An exception of a signal handler may come when the extension has returned the request, and before the request has a name.

    Args:
        issued: the number of the next call of the group before the extension was called.
    """
    for each in reversed(tuple(_pending)):
        if type(each) is not Request or each.group is not group or each.number < issued:
            continue
        if each.recv is recv and id(each) not in group.unwaited:
            return each
    return None


# What the extension calls from ``run``; the lock of the group is held.


def _finish(
    group: ProcessGroup, prepared: PreparedOperation, send: Any, recv: Any, frame: FrameType, *given: Any
) -> bool:
    """Wait for the other members in a call that the extension has posted, and read its result.

    Args:
        given: the limit and the name that the program gives the call, and the words with that name.
    """
    wrong: BaseException | None = None
    request: Request | None = None
    try:
        order = prepared.agreement.order
        request = _describe(group, prepared, frame, *given)
        request.outputs = [send, recv]
        request.send, request.recv = send, recv
        number, channel = order.issued - 1, prepared.agreement.channel
        posted = channel.posted(order.round)  # type: ignore[attr-defined]
        schedule = AT_ONCE if prepared.segment is None else EAGER
        request.start_prepared(prepared, number, request.words, schedule, posted)
        order.posted = number + 1
        with signals.shield:
            request.complete()
    except BaseException as error:
        wrong = error
        _lose(group, prepared, frame, request, error, *given)
        raise
    finally:
        if _guard.noted is not None:
            _guard.answer(wrong)
    return True


def _await(
    group: ProcessGroup, prepared: PreparedOperation, caller: Any, step: int, root_only: bool, *given: Any
) -> None:
    """Wait for the other members, or for the root, in the midst of a call that the extension makes in pieces.

    Args:
        caller: the frame of the program's call, or its request.
        given: as for :func:`_finish`.
    """
    request = caller if isinstance(caller, Request) else _describe(group, prepared, caller, *given)
    segment: Any = prepared.segment
    wrong: BaseException | None = None
    try:
        test = partial(segment.has_reached, step, prepared.root if root_only else -1)
        local_wait(test, request.policy())
    except BaseException as error:
        wrong = error
        retain_frames(error)
        raise
    finally:
        if _guard.noted is not None:
            _guard.answer(wrong)


def _give_up(
    group: ProcessGroup, prepared: PreparedOperation, frame: FrameType, call: int, error: BaseException, *given: Any
) -> None:
    """Give a call up that the extension has posted, if a signal handler raised as ``_finish`` began, or in ``_await``."""
    if prepared.agreement.order.posted == call and group.broken is None:
        _lose(group, prepared, frame, None, error, *given)


_guard.inside.update(each.__code__ for each in (_finish, _await, _give_up, run, begin, start_and_complete))


if extension is not None:
    extension.configure(_finish, _give_up, _await, _pending, _active, _threads, _inside)
    kinds = Request, type(threading.RLock()), RequestClaim
    extension.configure_requests(*kinds, claims.reusable, claims.dropped, observers, POSTED, COMPLETE, AT_ONCE, EAGER)


def _forget_in_child() -> None:
    if extension is not None:
        extension.configure_requests()
    known = registry.current()
    for group in () if known is None else known.groups.values():
        group.prepared = {}


os.register_at_fork(after_in_child=_forget_in_child)
