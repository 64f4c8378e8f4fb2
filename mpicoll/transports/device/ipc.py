"""Reduce on a GPU that the ranks of a group share, in memory of the device that all members have open (CUDA IPC).

The first member of a group makes one *window* with cudaMalloc, and the other members open the window. Each member has a part of
it: two buffers and working memory. A large ``all_reduce`` moves through the window in chunks. For each chunk every member

1. copies its elements into its buffer, and waits until the host has seen the copy complete;
2. enters a barrier;
3. reduces its share of the elements, of all buffers in the order of the ranks, into the buffer of the first member, and waits
   until the host has seen the reduction complete;
4. enters a barrier;
5. copies the whole result from the buffer of the first member into its own array.

One member reduces each element, always in the same order: all members get the same bits in each run. Calls use the two buffers
alternately: a member that copies its next elements into one buffer does not disturb copies out of the other one. A member
enters the next barrier only after its own copy out is complete. No member waits at the end of a call.

**Why not in the arrays of the program.** Each array would have to be exported and opened. Memory of cudaMallocAsync, or memory
that is mapped piece by piece, cannot be exported. An importer must close a handle before the memory is freed, and programs do
not announce that to the library. The window is made once. It needs two more copies on the device, whose memory is about thirty
times as fast as the PCIe bus that is not used.

**Between processes.** Before a barrier (a nonblocking barrier of MPI), the host waits until it has seen the events complete.
Results of complete kernels and copies are visible to kernels and copies that any process of that GPU starts later.

**When the window is used.** The members agree for each call: every member must be able to, with an array of at least 1 MiB on
the GPU of the window. The first such call that is waited for makes the window and tests it: each member writes into its part,
and reads the parts of all other members. Containers, ``--gpus-per-task`` and MIG break CUDA IPC: then all calls of the group
go through the host.

**Rules of CUDA** ("Interprocess communication" in its programming guide, and cudaIpcOpenMemHandle): the exporting process does
not open its own handle. A process opens a window once. Sizes are multiples of 2 MiB, as the driver would otherwise share
neighbouring allocations too. The window is freed only after all other members have closed it. Each member sets a flag in a page
of shared host memory, and the first member frees the window when it next reads the flags. If a member was killed, the end of
the process frees the window.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.memory.device import pool as device_pool
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.memory.device.array import MovableArray
from mpicoll.memory.device.runtime import FOLDED_HALVES, SCRATCH, EventComplete, Fold, Runtime, await_event
from mpicoll.runtime.waiting import Pollable, Steps
from mpicoll.transports.base import Array
from mpicoll.transports.control import IN_PIECES, NO_DEVICE
from mpicoll.transports.shm.mapping import map_together

NAME = "device_ipc"
"""The name of the transport among those that a group has opened."""

LEAST_BYTES = 1 << 20
"""Bytes of the smallest array that is reduced on the device."""

LARGEST_BUFFER = 32 << 20
SMALLEST_BUFFER = 1 << 20
WINDOW_BYTES = 256 << 20
"""Most bytes of a window, for any number of members."""

MOST_BYTES = 1 << 30
"""Most bytes of all windows that this process has open."""

DTYPES = frozenset("?bBhHiIlLqQfdFD")
"""Type characters of the dtypes that CuPy reduces; half types are looked up by name."""

CLOSING = 1.0
"""Longest wait for pending copies, in seconds, when a window is closed."""

_ALIGNED = 2 << 20
_TOKEN = 64
_PAGE = mmap.PAGESIZE


def buffer_bytes(size: int) -> int:
    """Return the bytes of each of the two buffers of a member; 0 if there are too many members."""
    part = WINDOW_BYTES // size // _ALIGNED * _ALIGNED
    buffer = min(LARGEST_BUFFER, (part - SCRATCH) // 2 // 4096 * 4096)
    return buffer if buffer >= SMALLEST_BUFFER else 0


class DeviceWindow:
    """The window of one group on one member.

    Attributes:
        device: number of the GPU of the window.
        awaited: the other members close the window at about the same time as this member.
        usable: whether the test succeeded, the same on all members; None before the test.
        why: why the window is not usable, if this member knows.
    """

    def __init__(self, comm: MPI.Intracomm, device: int) -> None:
        self._comm = comm
        self._gpu = device_runtime.runtime()
        self._me, self._size = comm.Get_rank(), comm.Get_size()
        self._pid = os.getpid()
        self._window: Any = None
        self._memory: mmap.mmap | None = None
        self._stride = 0  # bytes from one member's flag on the shared pages to the next member's
        self._buffer_number = 0
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
        """Make and test the window, once. All members call this method, and are known to."""
        free_closed()
        made = yield from map_together(self._comm, _PAGE, _PAGE)
        if isinstance(made, str):
            self.usable, self.why = False, f"no shared memory: {made}"
            return
        self._memory, self._stride = made
        self.usable = yield from self._try()
        if not self.usable:
            if self._me:
                self.close()
            yield self._comm.Ibarrier()  # all members have closed it
            self.close()

    def _try(self) -> Generator[Pollable, None, bool]:
        """Make and test the window; return whether all members succeeded."""
        mine = np.zeros(64, np.uint8)  # 1 if this member cannot take part, and the address of its GPU
        try:
            if not self._buffer:
                raise MemoryError("too many ranks share the GPU")
            if self.nbytes + sum(window.nbytes for window in _open) > MOST_BYTES:
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

    def _prove(self, handle: bytes, secret: Array) -> Generator[Pollable, None, bool]:
        """Open the window, write into this member's part, and read the parts of all members; return whether all succeeded."""
        gpu = self._gpu
        try:
            if self._me and handle:
                self._window = gpu.open_window(handle, self.nbytes, self.device)
                _open.append(self)
            stream = gpu.copy_stream(self.device)
            if self._window is not None:
                gpu.write(self._window, self._me * self._part, secret + np.uint8(self._me), stream)
                yield from self._wait_for_copies()
        except Exception as error:
            self._refuse(error)
        if not (yield from self._all_well()):
            return False
        try:
            found = np.zeros((self._size, _TOKEN), np.uint8)
            for rank in range(self._size):
                gpu.read(found[rank], self._window, rank * self._part, stream)
            # Test a reduction in this member's own part.
            places = [self._me * self._part + self._buffer + 4 * at for at in (0, 4)]
            count, four = np.arange(8, dtype=np.int32), np.empty(4, np.int32)
            gpu.write(self._window, places[0], count.view(np.uint8), stream)
            gpu.fold(Fold("SUM", count.dtype), self._window, places, 4, self._scratch(), stream)
            gpu.read(four.view(np.uint8), self._window, places[0], stream)
            yield from self._wait_for_copies()
            expected = [secret + np.uint8(rank) for rank in range(self._size)]
            if not (found == expected).all():
                self.why = "what another rank has written is not there"
            elif four.tolist() != [4, 6, 8, 10]:
                self.why = "the device does not add"
        except Exception as error:
            self._refuse(error)
        return (yield from self._all_well())

    def _all_well(self) -> Generator[Pollable, None, bool]:
        well = np.array([self._window is not None and not self.why], np.int64)
        yield self._comm.Iallreduce(MPI.IN_PLACE, well, MPI.MIN)
        if not well[0]:
            self.why = self.why or "another rank could not take part"
        return bool(well[0])

    def _scratch(self) -> int:
        return self._me * self._part + 2 * self._buffer

    def _wait_for_copies(self) -> Steps:
        """Wait until the host has seen the work on the library's stream complete."""
        return await_event(self._gpu, self._gpu.mark(self.device, self._gpu.copy_stream(self.device)))

    def all_reduce(self, held: MovableArray, fold: Fold) -> Steps:
        """Reduce an array of all members in place, in a usable window.

        Args:
            held: the array.
            fold: the reduction.
        """
        gpu, array, window = self._gpu, held.array, self._window
        stream, itemsize, count = gpu.copy_stream(self.device), array.dtype.itemsize, held.origin.size
        barrier = self._comm.Ibarrier
        width = self._buffer // itemsize
        parts = [rank * self._part for rank in range(self._size)]
        yield from await_event(gpu, held.began)  # 1
        gpu.pack(array, stream)
        for start in range(0, count, width):
            many = min(width, count - start)
            at = self._buffer_number * self._buffer
            self._buffer_number ^= 1  # 2
            gpu.take(window, parts[self._me] + at, array, start, many, stream)
            yield from self._wait_for_copies()  # 3
            yield barrier()  # 4
            low, high = many * self._me // self._size, many * (self._me + 1) // self._size
            if high > low:
                places = [part + at + low * itemsize for part in parts]
                gpu.fold(fold, window, places, high - low, self._scratch(), stream)
            yield from self._wait_for_copies()  # 5
            yield barrier()  # 6
            try:
                gpu.put(array, start, many, window, at, stream)
                if start + many == count:
                    gpu.unpack(array, stream)
                gpu.follow(self.device, array.stream, gpu.mark(self.device, stream))  # 7
            except BaseException:  # a signal handler's: no copy may follow the next work of the program
                with contextlib.suppress(Exception):
                    gpu.await_(gpu.mark(self.device, stream))
                raise

    def close(self, *, awaited: bool = True) -> None:
        """Close the window on this rank, without waiting for other members. The first member frees the window after the last.

        Args:
            awaited: the other members close the window soon too, so that :func:`free_closed` may wait for them.
        """
        self.awaited = awaited
        window, self._window = self._window, None
        if self.usable:
            self.usable, self.why = False, "its group was destroyed"
        if os.getpid() != self._pid or self._memory is None:
            return
        if self in _open:
            _open.remove(self)
        if window is not None and not self._is_idle():
            _retained.append(window)
            self._memory = None  # the flag is never set
        elif window is not None and self._me == 0:
            self._window = window
            _closing.append(self)
            free_closed()
        elif window is None or _released(self._gpu, window):
            self._flags()[self._me] = 1
        else:
            self._memory = None

    def _is_idle(self) -> bool:
        """Return whether all work on the library's stream is complete, within ``CLOSING`` seconds."""
        try:
            event = self._gpu.mark(self.device, self._gpu.copy_stream(self.device))
            # A withdrawn call may have copies behind kernels of the program that never end.
            return _within(EventComplete(self._gpu, event).Test, CLOSING)
        except Exception:  # the device has failed
            return False

    def _flags(self) -> Any:
        assert self._memory is not None
        return np.frombuffer(self._memory, np.uint8)[_PAGE :: self._stride]

    def closed_by_all(self) -> bool:
        """Return whether all other members have closed the window."""
        return bool(self._flags()[1:].all())

    def free(self) -> None:
        """Free the window, which no other member has open."""
        window, self._window = self._window, None
        _released(self._gpu, window)


def _fill(room: Array, content: bytes) -> None:
    """Write bytes to the start of an array."""
    room[: len(content)] = np.frombuffer(content, np.uint8)


def _released(gpu: Runtime, window: Any) -> bool:
    try:
        gpu.release(window)
    except Exception:  # the device has failed; the end of the process frees its memory
        _retained.append(window)
        return False
    return True


_open: list[DeviceWindow] = []
_closing: list[DeviceWindow] = []
_retained: list[Any] = []


def free_closed(seconds: float = 0.0) -> None:
    """Free the windows of this process that all other members have closed; wait for windows that they close soon."""

    def free() -> bool:
        for window in tuple(_closing):
            if window.closed_by_all():
                with contextlib.suppress(ValueError):  # another thread was faster
                    _closing.remove(window)
                    window.free()
        return not any(window.awaited for window in _closing)

    _within(free, seconds)


device_pool.closers.append(lambda: free_closed(CLOSING))


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


class DeviceReduction:
    """A reduction that this rank can make on the GPU that all members share (a :class:`mpicoll.transports.base.Preferred`).

    Args:
        opened: the transports that the group has opened, by name.
        checked: the array.
    """

    __slots__ = ("_fold", "_opened", "checked", "device", "fallback", "nbytes")

    def __init__(self, opened: dict[str, Any], checked: MovableArray) -> None:
        self._opened, self.checked = opened, checked

    def is_possible(self, waited: bool) -> bool:
        """Return whether this rank can reduce the array on the GPU.

        Args:
            waited: the call is waited for. An asynchronous call needs a usable window: only a call that is waited for makes one.
        """
        held, window = self.checked, self._opened.get(NAME)
        fits = held.origin.nbytes >= LEAST_BYTES and (
            held.array.dtype.char in DTYPES if not held.named else held.named in FOLDED_HALVES
        )
        return fits and (waited if window is None else bool(window.usable) and window.device == held.array.device)

    def prepare(self, op: str, divisor: int, itemsize: int, pieces: int, fallback: Callable[[], Any]) -> None:
        """Set what the call reduces.

        Args:
            op, divisor: as of a :class:`Fold`.
            itemsize: bytes of an element that moves through the host.
            pieces: as in :func:`mpicoll.memory.adapt.adapt`.
            fallback: as of a :class:`mpicoll.transports.base.Preferred`.
        """
        held = self.checked
        self._fold = Fold(op, held.each.wire, held.named, divisor)
        self.nbytes, self.fallback = held.origin.size * itemsize, fallback
        self.device = IN_PIECES if held.in_pieces(pieces) else NO_DEVICE

    def is_ready(self) -> bool:
        """Return whether the GPU has reached the call."""
        return device_runtime.over(device_runtime.runtime(), self.checked.began)

    def steps(self, comm: MPI.Intracomm) -> Generator[Pollable, None, bool]:
        """Reduce, after all members have agreed to; return whether the window was usable, the same on all members."""
        window = self._opened.get(NAME)
        if window is None:
            window = self._opened[NAME] = DeviceWindow(comm, self.checked.array.device)
            yield from window.prepare()
        if not window.usable:
            return False
        yield from window.all_reduce(self.checked, self._fold)
        return True
