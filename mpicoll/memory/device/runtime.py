"""The interface of a device runtime, the description of an array on a device, and the runtime of this process."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpicoll.runtime.waiting import Steps

Array = npt.NDArray[Any]


@dataclass(slots=True)
class DeviceArray:
    """An array on a GPU.

    Attributes:
        held: object that owns the memory, in the form that the runtime copies.
        packed: memory of the device for the elements in C order; None if the array itself is in C order.
        dtype, shape, strides: as of a NumPy array of the same elements.
        address: address of the first element.
        device: number of the GPU.
        readonly: whether the array must not be written.
        stream: the current stream at the call, in the package of the array.
    """

    held: Any
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: int
    readonly: bool
    stream: Any
    packed: Any = None


class Runtime(Protocol):
    """Streams, events, copies and pinned memory of the GPUs of this process."""

    def array(self, value: Any, name: str, *, writable: bool) -> DeviceArray:
        """Describe an array. Raise TypeError if its memory is not accessible, ValueError if it must not be written.

        ``name`` is the name of the parameter, for messages.
        """

    def plain(self, array: DeviceArray) -> bool:
        """Return whether an ordinary allocation holds the array, not CUDA's asynchronous allocator or memory mapped in pieces."""

    def count(self) -> int:
        """Return the number of devices that this process sees; at least one."""

    def current_device(self) -> int:
        """Return the number of the current device of this thread."""

    def use(self, device: int) -> None:
        """Make a device the current device of this thread, for all packages."""

    def bus(self, device: int) -> str:
        """Return the bus address of a device, which is the same in all processes of the node."""

    def stream(self, given: Any, device: int) -> Any:
        """Return the stream that the program passed; raise TypeError if the object is no stream."""

    def copy_stream(self, device: int, second: bool = False) -> Any:
        """Return the stream of the library on a device for copies; or its second stream, for copies to the GPU meanwhile."""

    def mark(self, device: int, stream: Any) -> Any:
        """Return an event behind all work that is on a stream now."""

    def over(self, event: Any) -> bool:
        """Return whether an event is complete, without waiting."""

    def await_(self, event: Any) -> None:
        """Wait on the host for an event."""

    def follow(self, device: int, stream: Any, event: Any) -> None:
        """Let later work on a stream of a device wait for an event."""

    def copy_out(self, host: Array, array: DeviceArray, stream: Any, begin: int | None = None) -> None:
        """Copy the elements, in C order, to host memory, on a stream.

        ``begin``: first byte of the part of a contiguous array that has the size of the host memory; None: the whole array.
        """

    def copy_in(self, array: DeviceArray, host: Array, stream: Any, begin: int | None = None) -> None:
        """Copy host memory to an array, on a stream; ``begin`` as in :meth:`copy_out`."""

    def pinned(self, nbytes: int, device: int) -> Array:
        """Return pinned host memory, as bytes; raise MemoryError if there is none."""

    def across(self, arrays: list[DeviceArray]) -> DeviceArray | None:
        """Return one array over contiguous arrays that stand one behind the other in one allocation; None if they do not."""

    def part(self, array: DeviceArray, part: slice) -> DeviceArray:
        """Return a part of a contiguous array, as if the array had one dimension."""

    def room(self, arrays: list[DeviceArray]) -> DeviceArray:
        """Return memory of the device for all elements of the arrays; raise MemoryError if there is none.

        The memory is used again in the order of the library's stream: earlier work on that stream may still use it.
        """

    def gather(self, room: DeviceArray, arrays: list[DeviceArray], stream: Any) -> None:
        """Copy contiguous arrays, one behind the other, to memory of :meth:`room`, on a stream."""

    def spread(self, arrays: list[DeviceArray], room: DeviceArray, stream: Any) -> None:
        """Copy memory of :meth:`room` to the arrays, on a stream."""

    def window(self, nbytes: int, device: int) -> Any:
        """Return new memory of a device that other processes may open; raise MemoryError if there is none."""

    def export(self, window: Any) -> bytes:
        """Return the handle with which another process opens a window of this process."""

    def open_window(self, handle: bytes, nbytes: int, device: int) -> Any:
        """Open a window of another process; once for each window."""

    def release(self, window: Any) -> None:
        """Free a window of this process that no other process has open, or close a window of another process."""

    def write(self, window: Any, at: int, host: Array, stream: Any) -> None:
        """Copy a few bytes of the host to a window, from byte ``at`` on, on a stream."""

    def read(self, host: Array, window: Any, at: int, stream: Any) -> None:
        """Copy a few bytes of a window, from byte ``at`` on, to host memory, on a stream."""

    def pack(self, array: DeviceArray, stream: Any) -> None:
        """Copy the elements of an array to C order for :meth:`take` and :meth:`put`, on a stream."""

    def unpack(self, array: DeviceArray, stream: Any) -> None:
        """Copy elements that :meth:`put` has written to their places in the array, on a stream."""

    def take(self, window: Any, at: int, array: DeviceArray, start: int, count: int, stream: Any) -> None:
        """Copy ``count`` elements of an array, from ``start`` in C order, to a window, on a stream."""

    def put(self, array: DeviceArray, start: int, count: int, window: Any, at: int, stream: Any) -> None:
        """Copy ``count`` elements of a window to an array, on a stream."""

    def fold(self, fold: Fold, window: Any, places: Sequence[int], count: int, scratch: int, stream: Any) -> None:
        """Reduce operands at some places of a window, in their order, into the first operand, on a stream.

        Args:
            fold: the reduction.
            window: window of this or of another process.
            places: bytes from the start of the window to each operand.
            count: elements of each operand.
            scratch: bytes from the start of the window to ``SCRATCH`` bytes of working memory.
            stream: the stream.
        """


SCRATCH = 8 << 20
"""Bytes of working memory that :meth:`Runtime.fold` may need to reduce half types as float32."""


FOLDED_HALVES = frozenset({"float16", "bfloat16"})
"""Half types that :meth:`Runtime.fold` reduces; calls on arrays of others go through the host."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A reduction on a device.

    Attributes:
        op: name of the MPI operation.
        dtype: dtype of the elements; 16-bit words for half types.
        half: one of ``FOLDED_HALVES``, which are reduced as float32 and rounded once; otherwise "".
        divisor: divisor of the result; 0: none.
    """

    op: str
    dtype: np.dtype[Any]
    half: str = ""
    divisor: int = 0


BINDING = "cuda"
"""The module in this package that implements :class:`Runtime`; it is imported for the first array on a device."""

_runtime: Runtime | None = None


def runtime() -> Runtime:
    """Return the runtime of CUDA.

    Raises:
        ImportError: CuPy is not installed, or finds no GPU.
    """
    global _runtime
    if _runtime is None:
        binding: Any = importlib.import_module(f"{__package__}.{BINDING}")
        _runtime = binding.Cuda()
    return _runtime


def current_device() -> int | None:
    """Return the number of the current device of this thread; None if the library has got no array on a GPU yet."""
    return None if _runtime is None else _runtime.current_device()


def use(device: int) -> None:
    """Make a device the current device of this thread."""
    runtime().use(device)


def over(gpu: Runtime, event: Any) -> bool:
    """Return whether an event is complete or has failed; a failure is raised by the code that needs the elements."""
    try:
        return gpu.over(event)
    except Exception:
        return True


class EventComplete:
    """An event of a device as something to wait for: ``Test`` returns whether it is complete, or has failed."""

    __slots__ = ("Test",)

    def __init__(self, gpu: Runtime, event: Any) -> None:
        self.Test = partial(over, gpu, event)


def await_event(gpu: Runtime, event: Any) -> Steps:
    """Wait until an event of a device is complete. Raises the error of the device if it has failed."""
    complete = EventComplete(gpu, event)
    if not complete.Test():
        yield complete
    gpu.await_(event)


_parents: list[Any] = []


def drop_in_child(names: dict[str, Any], name: str) -> None:
    """Set a name of a module to None in a forked process without CUDA calls: CUDA cannot even free memory there."""

    def drop() -> None:
        _parents.append(names[name])
        names[name] = None

    os.register_at_fork(after_in_child=drop)


drop_in_child(globals(), "_runtime")
