"""Match messages to receives by the rule of MPI, and check each message before the memory of a receive is written.

The envelope of a message has its dtype and number of elements (``transports.mpi.envelope``). The message is received into memory
of the library, and given to a receive only if it fits. The elements of a large message are received directly into the memory of
the receive, after that check. A message that does not fit overwrites nothing: it stays at the head of its queue, and the receive
ends with an error that names both calls. (Open MPI 5.0.11 crashes or hangs if a posted receive is too short for a message of
more than a few KiB.)

The rule (MPI-4.1 section 3.5): of all receives that match a message by source and tag, the one that was started first gets it.
Of all messages of one source that match a receive, the receive gets the one that was sent first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.memory.memory import Memory
from mpicoll.runtime import handler_calls, waiting
from mpicoll.runtime.mpi_library import retain_frames
from mpicoll.runtime.waiting import Pollable
from mpicoll.transports import large_counts
from mpicoll.transports.mpi.envelope import DTYPE_BEHIND, SMALL_BYTES, Envelope, open_message

_MOST_PLACES = 4096

OBJECT_TAGS = 16
"""Number of tags for the messages that follow the first message of a list of objects."""


class Snapshot(Protocol):
    """The contents of some memory, to find out later whether the memory was written."""

    def is_changed(self) -> bool:
        """Return whether the contents have changed."""


class Claim(Protocol):
    """The claim of a pending receive on its memory (``checks.memory_in_use``)."""

    def snapshot_of(self, arrays: list[Any]) -> Snapshot:
        """Return a snapshot of some arrays."""

    def snapshot_results(self) -> None:
        """Record the contents of memory that the receive has written."""


class Message:
    """A message that has been received from MPI, or is being received.

    Attributes:
        source: rank in the group.
        buffer: its bytes.
        envelope: decoded envelope, after the message has been received.
        elements: bytes of the elements, unless they move apart.
    """

    __slots__ = ("_request", "buffer", "elements", "envelope", "place", "source", "tag")

    def __init__(self, source: int, tag: int, buffer: Any, request: MPI.Request | None = None) -> None:
        self.source = source
        self.tag = tag
        self.envelope: Envelope | None = None
        self.elements: Any = None
        self.place = ""
        self.buffer = buffer
        self._request = request

    def arrived(self) -> bool:
        """Return whether the whole message has been received."""
        if self._request is not None:
            if not self._request.Test():
                return False
            self._request = None
        return True

    def here(self) -> bool:
        """Return whether the whole message has been received and opened."""
        if self.envelope is None:
            if not self.arrived():
                return False
            self.envelope, self.elements, self.place = open_message(self.buffer)
        return True


class Receive:
    """One receive: it waits for a message, is filled, and completes; or it is refused, as its message does not fit.

    Attributes:
        source, tag: source (a rank of the group or MPI.ANY_SOURCE) and tag of messages that match.
        exact: only a message of the same dtype and number of elements fits; otherwise a message that is not longer.
        sender: rank in the group that sent the message; -1 before.
        refused: envelope of the message that did not fit.
        place: call site of that message, or "" if it is not known.
        dirty: the program wrote the memory before the message was received.
        claim: claim on the memory.
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
        """Find writes of the program to the memory."""
        self.claim = claim
        if self.complete:
            claim.snapshot_results()
        elif self.request is None:
            self._snapshot = claim.snapshot_of([self.memory.own])

    def looked_at(self) -> None:
        """Check for writes of the program, before the message is copied into the memory."""
        self.dirty = self._snapshot is not None and self._snapshot.is_changed()

    def filled(self) -> None:
        """Complete the receive, whose message is in the memory."""
        if self.memory.unpack is not None and not self.dirty:
            self.memory.unpack()
        self.complete = True
        if self.claim is not None:
            self.claim.snapshot_results()

    def takes(self, source: int, tag: int) -> bool:
        """Return whether a message from ``source`` with ``tag`` matches the receive."""
        return tag == self.tag and self.source in (source, MPI.ANY_SOURCE)

    def fits(self, envelope: Envelope) -> bool:
        """Return whether a message fits into the memory."""
        flat = self.memory.flat
        if envelope.objects >= 0:
            return False
        if self.exact:
            return envelope.fits(self.memory)
        return envelope.nbytes <= flat.nbytes

    def Test(self) -> bool:
        """Progress the receive; return True if it is complete, or if its message does not fit."""
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
    """The receive of the first message of a list of objects; the rest is received afterwards.

    Attributes:
        length: length of the list; a list of another length does not fit.
        number: number of the list among those received from its sender.
    """

    __slots__ = ("_counts", "length", "number")

    def __init__(self, receiver: Receiver, length: int, source: int, tag: int, counts: dict[int, int]) -> None:
        super().__init__(receiver, Memory(np.zeros(SMALL_BYTES, np.uint8), (SMALL_BYTES,)), source, tag, exact=True)
        self.length = length
        self.number = 0
        self._counts = counts

    def take(self, source: int, content: Any) -> None:
        """Take a message that has been received; for the caller of :meth:`Receiver.take_at_once`.

        Args:
            content: the bytes behind the words.
        """
        self.sender = source
        self.looked_at()
        self.memory.flat[: len(content)] = content
        self.filled()

    def fits(self, envelope: Envelope) -> bool:
        """Return whether the message is a list of this length."""
        return envelope.objects == self.length and envelope.nbytes <= SMALL_BYTES and not envelope.apart

    def looked_at(self) -> None:
        """Number the list, in the order of messages."""
        super().looked_at()
        self.number = self._counts[self.sender] = self._counts.get(self.sender, 0) + 1

    def outrun(self) -> bool:
        """Return whether the next list of the sender would use the tag of messages of this list that are not received yet."""
        return self._counts[self.sender] + 1 - self.number >= OBJECT_TAGS

    def filled(self) -> None:
        """Complete the first message; the receive stays outstanding until :meth:`Receiver.taken`."""
        super().filled()
        self.receiver.taking.append(self)


class Receiver:
    """The outstanding receives of one group, in the order in which they were started (a waiting.Pollable).

    Attributes:
        waiting: receives without a message.
        torn: called after an unexpected exception while messages are received, so that a message may be lost.
        queues: messages received from MPI that no receive has got yet, by (source, tag), in the order of sending.
        posted: (source, tag) of receives that a caller has posted to MPI directly, while no receive waited and the queues were
            empty: they were started before all waiting receives.
    """

    def __init__(self, control: MPI.Intracomm, data: MPI.Intracomm) -> None:
        self.torn: Callable[[BaseException], None] = lambda error: None
        self._control = control
        self._data = data
        self._status = MPI.Status()  # of a probe, used under the lock
        self.lock = threading.Lock()
        self.posted: list[tuple[int, int]] = []
        self.waiting: list[Receive] = []
        self.taking: list[Receive] = []  # receives whose elements move
        self.queues: dict[tuple[int, int], deque[Message]] = {}
        self._places: dict[tuple[int, int], str] = {}
        self._dtypes: dict[tuple[int, int], str] = {}  # those without a number, by source and hash

    def start(self, memory: Memory, source: int, tag: int, exact: bool) -> Receive:
        """Start a receive; its message may have been received before."""
        receive = Receive(self, memory, source, tag, exact)
        self.begin(receive)
        return receive

    def begin(self, receive: Receive) -> None:
        """Start a given receive. Earlier receives are not looked after here: with many, each start would cost more."""
        with self.lock:
            self.waiting.append(receive)
            self._match(len(self.waiting) - 1)

    def adopt(self, message: Message, memory: Memory, exact: bool) -> Receive:
        """Start the receive that was posted directly, and got a message that must be checked."""
        key = (message.source, message.tag)
        receive = Receive(self, memory, *key, exact)
        with self.lock:
            self.posted.remove(key)
            self.queues.setdefault(key, deque()).appendleft(message)
            self.waiting.insert(0, receive)
            self._match()
        return receive

    def take_at_once(self, source: int, tag: int, takes: Callable[[int, Any], bool]) -> bool:
        """Take the next message of a source and tag if it has arrived, or arrives soon, and if no other receive may get it.

        After an exception a message may be lost: the caller gives the group up.

        Args:
            takes: with the source and the bytes of a message, returns whether the caller has taken the message, and counted it;
                otherwise the message stays for the next receive.
        """
        message: Message | None = None

        def comes() -> bool:
            nonlocal message
            message = self._take(source, tag)
            return message is not None

        with self.lock:
            if self.waiting or self.queues or self.posted or self.taking:
                return False
            if not waiting.comes_soon(comes, waiting.MOST_POLLS):
                return False
            assert message is not None
            if message.arrived() and takes(message.source, message.buffer):
                return True
            self.queues[message.source, message.tag] = deque((message,))
        return False

    def look(self) -> None:
        """Give each message that has arrived to the receive that it matches."""
        if not self.lock.acquire(blocking=False):
            return  # another thread does the same
        try:
            self._match()
        finally:
            self.lock.release()

    def _match(self, first: int = 0) -> None:
        try:
            self._match_from(first)
        except BaseException as error:
            # An exception of a signal handler, or no memory: between MPI and the queues a message may be lost.
            retain_frames(error)
            self.torn(error)
            raise

    def _match_from(self, at: int) -> None:
        """Look for messages of the waiting receives from the index ``at`` on, once for each source and tag."""
        without: set[tuple[int, int]] = set()
        while at < len(self.waiting):
            wanted = self.waiting[at]
            key = wanted.source, wanted.tag
            message = None if key in without else self._first_for(wanted)
            if message is None:
                without.add(key)
                at += 1
                continue
            # The first receive that matches gets the message: one before ``at`` may have looked just before it arrived.
            index, receive = next(
                each for each in enumerate(self.waiting) if each[1].takes(message.source, message.tag)
            )
            del self.waiting[index]
            at -= index < at
            self._give(receive, message)
        self._rest()

    def _rest(self) -> None:
        """Remove this object from the pending list if no receive waits (the caller has the lock)."""
        if not self.waiting:
            waiting.drop(self)

    def _first_for(self, wanted: Receive) -> Message | None:
        """Return the first complete message for a receive, from the queues or else from MPI."""
        for key, queue in self.queues.items():
            if wanted.takes(*key):
                if self._may_give(key, queue[0]):
                    return queue[0]
                if wanted.source != MPI.ANY_SOURCE:
                    return None  # a later message must not overtake it
        message = self._take(wanted.source, wanted.tag)
        if message is None:
            return None
        key = (message.source, message.tag)
        queue = self.queues.setdefault(key, deque())
        queue.append(message)
        return queue[0] if self._may_give(key, queue[0]) else None

    def _take(self, source: int, tag: int) -> Message | None:
        """Receive the next message of a source and tag from MPI, if one has arrived."""
        status = self._status
        found = self._data.Improbe(source, tag, status)
        if found is None:
            return None
        buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        # The message may not be complete: MPI_Mrecv would wait for a sender that computes.
        return Message(status.Get_source(), status.Get_tag(), buffer, found.Irecv([buffer, MPI.BYTE]))

    def _may_give(self, key: tuple[int, int], message: Message) -> bool:
        if not message.here():
            return False
        assert message.envelope is not None
        if message.place:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            place, _, told = message.place.partition(DTYPE_BEHIND)
            self._places[message.source, message.envelope.place] = place
            if told:
                if len(self._dtypes) >= _MOST_PLACES:
                    self._dtypes.clear()
                self._dtypes[message.source, message.envelope.print] = told
            message.place = ""
        if message.envelope.objects >= 0 and any(
            isinstance(each, ObjectReceive) and each.sender == message.source and each.outrun()
            for each in tuple(self.taking)
        ):
            return False
        # A posted receive was started before. It may have got an earlier message that does not fit, or whose elements still
        # move: elements move in the order of messages.
        return key not in self.posted

    def _give(self, receive: Receive, message: Message) -> None:
        envelope = message.envelope
        assert envelope is not None
        receive.sender = message.source
        if not receive.fits(envelope):
            receive.refused = replace(envelope, told=self._dtypes.get((message.source, envelope.print), ""))
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
            receive.memory.pack()  # elements behind the end of the message must not change
        if envelope.apart:
            # Elements unknown to MPI move as bytes, on both sides if the dtypes are the same or are not compared.
            flat = flat if flat.dtype.kind != "V" else flat.view(np.uint8)
            receive.request = large_counts.post(self._control.Irecv, flat, message.source, message.tag)
            self.taking.append(receive)
            waiting.transfer_hint(envelope.nbytes)
        else:
            flat.view(np.uint8)[: envelope.nbytes] = message.elements
            receive.filled()

    def taken(self, receive: Receive) -> None:
        """Record that a receive is complete."""
        if receive in self.taking:
            self.taking.remove(receive)

    def outstanding(self) -> list[tuple[int, int]]:
        """Return (source, tag) of all receives that are started and not complete."""
        started = [(receive.source, receive.tag) for receive in (*self.waiting, *self.taking)]
        return [*started, *self.posted]

    def unreceived(self, source: int) -> list[tuple[int, int]]:
        """Return (source, tag) of messages that no receive takes: those of the queues, and the first of each rank in MPI.

        Args:
            source: rank in the group; negative for any rank.
        """
        status = MPI.Status()
        found = {key for key in tuple(self.queues) if source < 0 or source == key[0]}
        for rank in (source,) if source >= 0 else range(self._data.Get_size()):
            if self._data.Iprobe(rank, MPI.ANY_TAG, status):
                found.add((rank, status.Get_tag()))
        taken = self.outstanding()
        return sorted(key for key in found if key not in taken and (MPI.ANY_SOURCE, key[1]) not in taken)

    def withdraw(self, receive: Receive) -> None:
        """Remove a withdrawn receive."""
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
        """Let all waits of the process look for messages, while a receive waits for one."""
        with self.lock:
            if self.waiting and self not in waiting.pending:
                waiting.pending.append(self)

    def drop(self, left: list[int]) -> Generator[Pollable, None, None]:
        """Receive and drop messages without a receive: ``left`` of each source, including messages in the queues.

        A generator that yields the requests to complete.
        """
        for source, count in enumerate(left):
            found = [message for (sender, _), queue in self.queues.items() if sender == source for message in queue]
            while len(found) < count:
                message = self._take(source, MPI.ANY_TAG)
                if message is None:
                    yield waiting.Condition(partial(self._data.Iprobe, source, MPI.ANY_TAG))
                else:
                    found.append(message)
            for message in found:
                yield waiting.Condition(message.here)
                assert message.envelope is not None
                if message.envelope.apart:
                    rest = np.empty(message.envelope.count, message.envelope.dtype)
                    yield large_counts.post(self._control.Irecv, rest, source, message.tag)
        self.queues.clear()


handler_calls.calls.add(Receiver.take_at_once.__code__)
