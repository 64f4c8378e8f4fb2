"""Blocking sends and receives that are made again: persistent requests, and little Python between the program and MPI.

A ``send`` or ``recv`` of a plain array that is made again with the same peer, tag, shape and dtype gets a persistent request
(MPI-4.1 section 3.9) on memory of the library, with the words of its envelope written once. Made again (in ``p2p``) it
copies its elements in, or out, and compares one word. Anything unusual, such as other pending operations, a message that
differs, or a second thread, takes the long way through ``p2p`` and ``matching``.

A persistent receive is posted to MPI itself, with room for any message, and only while no other receive waits: so MPI's
order is the right one. ``Receiver.posted`` keeps others from overtaking it.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.diagnosis.call import Call
from mpicoll.diagnosis.wait_policy import CallWait, local_wait
from mpicoll.groups import registry
from mpicoll.groups.process_group import MessageCache, ProcessGroup
from mpicoll.memory.dtypes import dtype_name
from mpicoll.memory.memory import Array
from mpicoll.operations.failures import guarded, wrap
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import CallSite
from mpicoll.runtime.mpi_library import retain_for_ever, retain_frames
from mpicoll.runtime.native import found as extension
from mpicoll.transports import large_counts
from mpicoll.transports.mpi.envelope import EAGER_BYTES, ROOM, SMALL_BYTES, WORDS, first_word

MOST = 128
"""Persistent sends, and as many receives, that a group keeps; each takes 4 KiB at most."""

MOST_BODIES = 4
"""Arrays of which a persistent send or receive keeps the request."""

_MOST_SEEN = 1024
_RARELY = 8
_MOST_POLLS = 4096
_misses = itertools.count()
_address = MPI.Get_address
_get_ident = threading.get_ident


def message_call(
    op: str, group: ProcessGroup, dtype: np.dtype[Any], count: int, peer: int, tag: int, site: CallSite
) -> Call:
    """Return the description of a send or receive; ``peer`` is a rank of the group, or negative for any."""
    other = f"rank {group.ranks[peer]}" if peer >= 0 else "any rank"
    other = ("to " if op in ("send", "isend") else "from ") + other
    return Call(op, (other, ("tag", tag), dtype_name(dtype), ("elements", count)), site)


Busy = IndexError
"""What ``take`` raises: it is the ``pop`` of a list, which no other thread can come into the middle of."""


class _Persistent:
    """What both kinds have.

    Attributes:
        elements: the elements of a small message in ``buffer``; None when they travel apart.
        bodies: persistent requests of elements that travel apart, by the address of the array; they hold no memory.
        kind: the datatype of these elements; None where they are more than a count of MPI takes, or stand in ``buffer``.
        make, post: how such a request is made, or posted for once.
        body: the one that was posted for once, while it is under way.
        polls: how often elements are asked for before a wait as every other.
        rank, tag, shape, dtype: what the program passes.
        count: times it was made, on top of those that the group counts itself.
        take, give_back: the right to use it, which one call has at a time; ``take`` raises Busy.
        code, instruction: where the program makes it.
    """

    __slots__ = (
        "bodies",
        "body",
        "buffer",
        "code",
        "count",
        "dtype",
        "elements",
        "give_back",
        "instruction",
        "kind",
        "make",
        "peer",
        "polls",
        "post",
        "rank",
        "request",
        "shape",
        "start",
        "tag",
        "take",
        "test",
        "words",
    )
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
        self.elements: Any = None
        if size <= SMALL_BYTES:
            self.elements = buffer[WORDS.size : WORDS.size + size].view(dtype).reshape(shape)
        self.body: MPI.Request | None = None
        self.kind: MPI.Datatype | None = None
        if size > SMALL_BYTES and math.prod(shape) <= large_counts.COUNT_LIMIT:
            self.kind = MPI.Datatype.fromcode(dtype.char)
        self.bodies: dict[int, MPI.Prequest] = {}
        self.make, self.post = make, post
        self.polls = range(2 if waiting.oversubscribed else min(size >> 9, _MOST_POLLS))
        self.count = 0
        self.code: CodeType | None = None
        self.instruction = -1
        self.rank, self.peer = rank, peer
        self.tag = tag
        self.shape, self.dtype = shape, dtype
        self.request = request
        self.start, self.test = request.Start, request.Test
        free = [None]
        self.take, self.give_back = free.pop, free.append

    def free(self) -> None:
        """Free its requests; none is under way."""
        self.request.Free()
        while self.bodies:
            self.bodies.popitem()[1].Free()

    @property
    def place(self) -> tuple[str, CodeType, int]:
        """The call and where the program makes it."""
        assert self.code is not None
        return "send" if self.sending else "recv", self.code, self.instruction


class PersistentSend(_Persistent):
    """A send that is made again, from one place in the program at a time."""

    __slots__ = ()
    sending = True

    def __init__(
        self, group: ProcessGroup, rank: int, peer: int, tag: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        size = _size(shape, dtype)
        buffer = np.empty(WORDS.size + (size if size <= SMALL_BYTES else 0), np.uint8)
        request = group.pair.data.Send_init([buffer, MPI.BYTE], peer, tag)
        control = group.pair.control
        make = control.Send_init if size <= EAGER_BYTES else control.Ssend_init
        super().__init__(request, make, _poster(group, size), buffer, rank, peer, tag, shape, dtype)
        self.words[0] = first_word(dtype, math.prod(shape))

    def move_to(self, group: ProcessGroup, frame: FrameType, op: str = "send") -> bool:
        """Say another place from now on, if the receiver has been told of it."""
        number = group.known_sites.known(self.peer, self.tag, op, CallSite(frame.f_code, frame.f_lasti))
        if number is None:
            return False
        try:
            self.take()
        except Busy:
            return False
        self.words[1] = number
        self.code, self.instruction = frame.f_code, frame.f_lasti
        self.give_back(None)
        return True


class PersistentReceive(_Persistent):
    """A receive that is made again.

    Attributes:
        expected: the first word of a message that fits and says no more than usual.
        key: (source, tag).
    """

    __slots__ = ("expected", "key")
    sending = False

    def __init__(
        self, group: ProcessGroup, rank: int, peer: int, tag: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        buffer = np.empty(ROOM, np.uint8)
        request = group.pair.data.Recv_init([buffer, MPI.BYTE], peer, tag)
        control = group.pair.control
        super().__init__(request, control.Recv_init, control.Irecv, buffer, rank, peer, tag, shape, dtype)
        self.expected = first_word(dtype, math.prod(shape))
        self.key = (peer, tag)


def _size(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


def matches_in_python(tensor: Any, dtype: np.dtype[Any], shape: tuple[int, ...], writes: bool) -> bool:
    """Whether an array can be moved as it is by what was prepared for a dtype and a shape.

    Args:
        writes: it is received into.
    """
    if type(tensor) is not np.ndarray or tensor.dtype is not dtype or tensor.shape != shape:
        return False
    flags = tensor.flags
    return bool(flags.carray if writes else flags.c_contiguous and flags.aligned)


matches: Callable[[Any, np.dtype[Any], tuple[int, ...], bool], bool]
matches = matches_in_python if extension is None else extension.matches


def learn(group: ProcessGroup, op: str, peer: int, tensor: Array, rank: Any, tag: Any) -> None:
    """Note a blocking call that was made the long way; made a second time, it gets a persistent request.

    Args:
        op: ``send`` or ``recv``.
        peer: rank in the group.
        rank, tag: as the program gave them.
    """
    if type(tensor) is not np.ndarray or type(rank) is not int or type(tag) is not int:
        return
    if not registry.state().thread_multiple or group.broken is not None:
        return
    key = (rank, tag, tensor.shape, tensor.dtype)
    seen = (op, *key)
    if seen not in group.seen:
        if len(group.seen) >= _MOST_SEEN:
            group.seen.clear()
        group.seen.add(seen)
        return
    cache: MessageCache = group.sends if op == "send" else group.receives
    if key in cache:
        return
    with signals.guard, group.posting:
        if len(cache) >= MOST:
            # A program with ever new tags would make and free one in every call.
            if next(_misses) % _RARELY:
                return
            oldest = next(iter(cache))
            with group.pair.receiver.lock:  # a receive is posted under it, if it has not been dropped by then
                if group.pair.receiver.posted:
                    return
                try:
                    cache[oldest].take()
                except Busy:
                    return
                dropped = cache.drop(oldest)
            group.retire(dropped)
        kind = PersistentSend if op == "send" else PersistentReceive
        made = kind(group, rank, peer, tag, tensor.shape, tensor.dtype)
        group.persistent.append(made)
        cache[key] = made


def _poster(group: ProcessGroup, nbytes: int) -> Callable[..., MPI.Request]:
    """Return what posts elements that travel apart from their envelope.

    Synchronously where they are many, so that whether a send completes before it is received does not depend on the MPI. It
    costs nothing: a message of this size waits for its receiver anyway, to be copied once.
    """
    return group.pair.control.Isend if nbytes <= EAGER_BYTES else group.pair.control.Issend


def post_apart(group: ProcessGroup, tensor: Array, peer: int, tag: int) -> MPI.Request:
    """Post the elements of a message that travel apart from its envelope."""
    return large_counts.post(_poster(group, tensor.nbytes), tensor, peer, tag)


def body_of(again: _Persistent, tensor: Array) -> MPI.Prequest | None:
    """Return the request that moves the elements of this array, not started; None for those that are posted for once.

    The request is cached by the address of the array, and started only while an array is there.
    """
    address = _address(tensor)
    found = again.bodies.get(address)
    if found is None and again.kind is not None:
        if len(again.bodies) >= MOST_BODIES:
            again.bodies.pop(next(iter(again.bodies))).Free()
        memory = MPI.buffer.fromaddress(address, tensor.nbytes)
        found = again.bodies[address] = again.make((memory, again.kind), again.peer, again.tag)
    return found


def send_apart(group: ProcessGroup, again: PersistentSend, tensor: Array) -> None:
    """Send the envelope, and the elements after it: no other message of its tag may come in between."""
    with group.posting:
        again.start()
        request: Any = body_of(again, tensor)
        if request is None:
            request = again.body = large_counts.post(again.post, tensor, again.peer, again.tag)
        else:
            request.Start()
    again.count += 1
    group.last = again
    signals.threads.add(_get_ident())
    # The envelope is on its way before the elements are, which the receiver asks for: so the other way round it costs time.
    for test in (again.test, request.Test):
        for _ in again.polls:
            if test():
                break
        else:
            finish(group, again, tensor, test)
    again.body = None


def recv_apart(group: ProcessGroup, again: PersistentReceive, tensor: Array, body: MPI.Prequest | None) -> None:
    """Receive the elements whose envelope has come."""
    request: Any = body
    if request is None:
        request = again.body = large_counts.post(again.post, tensor, again.peer, again.tag)
    else:
        request.Start()
    again.count += 1
    test = request.Test
    for _ in again.polls:
        if test():
            break
    else:
        finish(group, again, tensor, test)
    if body is None:
        again.body = None


def finish(group: ProcessGroup, again: _Persistent, tensor: Array, test: Callable[[], bool]) -> None:
    """Wait for a request as every wait does, after it was polled for as long as its elements may take."""
    waiting.transfer_hint(tensor.nbytes)
    this = call(group, again, tensor)
    local_wait(guarded(test, group, this), CallWait(group, this, group.timeout, group.ranks[again.peer], again.tag))


def call(group: ProcessGroup, again: _Persistent, tensor: Array) -> Call:
    """Return the description of a call that was made again."""
    op, code, instruction = again.place
    return message_call(op, group, tensor.dtype, tensor.size, again.peer, again.tag, CallSite(code, instruction))


def give_up(group: ProcessGroup, again: _Persistent, tensor: Array, error: BaseException) -> None:
    """Leave a call that an exception ended: the group is broken; the request is never used again, and never freed."""
    this = call(group, again, tensor)
    retain_for_ever(again, tensor)
    retain_frames(error)
    if group.broken is None:
        CallWait(group, this, group.timeout, group.ranks[again.peer], again.tag).withdraw(error)
    if isinstance(again, PersistentReceive):
        take_back(group, again)
    if isinstance(error, MPI.Exception):
        raise wrap(error, group, this) from error


def take_back(group: ProcessGroup, again: PersistentReceive) -> None:
    """Withdraw a receive that is posted, of a group that is given up."""
    if again.key in group.pair.receiver.posted:
        group.pair.receiver.posted.remove(again.key)
    try:
        if not again.request.Test():
            again.request.Cancel()
            again.request.Test()
    except MPI.Exception:
        pass  # what MPI said first is told


def _forget_in_child() -> None:
    known = registry.current()
    if known is not None:
        for group in known.groups.values():
            group.sends, group.receives = MessageCache(), MessageCache()


os.register_at_fork(after_in_child=_forget_in_child)
