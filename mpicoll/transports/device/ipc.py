"""Ranks that share a GPU reduce on it, in memory of the device that all of them have open (CUDA IPC).

The first member of a group makes one *window* with cudaMalloc, the others open it, and each has a part of it: two buffers, and
some room to work in. A large ``all_reduce`` goes through it in chunks. For each chunk every member

1. copies its elements into its buffer, and waits until it has seen that copy complete;
2. meets the others;
3. reduces its share of the elements, of all buffers in the order of the ranks, into the buffer of the first member, and waits
   until it has seen that complete;
4. meets the others;
5. copies the whole result from the first member's buffer into its own array.

So each element is reduced by one member alone, always in the same order: all hold the same bits, each time. The two buffers are
used in turn, through all calls: a member that copies its next elements in does not touch what others still copy out, and it
comes to the meeting after that only when its own copy out is over. Nobody waits at the end of a call.

**Why not the program's arrays themselves.** Each would have to be exported and opened; memory of cudaMallocAsync, or mapped
piece by piece, cannot be; and an importer must close a handle before its memory is freed, of which nobody tells the library.
The window is made once. It costs two more copies on the device, where memory is some thirty times as fast as the PCIe that is
left out.

**Between processes** only events that the host has seen complete count before a meeting, which is a nonblocking barrier of MPI.
Kernels and copies that have completed are seen by those that any process of that GPU begins later.

**Whether it is used** is agreed on for each call: every member has to offer it, which it does for an array of 1 MiB or more,
on the GPU on which the group's window is. The window is made at the first such call that is waited for, and proven: each member
writes into its part, and reads what all others have written. Containers, ``--gpus-per-task`` and MIG break CUDA IPC: then the
group goes by way of the host for good.

**What CUDA asks for** ("Interprocess communication" in its programming guide, and cudaIpcOpenMemHandle): the process that
exports does not open its own handle; a window is opened once in each process; sizes are multiples of 2 MiB, or what else the
driver has put beside it would be shared, too; it is freed only when all others have closed it. Each member says so in a page of
host memory that all share, and the first one frees the window when it next looks. That of a group of which a member was killed
is freed with the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.memory.device import runtime as device_runtime
from mpicoll.memory.device.array import MovableArray
from mpicoll.memory.device.runtime import SCRATCH, Fold, Runtime
from mpicoll.memory.dtypes import HALVES
from mpicoll.transports.base import Array, Request
from mpicoll.transports.shm.mapping import map_together

Steps = Generator[Request, None, None]

LEAST_BYTES = 1 << 20
"""Bytes of an array from which on it is reduced on the device."""

LARGEST_BUFFER = 32 << 20
SMALLEST_BUFFER = 1 << 20
WINDOW_BYTES = 256 << 20
"""Bytes of a window at most, whatever the number of members."""

MOST_BYTES = 1 << 30
"""Bytes of all windows that this process has open at most."""

DTYPES = frozenset("?bBhHiIlLqQfdFD")
"""Type characters of the dtypes that CuPy reduces; halves are known by their names."""

CLOSING = 1.0
"""Seconds for which copies under way are waited for when a window is closed."""

_ALIGNED = 2 << 20
_TOKEN = 64
_PAGE = mmap.PAGESIZE


class _Come:
    """An event has come, or never will (a Request)."""

    __slots__ = ("_event", "_gpu")

    def __init__(self, gpu: Runtime, event: Any) -> None:
        self._gpu, self._event = gpu, event

    def Test(self) -> bool:
        """Return whether it has."""
        try:
            return self._gpu.over(self._event)
        except Exception:  # raised where it is waited for
            return True


def buffer_bytes(size: int) -> int:
    """Return the bytes of each of the two buffers of a member; 0: there are too many members."""
    part = WINDOW_BYTES // size // _ALIGNED * _ALIGNED
    buffer = min(LARGEST_BUFFER, (part - SCRATCH) // 2 // 4096 * 4096)
    return buffer if buffer >= SMALLEST_BUFFER else 0


class Link:
    """The window of one group, as one member sees it.

    Attributes:
        device: the number of the GPU that it is on.
        awaited: when this member has closed it, the others will soon do so.
        usable: whether it has been proven; None before it was tried. Known to all members alike.
        why: why not, where this member knows.
    """

    def __init__(self, comm: MPI.Intracomm, device: int) -> None:
        self._comm = comm
        self._gpu = device_runtime.runtime()
        self._me, self._size = comm.Get_rank(), comm.Get_size()
        self._pid = os.getpid()
        self._window: Any = None
        self._memory: mmap.mmap | None = None
        self._said = 0  # bytes from one member's word on the shared page to the next one's
        self._which = 0
        self._buffer = buffer_bytes(self._size)
        self._part = -(-(2 * self._buffer + SCRATCH) // _ALIGNED) * _ALIGNED
        self.awaited = True
        self.device = device
        self.usable: bool | None = None
        self.why = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the window."""
        return self._size * self._part

    def prepare(self) -> Steps:
        """Make the window and prove it, once; all members do it, and are known to."""
        sweep()
        made = yield from map_together(self._comm, _PAGE, _PAGE)
        if isinstance(made, str):
            self.usable, self.why = False, f"no shared memory: {made}"
            return
        self._memory, self._said = made
        self.usable = yield from self._try()
        if not self.usable:
            if self._me:
                self.leave()
            yield self._comm.Ibarrier()  # everybody has closed it
            self.leave()

    def _try(self) -> Generator[Request, None, bool]:
        """Make the window and prove it; whether that went well, on all members alike."""
        mine = np.zeros(64, np.uint8)  # 1 where this member cannot take part, and the address of its GPU
        try:
            if not self._buffer:
                raise MemoryError("too many ranks share the GPU")
            if self.nbytes + sum(link.nbytes for link in _open) > MOST_BYTES:
                raise MemoryError("the groups of this process have as many windows as they may")
            _fill(mine[1:], self._gpu.bus(self.device).encode())
        except Exception as error:
            self._refuse(error)
            mine[0] = 1
        table = np.zeros((self._size, mine.size), np.uint8)
        yield self._comm.Iallgather(mine, table)
        if table[:, 0].any() or (table != table[0]).any():
            self.why = self.why or "the ranks' arrays are on several GPUs, or another rank could not take part"
            return False
        record = np.zeros(_TOKEN + 128, np.uint8)  # a secret, and the handle of the window
        if self._me == 0:
            try:
                self._window = self._gpu.window(self.nbytes, self.device)
                _open.append(self)
                handle = self._gpu.export(self._window)
                _fill(record, secrets.token_bytes(_TOKEN) + bytes([len(handle)]) + handle)
            except Exception as error:
                self._refuse(error)
        yield self._comm.Ibcast(record, 0)
        handle = bytes(record[_TOKEN + 1 :])[: int(record[_TOKEN])]
        return (yield from self._prove(handle, record[:_TOKEN]))

    def _refuse(self, error: Exception) -> None:
        self.why = self.why or f"{type(error).__name__}: {error}"

    def _prove(self, handle: bytes, secret: Array) -> Generator[Request, None, bool]:
        """Open the window, write into this member's part, and read what the others have written; whether all could."""
        gpu = self._gpu
        try:
            if self._me and handle:
                self._window = gpu.open_window(handle, self.nbytes, self.device)
                _open.append(self)
            stream = gpu.copy_stream(self.device)
            if self._window is not None:
                gpu.write(self._window, self._me * self._part, secret + np.uint8(self._me), stream)
                yield from self._seen()
        except Exception as error:
            self._refuse(error)
        if not (yield from self._all_well()):
            return False
        try:
            found = np.zeros((self._size, _TOKEN), np.uint8)
            for rank in range(self._size):
                gpu.read(found[rank], self._window, rank * self._part, stream)
            # In this member's own part: it can reduce at all.
            places = [self._me * self._part + self._buffer + 4 * at for at in (0, 4)]
            count, four = np.arange(8, dtype=np.int32), np.empty(4, np.int32)
            gpu.write(self._window, places[0], count.view(np.uint8), stream)
            gpu.fold(Fold("SUM", count.dtype), self._window, places, 4, self._scratch(), stream)
            gpu.read(four.view(np.uint8), self._window, places[0], stream)
            yield from self._seen()
            expected = [secret + np.uint8(rank) for rank in range(self._size)]
            if not (found == expected).all():
                self.why = "what another rank has written is not there"
            elif four.tolist() != [4, 6, 8, 10]:
                self.why = "the device does not add"
        except Exception as error:
            self._refuse(error)
        return (yield from self._all_well())

    def _all_well(self) -> Generator[Request, None, bool]:
        well = np.array([self._window is not None and not self.why], np.int64)
        yield self._comm.Iallreduce(MPI.IN_PLACE, well, MPI.MIN)
        if not well[0]:
            self.why = self.why or "another rank could not take part"
        return bool(well[0])

    def _scratch(self) -> int:
        return self._me * self._part + 2 * self._buffer

    def _seen(self) -> Steps:
        """Wait until the host has seen what is on the library's stream complete."""
        return self._come(self._gpu.mark(self.device, self._gpu.copy_stream(self.device)))

    def _come(self, event: Any) -> Steps:
        come = _Come(self._gpu, event)
        if not come.Test():
            yield come
        self._gpu.await_(event)  # it has come: this raises what the device has to say

    def all_reduce(self, held: MovableArray, fold: Fold) -> Steps:
        """Reduce an array of all members in place; the window has been proven.

        Args:
            held: the array.
            fold: how.
        """
        gpu, array, window = self._gpu, held.array, self._window
        stream, itemsize, count = gpu.copy_stream(self.device), array.dtype.itemsize, held.origin.size
        meets = self._comm.Ibarrier
        width = self._buffer // itemsize
        parts = [rank * self._part for rank in range(self._size)]
        yield from self._come(held.began)  # 1
        gpu.pack(array, stream)
        for start in range(0, count, width):
            many = min(width, count - start)
            at = self._which * self._buffer
            self._which ^= 1  # 2
            gpu.take(window, parts[self._me] + at, array, start, many, stream)
            yield from self._seen()  # 3
            yield meets()  # 4
            low, high = many * self._me // self._size, many * (self._me + 1) // self._size
            if high > low:
                places = [part + at + low * itemsize for part in parts]
                gpu.fold(fold, window, places, high - low, self._scratch(), stream)
            yield from self._seen()  # 5
            yield meets()  # 6
            try:
                gpu.put(array, start, many, window, at, stream)
                if start + many == count:
                    gpu.unpack(array, stream)
                gpu.follow(self.device, array.stream, gpu.mark(self.device, stream))  # 7
            except BaseException:  # a signal handler's: nothing may come in after what the program does next
                with contextlib.suppress(Exception):
                    gpu.await_(gpu.mark(self.device, stream))
                raise

    def leave(self, *, awaited: bool = True) -> None:
        """Close the window on this rank, without waiting for others; the last to do so lets the first free it.

        Args:
            awaited: the others will soon do the same, so that :func:`sweep` may wait for them.
        """
        self.awaited = awaited
        window, self._window = self._window, None
        if self.usable:
            self.usable, self.why = False, "its group was destroyed"
        if os.getpid() != self._pid or self._memory is None:
            return
        if self in _open:
            _open.remove(self)
        if window is not None and not self._at_rest():
            _kept.append(window)
            self._memory = None  # it is never said to be closed
        elif window is not None and self._me == 0:
            self._window = window
            _closing.append(self)
            sweep()
        elif window is None or _released(self._gpu, window):
            self._words()[self._me] = 1
        else:
            self._memory = None

    def _at_rest(self) -> bool:
        """Whether nothing that was put on the library's stream is still to come; after a while, no."""
        try:
            event = self._gpu.mark(self.device, self._gpu.copy_stream(self.device))
            # A call that was given up may have copies behind kernels of the program that run for ever.
            return _within(_Come(self._gpu, event).Test, CLOSING)
        except Exception:  # the device has failed
            return False

    def _words(self) -> Any:
        assert self._memory is not None
        return np.frombuffer(self._memory, np.uint8)[_PAGE :: self._said]

    def closed_by_all(self) -> bool:
        """Whether all other members have closed the window."""
        return bool(self._words()[1:].all())

    def free(self) -> None:
        """Free the window, which nobody else has open."""
        window, self._window = self._window, None
        _released(self._gpu, window)


def _fill(room: Array, content: bytes) -> None:
    """Write bytes into what has room for them."""
    room[: len(content)] = np.frombuffer(content, np.uint8)


def _released(gpu: Runtime, window: Any) -> bool:
    try:
        gpu.release(window)
    except Exception:  # the device has failed; what it holds goes with the process
        _kept.append(window)
        return False
    return True


_open: list[Link] = []
_closing: list[Link] = []
_kept: list[Any] = []


def sweep(seconds: float = 0.0) -> None:
    """Free the windows of this process that all others have closed; wait so long for those that they will close soon."""

    def free() -> bool:
        for link in tuple(_closing):
            if link.closed_by_all():
                with contextlib.suppress(ValueError):  # another thread was faster
                    _closing.remove(link)
                    link.free()
        return not any(link.awaited for link in _closing)

    _within(free, seconds)


def _within(test: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not test():
        if time.monotonic() >= limit:
            return False
        time.sleep(0.0005)
    return True


def _in_child() -> None:
    """Leave CUDA alone in a forked process."""
    _open.clear()
    _closing.clear()


os.register_at_fork(after_in_child=_in_child)


class Linked(Protocol):
    """A group, as far as it concerns a link."""

    link: Link | None


class Offer:
    """One rank's offer to reduce an array on the GPU that all members share.

    Args:
        group: what keeps the members' window.
        held: the array.
        fold: how it is reduced.
        nbytes: of what moves where it goes by way of the host.
        by_host: what makes the call where somebody does not offer it: returns what to move, what says whether it can begin, and
            what is done before it and after it.
        in_pieces: whether that moves in pieces.
    """

    __slots__ = ("_fold", "_group", "_held", "by_host", "in_pieces", "nbytes")

    def __init__(
        self, group: Linked, held: MovableArray, fold: Fold, nbytes: int, by_host: Callable[[], Any], in_pieces: bool
    ) -> None:
        self._group, self._held, self._fold, self.nbytes, self.by_host = group, held, fold, nbytes, by_host
        self.in_pieces = in_pieces

    def come(self) -> bool:
        """Whether the GPU has come to the call."""
        return device_runtime.over(device_runtime.runtime(), self._held.began)

    @staticmethod
    def possible(group: Linked, held: MovableArray, alone: bool) -> bool:
        """Whether this rank may offer an array.

        Args:
            group: what keeps the members' window.
            held: the array.
            alone: the call is waited for. One that is not is offered when the window has been proven: the first call alone says
                on which GPU that is.
        """
        fits = held.origin.nbytes >= LEAST_BYTES and (
            held.array.dtype.char in DTYPES if not held.named else held.named in HALVES
        )
        link = group.link
        return fits and (alone if link is None else bool(link.usable) and link.device == held.array.device)

    def steps(self, comm: MPI.Intracomm) -> Generator[Request, None, bool]:
        """Reduce, if the device proves to be able to; all members have offered it. Returns whether it did, on all alike."""
        link = self._group.link
        if link is None:
            link = self._group.link = Link(comm, self._held.array.device)
            yield from link.prepare()
        if not link.usable:
            return False
        yield from link.all_reduce(self._held, self._fold)
        return True
