"""Arrays on a GPU that MPI is handed as they are: memory of the host stands in for it, which Python must not touch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from standin_gpu import Gpu, select

import mpicoll as dist
from mpicoll.memory.device import array as device_array
from mpicoll.memory.device import pool as device_pool
from mpicoll.memory.device.addresses import DeviceAddresses, addresses_of
from mpicoll.memory.device.array import DIRECT_BYTES

pytestmark = pytest.mark.mpi(min_size=2)

Array = np.ndarray[Any, Any]
MANY = DIRECT_BYTES // 8 + 1000


@pytest.fixture(params=["eager", "lazy"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A stand-in whose memory MPI knows, on all ranks."""
    found = Gpu(request.param, known_to_mpi=True)
    select(found, monkeypatch)
    yield found
    device_pool.close()


def numbers(rank: int, count: int = MANY, dtype: str = "d") -> Array:
    return (np.arange(count) % 50 + rank).astype(dtype)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX], ids=["sum", "max"])
def test_all_reduce(op: Any, async_op: bool, gpu: Gpu) -> None:
    """Reduced by MPI in place, waited for or not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.zeros(MANY)
    gpu.launch(lambda: np.copyto(x, numbers(rank)))
    work = dist.all_reduce(gpu.array_of(x), op, async_op=async_op)
    if work is not None:
        work.wait()
    gpu.finish()
    assert gpu.copied == 0
    ufunc = np.add if op == dist.ReduceOp.SUM else np.maximum
    assert (x == ufunc.reduce([numbers(each) for each in range(size)])).all()


def test_what_is_done_to_the_elements_goes_by_way_of_the_host(gpu: Gpu) -> None:
    """Averages, multiplied sums, halves, small arrays, memory of no ordinary allocation, layouts that are not contiguous."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(numbers(each) for each in range(size))
    for op, expected in ((dist.ReduceOp.AVG, total / size), (dist.ReduceOp.PREMUL_SUM(2.0), 2 * total)):
        x, before = numbers(rank), gpu.copied
        dist.all_reduce(gpu.array_of(x), op)
        gpu.finish()
        assert np.allclose(x, expected)
        assert gpu.copied > before
    gpu.allocates_plainly = False
    x, before = numbers(rank), gpu.copied
    dist.all_reduce(gpu.array_of(x))
    gpu.finish()
    assert (x == total).all()
    assert gpu.copied > before
    gpu.allocates_plainly = True
    wide = np.zeros((MANY, 2))
    for x in (numbers(rank, dtype="e"), numbers(rank, 10), wide[:, 0]):
        x[:], before = 1, gpu.copied
        dist.all_reduce(gpu.array_of(x))
        gpu.finish()
        assert (x == size).all()
        assert gpu.copied > before


@pytest.mark.parametrize("async_op", [False, True])
def test_movements(async_op: bool, gpu: Gpu) -> None:
    """Broadcast, reduce, all_gather and all_to_all."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def done(work: dist.Work | None) -> None:
        if work is not None:
            work.wait()
        gpu.finish()

    x = numbers(rank)
    done(dist.broadcast(gpu.array_of(x), 1, async_op=async_op))
    assert (x == numbers(1)).all()
    x = numbers(rank)
    done(dist.reduce(gpu.array_of(x), 1, async_op=async_op))
    assert (x == (sum(numbers(each) for each in range(size)) if rank == 1 else numbers(rank))).all()
    x, y = numbers(rank), np.zeros(size * MANY)
    done(dist.all_gather_into_tensor(gpu.array_of(y), gpu.array_of(x), async_op=async_op))
    assert (y == np.concatenate([numbers(each) for each in range(size)])).all()
    x = np.concatenate([numbers(rank + each) for each in range(size)])
    done(dist.all_to_all_single(gpu.array_of(y), gpu.array_of(x), async_op=async_op))
    assert (y == np.concatenate([numbers(rank + each) for each in range(size)])).all()
    assert gpu.copied == 0
    # In place, which MPI does not take.
    y[rank * MANY : (rank + 1) * MANY] = numbers(rank)
    on_device = gpu.array_of(y)
    mine = gpu.array_of(y[rank * MANY : (rank + 1) * MANY])
    done(dist.all_gather_into_tensor(on_device, mine, async_op=async_op))
    gpu.finish()
    assert (y == np.concatenate([numbers(each) for each in range(size)])).all()


@pytest.mark.parametrize("level", ["full", "off"])
def test_messages(level: str, gpu: Gpu) -> None:
    """From GPU to GPU, and between a GPU and a host, compared or not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    group = dist.group.WORLD
    assert group is not None
    kept, group.level = group.level, level  # type: ignore[assignment]
    try:
        for count in (MANY, 5):
            for sends, receives in ((True, True), (True, False), (False, True)):
                x, y, seen = np.zeros(count), np.full(count, -1.0), []
                gpu.launch(lambda x=x: np.copyto(x, numbers(rank, len(x))))  # type: ignore[misc]
                gpu.launch(lambda y=y, seen=seen: seen.append(y[0]))  # type: ignore[misc]
                if not sends:
                    gpu.finish()
                work = dist.isend(gpu.array_of(x) if sends else x, after)
                dist.recv(gpu.array_of(y) if receives else y, before)
                work.wait()
                gpu.finish()
                assert (y == numbers(before, count)).all()
                assert seen == [-1.0] or not receives
            assert gpu.copied == 0 or count == 5 or level == "off"
    finally:
        group.level = kept


def test_ranks_that_differ(gpu: Gpu) -> None:
    """One rank passes memory of the host, or moves its own by way of it: the others' MPI calls meet its."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(numbers(each) for each in range(size))
    for async_op in (False, True):
        x = numbers(rank)
        work = dist.all_reduce(x if rank == 1 else gpu.array_of(x), async_op=async_op and rank == 0)
        if work is not None:
            work.wait()
        gpu.finish()
        assert (x == total).all()


def test_nonblocking_forms_that_fail(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where MPI's nonblocking form must not have memory of a GPU, that goes by way of the host, whichever rank wants it."""
    monkeypatch.setattr(device_array, "_permitted", lambda operation, nonblocking: not nonblocking)
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(numbers(each) for each in range(size))
    for starter in (None, 0, 1):
        x, before = np.zeros(MANY), gpu.copied
        gpu.launch(lambda x=x: np.copyto(x, numbers(rank)))  # type: ignore[misc]
        work = dist.all_reduce(gpu.array_of(x), async_op=rank == starter)
        if work is not None:
            work.wait()
        gpu.finish()
        assert (x == total).all()
        assert (gpu.copied > before) == (starter is not None)


def test_arrays_of_the_host_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What MPI can do with a GPU is not looked for on behalf of memory of the host."""

    def asked(operation: str, nonblocking: bool) -> bool:
        raise AssertionError(f"{operation} asks for GPUs")

    monkeypatch.setattr(device_array, "_permitted", asked)
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (4, MANY):
        x, y = numbers(rank, count), np.zeros(count)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        assert (x == sum(numbers(each, count) for each in range(size))).all()
        sending = dist.isend(x, (rank + 1) % size)
        dist.recv(y, (rank - 1) % size)
        assert sending is not None
        sending.wait()
        assert (y == x).all()


def test_nobody_reads_the_elements() -> None:
    """What would read memory of a GPU from the host raises; MPI and comparisons of addresses do not."""
    gpu = Gpu(known_to_mpi=True)
    x = np.ones(10)
    place = addresses_of(gpu.array(gpu.array_of(x), "x", writable=False))
    assert type(place) is DeviceAddresses
    assert np.may_share_memory(place, x)
    reads: list[Any] = [lambda: place + 1, place.copy, place.tobytes, place.tolist, lambda: np.copyto(x, place)]
    reads += [
        lambda: np.concatenate([place, place]),
        lambda: list(place),
        lambda: place.__setitem__(0, 1),
        lambda: place.fill(2),
    ]
    for read in reads:
        with pytest.raises(RuntimeError, match="not to be had on the host"):
            read()
