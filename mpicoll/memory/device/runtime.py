"""What the library needs of a device: the interface of a runtime, arrays on it, and the runtime of this process."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(slots=True)
class DeviceArray:
    """An array on a GPU.

    Attributes:
        held: what keeps its memory, in the form in which the runtime copies.
        packed: memory of the device for its elements in C order, where they do not stand so; None where they do.
        dtype, shape, strides: as NumPy's of an array of the same elements.
        address: of its first element.
        device: the number of the GPU.
        readonly: whether it must not be written.
        stream: the one that was current, in the package that the array is of, when the call was made.
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
    """What the library needs of a GPU: streams, events, copies and pinned memory."""

    def array(self, value: Any, name: str, *, writable: bool) -> DeviceArray:
        """Return what an array is; TypeError where it cannot be had, ValueError where it must not be written.

        ``name`` is the parameter's, for messages.
        """

    def plain(self, array: DeviceArray) -> bool:
        """Whether its memory is of an ordinary allocation, and not of CUDA's asynchronous allocator or mapped piece by piece."""

    def count(self) -> int:
        """Return the number of devices that this process sees; at least one."""

    def current_device(self) -> int:
        """Return the number of the current device of this thread."""

    def use(self, device: int) -> None:
        """Make a device the current one of this thread, for every package that asks."""

    def bus(self, device: int) -> str:
        """Return the address of a device on its bus, which is the same for all processes of the node."""

    def stream(self, given: Any, device: int) -> Any:
        """Return a stream that the program gave; TypeError where it is none."""

    def copy_stream(self, device: int, second: bool = False) -> Any:
        """Return the stream of the library on a device, on which it copies; or the one beside it, for copies in meanwhile."""

    def mark(self, device: int, stream: Any) -> Any:
        """Return an event: all that has been put on a stream so far."""

    def over(self, event: Any) -> bool:
        """Whether an event has come, without waiting."""

    def await_(self, event: Any) -> None:
        """Have the host wait for an event."""

    def follow(self, device: int, stream: Any, event: Any) -> None:
        """Have what is put on a stream of a device from now on wait for an event."""

    def copy_out(self, host: Array, array: DeviceArray, stream: Any, begin: int | None = None) -> None:
        """Put a copy of the elements, in C order, into host memory on a stream.

        ``begin``: of an array that is contiguous, the first byte of a part of it, as long as the host memory.
        """

    def copy_in(self, array: DeviceArray, host: Array, stream: Any, begin: int | None = None) -> None:
        """Put a copy of host memory into an array on a stream; ``begin`` as for :meth:`copy_out`."""

    def pinned(self, nbytes: int, device: int) -> Array:
        """Return host memory that a device reads and writes by itself, as bytes; MemoryError where there is none."""

    def across(self, arrays: list[DeviceArray]) -> DeviceArray | None:
        """Return one array over contiguous ones that stand one behind the other in one allocation; None where they do not."""

    def part(self, array: DeviceArray, part: slice) -> DeviceArray:
        """Return a part of a contiguous array, as if that had one dimension."""

    def room(self, arrays: list[DeviceArray]) -> DeviceArray:
        """Return memory of their device for as many elements; MemoryError where there is none.

        It is used again in the order of the library's stream: what that holds when this returns may still use it.
        """

    def gather(self, room: DeviceArray, arrays: list[DeviceArray], stream: Any) -> None:
        """Put copies of contiguous arrays, one behind the other, into such memory on a stream."""

    def spread(self, arrays: list[DeviceArray], room: DeviceArray, stream: Any) -> None:
        """Put copies of what is in such memory into the arrays on a stream."""

    def window(self, nbytes: int, device: int) -> Any:
        """Return new memory of a device that other processes may open; MemoryError where there is none."""

    def export(self, window: Any) -> bytes:
        """Return what another process opens a window of this one with."""

    def open_window(self, handle: bytes, nbytes: int, device: int) -> Any:
        """Return a window of another process; once for each window."""

    def release(self, window: Any) -> None:
        """Free a window of this process, which no other one has open, or close one of another process."""

    def write(self, window: Any, at: int, host: Array, stream: Any) -> None:
        """Put a copy of a few bytes of the host into a window, from byte ``at`` on, on a stream."""

    def read(self, host: Array, window: Any, at: int, stream: Any) -> None:
        """Put a copy of a few bytes of a window into host memory on a stream."""

    def pack(self, array: DeviceArray, stream: Any) -> None:
        """Have the elements of an array stand in C order, on a stream: what :meth:`take` and :meth:`put` use."""

    def unpack(self, array: DeviceArray, stream: Any) -> None:
        """Put what :meth:`put` has written into an array to where its elements are, on a stream."""

    def take(self, window: Any, at: int, array: DeviceArray, start: int, count: int, stream: Any) -> None:
        """Put a copy of ``count`` elements of an array, from ``start`` in C order, into a window on a stream."""

    def put(self, array: DeviceArray, start: int, count: int, window: Any, at: int, stream: Any) -> None:
        """Put a copy of a window into ``count`` elements of an array on a stream."""

    def fold(self, fold: Fold, window: Any, places: Sequence[int], count: int, scratch: int, stream: Any) -> None:
        """Reduce what stands at some places of a window, in their order, into the first of them, on a stream.

        Args:
            fold: what is done.
            window: of this process, or of another one.
            places: bytes from its start, for each operand.
            count: elements of each.
            scratch: bytes from the start of the window to ``SCRATCH`` bytes that nobody else uses.
            stream: the stream.
        """


SCRATCH = 8 << 20
"""Bytes that :meth:`Runtime.fold` may need beside its operands, to reduce halves as float32."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A reduction on a device.

    Attributes:
        op: name of the MPI operation.
        dtype: of the elements; 16-bit words for halves.
        half: "float16" or "bfloat16", which are reduced as float32 and rounded once; else "".
        divisor: what the result is divided by at the end; 0: nothing.
    """

    op: str
    dtype: np.dtype[Any]
    half: str = ""
    divisor: int = 0


BINDING = "cuda"
"""The module beside this one that implements :class:`Runtime`; imported when the first array on a device comes."""

_runtime: Runtime | None = None


def runtime() -> Runtime:
    """Return that of CUDA.

    Raises:
        ImportError: CuPy is not there, or finds no GPU.
    """
    global _runtime
    if _runtime is None:
        binding: Any = importlib.import_module(f"{__package__}.{BINDING}")
        _runtime = binding.Cuda()
    return _runtime


def current_device() -> int | None:
    """Return the number of the current device of this thread; None where no array on a GPU has come to the library."""
    return None if _runtime is None else _runtime.current_device()


def use(device: int) -> None:
    """Make a device the current one of this thread."""
    runtime().use(device)


def over(gpu: Runtime, event: Any) -> bool:
    """Whether an event has come, or never will: what the device says of that is raised where the elements are needed."""
    try:
        return gpu.over(event)
    except Exception:
        return True


_parents: list[Any] = []


def _in_child() -> None:
    """Leave CUDA alone in a forked process: it does not work there, not even to free what is here."""
    global _runtime
    _parents.append(_runtime)
    _runtime = None


os.register_at_fork(after_in_child=_in_child)
