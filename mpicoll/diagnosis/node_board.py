"""The node board: a slot of shared memory for each rank of a node, and a lock that shows whether the rank is alive.

A rank writes into its own slot only. A thread writes its place four times a second. The rank also writes when it waits for long,
gives a group up, or leaves. Other ranks read the slot whatever its owner does, also from a thread that must not call MPI. A CRC
checks the data that is read, so nothing depends on the order in which another core's stores become visible.

A record lock on the file shows whether a rank is alive: the kernel drops it when the process ends, whatever ended it. A process
id would fail for zombies, across containers, and when ids are used again (fcntl(2), "record locks").
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import zlib
from typing import Any

from mpi4py import MPI

from mpicoll.diagnosis.place import Place
from mpicoll.transports.shm import mapping

SLOT_BYTES = 22 * 1024

_STATUS, _CONFIRMED, _SEARCHED, _CHANGED, _SINCE, _REPORTED = 0, 8, 16, 24, 32, 40
_THERE, _LEFT, _ENDS_JOB, _ENDED = 1, 2, 3, 4
_WORD = struct.Struct("=q")
_HEAD = struct.Struct("=II")  # length, CRC
_FLOCK = struct.Struct("hhqqi")  # struct flock of 64-bit Linux
_AREAS = {
    "state": (64, 12 * 1024),
    "place": (12 * 1024 + 64, 1024),
    "withdrawn": (13 * 1024 + 64, 2048),
    "waits": (15 * 1024 + 64, 960),
    "termination": (16 * 1024, 4 * 1024),
    "destroyed": (20 * 1024, 2 * 1024),
}

ENDED_FOR = 1.5
"""Seconds after which a rank that a signal ends counts as dead: usually the same signal ends the other ranks, too."""


class NodeBoard:
    """The slots of the ranks of one node; ranks are those of the base communicator.

    Attributes:
        ranks: the ranks of this node, this rank included.
        me: this rank.
    """

    def __init__(self, descriptor: int, second: int, me: int, ranks: tuple[int, ...]) -> None:
        self.me = me
        self.ranks = ranks
        self._place = {rank: place for place, rank in enumerate(ranks)}
        # Closing any descriptor of the file would drop the lock, so this descriptor stays open as long as the slots are used.
        self._file = descriptor
        self._second = second  # for the wait of await_death
        self._memory = mmap.mmap(descriptor, len(ranks) * SLOT_BYTES)
        self._mine = self._place[me] * SLOT_BYTES
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place[me])
        self._put(_STATUS, _THERE)

    def _put(self, at: int, value: int) -> None:
        _WORD.pack_into(self._memory, self._mine + at, value)

    def _word(self, rank: int, at: int) -> int:
        value: int = _WORD.unpack_from(self._memory, self._place[rank] * SLOT_BYTES + at)[0]
        return value

    def write(self, area: str, data: bytes) -> bool:
        """Write ``data`` to an area of this rank's slot (b"" empties it); return whether there was room."""
        at, room = _AREAS[area]
        at += self._mine
        fits = len(data) + _HEAD.size <= room
        if not fits:
            data = b""
        _HEAD.pack_into(self._memory, at, 0, 0)
        self._memory[at + _HEAD.size : at + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._memory, at, len(data), zlib.crc32(data))
        return fits

    def read(self, rank: int, area: str) -> bytes:
        """Return the contents of an area of a rank's slot; b"" if the area is empty, or is just being written."""
        at, room = _AREAS[area]
        at += self._place[rank] * SLOT_BYTES
        length, crc = _HEAD.unpack_from(self._memory, at)
        if not 0 < length <= room - _HEAD.size:
            return b""
        data = self._memory[at + _HEAD.size : at + _HEAD.size + length]
        return data if zlib.crc32(data) == crc else b""

    def write_state(self, data: bytes) -> None:
        """Write a changed state of this rank, for searches for deadlocks."""
        self.write("state", data)  # if there is no room, the rank counts as a rank that does not answer
        self._put(_CHANGED, time.monotonic_ns())

    def changed(self) -> int:
        """Return when a rank of this node last wrote a changed state (``time.monotonic_ns``)."""
        return max(self._word(rank, _CHANGED) for rank in self.ranks)

    def waiting_below(self, since: int = 0) -> int:
        """Return how many lower ranks of this node have a state that was confirmed since then (``time.monotonic_ns``)."""
        return sum(rank < self.me and self._has_state(rank) and self.confirmed(rank) >= since for rank in self.ranks)

    def _has_state(self, rank: int) -> bool:
        length: int = _HEAD.unpack_from(self._memory, self._place[rank] * SLOT_BYTES + _AREAS["state"][0])[0]
        return length > 0

    def confirm(self, when: int) -> None:
        """Confirm that this rank's state was the written one at a time (``time.monotonic_ns``)."""
        self._put(_CONFIRMED, when)

    def confirmed(self, rank: int) -> int:
        """Return the time for which a rank last confirmed its state, on ``time.monotonic_ns`` (one clock for a node)."""
        return self._word(rank, _CONFIRMED)

    def searching(self) -> None:
        """Record that this rank searches now."""
        self._put(_SEARCHED, time.monotonic_ns())

    def searched(self, rank: int) -> int:
        """Return when a rank last searched (``time.monotonic_ns``)."""
        return self._word(rank, _SEARCHED)

    def write_place(self, site: str, op: str = "", last: str = "") -> None:
        """Write where this rank is now, and its last call (see :class:`Place`)."""
        words = (site.encode()[-420:], op.encode()[:60], last.encode()[-420:])
        self.write("place", _WORD.pack(time.monotonic_ns()) + b"\0".join(words))

    def place(self, rank: int) -> Place:
        """Return the place that a rank last wrote."""
        data = self.read(rank, "place")
        if len(data) < _WORD.size:
            return Place()
        when: int = _WORD.unpack_from(data)[0]
        site, op, last = (word.decode(errors="replace") for word in data[_WORD.size :].split(b"\0"))
        return Place((time.monotonic_ns() - when) / 1e9, site, op, last)

    def leave(self, *, ends_job: bool = False) -> None:
        """Record that this rank ends in an orderly way, and whether it ends the job: then the launcher kills the other ranks."""
        self._put(_STATUS, _ENDS_JOB if ends_job else _LEFT)

    def end(self) -> None:
        """Record that a signal ends this rank."""
        self._put(_SINCE, time.monotonic_ns())
        self._put(_STATUS, _ENDED)

    def ended(self, rank: int) -> bool:
        """Return whether a rank has recorded that a signal ends it."""
        return self._word(rank, _STATUS) == _ENDED

    def orderly(self, rank: int) -> bool:
        """Return whether a rank has ended in an orderly way."""
        return self._word(rank, _STATUS) in (_LEFT, _ENDS_JOB)

    def ends_job(self) -> bool:
        """Return whether a rank of this node has ended the job: then the launcher ends the other ranks."""
        return any(self._word(rank, _STATUS) == _ENDS_JOB for rank in self.ranks)

    def report(self) -> None:
        """Record that this rank has reported where the ranks of this node are."""
        self._put(_REPORTED, time.monotonic_ns())

    def reported(self, within: float) -> bool:
        """Return whether a rank has reported within the last ``within`` seconds."""
        since = time.monotonic_ns() - int(within * 1e9)
        return any(self._word(rank, _REPORTED) > since for rank in self.ranks)

    def dead(self) -> list[int]:
        """Return the ranks of this node whose process ended without a record, or by a signal more than ``ENDED_FOR`` s ago."""
        return [rank for rank in self.ranks if rank != self.me and not self._lives(rank)]

    def _lives(self, rank: int) -> bool:
        if not self._may_die(rank):
            return True
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._place[rank], 1, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, question))[0]
        return kind != fcntl.F_UNLCK or not self._may_die(rank)

    def _may_die(self, rank: int) -> bool:
        """Return whether the end of a rank's process would mean that the rank is dead."""
        status = self._word(rank, _STATUS)
        ended_at = self._word(rank, _SINCE)
        return status == _THERE or (status == _ENDED and time.monotonic_ns() - ended_at > ENDED_FOR * 1e9)

    def await_death(self) -> int:
        """Wait until the next rank of the node dies, and return that rank; -1 if none will.

        Call it in a thread of its own, as it blocks. The kernel wakes the thread when the process ends, before a launcher can
        end this process for that reason. If the next rank ends in an orderly way, wait for the rank after it. If a rank has
        ended the job, the launcher kills the other ranks: these deaths are not returned.
        """
        here = self.ranks.index(self.me)
        for rank in (*self.ranks[here + 1 :], *self.ranks[:here]):
            # A lock of the open file: the kernel looks for no cycles of such locks. The waits of all ranks are a cycle.
            question = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, self._place[rank], 1, 0)
            fcntl.fcntl(self._second, fcntl.F_OFD_SETLKW, question)
            answer = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, self._place[rank], 1, 0)
            fcntl.fcntl(self._second, fcntl.F_OFD_SETLK, answer)
            if self.ends_job():
                break
            if self._word(rank, _STATUS) == _THERE:
                return rank
        return -1

    def close(self) -> None:
        """Release the memory, and the lock with it."""
        if self._word(self.me, _STATUS) == _THERE:
            self.leave()
        self._memory.close()
        os.close(self._file)
        os.close(self._second)


def make_node_board(node: MPI.Comm, me: int, ranks: tuple[int, ...]) -> NodeBoard | None:
    """Make the node board; None, on all ranks of the node, if there is no shared memory.

    All ranks of ``node`` must be known to call this function: it makes blocking MPI calls.

    Args:
        node: the ranks of one node.
        me: this rank in the base communicator.
        ranks: all ranks of the node in the base communicator, by rank in ``node``.
    """
    path = ""
    if node.Get_rank() == 0:
        created, path, _ = mapping.create("slots", len(ranks) * SLOT_BYTES)
        if created >= 0:
            os.close(created)
    path = node.bcast(path, 0)
    slots: NodeBoard | None = None
    if path:
        try:
            second = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # opened first: closing it would drop the lock
            slots = NodeBoard(os.open(path, os.O_RDWR | os.O_CLOEXEC), second, me, ranks)
        except (OSError, ValueError):
            slots = None
    all_have: Any = node.allreduce(slots is not None, MPI.LAND)
    if path and node.Get_rank() == 0:
        mapping.remove(path)
    if all_have:
        return slots
    if slots is not None:
        slots.close()
    return None
