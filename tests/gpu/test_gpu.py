"""CuPy's arrays and torch's CUDA tensors in every call, behind kernels that take their time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import collective_cases as cases
import numpy as np
import pytest
from array_kinds import Returned, Through
from gpu.conftest import STANDIN

import mpicoll as dist
from mpicoll.groups import registry
from mpicoll.memory.device import array as device_array
from mpicoll.pytest_plugin import collective_raises
from mpicoll.transports.device import staged

pytestmark = pytest.mark.mpi

DTYPES = "?bBhHiIlLqQfdFD"  # those of collective_cases that CuPy has
several = pytest.mark.mpi(min_size=2)
Array = np.ndarray[Any, Any]


def cupy() -> Any:
    import cupy

    return cupy


def spin(milliseconds: float = 30.0) -> None:
    """Keep the current stream busy."""
    kernel = cupy().RawKernel(
        'extern "C" __global__ void spin(long long cycles) { long long t = clock64(); while (clock64() - t < cycles) {} }',
        "spin",
    )
    rate = cupy().cuda.Device().attributes["ClockRate"]  # kHz
    kernel((1,), (1,), (np.int64(milliseconds * rate),))


class _Back(Returned):
    """A Work whose results are copied back to the host when it has been waited for."""

    def __init__(self, work: dist.Work, fetch: Callable[[], None], back: dict[int, Any]) -> None:
        super().__init__(work, back)
        self.fetch = fetch

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        over = super().wait(timeout)
        self.fetch()
        return over


class OnGpu(Through):
    """mpicoll, with a copy on the GPU of every array, which is copied back when the call is over."""

    def __init__(self) -> None:
        super().__init__(lambda array: array)

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        pairs: dict[int, tuple[Array, Any]] = {}

        def moved(value: Any) -> Any:
            if isinstance(value, list):
                return [moved(each) for each in value]
            if not isinstance(value, np.ndarray):
                return value
            if id(value) not in pairs:
                spin(1)
                pairs[id(value)] = value, cupy().asarray(value)
            return pairs[id(value)][1]

        result = function(*map(moved, args), **{name: moved(value) for name, value in options.items()})

        def fetch() -> None:
            for host, device in pairs.values():
                if host.flags.writeable:
                    host[...] = device.get()

        if isinstance(result, dist.Work):
            return _Back(result, fetch, {id(device): host for host, device in pairs.values()})
        fetch()
        return result


@pytest.mark.parametrize("name", cases.ALL)
def test_every_collective(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op and dtype, small, large, and so large that MPI may be handed them, waited for or not."""
    monkeypatch.setattr(cases, "dist", OnGpu())
    for dtype in DTYPES:
        cases.run(name, cases.taste(name, dtype, (3, cases.large(dtype), 5 * cases.large(dtype))))


@pytest.fixture
def apart() -> Iterator[None]:
    """Have reductions leave the GPU that the ranks share, as if each rank had its own."""
    state = registry.state()
    found = state.settings
    state.settings = replace(found, cuda_ipc="off")
    yield
    state.settings = found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [4, 40_000, 3_000_000])
@pytest.mark.parametrize("async_op", [False, True])
def test_behind_kernels(count: int, async_op: bool, shared: bool, request: pytest.FixtureRequest) -> None:
    """A call reads what slow kernels before it write, and those after it read its results; on several streams."""
    if not shared:
        request.getfixturevalue("apart")
    xp, size = cupy(), dist.get_world_size()
    for stream in (xp.cuda.Stream.null, xp.cuda.Stream(), xp.cuda.Stream(non_blocking=True)):
        with stream:
            x = xp.zeros(count)
            for turn in range(4):
                spin()
                x[:] = turn + 1.0
                work = dist.all_reduce(x, async_op=async_op)
                if work is not None:
                    work.wait()
                y = x * 2
                x[:] = -1
                assert (y == 2 * size * (turn + 1.0)).all()


@several
@pytest.mark.parametrize("count", [4, 40_000, 3_000_000])
def test_messages(count: int) -> None:
    """From GPU to GPU, and between a GPU and a host, behind slow kernels."""
    xp, rank, size = cupy(), dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    for sends, receives in ((xp, xp), (xp, np), (np, xp)):
        x, y = sends.zeros(count), receives.zeros(count)
        spin()
        x[:] = rank
        works = [dist.isend(x, after), dist.irecv(y, before)]
        for work in works:
            work.wait()
        assert (y == before).all()
        spin()
        x[:] = rank + 1.0
        y[:] = -1
        work = dist.isend(x, after)
        dist.recv(y, before)
        work.wait()
        assert (y == before + 1.0).all()


@several
@pytest.mark.parametrize("count", [4, 40_000])
def test_one_after_the_other(count: int) -> None:
    """Pinned memory that results are still copied from is not used for those of the next call."""
    xp, rank, many = cupy(), dist.get_rank(), 60
    arrays = xp.zeros((many, count))
    arrays[:] = xp.arange(many)[:, None] if rank == 0 else -1
    for array in arrays:
        dist.broadcast(array, 0)
    assert (arrays == xp.arange(many)[:, None]).all()
    arrays[:] = xp.arange(many)[:, None] if rank == 0 else -1
    if rank == 0:
        for array in arrays:
            dist.send(array, 1)
    if rank == 1:
        for array in arrays:
            dist.recv(array, 0)
        assert (arrays == xp.arange(many)[:, None]).all()


@pytest.mark.skipif(not STANDIN, reason="a stand-in for CUDA alone tells of it")
def test_the_device_is_never_waited_for(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is memory of CUDA freed in a call, which would wait for it, too."""
    xp, rank, size = cupy(), dist.get_rank(), dist.get_world_size()
    arrays = [xp.ones(count) for count in (4, 40_000, 3_000_000)]
    rooms = [xp.ones((size, array.size)) for array in arrays]

    def calls() -> None:
        for array, room in zip(arrays, rooms, strict=True):
            dist.all_reduce(array)
            dist.all_gather_into_tensor(room, array)
            dist.all_gather(list(room), array)
            dist.broadcast(array, 0)
            for work in [dist.isend(array, (rank + 1) % size), dist.irecv(room[0], (rank - 1) % size)] * (size > 1):
                work.wait()

    calls()  # the first ones make what the others use
    monkeypatch.setenv("STANDIN_TELL", "1")
    capfd.readouterr()
    calls()
    assert "standin:" not in capfd.readouterr().err
    xp.cuda.Device().synchronize()
    assert "the device is waited for" in capfd.readouterr().err


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
@pytest.mark.parametrize("async_op", [False, True])
def test_in_pieces(dtype: str, async_op: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large arrays in many small pieces, behind slow kernels and before others, some ranks with memory of the host."""
    monkeypatch.setattr(device_array, "PIECES_FROM", 1 << 18)
    monkeypatch.setattr(staged, "PIECE_BYTES", 1 << 16)
    rank, size = dist.get_rank(), dist.get_world_size()
    xp = cupy() if rank != size - 1 or size == 2 else np
    count = 300_001

    def numbers(which: int, many: int = count) -> Any:
        return (xp.arange(many) % 50 + which).astype(dtype)

    def done(work: dist.Work | None) -> None:
        if work is not None:
            work.wait()

    for _ in range(3):
        spin()
        x = numbers(rank)
        done(dist.all_reduce(x, async_op=async_op))
        assert (x == sum(numbers(each) for each in range(size)).astype(dtype)).all()
        spin()
        x = numbers(rank)
        done(dist.broadcast(x, size - 1, async_op=async_op))
        assert (x == numbers(size - 1)).all()
        spin()
        x, y = numbers(rank), xp.zeros(size * count, dtype)
        done(dist.all_gather_into_tensor(y, x, async_op=async_op))
        assert (y == xp.concatenate([numbers(each) for each in range(size)])).all()
        spin()
        whole = xp.zeros((size, count), dtype) if rank == 1 else None
        done(dist.gather_single(x, whole, 1, async_op=async_op))
        assert whole is None or (whole == xp.stack([numbers(each) for each in range(size)])).all()
        spin()
        part = xp.zeros(count, dtype)
        done(dist.reduce_scatter_tensor(part, y, async_op=async_op))
        assert (part == size * numbers(rank)).all()
        spin()
        done(dist.all_to_all_single(x := xp.zeros_like(y), y, async_op=async_op))
        assert (x == xp.tile(numbers(rank), size)).all()


@pytest.mark.timed
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("megabytes", [16, 64, 512])
def test_how_long_a_large_all_reduce_takes(megabytes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, for the report: beside the copies out and in of as much pinned memory, and the same call on the host."""
    xp = cupy()
    nbytes = megabytes << 20
    x, y = xp.ones(nbytes // 4, "f"), np.ones(nbytes // 4, "f")
    pinned = xp.cuda.alloc_pinned_memory(nbytes)
    stream = xp.cuda.Stream(non_blocking=True)

    def copies() -> None:
        xp.cuda.runtime.memcpyAsync(pinned.ptr, x.data.ptr, nbytes, xp.cuda.runtime.memcpyDeviceToHost, stream.ptr)
        stream.synchronize()
        xp.cuda.runtime.memcpyAsync(x.data.ptr, pinned.ptr, nbytes, xp.cuda.runtime.memcpyHostToDevice, stream.ptr)
        stream.synchronize()

    def on_gpu() -> None:
        dist.all_reduce(x, dist.ReduceOp.MAX)
        xp.cuda.get_current_stream().synchronize()

    def timed(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(7):
            dist.barrier()
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return min(times)

    copied, host, whole = timed(copies), timed(lambda: dist.all_reduce(y, dist.ReduceOp.MAX)), timed(on_gpu)
    assert (x == 1).all()
    if dist.get_rank() == 0:
        with capsys.disabled():
            print(
                f"\ntimed: all_reduce of {megabytes} MiB: {whole * 1e3:.1f} ms; copies out and in {copied * 1e3:.1f} ms; "
                f"on the host {host * 1e3:.1f} ms; {whole / max(copied / 2, host):.2f} times the slower of one copy and the host"
            )


@pytest.mark.parametrize("dtype", ["float16", "complex64", "complex128"])
def test_dtypes(dtype: str) -> None:
    """Halves and complex numbers."""
    xp, size = cupy(), dist.get_world_size()
    x = xp.ones(1000, dtype)
    dist.all_reduce(x)
    assert (x == size).all()


def test_layouts() -> None:
    """Transposed, strided and backward views, no dimension, no element."""
    xp, size = cupy(), dist.get_world_size()
    for make in (lambda w: w.T, lambda w: w[:, ::2], lambda w: w[::-1], lambda w: w[1, 2], lambda w: w[:0]):
        whole = xp.ones((300, 400))
        view = make(whole)
        dist.all_reduce(view)
        assert (view == size).all()
        assert float(whole.sum()) == whole.size + view.size * (size - 1)


def test_wrong_arrays() -> None:
    """Host and device in one call, and a stream that is none."""
    xp, size = cupy(), dist.get_world_size()
    with collective_raises(ValueError, match="all be on the host, or all on one GPU"):
        dist.all_gather_into_tensor(np.zeros(2 * size), xp.ones(2))
    with collective_raises(TypeError, match="stream must be a stream of CUDA"):
        dist.all_reduce(xp.ones(2), stream=3)


def test_torch() -> None:
    """Tensors on the GPU, on torch's own streams; bfloat16 too."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch knows no GPU")
    size = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                x = torch.zeros(50_000, dtype=dtype, device="cuda")
                torch.cuda._sleep(50_000_000)
                x += 1
                dist.all_reduce(x)
                y = x * 2
                assert (y == 2 * size).all()


def test_memory_of_the_asynchronous_allocator() -> None:
    """It is recognised, and moves."""
    xp, size = cupy(), dist.get_world_size()
    try:
        pool = xp.cuda.MemoryAsyncPool()
    except Exception as error:
        pytest.skip(f"no asynchronous allocator: {error}")
    with xp.cuda.using_allocator(pool.malloc):
        x = xp.ones(100_000)
        dist.all_reduce(x)
        assert (x == size).all()


def test_what_this_ran_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, for the report."""
    xp = cupy()
    if dist.get_rank() != 0:
        return
    with capsys.disabled():
        name = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)["name"].decode()
        print(f"\nran on {name}, CuPy {xp.__version__}, Python {sys.version.split()[0]}, NumPy {np.__version__}")
