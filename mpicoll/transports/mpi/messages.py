"""Post messages to MPI: persistent requests for messages that are made again, and the elements that move apart.

A persistent request (MPI-4.1 section 3.9) uses memory of the library, with the words of its envelope written once. A start
only copies few elements in or out, and compares one word. Many elements move apart from their envelope, directly between the
arrays of the programs.

A persistent receive is posted to MPI itself, with room for any message, and only while no other receive waits. So messages
are matched in MPI's order. ``Receiver.posted`` prevents other receives from overtaking it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll.memory.dtypes import element
from mpicoll.memory.layouts import overlaps
from mpicoll.memory.memory import Array
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import CallSite
from mpicoll.runtime.native import found as extension
from mpicoll.transports import large_counts
from mpicoll.transports.mpi.collectives import AllRequests
from mpicoll.transports.mpi.envelope import EAGER_BYTES, ROOM, SMALL_BYTES, WORDS, KnownSites, first_word
from mpicoll.transports.mpi.matching import Receiver

ANY_SOURCE = MPI.ANY_SOURCE

MOST_PAYLOADS = 4
"""Number of arrays for which a persistent message has a persistent request of its elements."""

_MOST_POLLS = 4096
_address = MPI.Get_address
_threads = signals.threads

Busy = IndexError
"""The error of ``take``."""


@dataclass(slots=True, init=False, repr=False, eq=False)
class PythonMessageFields:
    """The fields of a persistent message, each None or 0 until it is set, on a rank without the extension.

    Attributes:
        elements: the few elements of a message in ``buffer``; None if the elements move apart.
        packed: memory for elements that move apart, of arrays that are not contiguous; None until there was one.
        payloads: persistent requests of elements that move apart, by the address of the array; they refer to no memory.
        words: the words of the envelope in ``buffer``.
        spins: the number of polls before a wait like any other.
        nbytes: bytes of the elements.
        rank, tag, shape, dtype: the arguments of the program. ``rank`` is None once the group has dropped the message.
        peer: the rank in the group.
        count, begun: numbers of starts, the second by the extension, in addition to the numbers of the group.
        code, instruction: the call site in the program.
        described: the parts of the description of its call.
        compares: the group compares messages.
        request, start, test: the persistent request of MPI, and its methods.
        key: of a receive: (source, tag).
        expected: of a receive: first word of a message that fits and has no text of a call site.
        acquire, release: of the lock under which messages of this kind are posted.
        posted, waiting, queues: of a receive: of the receiver of its group.
        inside: bytes of the elements in the envelope; -1 if the elements move apart.
        current: the request that the extension has started and not completed.
    """

    _free: list[None]
    _datatype: MPI.Datatype | None
    _make: Any
    _post: Any
    buffer: Any
    words: Any
    elements: Any
    packed: Array | None
    payloads: dict[int, MPI.Prequest]
    code: CodeType | None
    described: tuple[Any, ...]
    rank: int | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    key: tuple[int, int]
    request: MPI.Prequest
    start: Any
    test: Any
    acquire: Any
    release: Any
    posted: Any
    waiting: Any
    queues: Any
    current: Any
    compares: bool
    count: int
    expected: int
    inside: int
    instruction: int
    nbytes: int
    peer: int
    spins: int
    begun: int
    tag: int

    def __new__(cls, *_args: Any, **_more: Any) -> Any:
        made = object.__new__(cls)
        for name in PythonMessageFields.__slots__:
            setattr(made, name, None)
        made._free = [None]
        return made

    def take(self) -> None:
        """Acquire the right to use the message, which one call has at a time; raise Busy if another call has it."""
        self._free.pop()  # no other thread can run inside

    def give_back(self) -> None:
        """Release the right to use the message."""
        self._free.append(None)

    def begin(self, *_given: Any) -> Any:
        """Return None: only the extension starts a message in one step."""
        return None

    def fits(self, array: Any) -> bool:
        """Return whether the message can move an array of the program, where it stands or through memory of the message."""
        if type(array) is not np.ndarray or array.dtype is not self.dtype or array.shape != self.shape:
            return False
        flags, receives = array.flags, self.posted is not None
        if not flags.aligned or (receives and not flags.writeable):
            return False
        return flags.c_contiguous or not (
            (self.elements is None and self.packed is None) or (receives and overlaps(array))
        )

    def move(self, array: Array, code: CodeType, instruction: int) -> Any:
        """Make the message, and poll MPI until all of it has moved.

        Args:
            code, instruction: the call site; that of a send must be the one in its envelope.

        Returns:
            True: the message has moved. None, with nothing done: another call uses the message, the array does not fit, or
            another receive may get the message. Otherwise something is pending: of a send without a request of its elements,
            or of a receive whose envelope is pending or not as expected, False; else the request of the elements, which move
            apart.
        """
        if not self.fits(array) or self.rank is None:
            return None
        apart = self.elements is None
        if self.posted is not None:
            return self._receive(array, apart, code, instruction)
        return self._send(array, apart) if self.code is code and self.instruction == instruction else None

    def payload_of(self, moved: Array) -> MPI.Prequest | None:
        """See :class:`PersistentMessage`."""
        raise NotImplementedError

    def moved(self, array: Array) -> Array:
        """See :class:`PersistentMessage`."""
        raise NotImplementedError

    def _send(self, array: Array, apart: bool) -> Any:
        try:
            self.take()
        except Busy:
            return None
        moved = self.moved(array)
        payload = self.payload_of(moved) if apart else None
        if apart and (payload is None or not self.acquire(False)):
            self.give_back()
            return None
        try:
            if moved is not array:
                moved[...] = array
            self.start()
            if payload is not None:
                payload.Start()
        finally:
            if apart:  # no other message of the tag may stand between the envelope and the elements
                self.release()
        self.count += 1
        _threads.add(get_ident())
        if not self._poll(self.test) or not (payload is None or self._poll(payload.Test)):
            return payload or False
        self.give_back()
        return True

    def _receive(self, array: Array, apart: bool, code: CodeType, instruction: int) -> Any:
        if not self.acquire(False):
            return None
        try:
            if self.waiting or self.queues or self.key in self.posted or self.rank is None:
                return None
            self.code, self.instruction = code, instruction
            moved = self.moved(array)
            payload = self.payload_of(moved) if apart else None
            if apart and payload is None:
                return None
            self.posted.append(self.key)
            self.start()
        finally:
            self.release()
        _threads.add(get_ident())
        if not self._poll(self.test) or self.words[0] != self.expected:
            return False
        if payload is not None:
            payload.Start()
            if not self._poll(payload.Test):
                return payload
        if moved is not array:
            array[...] = moved
        self.posted.remove(self.key)
        self.count += 1
        return True

    def _poll(self, test: Callable[[], bool]) -> bool:
        """Poll a request for as long as its elements may take."""
        for _ in range(self.spins):
            if test():
                return True
            waiting.give_way()
        return test()


MessageFields = PythonMessageFields
if extension is not None and not TYPE_CHECKING:
    MessageFields = extension.MessageFields  # which starts a message in one step


class PersistentMessage(MessageFields):
    """A persistent send or receive of one peer, tag, shape and dtype."""

    __slots__ = ()
    sending: bool

    def __init__(
        self,
        request: MPI.Prequest,
        make: Callable[..., Any],
        post: Callable[..., MPI.Request],
        buffer: Any,
        rank: int,
        peer: int,
        tag: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        size = _size(shape, dtype)
        self.buffer = buffer
        self.words = buffer[: WORDS.size].data.cast("q")
        self.nbytes = size
        self.inside = size if size <= SMALL_BYTES else -1
        if size <= SMALL_BYTES:
            self.elements = buffer[WORDS.size : WORDS.size + size].view(dtype).reshape(shape)
        # None, too, if the elements are more than a count of MPI.
        if size > SMALL_BYTES and math.prod(shape) <= large_counts.COUNT_LIMIT:
            self._datatype = MPI.Datatype.fromcode(element(dtype).wire.char)
        self.payloads = {}
        self._make, self._post = make, post
        most = waiting.SPIN_POLLS if waiting.oversubscribed else _MOST_POLLS
        self.spins = max(waiting.SPIN_POLLS, min(size >> 9, most))
        self.begun, self.count, self.instruction = 0, 0, -1
        self.rank = rank
        self.peer, self.tag = peer, tag
        self.shape, self.dtype = shape, dtype
        self.request = request
        self.start, self.test = request.Start, request.Test

    def moved(self, array: Array) -> Array:
        """Return the memory that moves for an array that fits: the array, or memory of the message for the same elements."""
        if self.elements is not None:
            return self.elements  # type: ignore[no-any-return]
        return array if array.flags.c_contiguous or self.packed is None else self.packed

    def payload_of(self, tensor: Array) -> MPI.Prequest | None:
        """Return the persistent request of the elements of an array, not started; None if they have none, or have another size.

        The request is cached by the address of the array, and is only started while there is an array at that address.
        """
        if tensor.nbytes != self.nbytes:
            return None
        address = _address(tensor)
        found = self.payloads.get(address)
        if found is None and self._datatype is not None:
            if len(self.payloads) >= MOST_PAYLOADS:
                self.payloads.pop(next(iter(self.payloads))).Free()
            memory = MPI.buffer.fromaddress(address, tensor.nbytes)
            found = self.payloads[address] = self._make((memory, self._datatype), self.peer, self.tag)
        return found

    def moves_packed(self, payload: Any) -> bool:
        """Return whether a request of elements that move apart is that of ``packed``."""
        return self.packed is not None and self.payloads.get(_address(self.packed)) is payload

    def start_payload(self, tensor: Array, payload: MPI.Prequest | None) -> MPI.Request:
        """Start to move the elements that move apart, and return their request.

        Args:
            payload: their persistent request, as :meth:`payload_of` returns it.
        """
        if payload is None:
            return large_counts.post(self._post, tensor.view(element(tensor.dtype).wire), self.peer, self.tag)
        payload.Start()
        return payload

    def start_apart(self, tensor: Array, posting: AbstractContextManager[object]) -> MPI.Request:
        """Send the envelope and then the elements, with no other message of the tag between them; return the request of these.

        Args:
            posting: the lock of the group under which messages are posted.
        """
        with posting:
            self.start()
            return self.start_payload(tensor, self.payload_of(tensor))

    def cancel(self) -> None:
        """Cancel a receive that is posted, if MPI can."""
        try:
            if not self.request.Test():
                self.request.Cancel()
                self.request.Test()
        except MPI.Exception:
            pass  # an earlier error of MPI is raised

    def free(self) -> None:
        """Free the requests, which must not be started."""
        self.request.Free()
        while self.payloads:
            self.payloads.popitem()[1].Free()

    @property
    def place(self) -> tuple[str, CodeType, int]:
        """The call and its place in the program."""
        assert self.code is not None
        return "send" if self.sending else "recv", self.code, self.instruction


class PersistentSend(PersistentMessage):
    """A persistent send; it has one call site at a time."""

    __slots__ = ()
    sending = True

    def __init__(
        self,
        control: MPI.Intracomm,
        data: MPI.Intracomm,
        rank: int,
        peer: int,
        tag: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        size = _size(shape, dtype)
        buffer = np.empty(WORDS.size + (size if size <= SMALL_BYTES else 0), np.uint8)
        request = data.Send_init([buffer, MPI.BYTE], peer, tag)
        make = control.Send_init if size <= EAGER_BYTES else control.Ssend_init
        super().__init__(request, make, _poster(control, size), buffer, rank, peer, tag, shape, dtype)
        self.words[0] = first_word(dtype, math.prod(shape))

    def move_to(self, sites: KnownSites, frame: FrameType, op: str = "send") -> bool:
        """Change the call site, if the receiver knows its text; return whether it was changed."""
        number = sites.known(self.peer, self.tag, op, CallSite(frame.f_code, frame.f_lasti))
        if number is None:
            return False
        try:
            self.take()
        except Busy:
            return False
        self.words[1] = number
        self.code, self.instruction = frame.f_code, frame.f_lasti
        self.give_back()
        return True


class PersistentReceive(PersistentMessage):
    """A persistent receive."""

    __slots__ = ()
    sending = False

    def __init__(
        self,
        control: MPI.Intracomm,
        data: MPI.Intracomm,
        rank: int,
        peer: int,
        tag: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        buffer = np.empty(ROOM, np.uint8)
        request = data.Recv_init([buffer, MPI.BYTE], peer, tag)
        super().__init__(request, control.Recv_init, control.Irecv, buffer, rank, peer, tag, shape, dtype)
        self.expected = first_word(dtype, math.prod(shape))
        self.key = (peer, tag)

    def attach(self, receiver: Receiver) -> None:
        """Refer to the receiver of the group, which must have nothing to do with the message when it is posted."""
        self.acquire, self.release = receiver.lock.acquire, receiver.lock.release
        self.posted, self.waiting, self.queues = receiver.posted, receiver.waiting, receiver.queues


def _size(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


def _poster(control: MPI.Intracomm, nbytes: int) -> Callable[..., MPI.Request]:
    """Return the method that posts elements which move apart from their envelope.

    Many elements are sent synchronously. So whether a send completes before its receive does not depend on the MPI. This costs
    nothing, as a message of this size waits for its receiver anyway, to be copied once.
    """
    return control.Isend if nbytes <= EAGER_BYTES else control.Issend


def post_send(
    control: MPI.Intracomm, data: MPI.Intracomm, message: Array, flat: Array, peer: int, tag: int
) -> AllRequests:
    """Post a send: the envelope with few elements, or the envelope and the elements apart.

    Args:
        message: the bytes of the envelope, as ``envelope.write`` returns them.
        flat: the elements.
    """
    requests = [data.Isend([message, MPI.BYTE], peer, tag)]
    if flat.nbytes > SMALL_BYTES:
        payload = flat if flat.dtype.kind != "V" else flat.view(np.uint8)
        requests.append(large_counts.post(_poster(control, payload.nbytes), payload, peer, tag))
    return AllRequests(requests, (message, flat))
