"""Which message goes to which receive: MPI's own rule, with a look at the message before the receive's memory is touched.

A message says its dtype and number of elements (``transports.mpi.envelope``). It is taken into memory of the library, and goes to
a receive only if it fits; the elements of a large one are received straight into the receive's memory, but only then. So a
message that does not fit cuts and overwrites nothing: it stays at the head of its queue, and the receive ends with an error
that names both sides. (Open MPI 5.0.11 crashes or hangs when a posted receive is too short for a message of more than a few
KiB.)

The rule (MPI-4.1 section 3.5): of all outstanding receives that a message fits by source and tag, the one that was
started first gets it; of all messages that a receive fits, the one from a given source that was sent first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.memory.memory import Memory
from mpicoll.runtime import waiting
from mpicoll.runtime.mpi_library import retain_frames
from mpicoll.transports import large_counts
from mpicoll.transports.base import Request
from mpicoll.transports.mpi.envelope import SMALL_BYTES, Envelope, open_message

_MOST_PLACES = 4096

OBJECT_TAGS = 16
"""Tags that the rests of lists of objects take in turn."""


class Snapshot(Protocol):
    """What was in some memory, to tell later whether it was written."""

    def is_changed(self) -> bool:
        """Whether it no longer holds what it held."""


class Claim(Protocol):
    """What is known of the memory of a receive while it is under way (``checks.memory_in_use``)."""

    def snapshot_of(self, arrays: list[Any]) -> Snapshot:
        """Return what is in some arrays now."""

    def snapshot_results(self) -> None:
        """Note what the receive has written."""


class Message:
    """A message that has been taken from MPI, or is being taken.

    Attributes:
        source: rank in the group.
        envelope: what it says of itself, once it is here.
        elements: bytes of its elements, unless they travel apart.
    """

    __slots__ = ("_buffer", "_request", "elements", "envelope", "place", "source", "tag")

    def __init__(self, source: int, tag: int, buffer: Any, request: MPI.Request | None = None) -> None:
        self.source = source
        self.tag = tag
        self.envelope: Envelope | None = None
        self.elements: Any = None
        self.place = ""
        self._buffer = buffer
        self._request = request

    def here(self) -> bool:
        """Whether all of it has come."""
        if self.envelope is None:
            if self._request is not None and not self._request.Test():
                return False
            self.envelope, self.elements, self.place = open_message(self._buffer)
        return True


class Receive:
    """One receive (a Request): looked for, then filled, then complete; or refused, since its message does not fit.

    Attributes:
        source, tag: what it takes; the source is a rank of the group or MPI.ANY_SOURCE.
        exact: it takes only a message of its own dtype and number of elements; else one that is not longer.
        sender: rank in the group that its message came from; -1 until it has come.
        refused: what the message says of itself that did not fit.
        place: where that message was sent from, or "" when that is not known.
        dirty: somebody else wrote its memory before the message came.
        claim: what is kept of its memory.
    """

    __slots__ = (
        "_snapshot",
        "claim",
        "complete",
        "dirty",
        "exact",
        "memory",
        "place",
        "receiver",
        "refused",
        "request",
        "sender",
        "source",
        "tag",
    )

    def __init__(self, receiver: Receiver, memory: Memory, source: int, tag: int, exact: bool) -> None:
        self.receiver = receiver
        self.memory = memory
        self.source = source
        self.tag = tag
        self.exact = exact
        self.sender = -1
        self.refused: Envelope | None = None
        self.place = ""
        self.request: MPI.Request | None = None
        self.complete = False
        self.dirty = False
        self.claim: Claim | None = None
        self._snapshot: Snapshot | None = None

    def watch(self, claim: Claim) -> None:
        """Notice writes to its memory."""
        self.claim = claim
        if self.complete:
            claim.snapshot_results()
        elif self.request is None:
            self._snapshot = claim.snapshot_of([self.memory.own])

    def looked_at(self) -> None:
        """Note that the message comes into its memory now."""
        self.dirty = self._snapshot is not None and self._snapshot.is_changed()

    def filled(self) -> None:
        """Note that all of the message is in its memory."""
        if self.memory.unpack is not None and not self.dirty:
            self.memory.unpack()
        self.complete = True
        if self.claim is not None:
            self.claim.snapshot_results()

    def takes(self, source: int, tag: int) -> bool:
        """Whether a message from ``source`` with ``tag`` is for it."""
        return tag == self.tag and self.source in (source, MPI.ANY_SOURCE)

    def fits(self, envelope: Envelope) -> bool:
        """Whether a message can be taken into its memory."""
        flat = self.memory.flat
        if envelope.objects >= 0:
            return False
        if self.exact:
            return envelope.fits(self.memory)
        return envelope.nbytes <= flat.nbytes

    def Test(self) -> bool:
        """Look for the message and move it on; True when complete, or when it is known not to fit."""
        if self.complete:
            return True
        if self.request is None:
            self.receiver.look()
            if self.request is None:
                return self.complete
        if self.request.Test():
            self.filled()
            self.receiver.taken(self)
        return self.complete


class ObjectReceive(Receive):
    """The receive of a list of objects: of what stands in its message; the rest is received afterwards.

    Attributes:
        length: of the list; only one of this length is taken.
        number: how many lists of objects this one is the last of, that were received from its sender.
    """

    __slots__ = ("_counts", "length", "number")

    def __init__(self, receiver: Receiver, length: int, source: int, tag: int, counts: dict[int, int]) -> None:
        super().__init__(receiver, Memory(np.zeros(SMALL_BYTES, np.uint8), (SMALL_BYTES,)), source, tag, exact=True)
        self.length = length
        self.number = 0
        self._counts = counts

    def fits(self, envelope: Envelope) -> bool:
        """Whether it is a list of this length."""
        return envelope.objects == self.length and envelope.nbytes <= SMALL_BYTES and not envelope.apart

    def looked_at(self) -> None:
        """Number it, in the order of messages."""
        super().looked_at()
        self.number = self._counts[self.sender] = self._counts.get(self.sender, 0) + 1

    def outrun(self) -> bool:
        """Whether the next list of its sender would have the tag of its rest, which has not come yet."""
        return self._counts[self.sender] + 1 - self.number >= OBJECT_TAGS

    def filled(self) -> None:
        """Note that its message is here; it stays outstanding until :meth:`Receiver.taken` is told that the rest is."""
        super().filled()
        self.receiver.taking.append(self)


class Receiver:
    """The outstanding receives of one group, in the order in which they were started (a waiting.Pollable).

    Attributes:
        waiting: receives that have no message yet.
        torn: called when an exception that is not ours strikes while messages are taken, so that one may be lost.
        queues: messages that were taken from MPI, and no receive has got yet, by (source, tag), in the order of sending.
        posted: (source, tag) of receives that a caller has posted to MPI itself, with nothing waiting and nothing in the
            queues: they were started before all that wait.
    """

    def __init__(self, control: MPI.Intracomm, data: MPI.Intracomm) -> None:
        self.torn: Callable[[BaseException], None] = lambda error: None
        self._control = control
        self._data = data
        self.lock = threading.Lock()
        self.posted: list[tuple[int, int]] = []
        self.waiting: list[Receive] = []
        self.taking: list[Receive] = []  # those whose elements are on their way
        self.queues: dict[tuple[int, int], deque[Message]] = {}
        self._places: dict[tuple[int, int], str] = {}

    def start(self, memory: Memory, source: int, tag: int, exact: bool) -> Receive:
        """Start a receive; its message may be here already."""
        receive = Receive(self, memory, source, tag, exact)
        self.begin(receive)
        return receive

    def begin(self, receive: Receive) -> None:
        """Start a receive that has been made."""
        with self.lock:
            self.waiting.append(receive)
        self.look()

    def adopt(self, message: Message, memory: Memory, exact: bool) -> Receive:
        """Start the receive that was posted directly, and got a message that has to be looked at."""
        key = (message.source, message.tag)
        receive = Receive(self, memory, *key, exact)
        with self.lock:
            self.posted.remove(key)
            self.queues.setdefault(key, deque()).appendleft(message)
            self.waiting.insert(0, receive)
            self._match()
        return receive

    def look(self) -> None:
        """Give each message that has come to the receive that it is for."""
        if not self.lock.acquire(blocking=False):
            return  # another thread is looking
        try:
            self._match()
        finally:
            self.lock.release()

    def _match(self) -> None:
        try:
            self._match_all()
        except BaseException as error:
            # Out of a signal handler, or the memory ran out: between MPI and the queues a message may be lost.
            retain_frames(error)
            self.torn(error)
            raise

    def _match_all(self) -> None:
        at = 0
        while at < len(self.waiting):
            message = self._first_for(self.waiting[at])
            if message is None:
                at += 1
                continue
            # An earlier receive from any source may have looked just before this message came: it goes first.
            receive = next(r for r in self.waiting if r.takes(message.source, message.tag))
            self.waiting.remove(receive)
            self._give(receive, message)
            at = 0
        self._rest()

    def _rest(self) -> None:
        """Have nobody look any more when no receive waits (under the lock)."""
        if not self.waiting:
            waiting.drop(self)

    def _first_for(self, wanted: Receive) -> Message | None:
        """Return the first message for a receive that is all here, taking it from MPI if none is kept."""
        for key, queue in self.queues.items():
            if wanted.takes(*key):
                if self._may_give(key, queue[0]):
                    return queue[0]
                if wanted.source != MPI.ANY_SOURCE:
                    return None  # what was sent later must not overtake it
        message = self._take(wanted.source, wanted.tag)
        if message is None:
            return None
        key = (message.source, message.tag)
        queue = self.queues.setdefault(key, deque())
        queue.append(message)
        return queue[0] if self._may_give(key, queue[0]) else None

    def _take(self, source: int, tag: int) -> Message | None:
        """Take the next message of a source and tag from MPI, if one has come."""
        status = MPI.Status()
        found = self._data.Improbe(source, tag, status)
        if found is None:
            return None
        buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        # The message may still be on its way: MPI_Mrecv would wait for a sender that computes.
        return Message(status.Get_source(), status.Get_tag(), buffer, found.Irecv([buffer, MPI.BYTE]))

    def _may_give(self, key: tuple[int, int], message: Message) -> bool:
        if not message.here():
            return False
        assert message.envelope is not None
        if message.place:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            self._places[message.source, message.envelope.place] = message.place
            message.place = ""
        if message.envelope.objects >= 0 and any(
            isinstance(each, ObjectReceive) and each.sender == message.source and each.outrun()
            for each in tuple(self.taking)
        ):
            return False
        # A posted receive was started before, and may have got an earlier one: which does not fit, or whose elements, which come
        # in the order of messages, are on their way.
        return key not in self.posted

    def _give(self, receive: Receive, message: Message) -> None:
        envelope = message.envelope
        assert envelope is not None
        receive.sender = message.source
        if not receive.fits(envelope):
            receive.refused = envelope
            receive.place = self._places.get((message.source, envelope.place), "")
            receive.complete = True
            return
        key = (message.source, message.tag)
        self.queues[key].popleft()
        if not self.queues[key]:
            del self.queues[key]
        receive.looked_at()
        flat = receive.memory.flat
        if receive.memory.pack is not None and envelope.nbytes < flat.nbytes:
            receive.memory.pack()  # what the message does not reach keeps what it holds
        if envelope.apart:
            # Elements that MPI does not know travel as bytes; on both sides, if the dtypes are the same or not compared.
            flat = flat if flat.dtype.kind != "V" else flat.view(np.uint8)
            receive.request = large_counts.post(self._control.Irecv, flat, message.source, message.tag)
            self.taking.append(receive)
            waiting.transfer_hint(envelope.nbytes)
        else:
            flat.view(np.uint8)[: envelope.nbytes] = message.elements
            receive.filled()

    def taken(self, receive: Receive) -> None:
        """Note that a receive is complete."""
        if receive in self.taking:
            self.taking.remove(receive)

    def outstanding(self) -> list[tuple[int, int]]:
        """Return (source, tag) of every receive that is started and not complete."""
        started = [(receive.source, receive.tag) for receive in (*self.waiting, *self.taking)]
        return [*started, *self.posted]

    def withdraw(self, receive: Receive) -> None:
        """Take back a receive that is given up."""
        with self.lock:
            if receive in self.waiting:
                self.waiting.remove(receive)
            self._rest()

    def Test(self) -> bool:
        """Look for messages; True when no receive waits for one."""
        if self.waiting:
            self.look()
        return not self.waiting

    def watch(self) -> None:
        """Have every wait of the process look, while a receive waits for its message."""
        with self.lock:
            if self.waiting and self not in waiting.pending:
                waiting.pending.append(self)

    def drop(self, left: list[int]) -> Generator[Request, None, None]:
        """Receive and drop what nobody received: ``left`` messages of each source, those that are kept here among them.

        A generator: it yields what has to complete before it goes on.
        """
        for source, count in enumerate(left):
            kept = [message for (sender, _), queue in self.queues.items() if sender == source for message in queue]
            while len(kept) < count:
                message = self._take(source, MPI.ANY_TAG)
                if message is None:
                    yield waiting.Condition(partial(self._data.Iprobe, source, MPI.ANY_TAG))
                else:
                    kept.append(message)
            for message in kept:
                yield waiting.Condition(message.here)
                assert message.envelope is not None
                if message.envelope.apart:
                    rest = np.empty(message.envelope.count, message.envelope.dtype)
                    yield large_counts.post(self._control.Irecv, rest, source, message.tag)
        self.queues.clear()
