"""Arrays on a GPU as memory of the host that is copied out and back, in the order of their streams.

What a call needs of a GPU is a :class:`Runtime`; that of CUDA is in :mod:`mpicoll.memory.device.cuda`, and loaded with the first
array that is on one. The device as a whole is never waited for. Four orders have to be kept, and each is one line here:

1. the elements are copied out after what the program has put on its stream before the call;
2. the host reads them when they are there;
3. results are copied in after what the program has put on its stream before the call, which may read the old ones;
4. what the program puts on its stream after the call comes after the results;

and a fifth, of the host's memory: it is used again when what was copied out of it has left.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpicoll.memory import layouts
from mpicoll.memory.device.pool import _Block, pool
from mpicoll.memory.device.runtime import Array, DeviceArray, Runtime, over, runtime
from mpicoll.memory.dtypes import Element, element, is_native

_GPU = (2, 13)
"""Memory of CUDA, and managed memory (DLDeviceType of DLPack)."""


def _runtime_for(name: str) -> Runtime:
    try:
        return runtime()
    except ImportError as error:
        raise TypeError(f"parameter `{name}` is on a GPU, and {error}") from None


def on_device(value: Any) -> bool:
    """Whether an array, which is not NumPy's, is in the memory of a GPU, as far as it tells."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if isinstance(tensor, type) and isinstance(value, tensor):
        found: Any = value
        return bool(found.device.type == "cuda")
    if isinstance(value, type):
        return False
    try:
        asks = getattr(value, "__dlpack_device__", None)
        if asks is not None:
            return int(asks()[0]) in _GPU
    except Exception:
        pass  # an array on several devices, in JAX
    try:
        return hasattr(value, "__cuda_array_interface__")
    except Exception:  # a property of somebody else's
        return False


class Shadow(np.ndarray[Any, np.dtype[Any]]):
    """Where an array lies on a GPU: its addresses, to be compared with others, handed to MPI, or moved in pieces.

    Its elements are not to be had: NumPy would end the process by a signal, so what reads or writes them raises instead.

    Slices and views of a shadow have none of its attributes.

    Attributes:
        array: what it is of.
        began: the event that the call comes after.
        handed: whether MPI may be handed it; else it is moved in pieces, by way of the host.
        finish: what is done to each piece of a result before it is copied in; None: nothing.
        narrower: of an array that is moved as a wider dtype than it has, its own dtype, what makes the wider elements of its
            own, and its own of the wider; else None. Its addresses are then counted in the wider elements.
    """

    array: DeviceArray
    began: Any
    handed: bool
    finish: Callable[[Array], None] | None = None
    narrower: tuple[np.dtype[Any], Callable[[Array, Array], None], Callable[[Array, Array], None]] | None = None

    def widened(
        self,
        dtype: np.dtype[Any],
        widen: Callable[[Array, Array], None],
        narrow: Callable[[Array, Array], None],
    ) -> Shadow:
        """Return the same for elements that are moved as a wider dtype.

        Args:
            widen, narrow: write elements of the first argument into the second one.
        """
        interface = {"version": 3, "data": (self.ctypes.data, False), "shape": self.shape, "typestr": dtype.str}
        wide = np.asarray(_Place(interface, self.array.held)).view(Shadow)
        wide.array, wide.began, wide.handed = self.array, self.began, False
        wide.narrower = self.dtype, widen, narrow
        return wide

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise _unreadable()

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in (np.may_share_memory, np.shares_memory):
            raise _unreadable()
        return super().__array_function__(func, types, args, kwargs)

    def __repr__(self) -> str:
        return f"Shadow(shape={self.shape}, dtype={self.dtype})"

    __str__ = __repr__

    def _no(self, *_: Any, **__: Any) -> Any:
        raise _unreadable()

    copy = tobytes = tolist = item = __setitem__ = fill = __iter__ = __array__ = _no


def _unreadable() -> RuntimeError:
    return RuntimeError("the elements of an array on a GPU are not to be had on the host: this is a bug of mpicoll")


class _Place:
    """What tells NumPy of an address, and keeps the memory there from being given to another array."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def place_of(value: Any, name: str) -> Array:
    """Return the addresses of an array on a GPU; TypeError where it cannot be had. ``name`` is the parameter's."""
    return shadow(_runtime_for(name).array(value, name, writable=False))


def shadow(array: DeviceArray) -> Array:
    """Return the addresses of an array (a GPU's are not those of any other memory: CUDA guide, unified virtual addressing)."""
    if 0 in array.shape:
        return np.empty(array.shape, array.dtype).view(Shadow)
    raw = np.dtype((np.void, array.dtype.itemsize))
    interface = {
        "version": 3,
        "data": (array.address, False),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": raw.str,
    }
    return np.asarray(_Place(interface, array.held)).view(array.dtype).view(Shadow)


@dataclass(slots=True)
class OnGpu:
    """An array on a GPU: by way of host memory, or as it is handed to MPI.

    Attributes:
        flat: its elements in C order: host memory for them, or their own addresses.
        shape: the array's.
        named: the name of its dtype where that is not the one of ``flat``.
        origin: its addresses.
        place: the device, in words.
        ready: whether the device has come to the call, so that its elements can be had.
        pack: copies them out, or waits until MPI may have them.
        unpack: copies them back in; None where there is nothing to copy.
    """

    flat: Array
    shape: tuple[int, ...]
    named: str
    origin: Array
    place: str
    ready: Callable[[], bool]
    pack: Callable[[], None]
    unpack: Callable[[], None] | None


def _copies(
    gpu: Runtime, array: DeviceArray, host: Array, block: _Block | None, began: Any
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what copies an array out into host memory, and what copies it back in.

    Args:
        block: what the host memory is of; None for ordinary memory.
        began: the event that both come after.
    """

    def pack() -> None:
        stream = gpu.copy_stream(array.device)
        gpu.follow(array.device, stream, began)  # 1
        gpu.copy_out(host, array, stream)
        copied = gpu.mark(array.device, stream)
        if block is not None:
            block.busy = copied  # whatever strikes now
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
"""What is larger may be handed to MPI. What is not moves together with its envelope, or in a plan's buffers: of the host."""

MOST_DIRECT = (1 << 31) - 1
"""Bytes that MPI is handed at most in one piece."""


def _nothing(operation: str, nonblocking: bool) -> bool:
    return False


_permitted: Callable[[str, bool], bool] = _nothing
_notes = threading.local()


def permit(permitted: Callable[[str, bool], bool]) -> None:
    """Say which operations may be handed memory of a GPU: a function of their name, and whether they are nonblocking."""
    global _permitted
    _permitted = permitted


def permits(operation: str, nonblocking: bool) -> bool:
    """Whether an operation of MPI may be handed memory of a GPU."""
    return _permitted(operation, nonblocking)


class Noted:
    """Where the arrays of one call are looked at: they are on its stream.

    Args:
        stream: as the program gave it; None for the current one of the package that an array is of.

    Attributes:
        asks: of every array that is handed to MPI as it is, whether its GPU has come to the call.
    """

    __slots__ = ("_stream", "asks")

    def __init__(self, stream: Any = None) -> None:
        self.asks: list[Callable[[], bool]] = []
        self._stream = stream

    def __enter__(self) -> Noted:
        _notes.asks, _notes.stream = self.asks, self._stream
        return self

    def __exit__(self, *_: object) -> None:
        _notes.asks = _notes.stream = None


def _array(gpu: Runtime, value: Any, name: str, writable: bool) -> DeviceArray:
    array = gpu.array(value, name, writable=writable)
    stream = getattr(_notes, "stream", None)
    if stream is not None:
        array.stream = gpu.stream(stream, array.device)
    return array


def _note(ask: Callable[[], bool]) -> None:
    asks = getattr(_notes, "asks", None)
    if asks is not None:
        asks.append(ask)


def direct(value: Any, name: str, *, writable: bool, least: int = DIRECT_BYTES) -> OnGpu | None:
    """Return an array on a GPU as it is handed to MPI; None where it has to go by way of the host.

    Args:
        value, name, writable: as in :func:`stage`.
        least: arrays of more bytes may be handed to MPI.
    """
    gpu = runtime()
    array = _array(gpu, value, name, writable)
    place = shadow(array)
    if not (place.flags.c_contiguous and is_native(array.dtype) and least < place.nbytes <= MOST_DIRECT):
        return None
    if writable and array.readonly:
        return None  # it is said there
    if place.nbytes and not gpu.plain(array):
        return None  # libraries below MPI take it for memory of the host: openucx/ucx#7194
    flat = _addresses(gpu, array)

    def ready() -> bool:
        return come(flat)

    _note(ready)
    return OnGpu(flat, array.shape, "", flat, _words(array), ready, lambda: gpu.await_(flat.began), None)


PIECES_FROM = 8 << 20
"""Bytes of an array above which it is moved in pieces: up to two of them, hardly anything would be copied meanwhile."""


def _flat(gpu: Runtime, array: DeviceArray, place: Array, dtype: np.dtype[Any], *, handed: bool) -> Shadow:
    flat = place.view(dtype).reshape(-1)
    assert isinstance(flat, Shadow)
    flat.array, flat.began, flat.handed = array, gpu.mark(array.device, array.stream), handed
    return flat


def _addresses(gpu: Runtime, array: DeviceArray) -> Shadow:
    """Return the addresses of a contiguous array, to be handed to MPI."""
    return _flat(gpu, array, shadow(array), array.dtype, handed=True)


def _nothing_yet() -> None:
    """Copy nothing: that is done when the pieces move."""


def come(flat: Shadow) -> bool:
    """Whether the GPU has come to the call that an array was passed to."""
    return over(runtime(), flat.began)


def across(flats: list[Array]) -> Array | None:
    """Return the addresses of arrays that MPI may be handed, as those of one; None where they are not in one piece.

    Args:
        flats: as :func:`direct` returns them, of one dtype on one device.
    """
    held = [flat for flat in flats if flat.size] or flats[:1]
    if len(held) == 1:
        return held[0]
    whole = runtime().across([flat.array for flat in held])  # type: ignore[attr-defined]
    return None if whole is None else _addresses(runtime(), whole)


def room(flats: list[Array]) -> tuple[Array, Callable[[], None], Callable[[], None]] | None:
    """Return memory of the device in one piece for the elements of arrays that MPI may be handed.

    The call that is being looked at waits until that memory is free.

    Args:
        flats: as :func:`direct` returns them, of one dtype on one device.

    Returns:
        Its addresses, what copies the elements in when the arrays are ready, and what copies them out. None where the device
        has no such memory that MPI may be handed.
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
    _note(lambda: over(gpu, free))  # 1

    def gather() -> None:
        stream = gpu.copy_stream(device)
        gpu.gather(whole, arrays, stream)
        gpu.await_(gpu.mark(device, stream))  # 2

    def spread() -> None:
        stream = gpu.copy_stream(device)
        gpu.spread(arrays, whole, stream)
        done = gpu.mark(device, stream)
        told: list[Any] = []
        for array in arrays:
            if array.stream not in told:
                told.append(array.stream)
                gpu.follow(device, array.stream, done)  # 3

    return _addresses(gpu, whole), gather, spread


def picked(flat: Array, parts: list[slice]) -> Array:
    """Return parts of an array that MPI may be handed, one behind the other in other memory; the host waits for them.

    That memory is the device's, or the host's where the device has none: what a call needs when it has begun must not fail.
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
    """Return host memory in the place of what was to be handed to MPI, what copies the elements out, and what copies them in."""
    assert isinstance(flat, Shadow)
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
class Held:
    """An array on a GPU that can be moved; nothing is taken for it yet.

    Attributes:
        array: what it is.
        each: its elements.
        origin: its addresses.
        began: the event of all that its stream held at the call.
    """

    array: DeviceArray
    each: Element
    origin: Array
    began: Any

    @property
    def named(self) -> str:
        """The name of its dtype where its elements travel as those of another one."""
        return "" if is_native(self.array.dtype) else self.each.name

    def in_pieces(self, pieces: int | None) -> bool:
        """Whether it moves in pieces where contiguous arrays of more than so many bytes do; None: none does."""
        return pieces is not None and self.origin.nbytes > pieces and self.origin.flags.c_contiguous

    def stage(self, *, writable: bool, pieces: int | None = None) -> OnGpu:
        """Return host memory for it, or its addresses where it moves in pieces (see :meth:`in_pieces`)."""
        gpu, array, began = runtime(), self.array, self.began
        dtype = array.dtype if is_native(array.dtype) else self.each.wire
        if self.in_pieces(pieces):
            flat = _flat(gpu, array, self.origin, dtype, handed=False)
            return OnGpu(flat, array.shape, self.named, flat, _words(array), partial(come, flat), _nothing_yet, None)
        nbytes = self.origin.size * array.dtype.itemsize
        memory, block = pool().take(nbytes, array.device)
        host: Array = memory.view(array.dtype)

        def ready() -> bool:
            return over(gpu, began)

        pack, unpack = _copies(gpu, array, host, block, began)
        return OnGpu(
            host.view(dtype),
            array.shape,
            self.named,
            self.origin,
            _words(array),
            ready,
            pack,
            unpack if writable else None,
        )


def stage(value: Any, name: str, *, writable: bool, pieces: int | None = None) -> OnGpu:
    """Return host memory for an array on a GPU, as :func:`hold`; what the array's stream holds now comes before the call.

    Args:
        value, name, writable: as in :func:`hold`.
        pieces: bytes of a contiguous array above which it is not given host memory, but moved in pieces; None: never.
    """
    return hold(value, name, writable=writable).stage(writable=writable, pieces=pieces)


def hold(value: Any, name: str, *, writable: bool) -> Held:
    """Return an array on a GPU that can be moved, after what its stream holds now.

    Args:
        name: the parameter's name, for messages.
        writable: the call writes into it.
        pieces: bytes of a contiguous array above which it is not given host memory, but moved in pieces; None: never.

    Raises:
        TypeError: an array that cannot be had, or of a dtype that does not move; no CuPy.
        ValueError: read-only, or with elements that share memory, and the call writes into it.
    """
    gpu = _runtime_for(name)
    array = _array(gpu, value, name, writable)
    try:
        each = element(array.dtype)
    except TypeError as error:
        raise TypeError(f"parameter `{name}`: {error}") from None
    if each.swapped or (each.gaps and writable):
        what = "bytes in another order" if each.swapped else "gaps in its elements"
        raise TypeError(
            f"parameter `{name}`: an array on a GPU with {what} ({array.dtype}) is not supported: pass a copy"
        )
    origin = shadow(array)
    if writable and array.readonly:
        raise ValueError(
            f"parameter `{name}` is read-only, and this call writes its result into it: pass x.copy(), and keep it"
        )
    if writable and layouts.overlaps(origin):
        raise ValueError(
            f"parameter `{name}` has elements that share memory (shape {array.shape}, strides {array.strides}), and this call "
            "writes its result into it: pass a copy"
        )
    return Held(array, each, origin, gpu.mark(array.device, array.stream))
