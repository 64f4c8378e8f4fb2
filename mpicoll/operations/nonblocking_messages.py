"""Messages under way: how a receive ends, and ``isend`` and ``irecv`` that are made again.

An ``isend`` or ``irecv`` of a plain array that is made again with the same peer, tag, shape and dtype takes the persistent
request that ``persistent`` keeps for ``send`` and ``recv``. What is rarely asked for, such as the description of the call, is
made when it is. Anything unusual takes the long way through ``p2p`` and ``matching``: a request that is under way already,
memory that another operation uses, receives that wait for messages, a message that differs.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from types import CodeType, FrameType
from typing import Any

from mpi4py import MPI

from mpicoll.checks.memory_in_use import SNAPSHOT_BYTES, RequestClaim, claims, written
from mpicoll.diagnosis.call import Call
from mpicoll.diagnosis.report.entries import Entry, entry_of
from mpicoll.diagnosis.report.report import with_calls
from mpicoll.errors import CollectiveMismatchError
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.memory.adapt import adapt
from mpicoll.memory.memory import Array, Memory
from mpicoll.operations import persistent
from mpicoll.operations.operation import Operation
from mpicoll.operations.persistent import PersistentReceive, PersistentSend, message_call
from mpicoll.operations.states import MOVING
from mpicoll.operations.work import Work
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import CallSite
from mpicoll.runtime.mpi_library import retain_for_ever
from mpicoll.transports import large_counts
from mpicoll.transports.base import Request
from mpicoll.transports.mpi.envelope import Envelope, describe
from mpicoll.transports.mpi.matching import Message, Receive

_get_ident = threading.get_ident
_guard = signals.guard
_new_lock = threading.RLock


def send_again(group: ProcessGroup, again: PersistentSend, tensor: Array, frame: FrameType) -> Work | None:
    """Start a send that was made before; None when it has to go the long way.

    Args:
        tensor: a contiguous NumPy array of the shape and dtype of ``again``.
        frame: of the program, which calls ``isend`` there.
    """
    operation: _SendAgain | None = None
    try:
        with _guard:
            if (again.instruction != frame.f_lasti or again.code is not frame.f_code) and not again.move_to(
                group, frame, "isend"
            ):
                return None
            try:
                again.take()
            except persistent.Busy:
                return None
            try:
                made = _SendAgain(group, again, tensor, frame)
                claim = None
                if group.compares:
                    claim = made.claim = RequestClaim(tensor, writes=False)
                    claim.request = made
                    if claims.active and claims.conflicts(claim):
                        again.give_back(None)
                        return None  # the long way says what is wrong
                if again.elements is not None:
                    again.elements[...] = tensor
                    again.start()
                else:
                    if claim is not None and tensor.nbytes <= SNAPSHOT_BYTES:
                        claim.results = tensor.tobytes()
                    with group.posting:
                        again.start()
                        made.body = _start_body(again, tensor)
                    waiting.transfer_hint(tensor.nbytes)
                again.count += 1
                signals.threads.add(_get_ident())
                operation = made
            except BaseException as error:
                persistent.give_up(group, again, tensor, error)
                raise
    except BaseException:
        if operation is not None:  # Ctrl-C, once it was under way: nobody has a Work of it
            operation.claim = None
            waiting.pending.append(operation)
        raise
    return _work(operation, claim)


def receive_again(group: ProcessGroup, again: PersistentReceive, tensor: Array, frame: FrameType) -> Work | None:
    """Start a receive that was made before; None when it has to go the long way. Arguments as in :func:`send_again`."""
    receiver = group.pair.receiver
    key, posted = again.key, receiver.posted
    with _guard:
        if receiver.waiting or receiver.queues or key in posted:
            return None
        locked = False
        operation: _ReceiveAgain | None = None
        try:
            locked = receiver.lock.acquire(blocking=False)
            # Once more, since another thread may have been faster.
            if not locked or receiver.waiting or receiver.queues or key in posted or again.rank is None:
                return None
            made = _ReceiveAgain(group, again, tensor, frame)
            claim = None
            if group.compares:
                claim = made.claim = RequestClaim(tensor, writes=True)
                claim.request = made
                if claims.active and claims.conflicts(claim):
                    return None
                if tensor.nbytes <= SNAPSHOT_BYTES:
                    made.before = tensor.tobytes()
            again.code, again.instruction = frame.f_code, frame.f_lasti
            operation = made
            posted.append(key)
            again.start()
            signals.threads.add(_get_ident())
            # Elements that travel apart are asked for when their message has come, and a later receive may wait for this one.
            waiting.pending.append(operation)
        except BaseException as error:
            if operation is not None:
                waiting.drop(operation)
                persistent.give_up(group, again, tensor, error)
            raise
        finally:
            if locked:
                receiver.lock.release()
    return _work(operation, claim)


def _work(operation: _Again, claim: RequestClaim | None) -> Work:
    work = Work(operation)
    if claim is not None:
        work.with_reusable_claim(claim)
    return work


def _start_body(again: PersistentSend | PersistentReceive, tensor: Array) -> MPI.Request:
    """Start to move the elements that travel apart from their envelope."""
    body = persistent.body_of(again, tensor)
    if body is None:
        return large_counts.post(again.post, tensor, again.peer, again.tag)
    body.Start()
    return body


class _Again(Operation):
    """An operation with the request that its group keeps for it.

    Attributes:
        again: the request, and what belongs to it.
        array: the program's.
        body: what moves the elements that travel apart from their envelope, once it has begun.
    """

    __slots__ = ("again", "array", "body", "code", "instruction")
    name = ""

    def __init__(
        self, group: ProcessGroup, again: PersistentSend | PersistentReceive, tensor: Array, frame: FrameType
    ) -> None:
        # All that Operation sets, but the description of the call.
        self.group = group
        self.outputs = [tensor]
        self.held = again
        self.limit = group.timeout
        self.peer = group.ranks[again.peer]
        self.tag = again.tag
        self.state = MOVING
        self.number = self.returned = -1
        self.round = self.agreed = self.error = self.future = self.landing = None
        self.waited = self._in_effect = self._advancing = False
        self.polled = self.next_look = 0.0
        self.steps = _NONE
        self._call = self.prepared = self.start_of = self.schedule = self.words = self.claim = None
        self._withdraw = self._transfer = self._current = None
        self._lock = _new_lock()
        self.again: Any = again
        self.array = tensor
        self.body: MPI.Request | None = None
        self.code: CodeType = frame.f_code
        self.instruction: int = frame.f_lasti

    @property
    def call(self) -> Call:
        """The description of the call, made when it is asked for."""
        again, site = self.again, CallSite(self.code, self.instruction)
        return message_call(self.name, self.group, self.array.dtype, self.array.size, again.peer, again.tag, site)

    def expected(self) -> bytes | None:
        """Return what must be in the array when the program has waited; None: nobody compares."""
        return None

    def _keep(self) -> None:
        super()._keep()
        retain_for_ever(self.again, self.body, self.array)


def _nothing() -> Generator[Request, None, int | None]:
    yield from ()
    return None


_NONE = _nothing()
"""The steps of an operation that takes none."""


class _SendAgain(_Again):
    """A send.

    Attributes:
        through: MPI is done with it, so that its request can be used again.
    """

    __slots__ = ("through",)
    name = "isend"

    def __init__(self, group: ProcessGroup, again: PersistentSend, tensor: Array, frame: FrameType) -> None:
        super().__init__(group, again, tensor, frame)
        self.through = False

    def expected(self) -> bytes | None:
        """Return the elements of a small message."""
        return None if self.again.elements is None else self.again.elements.tobytes()

    def unclaimed(self) -> None:
        """Forget the claim; the request of MPI may be used again."""
        super().unclaimed()
        if self.through:
            self.again.give_back(None)

    def _move(self) -> bool:
        again = self.again
        if not again.test() or (self.body is not None and not self.body.Test()):
            return False
        self.through = True
        if self.claim is None:
            again.give_back(None)
        return True


class _ReceiveAgain(_Again):
    """A receive whose message MPI puts into memory of the library, from where it goes to the program's when somebody looks.

    Attributes:
        before: what was in the program's array when it was started, to notice writes; None where none are looked for.
        dirty: it was written before the message came.
    """

    __slots__ = ("before", "dirty")
    name = "irecv"

    def __init__(self, group: ProcessGroup, again: PersistentReceive, tensor: Array, frame: FrameType) -> None:
        super().__init__(group, again, tensor, frame)
        self.before: bytes | None = None
        self.dirty = False

    def _move(self) -> bool:
        if self.steps is not _NONE:
            return super()._move()
        again = self.again
        if self.body is None:
            if not again.test():
                return False
            self.dirty = self.before is not None and self.array.tobytes() != self.before
            if again.words[0] != again.expected:
                self._take_the_long_way()
                return super()._move()
            if again.elements is None:
                self.body = _start_body(again, self.array)
                waiting.transfer_hint(self.array.nbytes)
            elif self.array.shape == again.shape:
                self.array[...] = again.elements
            else:  # the program has given it another one meanwhile
                self.array.reshape(-1)[...] = again.elements.reshape(-1)
        if self.body is not None and not self.body.Test():
            return False
        again.count += 1
        posted = self.group.pair.receiver.posted
        if again.key in posted:
            posted.remove(again.key)
        self.returned = again.peer
        if self.dirty:
            raise written(self.name, self.call.site, self.group.display)
        if self.claim is not None:
            self.claim.snapshot_results()
        return True

    def _take_the_long_way(self) -> None:
        """Hand the message, which is not as expected, to those who look at messages."""
        group, again, receiver = self.group, self.again, self.group.pair.receiver
        memory = adapt(self.array, "tensor", writable=True)
        receive = receiver.adopt(Message(again.peer, again.tag, again.buffer.copy()), memory, exact=group.compares)
        receive.dirty = self.dirty
        if self.claim is not None:
            receive.watch(self.claim)
        self.steps = receiving(group, self.call, memory, receive)
        self._withdraw = lambda: receiver.withdraw(receive)
        receiver.watch()

    def _take_back(self) -> None:
        if self.steps is _NONE and not self.done:
            persistent.take_back(self.group, self.again)
        super()._take_back()


def receiving(
    group: ProcessGroup, call: Call, memory: Memory, receive: Receive
) -> Generator[Request, None, int | None]:
    """Wait for a message; the steps of an Operation, which end with the sender's rank in the group."""
    yield receive
    source = receive.sender
    if receive.refused is not None:
        raise _misfit(group, call, memory, receive, receive.refused)
    group.count_received(source, receive.tag)
    if receive.dirty:
        raise written(call.op, call.site, group.display)
    return source


def _misfit(
    group: ProcessGroup, call: Call, memory: Memory, receive: Receive, sent: Envelope
) -> CollectiveMismatchError:
    """Return the error of a receive whose message does not fit."""
    sender, me = group.ranks[receive.sender], group.ranks[group.rank()]
    error = CollectiveMismatchError(
        f"{call.op} on group {group.display}: rank {sender} sent {sent.describe(memory)} (tag {receive.tag}, "
        f"{receive.place or 'from a place that is not known'}), {call.op} on rank {me} of "
        f"{describe(memory.name, memory.flat.size)} at {call.site}. The message is not lost: a "
        f"{'recv' if sent.objects < 0 else 'recv_object_list'} of {sent.describe(memory)} takes it"
    )
    op, _, site = receive.place.partition(" at ")
    what: tuple[tuple[str, str], ...] = (
        ("dtype", sent.name or (memory.name if sent.alike(memory) else "another")),
        ("elements", str(sent.nbytes // memory.flat.itemsize if sent.alike(memory) else sent.count)),
    )
    if sent.objects >= 0:
        what = (("objects", str(sent.objects)),)
    key = (("peer", f"to rank {me}"), ("tag", str(receive.tag)), *what)
    taken = entry_of(call, me, peer=sender)
    return with_calls(
        error, group.display, [sender, me], [Entry(((sender, sender),), op or "send", key, site=site, peer=me), taken]
    )
