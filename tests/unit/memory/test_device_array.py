"""Arrays on a GPU: how they are told from others, what is said without a GPU, and the pinned memory."""

from __future__ import annotations

import importlib.abc
import sys
import types
from typing import Any

import numpy as np
import pytest
from standin_gpu import Gpu

from mpicoll.memory.adapt import adapt
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.memory.device.addresses import DeviceAddresses, addresses_of
from mpicoll.memory.device.array import on_device
from mpicoll.memory.device.pool import Pool


class OnDevice:
    """An array of DLPack on a kind of device."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


class Interface:
    """An array that has the CUDA array interface alone."""

    __cuda_array_interface__ = {"version": 3, "shape": (2,), "typestr": "<f8", "data": (1 << 40, False)}  # noqa: RUF012


def test_what_is_on_a_gpu() -> None:
    """What says so; a class, and what is on the host or on another kind of device, is not."""
    assert on_device(OnDevice(2))
    assert on_device(OnDevice(13))
    assert on_device(Interface())
    for value in (OnDevice(1), OnDevice(3), OnDevice(10), Interface, np.ones(2), None, 3, [np.ones(2)], "x", object()):
        assert not on_device(value), value


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array on a GPU without CuPy, or without a GPU: the error names the package, or what CuPy says."""
    monkeypatch.setattr(device_runtime, "_runtime", None)
    monkeypatch.delitem(sys.modules, "mpicoll.memory.device.cuda", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TypeError, match=r"parameter `x` is on a GPU, and this needs CuPy.*pip install cupy-cuda12x"):
        adapt(Interface(), "x", writable=False)

    class Broken(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "cupy":
                raise ImportError(
                    "\n=====\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: libcudart.so: no\n=====\n"
                )

    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(
        TypeError, match=r"and this needs CuPy, which cannot be loaded: ImportError: libcudart\.so: no$"
    ):
        adapt(Interface(), "x", writable=False)

    def no_driver() -> int:
        raise OSError("CUDA driver version is insufficient")

    runtime = types.SimpleNamespace(getDeviceCount=no_driver)
    cupy: Any = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(TypeError, match="parameter `x` is on a GPU, and CuPy finds no GPU: CUDA driver version"):
        adapt(Interface(), "x", writable=True)
    monkeypatch.delitem(sys.modules, "mpicoll.memory.device.cuda", raising=False)


def test_a_shadow_is_an_address() -> None:
    """Shadows overlap as their arrays do, and nobody reads them."""
    gpu = Gpu()
    x = np.zeros((4, 6))
    places = [
        addresses_of(gpu.array(gpu.array_of(part), "x", writable=False)) for part in (x, x[1:3], x[:, 2:4], x[3], x[:0])
    ]
    whole, rows, columns, last, nothing = places
    assert all(type(place) is DeviceAddresses for place in places)
    assert np.shares_memory(whole, rows)
    assert np.shares_memory(rows, columns)
    assert not np.shares_memory(rows, last)
    assert nothing.size == 0
    assert not np.shares_memory(whole, addresses_of(gpu.array(gpu.array_of(np.zeros(4)), "x", writable=False)))


def test_the_pool_is_bounded_and_gives_memory_again() -> None:
    """Memory comes back when nothing refers to it, and its copies are over; beyond the limit there is ordinary memory."""
    gpu = Gpu("lazy", polls=2)
    pool = Pool(gpu, 3 * 4096)
    first, block = pool.take(100, 0)
    assert block is not None
    assert pool.take(0, 0)[0].nbytes == 0
    assert pool.taken == 2 * 4096  # what the second took is free, and serves the next
    view, address = first[10:20], first.ctypes.data
    del first, block
    second, other = pool.take(4096, 0)
    assert second.ctypes.data != address
    del view, second, other
    third, again = pool.take(4000, 0)
    assert again is not None
    assert pool.taken == 2 * 4096
    stream = gpu.copy_stream(0)
    stream.work.append(lambda: None)
    again.busy = gpu.mark(0, stream)
    address = third.ctypes.data
    del third, again
    held = [pool.take(4096, 0) for _ in range(2)]
    assert address not in [memory.ctypes.data for memory, _ in held]  # its copy is not over
    ordinary, none = pool.take(8192, 0)
    assert none is None
    assert ordinary.nbytes == 8192
    del held
    pool.close()
    assert pool.taken == 0


def test_a_full_pool_frees_nothing() -> None:
    """CUDA would wait for the device: somewhat larger blocks serve, and ordinary memory."""
    gpu = Gpu()
    pool = Pool(gpu, 16384 + 4096)
    large, small = pool.take(16384, 0)[0], pool.take(10, 0)[0]
    where = large.ctypes.data
    del large, small
    assert pool.take(9000, 0)[1] is not None  # of the large one, and back again
    memory, block = pool.take(6000, 0)
    assert block is not None
    assert memory.ctypes.data == where
    assert pool.take(6000, 0)[1] is None
    assert pool.taken == 16384 + 4096


def test_no_pinned_memory() -> None:
    """Where the machine gives none, ordinary memory serves."""

    class Poor(Gpu):
        def pinned(self, nbytes: int, device: int) -> Any:
            raise MemoryError("no pinned memory")

    pool = Pool(Poor(), 1 << 20)
    memory, block = pool.take(10, 0)
    assert block is None
    assert memory.nbytes == 10
    assert pool.taken == 0


def test_what_comes_back_after_the_end_is_freed() -> None:
    """A pool that is closed waits for what is under way, and keeps nothing."""
    gpu = Gpu("lazy")
    pool = Pool(gpu, 1 << 20)
    memory, block = pool.take(100, 0)
    assert block is not None
    stream, ran = gpu.copy_stream(0), []
    stream.work.append(lambda: ran.append(1))
    block.busy = gpu.mark(0, stream)
    pool.close()
    assert pool.taken == 4096
    del memory, block
    assert ran
    assert pool.taken == 0


def test_memory_that_comes_back_at_any_moment() -> None:
    """The garbage collector may give memory back while the pool is looked through: nothing is lost, or freed too early."""
    gpu = Gpu("lazy", polls=10_000)
    pool = Pool(gpu, 4 * 4096)
    held = [pool.take(10, 0) for _ in range(4)]
    stream, ran = gpu.copy_stream(0), []
    stream.work.append(lambda: ran.append(1))
    for _, block in held:
        assert block is not None
        block.busy = gpu.mark(0, stream)
    asked = gpu.over

    def over(event: Any) -> bool:
        if held:
            del held[:]  # as if the garbage collector ran just now
        return asked(event)

    gpu.over = over  # type: ignore[method-assign]
    del block, _
    held[:] = held[:3]  # one has come back already
    assert pool.take(10, 0)[1] is None
    assert not ran
    assert not held
    assert pool.taken == 4 * 4096
    gpu.await_(gpu.mark(0, stream))
    assert pool.take(10, 0)[1] is not None
    assert pool.take(1 << 20, 0)[1] is None  # more than it may have in all
