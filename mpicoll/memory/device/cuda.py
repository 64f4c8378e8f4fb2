"""The device runtime of CUDA, on CuPy: streams, events, copies and pinned memory for :mod:`mpicoll.memory.device.array`."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicoll.memory.device.runtime import SCRATCH, DeviceArray, Fold
from mpicoll.memory.protocols import check_torch_result, torch_dtype, waited_for

try:
    import cupy  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError as error:
    if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
        _why = "is not installed: pip install cupy-cuda12x (or cupy-cuda13x, for CUDA 13)"
    else:  # the text of CuPy is long, with the reason in the last line
        _lines = [line.strip(" =") for line in str(error).splitlines()]
        _why = f"cannot be loaded: {next(filter(None, reversed(_lines)), 'it does not say why')}"
    raise ImportError(f"this needs CuPy, which {_why}") from error


Array = npt.NDArray[Any]


class _Handle:
    """A stream of another package, with the CUDA stream protocol and a reference to the owner of the stream."""

    def __init__(self, handle: int, owner: Any) -> None:
        self.handle = handle
        self.owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _stream(handle: int, device: int, owner: Any = None) -> Any:
    """Return the stream of a handle, with a reference to the object that owns the stream."""
    if not handle:
        return cupy.cuda.Stream.null
    if handle == _PER_THREAD:
        return cupy.cuda.Stream.ptds
    held = _Handle(handle, owner)
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
        return cupy.cuda.Stream.from_external(held)
    stream = cupy.cuda.ExternalStream(handle, device)
    stream.held = held
    return stream


_PER_THREAD = 2  # cudaStreamPerThread
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice
_ASKED = (0, 600)  # cudaSuccess, cudaErrorNotReady
_CAPTURE_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit: on the default stream while another stream is captured
_LEGACY_IPC = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_RANGE_START = 11  # CU_POINTER_ATTRIBUTE_RANGE_START_ADDR


class Cuda:
    """The GPUs that CuPy finds (a :class:`mpicoll.memory.device.runtime.Runtime`)."""

    def __init__(self) -> None:
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except Exception as error:
            raise ImportError(f"CuPy finds no GPU: {error}") from error
        if not count:
            raise ImportError("CuPy finds no GPU")
        self._copy_streams: list[Any] = [None] * count
        self._second_streams: list[Any] = [None] * count
        self._driver: Any = None
        self._making = threading.Lock()

    def array(self, value: Any, name: str, *, writable: bool) -> DeviceArray:
        """Describe an array of CuPy or torch, or an array with the CUDA array interface or DLPack."""
        if isinstance(value, cupy.ndarray):
            return self._of(value, value.dtype, cupy.cuda.get_current_stream(value.device.id), readonly=False)
        torch = sys.modules.get("torch")
        tensor = getattr(torch, "Tensor", None)
        if torch is not None and isinstance(tensor, type) and isinstance(value, tensor):
            return self._of_torch(torch, value, name, writable)
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is not None:
            return self._of_interface(interface, value, name)
        found = cupy.from_dlpack(value)
        return self._of(found, found.dtype, cupy.cuda.get_current_stream(found.device.id), readonly=False)

    def _of(self, array: Any, dtype: np.dtype[Any], stream: Any, readonly: bool) -> DeviceArray:
        _refuse_capture(stream)
        number, packed = array.device.id, None
        if not array.flags.c_contiguous:
            # Now, as all ranks learn of errors before anything moves.
            with cupy.cuda.Device(number), self.copy_stream(number):
                packed = cupy.empty(array.shape, array.dtype)
        return DeviceArray(
            array, np.dtype(dtype), array.shape, array.strides, array.data.ptr, number, readonly, stream, packed
        )

    def _of_torch(self, torch: Any, tensor: Any, name: str, writable: bool) -> DeviceArray:
        tensor = waited_for(tensor)
        dtype = torch_dtype(torch, tensor, name, device="cuda")
        raw = dtype if dtype.names is None else dtype[0]
        if writable:
            check_torch_result(torch, tensor, name)
        elif tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
        strides = tuple(stride * raw.itemsize for stride in tensor.stride())
        number = tensor.device.index
        try:
            address = tensor.data_ptr()
        except RuntimeError as error:  # torch raises it for a tensor that vmap or grad has wrapped
            raise TypeError(f"parameter `{name}`: this tensor has no memory of its own: {error}") from error
        if not address and 0 not in tensor.shape:
            raise TypeError(f"parameter `{name}`: this tensor has no memory of its own: is it being traced?")
        found = self._at(address, tuple(tensor.shape), strides, raw, number, tensor.untyped_storage())
        current = torch.cuda.current_stream(number).cuda_stream
        stream = _stream(current, number)
        return self._of(found, dtype, stream, readonly=False)

    def _of_interface(self, interface: Any, value: Any, name: str) -> DeviceArray:
        address, readonly = interface["data"]
        shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
        if interface.get("mask") is not None:
            raise TypeError(f"parameter `{name}`: its mask would be lost: pass its elements, filled")
        strides = interface.get("strides")
        if strides is None:
            strides = tuple(math.prod(shape[at + 1 :]) * dtype.itemsize for at in range(len(shape)))  # C order
        number = cupy.cuda.Device().id
        if address:
            number = cupy.cuda.runtime.pointerGetAttributes(address).device
        found = self._at(address, shape, tuple(strides), dtype, max(number, 0), value)
        current = interface.get("stream")
        if current is None:
            stream = cupy.cuda.get_current_stream(found.device.id)
        elif current == 1:  # the legacy default stream (CUDA array interface, version 3)
            stream = cupy.cuda.Stream.null
        elif current == 2:
            stream = cupy.cuda.Stream.ptds
        else:
            stream = _stream(current, found.device.id, value)
        return self._of(found, dtype, stream, bool(readonly))

    @staticmethod
    def _at(address: int, shape: Any, strides: Any, dtype: Any, device: int, owner: Any) -> Any:
        low = sum(stride * (length - 1) for length, stride in zip(shape, strides, strict=True) if stride < 0)
        high = sum(stride * (length - 1) for length, stride in zip(shape, strides, strict=True) if stride > 0)
        if 0 in shape:
            low = high = 0
        memory = cupy.cuda.UnownedMemory(address + low, high - low + dtype.itemsize, owner, device)
        with cupy.cuda.Device(device):
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, -low), strides)

    def plain(self, array: DeviceArray) -> bool:
        """Return whether an ordinary allocation holds the array, not cudaMallocAsync or mapped virtual memory."""
        return self._asked(array, _LEGACY_IPC, ctypes.c_int(0)) == 1

    def _asked(self, array: DeviceArray, attribute: int, found: Any) -> int | None:
        """Return an attribute of the memory of an array, which the driver writes into ``found``; None if it has none."""
        if self._driver is None:
            self._driver = ctypes.CDLL("libcuda.so.1")
        failed = self._driver.cuPointerGetAttribute(
            ctypes.byref(found), ctypes.c_int(attribute), ctypes.c_uint64(array.address)
        )
        return None if failed else int(found.value)

    def count(self) -> int:
        """Return the number of devices that this process sees."""
        return len(self._copy_streams)

    def current_device(self) -> int:
        """Return the number of the current device of this thread."""
        return int(cupy.cuda.runtime.getDevice())

    def use(self, device: int) -> None:
        """Make a device the current device of this thread, for CuPy and, if it is imported, for torch."""
        cupy.cuda.Device(device).use()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.set_device(device)

    def bus(self, device: int) -> str:
        """Return the bus address of a device."""
        return str(cupy.cuda.runtime.deviceGetPCIBusId(device))

    def stream(self, given: Any, device: int) -> Any:
        """Return a stream that the program gave: CuPy's, torch's, or of the CUDA stream protocol."""
        number = getattr(given, "device_id", getattr(given, "device_index", device))  # CuPy's and torch's
        if isinstance(number, int) and number >= 0 and number != device:
            raise ValueError(
                f"stream is one of cuda:{number}, and the array is on cuda:{device}: pass a stream of that"
            )
        if isinstance(given, (cupy.cuda.Stream, cupy.cuda.ExternalStream)):
            _refuse_capture(given)
            return given
        handle = getattr(given, "cuda_stream", None)  # torch.cuda.Stream
        if handle is None and hasattr(given, "__cuda_stream__"):
            handle = given.__cuda_stream__()[1]
        if not isinstance(handle, int):
            raise TypeError(f"stream must be a stream of CUDA, not {type(given).__name__}")
        stream = _stream(handle, device, given)
        _refuse_capture(stream)
        return stream

    def copy_stream(self, device: int, second: bool = False) -> Any:
        """Return the first or second stream of the library on a device; both do not wait for the default stream."""
        streams = self._second_streams if second else self._copy_streams
        stream = streams[device]
        if stream is None:
            with self._making, cupy.cuda.Device(device):
                stream = streams[device]
                if stream is None:
                    stream = streams[device] = cupy.cuda.Stream(non_blocking=True)
        return stream

    def mark(self, device: int, stream: Any) -> Any:
        """Return an event behind all work that is on a stream now."""
        with cupy.cuda.Device(device):
            event = cupy.cuda.Event(disable_timing=True)
            event.record(stream)
        return event

    def over(self, event: Any) -> bool:
        """Return whether an event is complete; raise if the device has failed, which ``done`` of CuPy does not."""
        found = cupy.cuda.runtime.eventQuery(event.ptr)
        if found not in _ASKED:
            raise cupy.cuda.runtime.CUDARuntimeError(found)
        return bool(found == 0)

    def await_(self, event: Any) -> None:
        """Wait on the host for an event."""
        event.synchronize()

    def follow(self, device: int, stream: Any, event: Any) -> None:
        """Let later work on a stream of a device wait for an event."""
        if stream.ptr == _PER_THREAD:  # the handle means the stream of the calling thread, which may be another one now
            event.synchronize()
            return
        with cupy.cuda.Device(device):  # the default stream belongs to the current device
            stream.wait_event(event)

    def copy_out(self, host: Array, array: DeviceArray, stream: Any, begin: int | None = None) -> None:
        """Copy the elements, in C order, to host memory, on a stream; a part from byte ``begin`` on if given."""
        if begin is None:
            self.pack(array, stream)
        source = _elements(array) if begin is None else array.address + begin
        if host.nbytes:
            _copy(host.ctypes.data, source, host.nbytes, _TO_HOST, array.device, stream)

    def copy_in(self, array: DeviceArray, host: Array, stream: Any, begin: int | None = None) -> None:
        """Copy host memory to an array, on a stream; to a part from byte ``begin`` on if given."""
        target = _elements(array) if begin is None else array.address + begin
        if host.nbytes:
            _copy(target, host.ctypes.data, host.nbytes, _TO_DEVICE, array.device, stream)
        if begin is None:
            self.unpack(array, stream)

    def pinned(self, nbytes: int, device: int) -> Array:
        """Return pinned host memory, as bytes."""
        try:
            with cupy.cuda.Device(device):
                memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(nbytes), 0)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(f"no pinned memory: {error}") from error
        return np.frombuffer(memory, np.uint8, nbytes)

    def across(self, arrays: list[DeviceArray]) -> DeviceArray | None:
        """Return one array over contiguous arrays that stand one behind the other in one allocation; None if they do not."""
        first, at, count = arrays[0], arrays[0].address, 0
        for each in arrays:
            if each.address != at or each.stream != first.stream:
                return None
            count += math.prod(each.shape)
            at = first.address + count * first.dtype.itemsize
        # Two allocations may be adjacent: libraries below MPI map only one of them in another process.
        begins = {self._asked(each, _RANGE_START, ctypes.c_uint64(0)) for each in arrays}
        if len(begins) > 1 or None in begins:
            return None
        size = first.dtype.itemsize
        whole = self._at(first.address, (count,), (size,), first.dtype, first.device, [each.held for each in arrays])
        return self._of(whole, first.dtype, first.stream, any(each.readonly for each in arrays))

    def part(self, array: DeviceArray, part: slice) -> DeviceArray:
        """Return a part of a contiguous array, as if the array had one dimension."""
        return self._of(array.held.reshape(-1)[part], array.dtype, array.stream, array.readonly)

    def room(self, arrays: list[DeviceArray]) -> DeviceArray:
        """Return memory of the device for all elements of the arrays, from the allocator of CuPy."""
        first, stream = arrays[0], self.copy_stream(arrays[0].device)
        with cupy.cuda.Device(first.device), stream:  # the pool gives the memory to this stream only
            memory = cupy.empty(sum(math.prod(each.shape) for each in arrays), first.dtype)
        return self._of(memory, first.dtype, stream, readonly=False)

    def gather(self, room: DeviceArray, arrays: list[DeviceArray], stream: Any) -> None:
        """Copy contiguous arrays, one behind the other, to memory of :meth:`room`, on a stream."""
        at = room.address
        for each in arrays:
            at += _copy_on_device(at, each.address, each, stream)

    def spread(self, arrays: list[DeviceArray], room: DeviceArray, stream: Any) -> None:
        """Copy memory of :meth:`room` to the arrays, on a stream."""
        at = room.address
        for each in arrays:
            at += _copy_on_device(each.address, at, each, stream)

    def window(self, nbytes: int, device: int) -> _Window:
        """Return new memory of cudaMalloc, which other processes can open, unlike parts of CuPy's pool."""
        try:
            with cupy.cuda.Device(device):
                return _Window(cupy.cuda.runtime.malloc(nbytes), nbytes, device, opened=False)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(f"no memory for a window of {nbytes >> 20} MiB: {error}") from error

    def export(self, window: _Window) -> bytes:
        """Return the handle of a window of this process."""
        with cupy.cuda.Device(window.device):
            return bytes(cupy.cuda.runtime.ipcGetMemHandle(window.address))

    def open_window(self, handle: bytes, nbytes: int, device: int) -> _Window:
        """Open a window of another process."""
        with cupy.cuda.Device(device):
            return _Window(cupy.cuda.runtime.ipcOpenMemHandle(handle), nbytes, device, opened=True)

    def release(self, window: _Window) -> None:
        """Free a window of this process, or close one of another process."""
        with cupy.cuda.Device(window.device):
            if window.opened:
                cupy.cuda.runtime.ipcCloseMemHandle(window.address)
            else:
                cupy.cuda.runtime.free(window.address)

    def write(self, window: _Window, at: int, host: Array, stream: Any) -> None:
        """Copy a few bytes of the host to a window, on a stream; CUDA has read the bytes when this returns."""
        _copy(window.address + at, host.ctypes.data, host.nbytes, _TO_DEVICE, window.device, stream)

    def read(self, host: Array, window: _Window, at: int, stream: Any) -> None:
        """Copy a few bytes of a window to host memory, on a stream."""
        _copy(host.ctypes.data, window.address + at, host.nbytes, _TO_HOST, window.device, stream)

    def pack(self, array: DeviceArray, stream: Any) -> None:
        """Copy the elements of an array to C order, on a stream."""
        if array.packed is not None:
            with cupy.cuda.Device(array.device), stream:
                array.packed[...] = array.held

    def unpack(self, array: DeviceArray, stream: Any) -> None:
        """Copy elements from C order to their places in the array, on a stream."""
        if array.packed is not None:
            with cupy.cuda.Device(array.device), stream:
                array.held[...] = array.packed

    def take(self, window: _Window, at: int, array: DeviceArray, start: int, count: int, stream: Any) -> None:
        """Copy elements of an array to a window, on a stream."""
        nbytes, source = count * array.dtype.itemsize, _elements(array) + start * array.dtype.itemsize
        _copy(window.address + at, source, nbytes, _ON_DEVICE, array.device, stream)

    def put(self, array: DeviceArray, start: int, count: int, window: _Window, at: int, stream: Any) -> None:
        """Copy elements of a window to an array, on a stream."""
        nbytes, target = count * array.dtype.itemsize, _elements(array) + start * array.dtype.itemsize
        _copy(target, window.address + at, nbytes, _ON_DEVICE, array.device, stream)

    def fold(self, fold: Fold, window: _Window, places: Sequence[int], count: int, scratch: int, stream: Any) -> None:
        """Reduce operands at some places of a window, in their order, into the first operand, on a stream."""
        with cupy.cuda.Device(window.device), stream:
            if not fold.half:
                first, *others = [window.view(place, count, fold.dtype) for place in places]
                _reduce(fold, first, others)
                return
            most = SCRATCH // 8  # two float32 for each element
            total, term = (window.view(scratch + at, most, np.dtype("f4")) for at in (0, SCRATCH // 2))
            for start in range(0, count, most):
                many = min(most, count - start)
                words = [window.view(place + 2 * start, many, np.dtype("u2")) for place in places]
                _widen(fold.half, words[0], total[:many])
                for word in words[1:]:
                    _widen(fold.half, word, term[:many])
                    _ufunc(fold)(total[:many], term[:many], out=total[:many])
                _reduce(fold, total[:many], [])
                _narrow(fold.half, total[:many], words[0])


def _refuse_capture(stream: Any) -> None:
    """Raise RuntimeError if a stream is being captured into a CUDA graph."""
    try:
        captured = cupy.cuda.runtime.streamIsCapturing(stream.ptr)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status != _CAPTURE_IMPLICIT:
            raise
        captured = True
    if captured:
        raise RuntimeError(
            "what is put on this stream is being captured into a CUDA graph, and a graph cannot hold a call that ranks make "
            "together: make it outside of the capture"
        )


def _copy(target: int, source: int, nbytes: int, kind: int, device: int, stream: Any) -> None:
    """Copy bytes from one address to another, on a stream."""
    with cupy.cuda.Device(device):
        cupy.cuda.runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)


def _copy_on_device(target: int, source: int, like: DeviceArray, stream: Any) -> int:
    """Copy as many bytes as an array has, on a stream, and return their number."""
    nbytes = math.prod(like.shape) * like.dtype.itemsize
    _copy(target, source, nbytes, _ON_DEVICE, like.device, stream)
    return nbytes


class _Window:
    """Memory of a device that several processes have open; it is not freed automatically.

    Attributes:
        address: address in this process.
        nbytes, device: size, and number of the device.
        opened: another process has made the window.
    """

    __slots__ = ("__weakref__", "address", "device", "nbytes", "opened")

    def __init__(self, address: int, nbytes: int, device: int, *, opened: bool) -> None:
        self.address, self.nbytes, self.device, self.opened = address, nbytes, device, opened

    def view(self, at: int, count: int, dtype: np.dtype[Any]) -> Any:
        """Return elements from byte ``at`` on as an array."""
        memory = cupy.cuda.UnownedMemory(self.address, self.nbytes, self, self.device)
        return cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, at))


def _elements(array: DeviceArray) -> int:
    """Return the address of the first element in C order."""
    return int((array.held if array.packed is None else array.packed).data.ptr)


_UFUNCS = {
    "SUM": "add",
    "PROD": "multiply",
    "MAX": "maximum",
    "MIN": "minimum",
    "BAND": "bitwise_and",
    "BOR": "bitwise_or",
    "BXOR": "bitwise_xor",
    "LAND": "logical_and",
    "LOR": "logical_or",
    "LXOR": "logical_xor",
}


def _ufunc(fold: Fold) -> Any:
    return getattr(cupy, _UFUNCS[fold.op])


def _reduce(fold: Fold, total: Any, others: Sequence[Any]) -> None:
    for other in others:
        _ufunc(fold)(total, other, out=total)
    if fold.divisor:
        cupy.true_divide(total, total.dtype.type(fold.divisor), out=total)


def _widen(half: str, words: Any, out: Any) -> None:
    """Convert half-type elements, as 16-bit words, to float32 on the current stream."""
    if half == "float16":
        out[...] = words.view(np.float16)
    else:
        _bfloat16_kernels()[0](words, out)


def _narrow(half: str, values: Any, out: Any) -> None:
    """Round float32 to a half type on the current stream, as :mod:`mpicoll.memory.half` does."""
    if half == "float16":
        out.view(np.float16)[...] = values
    else:
        _bfloat16_kernels()[1](values, out)


@cache
def _bfloat16_kernels() -> tuple[Any, Any]:
    """Return the kernel that converts words to float32, and the kernel that rounds float32 to words."""
    widen = cupy.ElementwiseKernel(
        "uint16 word", "float32 wide", "wide = __uint_as_float((unsigned int)word << 16)", "mpicoll_widen"
    )
    narrow = cupy.ElementwiseKernel(
        "float32 wide",
        "uint16 word",
        """
        unsigned int bits = __float_as_uint(wide), upper = bits >> 16;
        bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        word = (unsigned short)(nan ? (upper | 0x40u) : ((bits + 0x7fffu + (upper & 1u)) >> 16));
        """,
        "mpicoll_narrow",
    )
    return widen, narrow
