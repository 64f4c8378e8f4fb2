"""Messages between two ranks: blocking ones that are prepared, and the requests of ``isend`` and ``irecv``.

A ``send`` or ``recv`` of a plain array that is made again with the same peer, tag, shape and dtype uses a persistent request
(``transports.mpi.messages``), and so do ``isend`` and ``irecv``. A ``recv`` without one, as from any rank, takes a message of few
elements at once if it has arrived, or arrives soon. The general way (``operations.prepare.messages`` and
``transports.mpi.matching``) is for all else: a persistent request that is in use, memory that a pending operation uses, other
receives that wait, and a message that differs.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import numpy as np

from mpicoll.checks.memory_in_use import RequestClaim, claims, written
from mpicoll.checks.memory_ranges import contents, differ
from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import CollectiveMismatchError
from mpicoll.groups import registry
from mpicoll.groups.process_group import MessageCache, ProcessGroup
from mpicoll.memory.memory import Array
from mpicoll.memory.protocols import view_of
from mpicoll.operations.operation import (
    adopt,
    call_of,
    finish,
    give_up,
    receive_operation,
    receive_steps,
    take_back,
)
from mpicoll.operations.request import Request
from mpicoll.operations.states import MOVING
from mpicoll.operations.work import Work, answer
from mpicoll.runtime import handler_calls, signals, waiting
from mpicoll.runtime.call_site import CallSite, FrameFinder, follow
from mpicoll.runtime.native import found as extension
from mpicoll.transports.mpi.messages import Busy, PersistentMessage, PersistentReceive, PersistentSend

PACKED_BYTES = 16 * 1024 * 1024
"""Most bytes that the persistent sends of a group, and the receives, keep for elements of arrays that are not contiguous."""

# Objects that each call uses, as globals of this module.
_default = registry.default
_claims = claims.active
_frame: FrameFinder = sys._getframe
_get_ident = threading.get_ident
_guard = signals.guard
_ndarray = np.ndarray
_new_lock = threading.RLock
_packing = threading.Lock()
_pending = waiting.pending
_inside = handler_calls.inside
_threads = signals.threads


def _find_frames(find: FrameFinder) -> None:
    global _frame
    _frame = find


follow(_find_frames)


def move_prepared(tensor: Any, rank: Any, group: Any, tag: Any, receives: bool, depth: int = 2) -> bool:
    """Send or receive an array by a persistent request; return False, and do nothing, if there is none that can be used now.

    Args:
        receives: the message is received.
        depth: frames between this function and the program.
    """
    known: Any = _default.world if group is None else group
    if type(tensor) is not _ndarray:
        tensor = view_of(tensor, depth + 1)
    try:
        cache = known.receives if receives else known.sends
        again = cache.last
        if again is None or again.rank is not rank or again.tag is not tag:
            again = _find(cache, tensor, rank, tag, receives)
        frame = _frame(depth)
    except (AttributeError, ValueError) as error:  # no group, or not a member; called from C
        if handler_calls.raised(error) is not None:
            raise
        return False
    if again is None or _inside or (extension is None and (_pending or _claims)):
        return False  # without the extension, nothing here compares memory or progresses other requests
    if _move(known, again, tensor, frame):
        return True
    again = _find(cache, tensor, rank, tag, receives)
    return again is not None and _move(known, again, tensor, frame, moves_site=not receives)


def _move(group: ProcessGroup, again: Any, tensor: Array, frame: FrameType, moves_site: bool = False) -> bool:
    """Make a message by its persistent request; return False, and do nothing, if that is impossible now.

    Args:
        moves_site: change the call site of a send first.
    """
    wrong: BaseException | None = None
    try:
        if moves_site and not again.move_to(group.known_sites, frame):
            return False
        moved = again.move(tensor, frame.f_code, frame.f_lasti)
        if moved is None:
            return False
        group.last = again
        if moved is not True:
            (_complete_send if again.sending else _complete_receive)(group, again, tensor, moved or None)
    except BaseException as error:
        wrong = error
        # After a received message that does not fit nothing has changed.
        if again.sending or not isinstance(error, CollectiveMismatchError):
            again.code, again.instruction = frame.f_code, frame.f_lasti
            give_up(group, again, tensor, error)
        raise
    finally:
        if _guard.noted is not None:
            _guard.answer(wrong)
    return True


# Ctrl-C in this function is noted, and answered at its end or in a wait. To enter the guard would take 0.1 us, of the 1 us that
# the function takes in addition to MPI.
_guard.inside.add(_move.__code__)


def _complete_send(group: ProcessGroup, again: PersistentSend, tensor: Array, payload: Any) -> None:
    """Wait for what is pending of a send.

    Args:
        payload: the request of the elements that move apart, or None.
    """
    for request in (again.request, payload):
        if request is not None and not request.Test():
            finish(group, again, tensor, request.Test)
    again.give_back()


def _complete_receive(group: ProcessGroup, again: PersistentReceive, tensor: Array, payload: Any) -> None:
    """Wait for what is pending of a receive.

    Args:
        payload: the request of the elements that move apart; None: the envelope is pending, or is not as expected.
    """
    if payload is None:
        if not again.test():
            finish(group, again, tensor, again.test)
        if again.words[0] != again.expected:
            memory, receive = adopt(group, again, tensor)
            receive_operation(group, call_of(again), memory, receive, tensor, group.timeout).complete(group.timeout)
            return
        moved: Any = again.moved(tensor)
        if again.elements is None:
            payload = again.start_payload(moved, again.payload_of(moved))
    else:  # of the memory that moves: another thread may have changed the strides
        moved = again.packed if again.moves_packed(payload) else tensor
    if payload is not None and not payload.Test():
        finish(group, again, tensor, payload.Test)
    if moved is not tensor:
        tensor[...] = moved
    again.posted.remove(again.key)
    again.count += 1


def _find(cache: MessageCache, tensor: Any, rank: Any, tag: Any, writes: bool) -> Any:
    """Return the persistent message for an array, or None.

    Args:
        writes: the message is received into the array.
    """
    if type(rank) is not int or type(tag) is not int:
        return None
    again = cache.last
    same = again is not None and again.rank == rank and again.tag == tag
    if same and again.fits(tensor):
        return again
    if type(tensor) is not _ndarray or not (tensor.flags.behaved if writes else tensor.flags.aligned):
        return None
    found = cache.get((rank, tag, tensor.shape, tensor.dtype))
    if found is None:
        return None
    if found.elements is None and found.packed is None and not tensor.flags.c_contiguous:
        with _packing:
            used = sum(each.packed.nbytes for each in tuple(cache.values()) if each.packed is not None)
            if used + tensor.nbytes > PACKED_BYTES:
                return None
            if found.packed is None:  # checked again, since another thread may have been faster
                found.packed = np.empty(tensor.shape, tensor.dtype)
    found.dtype = tensor.dtype  # an equal dtype may be another object, as that of an unpickled array
    cache.last = found
    return found


def start_prepared(tensor: Any, rank: Any, group: Any, tag: Any, receives: bool) -> Work | None:
    """Start a message by a persistent request; return None, and do nothing, if there is none that can be used now.

    The extension starts a message if no claim of memory may be in conflict with the message.

    Args:
        receives: the message is received.
    """
    known: Any = _default.world if group is None else group
    array = tensor if type(tensor) is _ndarray else view_of(tensor, 3)
    try:
        cache = known.receives if receives else known.sends
        frame = _frame(2)
    except (AttributeError, ValueError):  # no group, or not a member; called from C
        return None
    if _inside or array is None:
        return None  # the general way raises if a signal handler makes the call
    again = cache.last
    if again is None or again.rank is not rank or again.tag is not tag:
        again = _find(cache, array, rank, tag, receives)
        if again is None:
            return None
    work = _begin(known, again, array, frame)
    if work is None and not again.fits(array):
        again = _find(cache, array, rank, tag, receives)
        if again is None:
            return None
        work = _begin(known, again, array, frame)
    if work is None and again.fits(array):
        work = (_start_receive if receives else _start_send)(known, again, array, frame)
    return work if work is None or array is tensor else work.with_output(tensor)


def _begin(group: ProcessGroup, again: PersistentMessage, tensor: Array, frame: FrameType) -> Work | None:
    """Start a message by the extension; return None, and do nothing, if that is impossible now."""
    work: Work | None = None
    wrong: BaseException | None = None
    before = again.current
    try:
        request = again.begin(tensor, frame.f_code, frame.f_lasti, group)
        if request is not None:
            work = Work(request, request.claim)
            if again.inside < 0 and again.sending:
                waiting.transfer_hint(again.nbytes)
    except BaseException as error:
        wrong = error
        request = again.current
        if request is not before and request is not None:  # otherwise a signal handler has raised before the start
            if request.claim is not None:
                claims.drop(request.claim)
            waiting.drop(request)
            give_up(group, again, tensor, error)
        raise
    finally:
        if _guard.noted is not None:
            answer(work, wrong)
    return work


_guard.inside.add(_begin.__code__)


def _start_send(group: ProcessGroup, again: PersistentSend, tensor: Array, frame: FrameType) -> Work | None:
    operation: _PreparedSend | None = None
    try:
        with _guard:
            same = again.instruction == frame.f_lasti and again.code is frame.f_code
            if not (same or again.move_to(group.known_sites, frame, "isend")):
                return None
            try:
                again.take()
            except Busy:
                return None
            try:
                made = _PreparedSend(group, again, tensor, frame)
                claim, moved = None, again.moved(tensor)
                if again.compares:
                    claim = _claim(made, False)
                    if claim is None:
                        again.give_back()
                        return None  # the general way raises the error
                if claim is not None and again.elements is None:
                    made.after = contents(tensor)
                if moved is not tensor:
                    moved[...] = tensor
                if again.elements is not None:
                    again.start()
                else:
                    made._current = again.start_apart(moved, group.posting)
                    waiting.transfer_hint(tensor.nbytes)
                again.count += 1
                _threads.add(_get_ident())
                operation = made
            except BaseException as error:
                give_up(group, again, tensor, error)
                raise
    except BaseException:
        if operation is not None:  # Ctrl-C after the start: there is no Work of the operation
            operation.claim = None
            _pending.append(operation)
        raise
    return _work(operation, claim)


def _start_receive(group: ProcessGroup, again: PersistentReceive, tensor: Array, frame: FrameType) -> Work | None:
    receiver = group.pair.receiver
    key, posted = again.key, receiver.posted
    with _guard:
        if receiver.waiting or receiver.queues or key in posted:
            return None
        locked = False
        operation: _PreparedReceive | None = None
        try:
            locked = receiver.lock.acquire(blocking=False)
            # Checked again, since another thread may have been faster.
            if not locked or receiver.waiting or receiver.queues or key in posted or again.rank is None:
                return None
            made = _PreparedReceive(group, again, tensor, frame)
            moved = again.moved(tensor)
            if again.elements is None and moved is not tensor:
                made.recv = moved
            claim = None
            if again.compares:
                claim = _claim(made, True)
                if claim is None:
                    return None
                made.before = contents(tensor)
            again.code, again.instruction = frame.f_code, frame.f_lasti
            operation = made
            posted.append(key)
            again.start()
            _threads.add(_get_ident())
            # Elements that move apart are requested when their envelope has been received, and a later receive may wait for this.
            _pending.append(operation)
        except BaseException as error:
            if operation is not None:
                waiting.drop(operation)
                give_up(group, again, tensor, error)
            raise
        finally:
            if locked:
                receiver.lock.release()
    return _work(operation, claim)


def _claim(made: _PreparedMessage, writes: bool) -> RequestClaim | None:
    """Claim the memory of a message; return None if a pending operation may use that memory in conflict with the message."""
    claim = made.claim = RequestClaim(made.arrays, writes=writes)
    claim.request = made
    if claims.conflicts(claim):
        claim.clear()
        return None
    return claim


def _work(operation: _PreparedMessage, claim: RequestClaim | None) -> Work:
    work = Work(operation, claim)
    if claim is not None:
        claims.claim(claim)
    return work


class _PreparedMessage(Request):
    """A request with a persistent message, which its group owns.

    ``held`` is the persistent message, and ``arrays`` the array of the program. ``_current`` is the request of the elements that
    move apart from their envelope, once they move.
    """

    __slots__ = ()
    name = ""

    def __init__(self, group: ProcessGroup, again: PersistentMessage, tensor: Array, frame: FrameType) -> None:
        self.group = group
        self.outputs = [tensor]
        self.held = again
        self.limit = group.timeout
        self.peer = group.ranks[again.peer]
        self.tag = again.tag
        self.state = MOVING
        self.returned = -1
        self._lock = _new_lock()
        self.arrays = tensor
        self.code = frame.f_code
        self.instruction = frame.f_lasti

    @property
    def call(self) -> CallDescription:
        """The description of the call, made when it is needed."""
        return CallDescription(self.name, self.held.described, CallSite(self.code, self.instruction))


class _PreparedSend(_PreparedMessage):
    """A send; ``after`` is what must be in the array when the program has waited, empty if nobody compares."""

    __slots__ = ()
    name = "isend"

    def _advance(self) -> None:
        again = self.held
        if not again.test() or (self._current is not None and not self._current.Test()):
            return
        if self.claim is not None and again.elements is not None:
            self.after = again.elements.tobytes()
        again.current = None
        self._complete()
        again.give_back()  # last: until the request is over, only this request may test the message


class _PreparedReceive(_PreparedMessage):
    """A receive: MPI writes the message into memory of the library, and a test copies the elements into the array.

    ``before`` is what the array held at the start, to find writes of the program; None if they are not looked for, and once the
    message has come and there were none. ``after`` is what the extension found there when the elements had arrived, if it looked
    before the program waited. ``move`` is the general receive of a message that was not as expected. ``recv`` is memory of the
    message to which elements that move apart go, if they are copied to ``arrays`` from there; otherwise None.
    """

    __slots__ = ()
    name = "irecv"

    def _advance(self) -> None:
        if self._run_steps() if self.move is not None else self._receive():
            self._complete()

    def _receive(self) -> bool:
        """Progress the receive; return whether it is complete."""
        again, array = self.held, self.arrays
        moved = again.elements if again.elements is not None else array if self.recv is None else self.recv
        if self._current is None:
            if not again.test():
                return False
            again.current = None
            if self.before is not None and not differ(array, self.before):
                self.before = None
            if again.words[0] != again.expected:
                self._go_the_general_way()
                return self._run_steps()
            if again.elements is None:
                self._current = again.start_payload(moved, again.payload_of(moved))
                waiting.transfer_hint(again.nbytes)
        elif again.current is self:  # the extension has requested the elements
            again.current = None
            waiting.transfer_hint(again.nbytes)
        if self._current is not None and not self._current.Test():
            return False
        if moved is not array and not self.after:
            if array.shape == again.shape:
                array[...] = moved
            else:  # the program has changed the shape meanwhile
                array.flat[:] = moved.reshape(-1)
        again.count += 1
        posted = self.group.pair.receiver.posted
        if again.key in posted:
            posted.remove(again.key)
        self.returned = again.peer
        if self.before is not None:
            raise written(self.name, self.call.site, self.group.display)
        if self.claim is not None and not self.after:
            self.claim.snapshot_results()
        return True

    def _go_the_general_way(self) -> None:
        memory, receive = adopt(self.group, self.held, self.arrays)
        receive.dirty = self.before is not None
        if self.claim is not None:
            receive.watch(self.claim)
        self.steps = receive_steps(self.group, self.call, memory, receive)
        self.move = receive
        receive.receiver.watch()

    def _take_back(self) -> None:
        if self.move is not None:
            self.move.receiver.withdraw(self.move)
        elif not self.done:
            take_back(self.group, self.held)


if extension is not None:
    extension.configure_messages(_PreparedSend, _PreparedReceive, MOVING)
