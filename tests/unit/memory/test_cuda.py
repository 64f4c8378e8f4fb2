"""The memory that ranks share on a GPU, by CuPy's calls, on a CuPy that is none: addresses, sizes, conversions and order."""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpicoll.memory.device.runtime import SCRATCH, DeviceArray, Fold
from mpicoll.memory.half import narrow, widen

Array = np.ndarray[Any, Any]


class Nothing:
    """A device or a stream as a context."""

    ptr = 77

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


class Runtime:
    """cupy.cuda.runtime with memory of the host."""

    memcpyDeviceToDevice, memcpyHostToDevice, memcpyDeviceToHost = 3, 1, 2
    CUDARuntimeError = OSError

    def __init__(self) -> None:
        self.held: dict[int, Array] = {}
        self.closed: list[int] = []
        self.copies: list[int] = []

    def getDeviceCount(self) -> int:
        return 1

    def malloc(self, nbytes: int) -> int:
        if nbytes > 1 << 30:
            raise OSError("cudaErrorMemoryAllocation")
        memory = np.zeros(nbytes, np.uint8)
        self.held[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, address: int) -> None:
        del self.held[address]

    def ipcGetMemHandle(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        assert len(handle) == 64
        return int.from_bytes(handle, "little")

    def ipcCloseMemHandle(self, address: int) -> None:
        self.closed.append(address)

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert stream == 77
        self.copies.append(kind)
        ctypes.memmove(target, source, nbytes)


def array_at(shape: Any, dtype: Any, pointer: tuple[Any, int]) -> Array:
    (address, nbytes, _, _), at = pointer
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    return memory[at : at + int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)


def kernel(inputs: str, outputs: str, code: str, name: str) -> Any:
    """Return NumPy's in the place of a kernel of this name; what it says in CUDA is for tests/gpu."""
    assert inputs.split()[1] in code
    assert outputs.split()[1] in code
    convert: Any = {"mpicoll_widen": widen, "mpicoll_narrow": narrow}[name]
    return lambda source, target: convert("bfloat16", source, target)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """The stand-in for CuPy, installed as such."""
    found = Runtime()
    cupy: Any = types.ModuleType("cupy")
    for name in dir(np):
        if not name.startswith("__"):
            setattr(cupy, name, getattr(np, name))
    cupy.ndarray, cupy.ElementwiseKernel = array_at, kernel
    cupy.cuda = types.SimpleNamespace(
        runtime=found,
        Device=Nothing,
        UnownedMemory=lambda *given: given,
        MemoryPointer=lambda memory, at: (memory, at),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.delitem(sys.modules, "mpicoll.memory.device.cuda", raising=False)
    yield found
    sys.modules.pop("mpicoll.memory.device.cuda", None)


def gpu() -> Any:
    return importlib.import_module("mpicoll.memory.device.cuda").Cuda()


class OnDevice:
    """What CuPy's array is asked for."""

    def __init__(self, elements: Array) -> None:
        self.data = types.SimpleNamespace(ptr=elements.ctypes.data)


def test_a_window_is_exported_opened_and_freed(runtime: Runtime) -> None:
    """Its handle keeps its last bytes; what was opened is closed, and what was made freed, once."""
    cuda = gpu()
    window = cuda.window(4096, 0)
    handle = cuda.export(window)
    assert len(handle) == 64
    other = cuda.open_window(handle, 4096, 0)
    stream = Nothing()
    cuda.write(window, 100, np.arange(8, dtype=np.uint8), stream)
    found = np.zeros(8, np.uint8)
    cuda.read(found, other, 100, stream)
    assert found.tolist() == list(range(8))
    assert runtime.copies == [1, 2]
    cuda.release(other)
    assert runtime.closed == [window.address]
    cuda.release(window)
    assert not runtime.held
    with pytest.raises(MemoryError, match="no memory for a window of 2048 MiB: cudaErrorMemoryAllocation"):
        cuda.window(2 << 30, 0)


def test_elements_are_copied_in_and_out(runtime: Runtime) -> None:
    """A part of an array goes to a place of the window, and back to another part."""
    cuda, stream = gpu(), Nothing()
    window = cuda.window(4096, 0)
    x = np.arange(20.0)
    array = DeviceArray(OnDevice(x), x.dtype, x.shape, x.strides, x.ctypes.data, 0, False, None)
    cuda.pack(array, stream)
    cuda.take(window, 64, array, 5, 3, stream)
    cuda.put(array, 17, 3, window, 64, stream)
    cuda.unpack(array, stream)
    assert x.tolist() == [*range(17), 5, 6, 7]
    assert runtime.copies == [3, 3]


def test_an_array_that_is_packed_on_the_device(runtime: Runtime) -> None:
    """Elements that do not stand in C order are put together before, and taken apart after."""
    cuda, stream = gpu(), Nothing()
    window = cuda.window(4096, 0)

    class Held(np.ndarray[Any, Any]):
        data: Any = None

    whole = np.arange(12.0).reshape(3, 4)
    held, packed = whole.T, np.zeros((4, 3)).view(Held)
    packed.data = types.SimpleNamespace(ptr=packed.ctypes.data)
    array = DeviceArray(held, held.dtype, held.shape, held.strides, held.ctypes.data, 0, False, None, packed)
    cuda.pack(array, stream)
    cuda.take(window, 0, array, 0, 12, stream)
    window.view(0, 12, np.dtype("f8"))[:] *= 2
    cuda.put(array, 0, 12, window, 0, stream)
    cuda.unpack(array, stream)
    assert (whole == 2 * np.arange(12.0).reshape(3, 4)).all()


@pytest.mark.parametrize("op", ["SUM", "PROD", "MAX", "MIN", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR"])
def test_operands_are_reduced_into_the_first(op: str, runtime: Runtime) -> None:
    """Every operation, in the order of the operands; nothing but the first is written."""
    cuda, stream = gpu(), Nothing()
    dtype = np.dtype("?" if op.startswith("L") else "i4")
    window = cuda.window(4096, 0)
    places, values = (64, 1024, 2048), np.random.default_rng(1).integers(0, 2, (3, 50)).astype(dtype)
    for place, each in zip(places, values, strict=True):
        window.view(place, 50, dtype)[:] = each
    ufunc = {"SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}.get(op)
    ufunc = ufunc or {"AND": np.bitwise_and, "OR": np.bitwise_or, "XOR": np.bitwise_xor}[op[1:]]
    expected = ufunc(ufunc(values[0], values[1]), values[2])
    cuda.fold(Fold(op, dtype), window, places, 50, 0, stream)
    assert (window.view(64, 50, dtype) == expected).all()
    assert (window.view(1024, 50, dtype) == values[1]).all()
    assert (window.view(2048, 50, dtype) == values[2]).all()


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("divisor", [0, 3])
def test_halves_are_rounded_once(half: str, divisor: int, runtime: Runtime) -> None:
    """Halves are reduced as float32 in pieces of what room there is, and rounded at the end."""
    cuda, stream = gpu(), Nothing()
    count = SCRATCH // 8 + 1000
    scratch = -(-3 * 2 * count // 4096) * 4096
    window = cuda.window(scratch + SCRATCH, 0)
    wide = np.random.default_rng(2).standard_normal((3, count)).astype(np.float32)
    places, total = [2 * count * rank for rank in range(3)], np.zeros(count, np.float32)
    for rank, place in enumerate(places):
        words = window.view(place, count, np.dtype("u2"))
        narrow(half, wide[rank], words)
        widen(half, words, wide[rank])
        total = wide[rank].copy() if rank == 0 else total + wide[rank]
    if divisor:
        total /= np.float32(divisor)
    expected = np.zeros(count, np.uint16)
    narrow(half, total, expected)
    cuda.fold(Fold("SUM", np.dtype("u2"), half, divisor), window, places, count, scratch, stream)
    assert (window.view(0, count, np.dtype("u2")) == expected).all()
