"""Adapt arrays on a GPU: pass their memory to MPI directly, or copy the elements through host memory in the order of streams.

A :class:`Runtime` gives access to the GPU. The runtime of CUDA, :mod:`mpicoll.memory.device.cuda`, is loaded with the first
array on a GPU. No call waits for the whole device. Five rules hold; the line that establishes a rule has its number:

1. elements are copied to the host after the work that the program put on its stream before the call;
2. the host reads the elements after that copy is complete;
3. results are copied to the GPU after the work that the program put on its stream before the call, which may read old elements;
4. work that the program puts on its stream after the call runs after the copy of the results;
5. host memory is used again after the copies from it are complete.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpicoll.memory import layouts
from mpicoll.memory.device.addresses import DeviceAddresses, addresses_of
from mpicoll.memory.device.pool import _Block, pool
from mpicoll.memory.device.runtime import Array, DeviceArray, Runtime, over, runtime
from mpicoll.memory.dtypes import Element, element_of, is_native
from mpicoll.memory.memory import Memory, stream_order

_GPU = (2, 13)
"""Memory of CUDA, and managed memory (DLDeviceType of DLPack)."""


def _runtime_for(name: str) -> Runtime:
    try:
        return runtime()
    except ImportError as error:
        raise TypeError(f"parameter `{name}` is on a GPU, and {error}") from None


def on_device(value: Any) -> bool:
    """Return whether an array of another package than NumPy is in the memory of a GPU, as far as the array tells."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if isinstance(tensor, type) and isinstance(value, tensor):
        found: Any = value
        return bool(found.device.type == "cuda")
    if isinstance(value, type):
        return False
    try:
        query = getattr(value, "__dlpack_device__", None)
        if query is not None:
            return int(query()[0]) in _GPU
    except Exception:
        pass  # an array on several devices, in JAX
    try:
        return hasattr(value, "__cuda_array_interface__")
    except Exception:  # a property of another package
        return False


def place_of(value: Any, name: str) -> Array:
    """Return the addresses of an array on a GPU, or raise TypeError. ``name`` is the name of the parameter."""
    return addresses_of(_runtime_for(name).array(value, name, writable=False))


def _copies(
    gpu: Runtime, array: DeviceArray, host: Array, block: _Block | None, began: Any
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions: one copies an array to host memory, one copies host memory to the array.

    Args:
        block: the block of the host memory; None for ordinary memory.
        began: the event that both copies follow.
    """

    def pack() -> None:
        stream = gpu.copy_stream(array.device)
        gpu.follow(array.device, stream, began)  # 1
        gpu.copy_out(host, array, stream)
        copied = gpu.mark(array.device, stream)
        if block is not None:
            block.busy = copied  # now, as a signal handler may raise at any time
        gpu.await_(copied)  # 2

    def unpack() -> None:
        stream = gpu.copy_stream(array.device)
        gpu.follow(array.device, stream, began)  # 3
        gpu.copy_in(array, host, stream)
        done = gpu.mark(array.device, stream)
        gpu.follow(array.device, array.stream, done)  # 4
        if block is not None:
            block.busy = done  # 5
        else:
            gpu.await_(done)

    return pack, unpack


DIRECT_BYTES = 64 * 1024
"""Larger arrays may be passed to MPI directly. Smaller arrays move with an envelope, or in buffers of a plan, on the host."""

MOST_DIRECT = (1 << 31) - 1
"""Most bytes passed to MPI directly in one piece."""


def _nothing(operation: str, nonblocking: bool) -> bool:
    return False


_permitted: Callable[[str, bool], bool] = _nothing


def permit(permitted: Callable[[str, bool], bool]) -> None:
    """Register the function that returns whether MPI may get memory of a GPU: of an operation's name, and whether nonblocking."""
    global _permitted
    _permitted = permitted


def permits(operation: str, nonblocking: bool) -> bool:
    """Return whether memory of a GPU may be passed to an operation of MPI."""
    return _permitted(operation, nonblocking)


def _array(gpu: Runtime, value: Any, name: str, writable: bool) -> DeviceArray:
    array = gpu.array(value, name, writable=writable)
    stream = getattr(stream_order, "stream", None)
    if stream is not None:
        array.stream = gpu.stream(stream, array.device)
    return array


def _add_ready_test(test: Callable[[], bool]) -> None:
    ready_tests = getattr(stream_order, "ready_tests", None)
    if ready_tests is not None:
        ready_tests.append(test)


def direct(value: Any, name: str, *, writable: bool, least: int = DIRECT_BYTES) -> Memory | None:
    """Return the memory of an array on a GPU that is passed to MPI directly; None if it has to move through the host.

    Args:
        value, name, writable: as in :func:`movable_array`.
        least: arrays of more bytes may be passed directly.
    """
    gpu = runtime()
    array = _array(gpu, value, name, writable)
    place = addresses_of(array)
    if not (place.flags.c_contiguous and is_native(array.dtype) and least < place.nbytes <= MOST_DIRECT):
        return None
    if writable and array.readonly:
        return None  # `movable_array` raises
    if place.nbytes and not gpu.plain(array):
        return None  # libraries below MPI treat such memory as memory of the host: openucx/ucx#7194
    flat = _addresses(gpu, array)
    _add_ready_test(flat.is_ready)
    wait = partial(gpu.await_, flat.began)
    return Memory(flat, array.shape, pack=wait, origin=flat, place=_words(array), ready=flat.is_ready, direct=True)


PIECES_FROM = 8 << 20
"""Bytes of an array above which the array moves in pieces: with one or two pieces almost no copies overlap."""


def _flat(
    gpu: Runtime, array: DeviceArray, place: Array, dtype: np.dtype[Any], *, passed_directly: bool
) -> DeviceAddresses:
    flat = place.view(dtype).reshape(-1)
    assert isinstance(flat, DeviceAddresses)
    flat.array, flat.began, flat.passed_directly = array, gpu.mark(array.device, array.stream), passed_directly
    return flat


def _addresses(gpu: Runtime, array: DeviceArray) -> DeviceAddresses:
    """Return the addresses of a contiguous array that is passed to MPI directly."""
    return _flat(gpu, array, addresses_of(array), array.dtype, passed_directly=True)


def _nothing_yet() -> None:
    """Copy nothing: elements are copied when the pieces move."""


def across(flats: list[Array]) -> Array | None:
    """Return the addresses of one array over all given arrays; None if they do not stand one behind the other.

    Args:
        flats: addresses as in results of :func:`direct`, of one dtype on one device.
    """
    held = [flat for flat in flats if flat.size] or flats[:1]
    if len(held) == 1:
        return held[0]
    whole = runtime().across([flat.array for flat in held])  # type: ignore[attr-defined]
    return None if whole is None else _addresses(runtime(), whole)


def room(flats: list[Array]) -> tuple[Array, Callable[[], None], Callable[[], None]] | None:
    """Return memory of the device in one piece for the elements of arrays that are passed to MPI directly.

    The call that is being prepared (:class:`StreamOrder`) waits until that memory is free.

    Args:
        flats: addresses as in results of :func:`direct`, of one dtype on one device.

    Returns:
        Addresses of the memory, a function that copies the elements into it when the arrays are ready, and a function that
        copies the elements out of it. None if the device has no such memory that MPI may get.
    """
    gpu = runtime()
    arrays: list[DeviceArray] = [flat.array for flat in flats if flat.size]  # type: ignore[attr-defined]
    device = arrays[0].device
    try:
        whole = gpu.room(arrays)
    except MemoryError:
        return None
    if not gpu.plain(whole):
        return None
    free = gpu.mark(device, gpu.copy_stream(device))
    _add_ready_test(lambda: over(gpu, free))  # 1

    def gather() -> None:
        stream = gpu.copy_stream(device)
        gpu.gather(whole, arrays, stream)
        gpu.await_(gpu.mark(device, stream))  # 2

    def spread() -> None:
        stream = gpu.copy_stream(device)
        gpu.spread(arrays, whole, stream)
        done = gpu.mark(device, stream)
        seen: list[Any] = []
        for array in arrays:
            if array.stream not in seen:
                seen.append(array.stream)
                gpu.follow(device, array.stream, done)  # 3

    return _addresses(gpu, whole), gather, spread


def picked(flat: Array, parts: list[slice]) -> Array:
    """Copy parts of an array that is passed to MPI directly into other memory, one behind the other; wait for the copies.

    The memory is on the device, or on the host if the device has none left: a call that has begun must not fail.
    """
    gpu, whole = runtime(), flat.array  # type: ignore[attr-defined]
    flats: list[Array] = [_addresses(gpu, gpu.part(whole, part)) for part in parts if part.stop > part.start]
    found = room(flats)
    if found is not None:
        packed, gather, _ = found
        gather()
        return packed
    stream, at = gpu.copy_stream(whole.device), 0
    host: Array = np.empty(sum(each.size for each in flats), whole.dtype)
    for each in flats:
        gpu.copy_out(host[at : at + each.size], each.array, stream)  # type: ignore[attr-defined]
        at += each.size
    gpu.await_(gpu.mark(whole.device, stream))
    return host


def _words(array: DeviceArray) -> str:
    return f"cuda:{array.device}"


def on_host(flat: Array) -> tuple[Array, Callable[[], None], Callable[[], None]]:
    """Return host memory for an array on a GPU, a function that copies elements to the host, and one that copies them back."""
    assert isinstance(flat, DeviceAddresses)
    gpu, array = runtime(), flat.array
    dtype = flat.dtype if flat.narrower is None else flat.narrower[0]
    memory, block = pool().take(flat.size * dtype.itemsize, array.device)
    host: Array = memory.view(dtype)
    pack, unpack = _copies(gpu, array, memory.view(array.dtype), block, flat.began)
    values, widen, narrow = host, None, None
    if flat.narrower is not None:
        _, widen, narrow = flat.narrower
        values = np.empty(flat.size, flat.dtype)

    def out() -> None:
        pack()
        if widen is not None:
            widen(host, values)

    def back() -> None:
        if flat.finish is not None:
            flat.finish(values)
        if narrow is not None:
            narrow(values, host)
        unpack()

    return values, out, back


@dataclass(slots=True)
class MovableArray:
    """An array on a GPU that was checked and can be moved; no memory is reserved for it yet.

    Attributes:
        array: the array.
        each: description of the elements.
        origin: addresses of the array.
        began: the event behind all work that was on the stream at the call.
    """

    array: DeviceArray
    each: Element
    origin: Array
    began: Any

    @property
    def named(self) -> str:
        """The name of the dtype if the elements move as another dtype, otherwise ""."""
        return "" if is_native(self.array.dtype) else self.each.name

    def in_pieces(self, pieces: int) -> bool:
        """Return whether the array moves in pieces; ``pieces`` as in :func:`mpicoll.memory.adapt.adapt`."""
        return pieces > 0 and self.origin.nbytes > PIECES_FROM // pieces and self.origin.flags.c_contiguous

    def stage(self, *, writable: bool, pieces: int = 0) -> Memory:
        """Return host memory for the array, or its addresses if it moves in pieces (see :meth:`in_pieces`)."""
        gpu, array, began = runtime(), self.array, self.began
        dtype = array.dtype if is_native(array.dtype) else self.each.wire
        if self.in_pieces(pieces):
            flat = _flat(gpu, array, self.origin, dtype, passed_directly=False)
            found = Memory(flat, array.shape, pack=_nothing_yet, origin=flat, direct=True)
            found.ready = flat.is_ready
        else:
            memory, block = pool().take(self.origin.size * array.dtype.itemsize, array.device)
            host: Array = memory.view(array.dtype)
            pack, unpack = _copies(gpu, array, host, block, began)
            found = Memory(host.view(dtype), array.shape, pack=pack, unpack=unpack if writable else None)
            found.origin = self.origin
            found.ready = partial(over, gpu, began)
        found.named, found.place = self.named, _words(array)
        return found


def movable_array(value: Any, name: str, *, writable: bool) -> MovableArray:
    """Check an array on a GPU, and note the work that is on its stream now: the call follows that work.

    Args:
        name: the name of the parameter, for messages.
        writable: the call writes into the array.

    Raises:
        TypeError: the memory of the array is not accessible, its dtype cannot be moved, or there is no CuPy.
        ValueError: the call writes into the array, which is read-only or has elements that share memory.
    """
    gpu = _runtime_for(name)
    array = _array(gpu, value, name, writable)
    each = element_of(array.dtype, name)
    if each.swapped or (each.gaps and writable):
        what = "bytes in another order" if each.swapped else "gaps in its elements"
        raise TypeError(
            f"parameter `{name}`: an array on a GPU with {what} ({array.dtype}) is not supported: pass a copy"
        )
    origin = addresses_of(array)
    if writable:
        layouts.check_result(origin, name, array.readonly)
    return MovableArray(array, each, origin, gpu.mark(array.device, array.stream))
