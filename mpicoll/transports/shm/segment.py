"""A segment of memory that the members of a group on one node share: a counter and two buffers for each member.

Members move in *steps*. In a step a member may write into its buffer of that step (there are two, used in turn), says by its
counter that it has come to the step, and then may read what the others have written in it. A member comes to the next step
only when it has read what it wanted, so

- what a member has written in step k may be read by whoever has seen its counter at k;
- a buffer of step k may be written when all counters are at k - 1: everybody has read what stood there in step k - 2.

**Why plain stores and loads are enough.** On x86-64, stores of one core are seen by all others in their order, and loads are
not done out of theirs (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3A, "Memory Ordering in P6 and
More Recent Processor Families"; Sewell et al., "x86-TSO: a rigorous and usable programmer's model for x86 multiprocessors",
CACM 53(7), 2010): who sees the counter sees what was written before it. An aligned 8-byte store is not torn (the same manual,
"Guaranteed Atomic Operations"). The exception are non-temporal stores, which the C library uses to copy much at once: it ends
them by an SFENCE of its own, and before the counter is stored a lock is taken here, whose locked instruction drains them,
whoever made them. The interpreter keeps the order of the program: each statement's effect on memory is over before the next
one's.

On other processors loads and stores may pass each other, and Python has no fence: there a step is a nonblocking barrier of
MPI, whose ordering MPI itself needs for its own shared memory. That way is tested on x86-64 alone.
"""

from __future__ import annotations

import math
import mmap
import platform
import threading
from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicoll.transports.base import Request
from mpicoll.transports.shm.mapping import map_together

ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Whether this processor keeps the order of stores, and of loads."""

BUFFERS = 2
LINE = 128
"""Bytes between two counters: two cache lines, as processors fetch these in pairs."""

_PAGE = mmap.PAGESIZE


class _Barriers:
    """Counters that are barriers of MPI: to store a number posts one, and it is seen when all have posted as many."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._under_way: list[tuple[int, MPI.Request]] = []
        self._seen = 0

    def __setitem__(self, at: int, step: int) -> None:
        self._under_way.append((step, self._comm.Ibarrier()))

    def __getitem__(self, at: int) -> int:
        while self._under_way and self._under_way[0][1].Test():
            self._seen = self._under_way.pop(0)[0]
        return self._seen


class Meeting:
    """All of ``peers`` have come to a step (a Request)."""

    __slots__ = ("_counters", "_peers", "_step")

    def __init__(self, counters: Any, peers: tuple[int, ...], step: int) -> None:
        self._counters, self._peers, self._step = counters, peers, step

    def Test(self) -> bool:
        """Return whether they have."""
        counters, step = self._counters, self._step
        return all(counters[peer] >= step for peer in self._peers)


class Segment:
    """The shared memory of one group, as one member sees it.

    Attributes:
        me, size: of this member; ``others`` are all but it.
        step: the last one that this member has come to.
        room: bytes of a buffer.
        counters: where the members stand; ``places[i]`` is that of member i.
        lines: the same memory; behind each counter its member may say something of its step.
    """

    __slots__ = (
        "_fence",
        "_memory",
        "_views",
        "counters",
        "lines",
        "me",
        "others",
        "peers",
        "places",
        "room",
        "size",
        "step",
    )

    def __init__(self, memory: mmap.mmap, me: int, size: int, room: int, barriers: MPI.Intracomm | None = None) -> None:
        self.me, self.size, self.room, self.step = me, size, room, 0
        self._memory = memory
        self._fence = threading.Lock()
        self.places = tuple(rank * LINE // 8 for rank in range(size))
        self.others = tuple(rank for rank in range(size) if rank != me)
        self.peers = tuple(self.places[rank] for rank in self.others)
        self.lines = memoryview(self._memory)[: _head(size)].cast("q")
        self.counters: Any = self.lines
        if barriers is not None:
            self.counters = _Barriers(barriers)
        self._views: dict[str, list[list[npt.NDArray[Any]]]] = {}

    def buffers(self, dtype: np.dtype[Any]) -> list[list[npt.NDArray[Any]]]:
        """Return the buffers as arrays of a dtype: of each member, those of the even and of the odd steps."""
        found = self._views.get(dtype.char)
        if found is None:
            whole, at = np.frombuffer(self._memory, np.uint8), _head(self.size)
            starts = [[at + (BUFFERS * rank + i) * self.room for i in range(BUFFERS)] for rank in range(self.size)]
            cut = self.room // dtype.itemsize * dtype.itemsize
            found = [[whole[start : start + cut].view(dtype) for start in of] for of in starts]
            self._views[dtype.char] = found
        return found

    def beside(self, which: int, rank: int, dtype: np.dtype[Any], shape: tuple[int, ...], at: int = 0) -> Any:
        """Return what stands in a member's buffer of the even (0) or odd steps, as an array, from byte ``at`` on."""
        start = _head(self.size) + (BUFFERS * rank + which) * self.room + at
        nbytes = dtype.itemsize * math.prod(shape)
        return np.frombuffer(self._memory, np.uint8, nbytes, start).view(dtype).reshape(shape)

    def across(self, which: int, dtype: np.dtype[Any], count: int, at: int = 0) -> Any:
        """Return ``count`` elements of each member's buffer of the even or odd steps, as one array with a row for each."""
        whole = np.frombuffer(self._memory, np.uint8)[_head(self.size) :].reshape(self.size, BUFFERS * self.room)
        start = which * self.room + at
        return whole[:, start : start + count * dtype.itemsize].view(dtype)

    def layout(self) -> dict[str, Any]:
        """Return where the buffers stand, in bytes, as the extension wants to know it."""
        apart = BUFFERS * self.room
        return {
            "data": self._memory,
            "first": _head(self.size),
            "apart": apart,
            "room": self.room,
            "places": BUFFERS,
            "line": LINE,
        }

    def come(self, step: int) -> None:
        """Say that this member has come to a step, and has written all that it writes in it."""
        self.drain()
        self.step = step
        self.counters[self.places[self.me]] = step

    def drain(self) -> None:
        """Have everything written that this member has stored, whatever instructions the C library has copied it by."""
        fence = self._fence
        fence.acquire()
        fence.release()

    def all_at(self, step: int) -> bool:
        """Whether all others have come to a step."""
        counters = self.counters
        return all(counters[peer] >= step for peer in self.peers)


def _head(size: int) -> int:
    return -(-size * LINE // _PAGE) * _PAGE


def make_segment(comm: MPI.Intracomm, room: int, willing: bool) -> Generator[Request, None, Segment | str]:
    """Make the segment of a group whose members are on one node; all of them call it, and are known to.

    A generator: it yields what has to complete before it goes on.

    Args:
        room: bytes of a buffer, a multiple of the page; that of member 0 counts.
        willing: this member has so much left to give.

    Returns:
        The segment, or why there is none: on all members alike, in words on those that know.
    """
    size = comm.Get_size()
    made = yield from map_together(
        comm, _head(size), BUFFERS * room, "" if willing else "the groups of this process use what MPICOLL_SHM_MB gives"
    )
    if isinstance(made, str):
        return made
    memory, part = made
    return Segment(memory, comm.Get_rank(), size, part // BUFFERS, None if ORDERED else comm)
