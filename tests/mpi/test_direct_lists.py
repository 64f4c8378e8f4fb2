"""Collectives with lists, blocks and counts on a GPU that MPI is handed: memory of the host stands in for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import collective_cases as cases
import numpy as np
import pytest
from array_kinds import OnGpu
from collective_cases import Case
from standin_gpu import Gpu, Stream, fails_at_some_pace, select

import mpicoll as dist
from mpicoll.memory.device import array as device_array
from mpicoll.memory.device import pool as device_pool
from mpicoll.memory.device.addresses import DeviceAddresses
from mpicoll.memory.device.array import DIRECT_BYTES
from mpicoll.operations import execution
from mpicoll.transports import large_counts
from mpicoll.transports.device.capability import decide
from mpicoll.transports.mpi.collectives import EagerMpiSchedule, MpiTransport

pytestmark = pytest.mark.mpi

Array = np.ndarray[Any, Any]
several = pytest.mark.mpi(min_size=2)
MANY = DIRECT_BYTES // 8 + 1001
NAMES = ("broadcast", *(name for name in cases.ALL if name not in ("broadcast", "barrier")))
LISTS = [name for name in NAMES if "single" not in name and "tensor" not in name]


def stand_in(monkeypatch: pytest.MonkeyPatch, pace: Any) -> Gpu:
    found = Gpu(pace, known_to_mpi=True)
    select(found, monkeypatch)
    return found


@pytest.fixture(params=[pytest.param("eager", marks=pytest.mark.slow), "lazy"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A stand-in whose memory MPI knows, on all ranks."""
    yield stand_in(monkeypatch, request.param)
    device_pool.close()


def many(dtype: str) -> int:
    """Return an odd number of elements whose block is handed to MPI."""
    return DIRECT_BYTES // np.dtype(dtype).itemsize + 3


def numbers(*key: int, count: int = MANY) -> Array:
    return np.arange(count) % 50 + sum((place + 1) * number for place, number in enumerate(key)) + 0.0


def done(gpu: Gpu, work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
    gpu.finish()


@pytest.mark.parametrize("name", NAMES)
def test_every_collective(name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes by way of the host where MPI may have the elements as they are, waited for or not, compared or not."""
    monkeypatch.setattr(cases, "dist", OnGpu(gpu))
    world = dist.group.WORLD
    assert world is not None
    kept, size, turn = world.level, dist.get_world_size(), 0
    try:
        for level in ("full", "off"):
            world.level = level  # type: ignore[assignment]
            for dtype in "dF?":
                for async_op in (False, True):
                    before = gpu.copied
                    cases.run(name, iter([Case(dtype, many(dtype), root=turn % size, async_op=async_op, seed=turn)]))
                    # The sizes of the uneven ones are such that on few ranks all are small.
                    assert gpu.copied == before or ("uneven" in name or "splits" in name), (dtype, async_op, level)
                    turn += 1
    finally:
        world.level = kept


def parts(array: Array, gpu: Gpu, counts: list[int]) -> list[Any]:
    ends = np.cumsum(counts)
    return [gpu.array_of(array[end - count : end]) for end, count in zip(ends, counts, strict=True)]


@pytest.mark.parametrize("async_op", [False, True])
def test_lists_in_one_piece(async_op: bool, gpu: Gpu) -> None:
    """Parts of one array are handed to MPI as they are: nothing is copied, not even on the device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = [MANY] * size
    x, y = np.zeros(size * MANY), np.full(size * MANY, -1.0)
    mine = np.concatenate([numbers(rank, each) for each in range(size)])
    seen: list[float] = []
    gpu.launch(lambda: np.copyto(x, mine))
    done(gpu, dist.all_to_all(parts(y, gpu, counts), parts(x, gpu, counts), async_op=async_op))
    assert (y == np.concatenate([numbers(each, rank) for each in range(size)])).all()
    gpu.launch(lambda: seen.append(y[0]))
    done(gpu, dist.all_gather(parts(y, gpu, counts), gpu.array_of(numbers(rank)), async_op=async_op))
    assert (y == np.concatenate([numbers(each) for each in range(size)])).all()
    assert seen == [float(0 + 2 * rank)]
    out = np.zeros(MANY)
    done(gpu, dist.reduce_scatter(gpu.array_of(out), parts(x, gpu, counts), async_op=async_op))
    assert (out == sum(numbers(each, rank) for each in range(size))).all()
    root = size - 1
    done(gpu, dist.scatter(gpu.array_of(out), parts(x, gpu, counts) if rank == root else None, root, async_op=async_op))
    assert (out == numbers(root, rank)).all()
    y[:] = -1
    done(gpu, dist.gather(gpu.array_of(out), parts(y, gpu, counts) if rank == root else None, root, async_op=async_op))
    if rank == root:
        assert (y == np.concatenate([numbers(root, each) for each in range(size)])).all()
    assert (gpu.copied, gpu.packed) == (0, 0)


def test_lists_apart_in_the_order_of_streams(gpu: Gpu) -> None:
    """Arrays apart are packed on the device: behind the kernels before the call, and before those after it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for async_op in (False, True):
        for turn in range(3):
            given, got = [np.zeros(MANY) for _ in range(size)], [np.full(MANY, -1.0) for _ in range(size)]
            seen: list[float] = []
            for each, array in enumerate(given):
                now = numbers(rank, each, turn)
                gpu.launch(lambda array=array, now=now: np.copyto(array, now))  # type: ignore[misc]
            gpu.launch(lambda got=got, seen=seen: seen.append(got[0][0]))  # type: ignore[misc]
            work = dist.all_to_all(
                [gpu.array_of(array) for array in got], [gpu.array_of(array) for array in given], async_op=async_op
            )
            if work is not None:
                work.wait()
            gpu.launch(lambda got=got, seen=seen: seen.append(got[-1][0]))  # type: ignore[misc]
            gpu.finish()
            for each, array in enumerate(got):
                assert (array == numbers(each, rank, turn)).all()
            assert seen == [-1.0, numbers(size - 1, rank, turn)[0]]
    assert gpu.copied == 0
    assert (gpu.packed > 0) == (size > 1)


def test_the_memory_of_a_call_is_not_used_too_early(gpu: Gpu) -> None:
    """Results that still have to be copied out of memory of the device are not spoiled by the next call that gets it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kept = [[np.zeros(MANY) for _ in range(size)] for _ in range(4)]
    streams = [Stream() for _ in kept]
    for turn, (got, stream) in enumerate(zip(kept, streams, strict=True)):
        dist.all_gather([gpu.array_of(array) for array in got], gpu.array_of(numbers(rank, turn)), stream=stream)
    for stream in streams:
        gpu.finish(stream)
    for turn, got in enumerate(kept):
        for each, array in enumerate(got):
            assert (array == numbers(each, turn)).all(), (turn, each)
    assert gpu.copied == 0


def sizes_of(turn: int, size: int) -> list[int]:
    """Return unequal numbers of elements, some none, some of a few bytes, one large."""
    return [(0, 5, MANY, 2 * MANY + 1)[(each + turn) % 4] for each in range(size)]


@pytest.mark.parametrize("async_op", [False, True])
def test_uneven(async_op: bool, gpu: Gpu) -> None:
    """Blocks of unequal sizes: what is large somewhere in the call is handed to MPI with all the rest."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(4):
        counts = sizes_of(turn, size)
        large_one = max(counts) >= MANY
        for piece in (False, True):
            got = np.full(sum(counts), -1.0)
            lists = parts(got, gpu, counts) if piece else [gpu.array_of(np.zeros(count)) for count in counts]
            before = gpu.copied
            done(gpu, dist.all_gather(lists, gpu.array_of(numbers(rank, count=counts[rank])), async_op=async_op))
            for each, array in enumerate(lists):
                assert (array.elements == numbers(each, count=counts[each])).all()
            assert (gpu.copied == before) == large_one
            out, before = np.zeros(counts[rank]), gpu.copied
            given = [numbers(rank, each, count=count) for each, count in enumerate(counts)]
            whole = np.concatenate(given)
            lists = parts(whole, gpu, counts) if piece else [gpu.array_of(array) for array in given]
            done(gpu, dist.reduce_scatter(gpu.array_of(out), lists, async_op=async_op))
            assert (out == sum(numbers(each, rank, count=counts[rank]) for each in range(size))).all()
            assert (gpu.copied == before) == large_one
        sent = [sizes_of(turn + rank, size)[each] for each in range(size)]
        received = [sizes_of(turn + each, size)[rank] for each in range(size)]
        given = [numbers(rank, each, count=count) for each, count in enumerate(sent)]
        out, whole, before = np.full(sum(received), -1.0), np.concatenate(given), gpu.copied
        done(
            gpu,
            dist.all_to_all_single(gpu.array_of(out), gpu.array_of(whole), received, sent, async_op=async_op),
        )
        expected = np.concatenate([numbers(each, rank, count=count) for each, count in enumerate(received)])
        assert (out == expected).all()
        arrays = [np.full(count, -1.0) for count in received]
        lists = [gpu.array_of(array) for array in arrays], [gpu.array_of(array) for array in given]
        done(gpu, dist.all_to_all(*lists, async_op=async_op))
        assert (np.concatenate(arrays) == expected).all()
        assert gpu.copied == before or max(sent + received) < MANY


@several
@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_differ(name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that passes memory of the host, or moves its own by way of it, meets the others in the same calls of MPI."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for how in ("host", "staged", "no memory"):
        odd = rank == size - 1
        gpu.allocates_plainly = not (odd and how == "staged")
        gpu.memory = not (odd and how == "no memory")
        monkeypatch.setattr(cases, "dist", dist if odd and how == "host" else OnGpu(gpu))
        for turn in range(5):  # a call of NumPy's arrays that is made again takes a shorter way
            case = Case("d", MANY, root=(turn // 2) % size, async_op=turn == 4 and rank == 0, seed=turn)
            cases.run(name, iter([case]))
    gpu.allocates_plainly = gpu.memory = True


@several
@pytest.mark.parametrize(
    "name", ["all_gather", "all_to_all", "all_gather_uneven", "all_to_all_uneven", "gather", "scatter"]
)
def test_arrays_apart_on_the_host(name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose arrays of the host could be passed as they are meets ranks with a GPU in the same calls of MPI."""
    monkeypatch.setattr(MpiTransport, "apart_from", lambda self, kind: 24_000)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    assert group is not None
    monkeypatch.setattr(group.pair, "through", lambda kind, nbytes: None)
    calls: list[str] = []
    call = MpiTransport.call

    def noted(self: MpiTransport, move: Any) -> tuple[str, tuple[Any, ...]]:
        found = call(self, move)
        calls.append(found[0])
        return found

    monkeypatch.setattr(MpiTransport, "call", noted)
    for on_host in (True, False):
        monkeypatch.setattr(cases, "dist", dist if on_host and rank == size - 1 else OnGpu(gpu))
        for turn in range(4):
            cases.run(name, iter([Case("d", MANY, group=group, root=turn % size, async_op=turn == 3, seed=turn)]))
    if name in ("all_gather", "all_to_all"):
        assert not any(each.endswith("v") for each in calls)
    dist.destroy_process_group(group)


@several
@pytest.mark.parametrize("name", NAMES)
def test_nonblocking_forms_that_fail(name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Open MPI must not have in a nonblocking call goes by way of the host then, whichever rank is asynchronous."""
    table = decide("auto", None, True, {}, "Open MPI v5.0.7, package")
    monkeypatch.setattr(device_array, "_permitted", table.allows)
    monkeypatch.setattr(cases, "dist", OnGpu(gpu))
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn, starter in enumerate((None, 0, size - 1)):
        before = gpu.copied
        cases.run(name, iter([Case("d", MANY, root=turn % size, async_op=rank == starter, seed=turn)]))
        if "uneven" not in name and "splits" not in name:
            assert (gpu.copied > before) == (starter is not None and name in cases.REDUCING), (starter, name)


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_in_pieces(name: str, beyond: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut into pieces is handed to MPI, too; of a reduce_scatter each piece is packed on the device."""
    size = dist.get_world_size()
    monkeypatch.setattr(execution, "NATIVE_BYTES", 40_000)
    monkeypatch.setattr(execution, "BLOCKS", 1)
    if beyond:
        monkeypatch.setattr(
            large_counts, "COUNT_LIMIT", size * 112_000
        )  # elements of all blocks together are never more
    monkeypatch.setattr(cases, "dist", OnGpu(gpu))
    call = MpiTransport.call

    def known(self: MpiTransport, move: Any) -> tuple[str, tuple[Any, ...]]:
        found = call(self, move)
        assert found[0] != "Reduce_scatter" or name == "reduce_scatter_uneven"  # Open MPI has the other for GPUs
        return found

    monkeypatch.setattr(MpiTransport, "call", known)
    for turn, async_op in enumerate((False, True, False)):
        before = gpu.copied
        cases.run(name, iter([Case("d", 2 * MANY + turn, root=turn % size, async_op=async_op, seed=turn)]))
        assert gpu.copied == before or "uneven" in name or "splits" in name
    if name in cases.REDUCING and "reduce_scatter" in name and "uneven" not in name:
        assert gpu.packed > 0


@several
@pytest.mark.parametrize("name", ["all_gather_uneven", "all_gather_single"])
def test_nothing_is_posted(name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one rank has its array on a GPU, a call that all wait for makes no nonblocking call, which MPI may not support."""
    asked: list[bool] = []
    call = MpiTransport.blocking

    def noted(self: MpiTransport, move: Any, posted: bool = True) -> None:
        asked.append(posted)
        call(self, move, posted)

    monkeypatch.setattr(MpiTransport, "blocking", noted)
    monkeypatch.setattr(execution, "NATIVE_BYTES", 40_000)
    monkeypatch.setattr(execution, "BLOCKS", 1)
    count = many("d") * 2
    cases.run(name, iter([Case("d", count)]))
    assert set(asked) <= {True}
    asked.clear()
    monkeypatch.setattr(cases, "dist", OnGpu(gpu) if dist.get_rank() == 0 else dist)
    cases.run(name, iter([Case("d", count)]))
    small = "uneven" in name and dist.get_world_size() == 2  # no block is large enough for a blocking call
    assert bool(asked) != small
    assert not any(asked)


def test_no_memory_for_a_piece(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory for the pieces of a reduce_scatter that has begun: they go by way of the host."""
    monkeypatch.setattr(execution, "NATIVE_BYTES", 40_000)
    monkeypatch.setattr(execution, "BLOCKS", 1)
    monkeypatch.setattr(cases, "dist", OnGpu(gpu))
    gpu.memory = dist.get_rank() > 0
    cases.run("reduce_scatter_single", iter([Case("d", 2 * MANY)]))
    assert (gpu.copied > 0) == (dist.get_rank() == 0)


def test_small_blocks_of_what_is_large(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few bytes of an array that is handed to MPI do not move through buffers of the host."""
    size, rank = dist.get_world_size(), dist.get_rank()
    start = EagerMpiSchedule.start

    def checked(self: EagerMpiSchedule, move: Any) -> Any:
        assert not isinstance(move.send, DeviceAddresses)
        assert not isinstance(move.recv, DeviceAddresses)
        return start(self, move)

    monkeypatch.setattr(EagerMpiSchedule, "start", checked)
    monkeypatch.setattr(device_array, "DIRECT_BYTES", 1000)
    for count in (200, 3000):
        x, y = np.repeat(np.arange(size) + 10.0 * rank, count), np.zeros(size * count)
        before = gpu.copied
        for async_op in (False, True):
            y[:] = 0
            done(gpu, dist.all_to_all_single(gpu.array_of(y), gpu.array_of(x), async_op=async_op))
            assert (y == np.repeat(10.0 * np.arange(size) + rank, count)).all()
        assert gpu.copied == before


def test_in_place(gpu: Gpu) -> None:
    """What is read and written in the same memory is copied on the device first: MPI forbids that they overlap."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for async_op in (False, True):
        y = np.full(size * MANY, -1.0)
        counts = [MANY] * size
        mine = y[rank * MANY : (rank + 1) * MANY]
        expected = np.concatenate([numbers(each) for each in range(size)])
        gpu.launch(lambda mine=mine: np.copyto(mine, numbers(rank)))  # type: ignore[misc]
        done(gpu, dist.all_gather_into_tensor(gpu.array_of(y), gpu.array_of(mine), async_op=async_op))
        assert (y == expected).all()
        y[:] = -1
        mine[:] = numbers(rank)
        done(gpu, dist.all_gather(parts(y, gpu, counts), gpu.array_of(mine), async_op=async_op))
        assert (y == expected).all()
        y[:] = np.concatenate([numbers(rank, each) for each in range(size)])
        done(gpu, dist.all_to_all_single(gpu.array_of(y), gpu.array_of(y), async_op=async_op))
        assert (y == np.concatenate([numbers(each, rank) for each in range(size)])).all()
        y[:] = np.concatenate([numbers(rank, each) for each in range(size)])
        done(gpu, dist.reduce_scatter_tensor(gpu.array_of(mine), gpu.array_of(y), async_op=async_op))
        assert (mine == sum(numbers(each, rank) for each in range(size))).all()
    assert gpu.copied == 0


def test_what_goes_by_way_of_the_host(gpu: Gpu) -> None:
    """Averages, halves, a list with one array that is not contiguous, small blocks, and a device without memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(numbers(each, rank) for each in range(size))

    def scattered(op: Any, dtype: str = "d", count: int = MANY, step: int = 1) -> Array:
        given = [np.repeat(numbers(rank, each)[:count].astype(dtype), step)[::step] for each in range(size)]
        out, before = np.zeros(count, dtype), gpu.copied
        dist.reduce_scatter(gpu.array_of(out), [gpu.array_of(each) for each in given], op)
        gpu.finish()
        assert gpu.copied > before
        return out

    assert np.allclose(scattered(dist.ReduceOp.AVG), total / size)
    assert np.allclose(scattered(dist.ReduceOp.PREMUL_SUM(2.0)), 2 * total)
    assert (scattered(dist.ReduceOp.SUM, "e") == total).all()
    assert (scattered(dist.ReduceOp.SUM, count=10) == total[:10]).all()
    assert (scattered(dist.ReduceOp.SUM, step=2) == total).all()
    gpu.memory = size == 1  # one array needs none
    before = gpu.copied
    got = [np.zeros(MANY) for _ in range(size)]
    dist.all_gather([gpu.array_of(each) for each in got], gpu.array_of(numbers(rank)))
    gpu.finish()
    assert all((array == numbers(each)).all() for each, array in enumerate(got))
    assert (gpu.copied > before) == (size > 1)


def test_operations_that_share_memory(gpu: Gpu) -> None:
    """Lists that are under way are compared with other calls, although MPI has a copy of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    got = [np.zeros(MANY) for _ in range(size)]
    given = [numbers(rank, each) for each in range(size)]
    work = dist.all_to_all([gpu.array_of(each) for each in got], [gpu.array_of(each) for each in given], async_op=True)
    with pytest.raises(dist.BufferInUseError, match="writes memory that all_to_all"):
        dist.all_reduce(gpu.array_of(given[0]))
    with pytest.raises(dist.BufferInUseError, match="all_to_all"):
        dist.all_reduce(gpu.array_of(got[-1]))
    assert work is not None
    done(gpu, work)
    assert all((array == numbers(each, rank)).all() for each, array in enumerate(got))


NOTICED_BY: dict[int, Callable[[Gpu], None]] = {
    1: test_the_memory_of_a_call_is_not_used_too_early,
    2: test_lists_apart_in_the_order_of_streams,
    3: test_lists_apart_in_the_order_of_streams,
}


@several
@pytest.mark.parametrize("wait", [0, *NOTICED_BY])
def test_every_wait_is_needed(wait: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Without any one of the waits, numbered in the source, a test of those above fails at some pace; with all, none."""
    lines = inspect.getsource(device_array.room).splitlines()
    kept = [line for line in lines if not line.endswith(f"# {wait}")]
    assert len(lines) - len(kept) == (1 if wait else 0)
    room = device_array.room
    source = "\n".join(["from __future__ import annotations", *kept]).replace(".append(array.stream)\n\n", "\n")
    exec(compile(source, device_array.__file__, "exec"), vars(device_array))
    request.addfinalizer(lambda: setattr(device_array, "room", room))
    checks = [NOTICED_BY[wait]] if wait else dict.fromkeys(NOTICED_BY.values())
    assert fails_at_some_pace(checks, lambda pace: stand_in(monkeypatch, pace)) == bool(wait)
