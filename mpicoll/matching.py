"""Which message goes to which receive: MPI's own rule, applied before a receive is posted.

A receive is posted to MPI when its message has come and fits (``MPI_Iprobe`` tells its size). So a message that is too long
is never cut: it stays in the queue, and the receive ends with an error that names both sizes. That is more than a
courtesy: Open MPI 5.0.11 crashes or hangs when a posted receive is too short for a message of more than a few KiB.

The rule (MPI-4.1 section 3.5): of all outstanding receives that a message fits by source and tag, the one that was
started first gets it; of all messages that a receive fits, the one from a given source that was sent first.
"""

from __future__ import annotations

import threading

from mpi4py import MPI

from mpicoll import waiting
from mpicoll.buffers.array import Memory

__all__ = ["Receive", "Receiver"]


class Receive:
    """One receive (a Request): looked for, then posted, then complete, or too short for its message.

    Attributes:
        source, tag: what it takes; the source is a rank of the group or MPI.ANY_SOURCE.
        sender: rank in the group that its message came from; -1 until it has come.
        message_bytes: size of that message.
    """

    __slots__ = ("complete", "memory", "message_bytes", "receiver", "request", "sender", "source", "status", "tag")

    def __init__(self, receiver: Receiver, memory: Memory, source: int, tag: int) -> None:
        self.receiver = receiver
        self.memory = memory
        self.source = source
        self.tag = tag
        self.sender = -1
        self.message_bytes = 0
        self.request: MPI.Request | None = None
        self.status = MPI.Status()
        self.complete = False

    @property
    def too_short(self) -> bool:
        """Whether its message is longer than its memory."""
        return self.message_bytes > self.memory.flat.nbytes

    def takes(self, source: int, tag: int) -> bool:
        """Whether a message from ``source`` with ``tag`` is for it."""
        return tag == self.tag and self.source in (source, MPI.ANY_SOURCE)

    def Test(self) -> bool:
        """Look for the message and move it on; True when complete, or when it is known not to fit."""
        if self.complete:
            return True
        if self.request is None:
            self.receiver.look()
            if self.request is None:
                return self.complete
        if self.request.Test(self.status):
            self.complete = True
            self.receiver.taken(self)
        return self.complete


class Receiver:
    """The outstanding receives of one group, in the order in which they were started (a waiting.Pending)."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._waiting: list[Receive] = []
        self._taking: list[Receive] = []

    def start(self, memory: Memory, source: int, tag: int) -> Receive:
        """Start a receive; its message may be here already."""
        receive = Receive(self, memory, source, tag)
        with self._lock:
            self._waiting.append(receive)
        self.look()
        return receive

    def look(self) -> None:
        """Give each message that has come to the receive that it is for, and post that receive."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is looking
        try:
            status = MPI.Status()
            at = 0
            while at < len(self._waiting):
                wanted = self._waiting[at]
                if not self._comm.Iprobe(wanted.source, wanted.tag, status):
                    at += 1
                    continue
                # An earlier receive from any source may have looked just before this message came: it goes first.
                source = status.Get_source()
                receive = next(r for r in self._waiting if r.takes(source, wanted.tag))
                self._waiting.remove(receive)
                self._give(receive, source, status)
                at = 0
        finally:
            self._lock.release()

    def _give(self, receive: Receive, source: int, status: MPI.Status) -> None:
        receive.sender = source
        receive.message_bytes = status.Get_count(MPI.BYTE)
        if receive.too_short:
            receive.complete = True
        else:
            receive.request = self._comm.Irecv(receive.memory.flat, source, receive.tag)
            self._taking.append(receive)
            waiting.moving(receive.message_bytes)

    def taken(self, receive: Receive) -> None:
        """Note that a receive is complete."""
        if receive in self._taking:
            self._taking.remove(receive)

    def outstanding(self) -> list[tuple[int, int]]:
        """Return (source, tag) of every receive that is started and not complete."""
        return [(receive.source, receive.tag) for receive in (*self._waiting, *self._taking)]

    def withdraw(self, receive: Receive) -> None:
        """Take back a receive that is given up."""
        with self._lock:
            if receive in self._waiting:
                self._waiting.remove(receive)

    def advance(self) -> bool:
        """Look for messages; True when no receive waits for one."""
        if self._waiting:
            self.look()
        return not self._waiting

    def watch(self) -> None:
        """Have every wait of the process look, while a receive waits for its message."""
        if self._waiting and self not in waiting.pending:
            waiting.pending.append(self)
