"""A stand-in for a GPU: streams and events that run as late or as early as possible, on memory without an address on the host.

As late as possible (``lazy``): work runs only when an event behind it is waited for, so a read that is too early finds the old
values. As early as possible (``eager``): the library's copies run when they are put on their stream, unless they wait for
an event, so a write that is too early destroys values that are still to be read. A missing wait shows in one of the two.
"""

from __future__ import annotations

import glob
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from reductions import OPS

import mpicoll as dist
from mpicoll.memory import half
from mpicoll.memory.arithmetic import without_warnings
from mpicoll.memory.device import array as device_array
from mpicoll.memory.device import pool as device_pool
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.memory.device.runtime import DeviceArray, Fold
from mpicoll.transports.device.capability import REDUCTIONS

if TYPE_CHECKING:
    import pytest

__all__ = ["PACES", "Gpu", "GpuArray", "Stream", "Window", "fails_at_some_pace", "select"]

PACES: tuple[Literal["eager", "lazy"], ...] = ("eager", "lazy")

Array = np.ndarray[Any, Any]
AWAY = int(os.environ.get("TEST_GPU_AWAY", "0"), 0)
"""Distance of memory that MPI knows from its addresses on the device: not 0 with the driver of ``tests/gpu/driver.c``."""
HANDLE = 120
"""Bytes of the handle of a window; the last bytes are zero, as in handles of CUDA."""
NOWHERE = 0x7ABC << 48
"""Addresses that no process has: a read of such an address ends the process by a signal, as with addresses of a GPU."""


class Event:
    """A point in a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.behind = len(stream.work)
        self.asked = 0
        self.since = time.monotonic()

    @property
    def come(self) -> bool:
        return self.stream.done >= self.behind


class Stream:
    """Work that runs in order: functions, and waits for events of other streams."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None] | Event | None] = []
        self.done = 0

    def run(self, behind: int) -> None:
        """Run the work before a point, and the work of other streams that it waits for."""
        while self.done < behind:
            step = self.work[self.done]
            if isinstance(step, Event):
                step.stream.run(step.behind)
            elif step is not None:
                step()
            self.work[self.done] = None  # frees the memory of the copy, too
            self.done += 1


def _base(elements: Array) -> Array:
    """Return the array of the host whose memory has these elements."""
    while isinstance(elements.base, np.ndarray):
        elements = elements.base
    return elements


class _Room:
    """Memory of the device that is used again as soon as no reference is left; copies on a stream hold no reference."""

    def __init__(self, free: list[Array], memory: Array) -> None:
        self.free, self.memory = free, memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self.free.append(self.memory)


class _Address:
    """Memory of the host as a device knows it: without a reference that holds it."""

    def __init__(self, host: Array) -> None:
        self.__array_interface__ = dict(host.__array_interface__)
        self.dtype = host.dtype

    def array(self) -> Array:
        return np.asarray(self).view(self.dtype)


class Window:
    """Memory of the device that several processes have open: a file in memory.

    Attributes:
        named: the windows that this process has made, and not freed.
    """

    named: ClassVar[set[str]] = set()

    def __init__(self, name: str, own: bool) -> None:
        if own:
            self.named.add(name)
        self.name, self.own = name, own
        self.memory: Array | None = np.memmap(name, np.uint8, "r+")

    def of(self, at: int = 0, nbytes: int | None = None) -> Array:
        assert self.memory is not None, "it was closed while copies were under way"
        return self.memory[at:] if nbytes is None else self.memory[at : at + nbytes]


class GpuArray:
    """An array on the stand-in: only `Gpu` gives access to its elements."""

    _next = itertools.count(NOWHERE, 1 << 32)

    def __init__(self, gpu: Gpu, elements: Array, number: int = 0, readonly: bool = False) -> None:
        self.gpu, self.elements, self.number, self.readonly = gpu, elements, number, readonly
        self.address = gpu.address(elements)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.elements.shape,
            "typestr": self.elements.dtype.str,
            "strides": self.elements.strides,
            "data": (self.address, self.readonly),
        }


class Gpu:
    """The stand-in for CUDA (a :class:`mpicoll.memory.device.runtime.Runtime`).

    Args:
        pace: how soon the library's copies run.
        polls: number of polls after which an event completes by itself; this takes at least ``seconds``.
        known_to_mpi: its memory has addresses of the host, so it can be passed to MPI.

    Attributes:
        current: the stream of the program; work of the program there runs as late as possible.
        copied: number of copies to and from the host, without copies that MPI decides on.
        packed: number of copies on the device.
        memory: the device has memory for the library.
        refuses: the step of sharing memory between processes that fails: "window", "export", "open" or "share".
        taken: copies of arrays into shared memory; released: number of windows that were closed.
    """

    def __init__(self, pace: Literal["lazy", "eager"] = "eager", polls: int = 3, known_to_mpi: bool = False) -> None:
        self.pace, self.polls, self.known_to_mpi = pace, polls, known_to_mpi
        self.current = Stream()
        self.copy_streams: dict[int, Stream] = {}
        self.copied = self.packed = 0
        self.memory = True
        self._rooms: dict[int, list[Array]] = {}
        self.seconds = 0.0
        self.refuses: set[str] = set()
        self.taken = self.released = 0
        self.allocates_plainly = True
        self.devices, self.used = 4, -1
        self._bases: dict[int, tuple[Array, int]] = {}

    def array_of(self, elements: Array, number: int = 0, readonly: bool = False) -> GpuArray:
        """Return an array on the device with these ``elements``."""
        return GpuArray(self, elements, number, readonly)

    def address(self, elements: Array) -> int:
        """Return the address of elements on the device. Elements of one array have the same distances as on the host."""
        if self.known_to_mpi:
            return int(elements.__array_interface__["data"][0]) - AWAY
        base = _base(elements)
        start = base.__array_interface__["data"][0]
        kept = self._bases.get(start)
        if kept is None:
            kept = self._bases[start] = (base, next(GpuArray._next))
        return kept[1] + elements.__array_interface__["data"][0] - start

    def permitted(self, operation: str, nonblocking: bool) -> bool:
        """Return whether MPI gets memory of the device: all if it is the host's, else what Open MPI supports."""
        return not (AWAY and nonblocking and operation in REDUCTIONS)

    def launch(self, kernel: Callable[[], None], stream: Stream | None = None) -> None:
        """Put a kernel on a stream of the program."""
        (stream or self.current).work.append(kernel)

    def finish(self, stream: Stream | None = None) -> None:
        """Wait for a stream of the program (and for no other)."""
        stream = stream or self.current
        stream.run(len(stream.work))

    def array(self, value: Any, name: str, *, writable: bool) -> DeviceArray:
        assert isinstance(value, GpuArray), name
        found = value.elements
        return DeviceArray(
            value, found.dtype, found.shape, found.strides, value.address, value.number, value.readonly, self.current
        )

    def plain(self, array: DeviceArray) -> bool:
        return self.allocates_plainly

    def count(self) -> int:
        return self.devices

    def current_device(self) -> int:
        return self.used

    def use(self, device: int) -> None:
        self.used = device

    def bus(self, device: int) -> str:
        return f"0000:{device:02x}:00.0"

    def stream(self, given: Any, device: int) -> Stream:
        if not isinstance(given, Stream):
            raise TypeError(f"stream must be a stream of CUDA, not {type(given).__name__}")
        return given

    def copy_stream(self, device: int, second: bool = False) -> Stream:
        return self.copy_streams.setdefault(-1 - device if second else device, Stream())

    def mark(self, device: int, stream: Stream) -> Event:
        return Event(stream)

    def over(self, event: Event) -> bool:
        if not event.come:
            event.asked += 1
            if event.asked > self.polls and time.monotonic() - event.since >= self.seconds:
                event.stream.run(event.behind)
        return event.come

    def await_(self, event: Event) -> None:
        event.stream.run(event.behind)

    def follow(self, device: int, stream: Stream, event: Event) -> None:
        stream.work.append(event)
        self._go_on(stream)

    def copy_out(self, host: Array, array: DeviceArray, stream: Stream, begin: int | None = None) -> None:
        elements, there = _part(array, host, begin), _Address(host).array()
        self._put(stream, lambda: np.copyto(there, elements.reshape(-1)))

    def copy_in(self, array: DeviceArray, host: Array, stream: Stream, begin: int | None = None) -> None:
        elements, there = _part(array, host, begin), _Address(host).array()
        self._put(stream, lambda: np.copyto(elements, there.reshape(elements.shape)))

    def window(self, nbytes: int, device: int) -> Window:
        if "window" in self.refuses:
            raise MemoryError("out of memory")
        name = os.path.join(os.environ.get("STANDIN_GPU_DIR", "/dev/shm"), f"standin-gpu-{secrets.token_hex(8)}")
        with open(name, "xb") as file:
            file.truncate(nbytes)
        return Window(name, True)

    def export(self, window: Window) -> bytes:
        assert window.own
        if "export" in self.refuses:
            raise RuntimeError("cudaErrorNotSupported")
        return window.name.encode().ljust(HANDLE, b"\0")

    def open_window(self, handle: bytes, nbytes: int, device: int) -> Window:
        if "open" in self.refuses:
            raise RuntimeError("cudaErrorMapBufferObjectFailed")
        assert len(handle) == HANDLE
        window = Window(handle.rstrip(b"\0").decode(), False)
        with open(f"{window.name}.{os.getpid()}", "xb"):  # once in each process
            pass
        assert window.of().nbytes == nbytes
        if "share" in self.refuses:  # there is a GPU of the same address, with other memory
            window.memory = np.zeros(nbytes, np.uint8)
        return window

    def release(self, window: Window) -> None:
        assert window.memory is not None, "it is closed already"
        if window.own:
            assert not glob.glob(f"{window.name}.*"), "another process has it open"
            os.unlink(window.name)
            Window.named.remove(window.name)
        else:
            os.unlink(f"{window.name}.{os.getpid()}")
        window.memory = None
        self.released += 1

    def write(self, window: Window, at: int, host: Array, stream: Stream) -> None:
        staged = host.copy()
        self._put(stream, lambda: np.copyto(window.of(at, staged.nbytes), staged))

    def read(self, host: Array, window: Window, at: int, stream: Stream) -> None:
        there = _Address(host).array()
        self._put(stream, lambda: np.copyto(there, window.of(at, there.nbytes)))

    def pack(self, array: DeviceArray, stream: Stream) -> None:
        pass

    def unpack(self, array: DeviceArray, stream: Stream) -> None:
        pass

    def take(self, window: Window, at: int, array: DeviceArray, start: int, count: int, stream: Stream) -> None:
        elements, dtype = array.held.elements, array.dtype

        def copy() -> None:
            window.of(at, count * dtype.itemsize).view(dtype)[:] = elements.reshape(-1)[start : start + count]

        self._put(stream, copy)
        self.taken += 1

    def put(self, array: DeviceArray, start: int, count: int, window: Window, at: int, stream: Stream) -> None:
        elements, dtype = array.held.elements, array.dtype

        def copy() -> None:
            elements.flat[start : start + count] = window.of(at, count * dtype.itemsize).view(dtype)

        self._put(stream, copy)

    def fold(self, fold: Fold, window: Window, places: Sequence[int], count: int, scratch: int, stream: Stream) -> None:
        def reduce() -> None:
            terms = [window.of(place, count * fold.dtype.itemsize).view(fold.dtype) for place in places]
            values = terms
            if fold.half:
                values = [np.empty(count, np.float32) for _ in terms]
                for words, wide in zip(terms, values, strict=True):
                    half.widen(fold.half, words, wide)
            for term in values[1:]:
                without_warnings(OPS[fold.op], values[0], term, out=values[0])
            if fold.divisor:
                without_warnings(np.divide, values[0], fold.divisor, out=values[0])
            if fold.half:
                half.narrow(fold.half, values[0], terms[0])

        self._put(stream, reduce)

    def _put(self, stream: Stream, copy: Callable[[], None]) -> None:
        self.copied += not AWAY
        stream.work.append(copy)
        self._go_on(stream)

    def _go_on(self, stream: Stream) -> None:
        if self.pace == "eager" and stream in self.copy_streams.values():
            stream.run(len(stream.work))

    def pinned(self, nbytes: int, device: int) -> Array:
        return np.full(nbytes, 0xA5, np.uint8)

    def across(self, arrays: list[DeviceArray]) -> DeviceArray | None:
        parts = [each.held.elements for each in arrays]
        base, at = _base(parts[0]), arrays[0].address
        for each, part in zip(arrays, parts, strict=True):
            if _base(part) is not base or each.address != at or each.stream is not arrays[0].stream:
                return None
            at += part.nbytes
        flat = parts[0].reshape(-1)
        count = (at - arrays[0].address) // flat.itemsize
        return self._array_of(np.lib.stride_tricks.as_strided(flat, (count,)), arrays[0])

    def part(self, array: DeviceArray, part: slice) -> DeviceArray:
        return self._array_of(array.held.elements.reshape(-1)[part], array)

    def room(self, arrays: list[DeviceArray]) -> DeviceArray:
        if not self.memory:
            raise MemoryError("no memory of the device")
        count, dtype = sum(each.held.elements.size for each in arrays), arrays[0].dtype
        free = self._rooms.setdefault(count * dtype.itemsize, [])
        memory = free.pop() if free else np.empty(count * dtype.itemsize, np.uint8)
        found = self._array_of(np.asarray(_Room(free, memory)).view(dtype), arrays[0])
        found.stream = self.copy_stream(found.device)
        return found

    def _array_of(self, elements: Array, like: DeviceArray) -> DeviceArray:
        held = self.array_of(elements, like.device)
        return DeviceArray(
            held, held.elements.dtype, elements.shape, elements.strides, held.address, like.device, False, like.stream
        )

    def gather(self, room: DeviceArray, arrays: list[DeviceArray], stream: Stream) -> None:
        self._one_by_one(room, arrays, stream, lambda inside, each: np.copyto(inside, each.reshape(-1)))

    def spread(self, arrays: list[DeviceArray], room: DeviceArray, stream: Stream) -> None:
        self._one_by_one(room, arrays, stream, lambda inside, each: np.copyto(each, inside.reshape(each.shape)))

    def _one_by_one(
        self, room: DeviceArray, arrays: list[DeviceArray], stream: Stream, copy: Callable[[Array, Array], None]
    ) -> None:
        at = 0
        for each in arrays:
            elements = each.held.elements
            there = _Address(room.held.elements[at : at + elements.size]).array()
            at += elements.size
            self.packed += 1
            stream.work.append(lambda there=there, elements=elements: copy(there, elements))  # type: ignore[misc]
        self._go_on(stream)


def _part(array: DeviceArray, host: Array, begin: int | None) -> Array:
    """Return the elements that are copied: all, or as bytes the elements from ``begin`` on."""
    elements: Array = array.held.elements
    if begin is None:
        return elements
    return elements.reshape(-1).view(np.uint8)[begin : begin + host.nbytes]


def select(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a stand-in the GPU of this rank, without pinned memory; pass its memory to MPI if MPI knows the memory."""
    monkeypatch.setattr(device_runtime, "_runtime", gpu)
    monkeypatch.setattr(device_pool, "_pool", None)
    if gpu.known_to_mpi:
        monkeypatch.setattr(device_array, "_permitted", gpu.permitted)


def fails_at_some_pace(
    checks: Iterable[Callable[[Any], None]], stand_in: Callable[[Literal["eager", "lazy"]], Gpu]
) -> bool:
    """Run checks with a stand-in of each pace; return whether a check fails on any rank."""
    failed = False
    for check in checks:
        for pace in PACES:
            try:
                check(stand_in(pace))
            except AssertionError:
                failed = True
            dist.barrier()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, failed)
    return any(everywhere)
