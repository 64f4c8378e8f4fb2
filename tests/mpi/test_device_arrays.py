"""Arrays on a GPU in every call, on a stand-in for one: in place, in the order of their streams."""

from __future__ import annotations

import gc
import inspect
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import collective_cases as cases
import numpy as np
import pytest
from array_kinds import OnGpu
from ranks import neighbours
from standin_gpu import Gpu, GpuArray, Stream, fails_at_some_pace, select

import mpicoll as dist
from mpicoll.memory.device import array as device_array
from mpicoll.memory.device import pool as device_pool
from mpicoll.operations import failures
from mpicoll.pytest_plugin import collective_raises
from mpicoll.transports.selection import Selection

pytestmark = pytest.mark.mpi

Array = np.ndarray[Any, Any]
several = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def _by_way_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is handed to MPI, which may know of GPUs, and takes the addresses of the stand-in for theirs."""
    monkeypatch.setattr(device_array, "_permitted", lambda operation, nonblocking: False)


@pytest.fixture(params=["eager", "lazy"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """The stand-in, as the GPU of this rank."""
    found = Gpu(request.param)
    select(found, monkeypatch)
    yield found
    device_pool.close()


@pytest.mark.parametrize("name", cases.ALL)
def test_every_collective(name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every collective reads and writes arrays on the device, of several dtypes, waited for or not."""
    monkeypatch.setattr(cases, "dist", OnGpu(gpu))
    for turn, dtype in enumerate("fdFihb?q"):
        counts = (3, cases.large(dtype)) if turn < 2 else (3,)
        cases.run(name, cases.taste(name, dtype, counts))
    assert gpu.copied


@several
@pytest.mark.parametrize("count", [3, 5000, 40_000])
def test_messages(count: int, gpu: Gpu) -> None:
    """Messages from device to device, from device to host, and from host to device."""
    (before, after), rank = neighbours(), dist.get_rank()
    for sends, receives in ((True, True), (True, False), (False, True)):
        x, y = np.full(count, float(rank)), np.zeros(count)
        work = dist.isend(gpu.array_of(x) if sends else x, after)
        dist.recv(gpu.array_of(y) if receives else y, before)
        work.wait()
        gpu.finish()
        assert (y == before).all()
        works = [dist.isend(gpu.array_of(x) if sends else x, after)]
        y[:] = -1
        works.append(dist.irecv(gpu.array_of(y) if receives else y, before))
        for each in works:
            each.wait()
        gpu.finish()
        assert (y == before).all()


def test_layouts(gpu: Gpu) -> None:
    """Arrays of any layout, of no dimension and with no element."""
    size = dist.get_world_size()
    whole = np.ones((6, 8))
    for view in (whole[:, ::2], whole.T, whole[::-1], whole[2, 3], whole[:0]):
        whole[:] = 1
        part = np.asarray(view) if isinstance(view, np.ndarray) else whole[2:3, 3].reshape(())
        dist.all_reduce(gpu.array_of(part))
        gpu.finish()
        assert (part == size).all()
        assert whole.sum() == 48 + part.size * (size - 1)


def test_order_with_the_programs_kernels(gpu: Gpu) -> None:
    """A call reads what kernels before it write, and kernels after it read its results; those before it read the old ones."""
    size = dist.get_world_size()
    x, seen = np.zeros(100), []
    on_device = gpu.array_of(x)
    for turn in range(5):
        gpu.launch(lambda turn=turn: x.fill(turn + 1.0))  # type: ignore[misc]
        work = dist.all_reduce(on_device, async_op=turn % 2 == 1)
        if work is not None:
            work.wait()
        gpu.launch(lambda: seen.append(x[0]))
    gpu.finish()
    assert seen == [size * (turn + 1.0) for turn in range(5)]


@several
def test_a_message_carries_what_kernels_before_it_write(gpu: Gpu) -> None:
    """A message is of what the kernels before the call have made."""
    before, after = neighbours()
    x, y = np.zeros(10), np.zeros(10)
    gpu.launch(lambda: x.fill(5.0))
    work = dist.isend(gpu.array_of(x), after)
    dist.recv(y, before)
    work.wait()
    assert (y == 5).all()


def test_a_call_that_copies_at_once_takes_what_kernels_before_it_write(gpu: Gpu) -> None:
    """PREMUL_SUM scales the elements before the ranks agree on the call: those that the kernels before it have written."""
    x = np.zeros(10)
    gpu.launch(lambda: x.fill(3))
    dist.all_reduce(gpu.array_of(x), dist.ReduceOp.PREMUL_SUM(2.0))
    gpu.finish()
    assert (x == 6 * dist.get_world_size()).all()


def test_a_stream_of_the_programs_choice(gpu: Gpu) -> None:
    """``stream=`` orders a call with what is on that stream, and with no other."""
    (before, after), size = neighbours(), dist.get_world_size()
    other, ran = Stream(), []
    gpu.launch(lambda: ran.append(1))
    x, y, seen = np.zeros(10), np.zeros(10), []
    gpu.launch(lambda: x.fill(5.0), other)
    for async_op in (False, True):
        work = dist.all_reduce(gpu.array_of(x), async_op=async_op, stream=other)
        if work is not None:
            work.wait()
        gpu.launch(lambda: seen.append(x[0]), other)
    work = dist.isend(gpu.array_of(x), after, stream=other)
    dist.irecv(gpu.array_of(y), before, stream=other).wait()  # type: ignore[union-attr]
    work.wait()  # type: ignore[union-attr]
    gpu.launch(lambda: seen.append(y[0]), other)
    gpu.finish(other)
    assert seen == [5 * size, 5 * size**2, 5 * size**2]
    assert not ran
    gpu.finish()
    with collective_raises(TypeError, match="stream must be a stream of CUDA, not int"):
        dist.all_reduce(gpu.array_of(x), stream=3)


@several
def test_results_come_after_kernels_that_read_the_old_ones(gpu: Gpu) -> None:
    """What is received is written after the kernels that were put on the stream before the call."""
    rank = dist.get_rank()
    x, seen = np.full(50, -1.0), []
    gpu.launch(lambda: seen.append(x[0]))
    dist.broadcast(gpu.array_of(np.full(50, 7.0) if rank == 0 else x), 0)
    gpu.launch(lambda: seen.append(x[0]))
    gpu.finish()
    assert seen == ([-1.0, -1.0] if rank == 0 else [-1.0, 7.0])


@several
def test_memory_of_the_host_is_not_used_again_too_early(gpu: Gpu) -> None:
    """Results that are still on their way to the device stay what they are while later calls use memory of the host."""
    rank = dist.get_rank()
    results = [np.zeros(1000) for _ in range(6)]
    for turn, x in enumerate(results):
        source = np.full(1000, turn + 1.0)
        dist.broadcast(gpu.array_of(source if rank == 0 else x), 0)
    gpu.finish()
    if rank != 0:
        assert [x[0] for x in results] == [1, 2, 3, 4, 5, 6]
        assert all((x == x[0]).all() for x in results)


def test_the_host_does_not_wait_for_kernels_of_an_asynchronous_call(gpu: Gpu) -> None:
    """A call that is not waited for returns while kernels before it still run."""
    gpu.polls = 1000
    x, ran = np.ones(10), []
    gpu.launch(lambda: ran.append(1))
    work = dist.all_reduce(gpu.array_of(x), async_op=True)
    assert not ran
    work.wait()
    assert ran
    gpu.finish()
    assert (x == dist.get_world_size()).all()


@several
@pytest.mark.parametrize("engine", ["node", "mpi"])
@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "all_gather", "gather_single"])
@pytest.mark.parametrize("others", ["gpu", "host"])
def test_nobody_enters_mpi_before_every_gpu_has_come(
    others: str, call: str, engine: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the limit a rank can leave a wait of ours by an exception, a blocking call of MPI by ending the job alone."""
    world = dist.group.WORLD
    assert world is not None
    monkeypatch.setattr(world.pair, "selection", Selection(engine))
    entered: list[float] = []
    enter = failures.BlockingCall.__enter__

    def noted(self: failures.BlockingCall) -> None:
        entered.append(time.monotonic())
        enter(self)

    monkeypatch.setattr(failures.BlockingCall, "__enter__", noted)
    gpu.pace = "lazy"
    rank, size = dist.get_rank(), dist.get_world_size()
    last, count = rank == size - 1, 100_000
    values, gathered = np.full(count, rank + 1.0), np.zeros((size, count))
    here = last or others == "gpu"
    x, rows = (gpu.array_of(values), gpu.array_of(gathered)) if here else (values, gathered)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, size - 1),
        "all_gather": lambda: dist.all_gather_into_tensor(rows, x),
        "gather_single": lambda: dist.gather_single(x, rows if last else None, size - 1),
    }
    for turn in range(6):  # some calls are made in short when they have been made before
        gpu.seconds = 0.2 if last and turn in (0, 5) else 0.0
        values[:] = rank + 1
        entered.clear()
        ran: list[float] = []
        gpu.launch(lambda ran=ran: ran.append(time.monotonic()))
        calls[call]()
        gpu.finish()
        came = [ran[0]]
        dist.broadcast_object_list(came, size - 1)
        if turn in (0, 5):
            assert all(at > came[0] for at in entered), (turn, came, entered)
        expected = {"all_reduce": size * (size + 1) / 2, "broadcast": size}.get(call, rank + 1)
        assert (values == expected).all()
        if call == "all_gather" or (call == "gather_single" and last):
            assert (gathered == np.arange(1, size + 1)[:, None]).all()
        assert entered or engine == "node"


def test_memory_in_use(gpu: Gpu) -> None:
    """Two operations on the same memory of the device are told apart from two on different memory."""
    x = np.ones((4, 5))
    work = dist.all_reduce(gpu.array_of(x[:2]), async_op=True)
    other = dist.all_reduce(gpu.array_of(x[2:]), async_op=True)
    with collective_raises(dist.BufferInUseError, match="writes memory that all_reduce"):
        dist.all_reduce(gpu.array_of(x[1]))
    work.wait()
    other.wait()


def test_arrays_in_several_places(gpu: Gpu) -> None:
    """Host and device, or two devices, in one call: an error on all ranks, even where one of them passes it."""
    size = dist.get_world_size()
    x, y = np.ones(2), np.zeros(2 * size)
    for out in (y, gpu.array_of(y, number=1)):
        with collective_raises(ValueError, match="all be on the host, or all on one GPU: found .* and cuda:0"):
            dist.all_gather_into_tensor(out, gpu.array_of(x))
    dist.all_gather_into_tensor(gpu.array_of(y), gpu.array_of(x))
    gpu.finish()
    assert (y == 1).all()


def test_wrong_arrays(gpu: Gpu) -> None:
    """What cannot be written, or has elements that share memory, is refused on all ranks."""
    with collective_raises(ValueError, match="read-only"):
        dist.all_reduce(gpu.array_of(np.ones(3), readonly=True))
    shared = np.lib.stride_tricks.as_strided(np.ones(3), (3, 3), (0, 8))
    with collective_raises(ValueError, match="share memory"):
        dist.all_reduce(gpu.array_of(shared))
    same = gpu.array_of(np.ones(3))
    with collective_raises(ValueError, match="share memory"):
        dist.all_reduce_coalesced([same] * 2)
    with collective_raises(TypeError, match="object"):
        dist.all_reduce(gpu.array_of(np.array([{}, {}])))
    with collective_raises(TypeError, match="bytes in another order"):
        dist.all_reduce(gpu.array_of(np.ones(3, ">f8")))


def test_memory_of_an_operation_is_kept_until_it_has_been_waited_for(gpu: Gpu) -> None:
    """An array that the program has dropped is not given to another one, which would seem to be in use."""
    size = dist.get_world_size()
    given = gpu.array_of(np.ones(4))
    seen = weakref.ref(given)
    work = dist.all_gather_into_tensor(gpu.array_of(np.zeros(4 * size)), given, async_op=True)
    del given
    assert work is not None
    while not work._request.done:
        work._request.Test()
    assert seen() is not None
    work.wait()
    del work
    gpu.finish()
    for stream in gpu.copy_streams.values():
        stream.work.clear()
        stream.done = 0
    gc.collect()
    assert seen() is None


class Failing(Gpu):
    """A GPU on which a kernel of the program has failed: it says so whenever it is asked."""

    failing = True

    def over(self, event: Any) -> bool:
        if self.failing:
            raise RuntimeError("cudaErrorIllegalAddress")
        return super().over(event)

    def await_(self, event: Any) -> None:
        if self.failing:
            raise RuntimeError("cudaErrorIllegalAddress")
        super().await_(event)


@pytest.mark.parametrize("async_op", [False, True])
def test_a_gpu_that_fails(async_op: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device says is raised soon, and the library can be left and begun again."""
    gpu = Failing("lazy")
    select(gpu, monkeypatch)
    x = gpu.array_of(np.ones(10))
    started = time.monotonic()
    with pytest.raises((RuntimeError, dist.DistError), match="cudaErrorIllegalAddress"):
        work = dist.all_reduce(x, async_op=async_op)
        assert work is not None
        work.wait()
    assert time.monotonic() - started < 10
    dist.destroy_process_group()
    assert not dist.is_initialized()


def test_many_arrays_in_one_call(gpu: Gpu) -> None:
    """Lists of arrays on the device are reduced and gathered together."""
    size, rank = dist.get_world_size(), dist.get_rank()
    arrays = [np.full((n, 2), float(rank)) for n in (1, 30, 500)]
    dist.all_reduce_coalesced([gpu.array_of(each) for each in arrays])
    gpu.finish()
    assert all((each == size * (size - 1) / 2).all() for each in arrays)


def test_plans(gpu: Gpu) -> None:
    """A plan of an array on the device."""
    x = np.ones(4)
    plan = dist.all_reduce_init(gpu.array_of(x))
    assert plan is not None
    for _ in range(3):
        gpu.launch(lambda: x.fill(2.0))
        plan.start()
        plan.wait()
        gpu.finish()
        assert (x == 2 * dist.get_world_size()).all()


def test_pinned_memory_is_used_again(gpu: Gpu) -> None:
    """A loop takes the memory of its first calls, and what is beyond the limit is ordinary memory."""
    x = np.ones(1000)
    for _ in range(20):
        dist.all_reduce(gpu.array_of(x))
    gpu.finish()
    pool = device_pool.pool()
    assert 0 < pool.taken <= (8192 if gpu.pace == "eager" else 8 * 8192)
    pool.limit = pool.taken
    big = np.ones(100_000)
    dist.all_reduce(gpu.array_of(big))
    gpu.finish()
    assert (big == dist.get_world_size()).all()
    assert pool.taken <= pool.limit


def test_an_array_of_the_stand_in_is_nowhere_on_the_host() -> None:
    """The addresses of the stand-in are no memory of this process: the tests would notice who reads them."""
    x = Gpu().array_of(np.ones(3))
    assert isinstance(x, GpuArray)
    assert x.address >> 48


NOTICED_BY: dict[int, Callable[[Gpu], None]] = {
    1: test_a_call_that_copies_at_once_takes_what_kernels_before_it_write,
    2: test_order_with_the_programs_kernels,
    3: test_results_come_after_kernels_that_read_the_old_ones,
    4: test_order_with_the_programs_kernels,
    5: test_memory_of_the_host_is_not_used_again_too_early,
}


@several
@pytest.mark.parametrize("wait", [0, *NOTICED_BY])
def test_every_wait_is_needed(wait: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Without any one of the waits, numbered in the source, a test of those above fails at some pace; with all, none."""
    lines = inspect.getsource(device_array._copies).splitlines()
    kept = [line for line in lines if not line.endswith(f"# {wait}")]
    assert len(lines) - len(kept) == (1 if wait else 0)
    source = "\n".join(kept).replace("is not None:\n        else", "is not None:\n            pass\n        else")
    copies = device_array._copies
    exec(compile("from __future__ import annotations\n" + source, device_array.__file__, "exec"), vars(device_array))
    request.addfinalizer(lambda: setattr(device_array, "_copies", copies))

    def stand_in(pace: Literal["eager", "lazy"]) -> Gpu:
        gpu = Gpu(pace)
        select(gpu, monkeypatch)
        return gpu

    checks = [NOTICED_BY[wait]] if wait else dict.fromkeys(NOTICED_BY.values())
    assert fails_at_some_pace(checks, stand_in) == bool(wait)
