"""Whatever has memory on a GPU: the CUDA array interface, DLPack, managed memory, torch's tensors, and on which device."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
from gpu.conftest import STANDIN
from gpu.test_gpu import cupy, spin

import mpicoll as dist
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi

COUNTS = (4, 40_000, 3_000_000)


class Interface:
    """An object of another package, such as Numba's, that has the CUDA array interface and nothing else."""

    def __init__(self, array: Any, stream: int | None = None, **changed: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream, **changed}


class Dlpack:
    """An object that has DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("which", ["none", "legacy", "own", "per thread"])
def test_the_stream_of_an_interface(which: str, count: int) -> None:
    """A call comes after what is on the stream that the interface names, and what comes after it there finds the result."""
    xp, size = cupy(), dist.get_world_size()
    own = xp.cuda.Stream(non_blocking=True)
    stream, number = {
        "none": (xp.cuda.get_current_stream(), None),
        "legacy": (xp.cuda.Stream.null, 1),
        "per thread": (xp.cuda.Stream.ptds, 2),
        "own": (own, own.ptr),
    }[which]
    x = xp.zeros(count)
    xp.cuda.get_current_stream().synchronize()
    for turn in range(3):
        with stream:
            spin()
            x[:] = turn + 1.0
        dist.all_reduce(Interface(x, number))
        with stream:
            y = x * 2
            x[:] = -1
            assert (y == 2 * size * (turn + 1.0)).all()


class Protocol:
    """A stream of another package that goes with its last reference."""

    def __init__(self) -> None:
        self.stream = cupy().cuda.Stream(non_blocking=True)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.ptr


def test_a_stream_that_nobody_else_holds() -> None:
    """It stays until the call is over."""
    xp, size = cupy(), dist.get_world_size()
    x = xp.ones(40_000)
    xp.cuda.get_current_stream().synchronize()
    for stream in (Protocol, lambda: xp.cuda.Stream(non_blocking=True)):
        x[:] = 1
        xp.cuda.get_current_stream().synchronize()
        work = dist.all_reduce(x, stream=stream(), async_op=True)
        assert work is not None
        work.wait()
        xp.cuda.Device().synchronize()
        assert (x == size).all()


def test_the_layout_of_an_interface() -> None:
    """With strides and without, of several dimensions, of none, and of no element."""
    xp, size = cupy(), dist.get_world_size()
    for shape in ((), (3,), (4, 5), (2, 3, 4), (0, 3)):
        x = xp.ones(shape)
        dist.all_reduce(Interface(x, strides=None))
        assert (x == size).all(), shape
    whole = xp.ones((6, 8))
    dist.all_reduce(Interface(whole[:, ::2]))
    assert float(whole.sum()) == 24 + 24 * size


def test_an_interface_that_is_not_taken() -> None:
    """Read-only memory as a result, and a mask; what only is read may be read-only."""
    xp, size = cupy(), dist.get_world_size()
    x, y = xp.ones(5), xp.zeros((size, 5))
    fixed = Interface(x, data=(x.data.ptr, True))
    dist.all_gather_into_tensor(y, fixed)
    assert (y == 1).all()
    with collective_raises(ValueError, match="is read-only"):
        dist.all_reduce(fixed)
    with collective_raises(TypeError, match="its mask would be lost"):
        dist.all_reduce(Interface(x, mask=x))


def test_a_stream_that_is_captured() -> None:
    """A call is refused on all ranks while its stream is captured into a CUDA graph, and the capture is not spoilt."""
    xp = cupy()
    stream = xp.cuda.Stream(non_blocking=True)
    x, rows = xp.ones(100_000), xp.ones((1000, 200))
    dist.all_reduce(x)
    xp.cuda.get_current_stream().synchronize()
    stream.begin_capture()
    try:
        with stream:
            for array in (x, x[:10], rows[:, ::2]):
                with collective_raises(RuntimeError, match="captured into a CUDA graph"):
                    dist.all_reduce(array)
            with pytest.raises(RuntimeError, match="captured into a CUDA graph"):
                dist.send(x, (dist.get_rank() + 1) % dist.get_world_size())
        for given in (stream, types.SimpleNamespace(cuda_stream=stream.ptr)):
            with collective_raises(RuntimeError, match="captured into a CUDA graph"):
                dist.all_reduce(x, stream=given)
    finally:
        stream.end_capture()
    dist.all_reduce(x, stream=stream)
    stream.synchronize()
    assert (x == float(dist.get_world_size() ** 2)).all()


def test_no_memory_on_one_rank() -> None:
    """The rank that lacks memory of its device gets CuPy's error; the others are told that, and all can go on."""
    xp, rank, size = cupy(), dist.get_rank(), dist.get_world_size()
    pool = xp.cuda.MemoryPool()
    pool.set_limit(size=1 << 20)
    rows = xp.full((1000, 2000), rank + 1.0)
    allocator = xp.cuda.using_allocator(pool.malloc if rank == size - 1 else None)
    with allocator, pytest.raises((MemoryError, dist.CollectiveMismatchError)) as caught:
        dist.all_reduce(rows[:, ::2])
    if rank == size - 1:
        assert isinstance(caught.value, xp.cuda.memory.OutOfMemoryError)
    else:
        assert f"no memory for the call on rank {size - 1}" in str(caught.value)
    dist.all_reduce(rows[:, ::2])
    assert (rows[:, ::2] == size * (size + 1) / 2).all()
    assert (rows[:, 1::2] == rank + 1).all()


@pytest.mark.parametrize("count", COUNTS)
def test_dlpack(count: int) -> None:
    """An object that has DLPack alone, behind a slow kernel."""
    xp, size = cupy(), dist.get_world_size()
    x = xp.zeros(count)
    spin()
    x[:] = 1
    dist.all_reduce(Dlpack(x))
    assert (x == size).all()


def test_managed_memory() -> None:
    """Memory that the host may read, too."""
    xp, size = cupy(), dist.get_world_size()
    x = xp.ndarray(100_000, "d", xp.cuda.malloc_managed(800_000))
    x[:] = 1
    dist.all_reduce(x)
    assert (x == size).all()


def test_objects() -> None:
    """Arrays on a GPU inside of objects are pickled, and come out on a GPU."""
    xp, rank, size = cupy(), dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"of": rank, "x": xp.full(1000, rank)})
    for each, told in enumerate(found):
        assert told["of"] == each
        assert isinstance(told["x"], xp.ndarray)
        assert (told["x"] == each).all()


@pytest.mark.parametrize("count", COUNTS)
def test_other_devices(count: int) -> None:
    """Arrays on a device that is not the current one, which stays the current one; two devices in one call are refused."""
    xp, rank, size = cupy(), dist.get_rank(), dist.get_world_size()
    if xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("this machine lacks a second GPU")
    here = xp.cuda.Device().id
    there = xp.cuda.Device(1 - here if here < 2 else 0)

    def full(value: float, *shape: int) -> Any:
        with there:
            return xp.full(shape or count, value)

    def holds(array: Any, value: float) -> bool:
        with there:
            return bool((array == value).all())

    x = full(rank + 1.0)
    dist.all_reduce(x)
    assert holds(x, size * (size + 1) / 2)
    whole = full(1.0, count // 4, 8)
    dist.all_reduce(whole[:, ::2])
    assert holds(whole[:, ::2], size)
    assert holds(whole[:, 1::2], 1)
    with there:
        stream = xp.cuda.Stream(non_blocking=True)
        with stream:
            spin()
            x[:] = 1
    work = dist.all_reduce(x, stream=stream, async_op=True)
    assert work is not None
    work.wait()
    with there, stream:
        assert (x == size).all()
    parts = [full(0.0) for _ in range(size)]
    dist.all_gather(parts, full(float(rank)))
    assert all(holds(part, each) for each, part in enumerate(parts))
    if size > 1:
        works = [dist.isend(full(float(rank)), (rank + 1) % size), dist.irecv(x, (rank - 1) % size)]
        for each in works:
            each.wait()
        assert holds(x, (rank - 1) % size)
    with collective_raises(ValueError, match=r"all be on the host, or all on one GPU: found cuda:\d and cuda:\d"):
        dist.all_gather_into_tensor(full(0.0, 2 * size), xp.zeros(2))
    with collective_raises(ValueError, match=r"stream is one of cuda:\d, and the array is on cuda:\d"):
        dist.all_reduce(xp.zeros(2), stream=stream)
    assert xp.cuda.Device().id == here


@pytest.fixture
def tensor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a tensor of torch of an array of CuPy, in its memory; where this torch knows no GPU, one that says it is on one."""
    torch, xp = pytest.importorskip("torch"), cupy()
    if torch.cuda.is_available():
        return lambda array: torch.as_tensor(array, device=f"cuda:{array.device.id}")
    if not STANDIN:
        pytest.skip("this torch knows no GPU")

    class OnGpu(torch.Tensor):  # type: ignore[misc,name-defined,unused-ignore]
        device = property(lambda self: torch.device("cuda", 0))

    def current_stream(device: int) -> Any:
        return types.SimpleNamespace(cuda_stream=xp.cuda.get_current_stream(device).ptr)

    def make(array: Any) -> Any:
        # The memory of a stand-in for a GPU is memory of the host.
        interface = {**array.__cuda_array_interface__, "version": 3}
        interface.pop("stream", None)
        interface["strides"] = array.strides
        held = types.SimpleNamespace(__array_interface__=interface, array=array)
        return torch.from_numpy(np.asarray(held)).as_subclass(OnGpu)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return make


@pytest.mark.parametrize("count", COUNTS)
def test_torch_tensors(count: int, tensor: Any) -> None:
    """Tensors of every kind of dtype, strided, and conjugated where torch knows the GPU, behind slow kernels."""
    torch, xp, size = pytest.importorskip("torch"), cupy(), dist.get_world_size()
    for dtype in ("f", "d", "q", "e", "F", "?"):
        x = xp.zeros(count, dtype)
        t = tensor(x)
        spin()
        x[:] = 1
        dist.all_reduce(t, dist.ReduceOp.MAX if dtype == "?" else dist.ReduceOp.SUM)
        assert (x == (1 if dtype == "?" else size)).all(), dtype
    words = xp.zeros(count, "u2")
    halves = tensor(words.view("i2")).view(torch.bfloat16)
    spin()
    words[:] = 0x3FC0  # 1.5
    dist.all_reduce(halves)
    wide = (words.astype("u4") << 16).view("f")
    assert (wide == 1.5 * size).all()
    whole = xp.ones((count, 2))
    dist.all_reduce(tensor(whole)[:, 0])
    assert (whole[:, 0] == size).all()
    assert (whole[:, 1] == 1).all()
    if torch.cuda.is_available():  # else what torch makes of it is on the host
        z, found = xp.full(count, 1 + 2j), xp.zeros((size, count), "D")
        dist.all_gather_into_tensor(tensor(found), tensor(z).conj())
        assert (found == 1 - 2j).all()


def test_torch_tensors_that_are_not_taken(tensor: Any) -> None:
    """A conjugated view as a result, and a tensor on the host beside one on a GPU."""
    torch, xp, size = pytest.importorskip("torch"), cupy(), dist.get_world_size()
    z = tensor(xp.ones(4, "D"))
    with collective_raises(ValueError, match="resolve_conj"):
        dist.all_reduce(z.conj())
    with collective_raises(ValueError, match="all be on the host, or all on one GPU"):
        dist.all_gather_into_tensor(torch.zeros(4 * size, dtype=torch.complex128), z)
