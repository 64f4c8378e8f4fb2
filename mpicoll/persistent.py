"""Blocking sends and receives that are made again: persistent requests, and little Python between the program and MPI.

A ``send`` or ``recv`` of a plain array that is made again with the same peer, tag, shape and dtype gets a persistent request
(MPI-4.1 section 3.9) on memory of the library, with the words of its envelope written once. Made again (in ``p2p``) it
copies its elements in, or out, and compares one word. Anything unusual, such as other operations in flight, a message that
differs, or a second thread, takes the long way through ``p2p`` and ``matching``.

A persistent receive is posted to MPI itself, with room for any message, and only while no other receive waits: so MPI's
order is the right one. ``Receiver.posted`` keeps others from overtaking it.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import groups, waiting
from mpicoll.buffers.array import Array
from mpicoll.buffers.dtypes import dtype_name
from mpicoll.checks.call import Call, Site
from mpicoll.checks.envelope import EARLY_BYTES, ROOM, SMALL_BYTES, WORDS, first_word
from mpicoll.engines import large
from mpicoll.execution import guarded, wrap
from mpicoll.groups import ProcessGroup
from mpicoll.kept import keep, keep_of
from mpicoll.patience import CallWait, local_wait

__all__ = [
    "Busy",
    "PersistentReceive",
    "PersistentSend",
    "call",
    "finish",
    "give_up",
    "learn",
    "message_call",
    "post_apart",
    "recv_apart",
    "send_apart",
]

MOST = 128
"""Persistent sends, and as many receives, that a group keeps; each takes 4 KiB at most."""

_MOST_SEEN = 1024
_RARELY = 8
_MOST_POLLS = 4096
_misses = itertools.count()


def message_call(
    op: str, group: ProcessGroup, dtype: np.dtype[Any], count: int, peer: int, tag: int, site: Site
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
        body: the request of elements that travel apart, while they do.
        count: times it was made, on top of those that the group counts itself.
        take, give_back: the right to use it, which one call has at a time; ``take`` raises Busy.
        code, instruction: where the program makes it.
    """

    __slots__ = (
        "body",
        "buffer",
        "code",
        "count",
        "elements",
        "give_back",
        "instruction",
        "peer",
        "request",
        "start",
        "tag",
        "take",
        "test",
        "words",
    )
    sending: bool

    def __init__(
        self, request: MPI.Prequest, buffer: Any, peer: int, tag: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        size = _size(shape, dtype)
        self.buffer = buffer
        self.words = buffer[: WORDS.size].data.cast("q")
        self.elements: Any = None
        if size <= SMALL_BYTES:
            self.elements = buffer[WORDS.size : WORDS.size + size].view(dtype).reshape(shape)
        self.body: MPI.Request | None = None
        self.count = 0
        self.code: CodeType | None = None
        self.instruction = -1
        self.peer = peer
        self.tag = tag
        self.request = request
        self.start, self.test = request.Start, request.Test
        free = [None]
        self.take, self.give_back = free.pop, free.append

    @property
    def place(self) -> tuple[str, CodeType, int]:
        """The call and where the program makes it."""
        assert self.code is not None
        return "send" if self.sending else "recv", self.code, self.instruction


class PersistentSend(_Persistent):
    """A send that is made again, from one place in the program at a time."""

    __slots__ = ()
    sending = True

    def __init__(self, group: ProcessGroup, peer: int, tag: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        size = _size(shape, dtype)
        buffer = np.empty(WORDS.size + (size if size <= SMALL_BYTES else 0), np.uint8)
        super().__init__(group.pair.data.Send_init([buffer, MPI.BYTE], peer, tag), buffer, peer, tag, shape, dtype)
        self.words[0] = first_word(dtype, math.prod(shape))

    def move_to(self, group: ProcessGroup, frame: FrameType) -> bool:
        """Say another place from now on, if the receiver has been told of it."""
        number = group.told.known(self.peer, self.tag, "send", Site(frame.f_code, frame.f_lasti))
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

    def __init__(self, group: ProcessGroup, peer: int, tag: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        buffer = np.empty(ROOM, np.uint8)
        super().__init__(group.pair.data.Recv_init([buffer, MPI.BYTE], peer, tag), buffer, peer, tag, shape, dtype)
        self.expected = first_word(dtype, math.prod(shape))
        self.key = (peer, tag)


def _size(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


def learn(group: ProcessGroup, op: str, peer: int, tensor: Array, rank: Any, tag: Any) -> None:
    """Note a blocking call that was made the long way; made a second time, it gets a persistent request.

    Args:
        op: ``send`` or ``recv``.
        peer: rank in the group.
        rank, tag: as the program gave them.
    """
    if type(tensor) is not np.ndarray or type(rank) is not int or type(tag) is not int:
        return
    if not groups.state().thread_multiple or group.broken is not None:
        return
    key = (rank, tag, tensor.shape, tensor.dtype)
    seen = (op, *key)
    if seen not in group.seen:
        if len(group.seen) >= _MOST_SEEN:
            group.seen.clear()
        group.seen.add(seen)
        return
    kept: dict[Any, Any] = group.sends if op == "send" else group.receives
    if key in kept:
        return
    with waiting.guard, group.posting:
        if len(kept) >= MOST:
            # A program with ever new tags would make and free one in every call.
            oldest = next(iter(kept))
            if next(_misses) % _RARELY or group.pair.receiver.posted:
                return
            try:
                kept[oldest].take()
            except Busy:
                return
            group.retire(kept.pop(oldest))
        made = (PersistentSend if op == "send" else PersistentReceive)(group, peer, tag, tensor.shape, tensor.dtype)
        group.persistent.append(made)
        kept[key] = made


def post_apart(group: ProcessGroup, tensor: Array, peer: int, tag: int) -> MPI.Request:
    """Post the elements of a message that travel apart from its envelope.

    Synchronously where they are many, so that whether a send completes before it is received does not depend on the MPI. It
    costs nothing: a message of this size waits for its receiver anyway, to be copied once.
    """
    post = group.pair.control.Isend if tensor.nbytes <= EARLY_BYTES else group.pair.control.Issend
    return large.post(post, tensor, peer, tag)


def send_apart(group: ProcessGroup, again: PersistentSend, tensor: Array) -> None:
    """Send the envelope, and the elements after it: no other message of its tag may come in between."""
    with group.posting:
        again.start()
        again.body = post_apart(group, tensor, again.peer, again.tag)
        again.count += 1
    finish(group, again, tensor, again.body.Test)
    again.body = None


def recv_apart(group: ProcessGroup, again: PersistentReceive, tensor: Array) -> None:
    """Receive the elements whose envelope has come."""
    again.body = large.post(group.pair.control.Irecv, tensor, again.peer, again.tag)
    finish(group, again, tensor, again.body.Test)
    again.body = None


def finish(group: ProcessGroup, again: _Persistent, tensor: Array, test: Callable[[], bool]) -> None:
    """Wait for a request: spin for as long as the elements may take, then as every wait does."""
    for _ in range(2 if waiting.crowded else min(tensor.nbytes >> 9, _MOST_POLLS)):
        if test():
            return
    waiting.moving(tensor.nbytes)
    this = call(group, again, tensor)
    local_wait(guarded(test, group, this), CallWait(group, this, group.timeout, group.ranks[again.peer], again.tag))


def call(group: ProcessGroup, again: _Persistent, tensor: Array) -> Call:
    """Return the description of a call that was made again."""
    op, code, instruction = again.place
    return message_call(op, group, tensor.dtype, tensor.size, again.peer, again.tag, Site(code, instruction))


def give_up(group: ProcessGroup, again: _Persistent, tensor: Array, error: BaseException) -> None:
    """Leave a call that something struck: the group is broken; the request is never used again, and never freed."""
    this = call(group, again, tensor)
    keep(again, tensor)
    keep_of(error)
    if group.broken is None:
        CallWait(group, this, group.timeout, group.ranks[again.peer], again.tag).give_up(error)
    if isinstance(again, PersistentReceive):
        if again.key in group.pair.receiver.posted:
            group.pair.receiver.posted.remove(again.key)
        try:
            if not again.request.Test():
                again.request.Cancel()
                again.request.Test()
        except MPI.Exception:
            pass  # what MPI said first is told
    if isinstance(error, MPI.Exception):
        raise wrap(error, group, this) from error


def _forget_in_child() -> None:
    known = groups.current()
    if known is not None:
        for group in known.groups.values():
            group.sends, group.receives = {}, {}


os.register_at_fork(after_in_child=_forget_in_child)
