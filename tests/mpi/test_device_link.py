"""Reductions on a GPU that the ranks share, on a stand-in for one: files in memory that all ranks have open."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import collective_cases as cases
import numpy as np
import pytest
from standin_gpu import Gpu, Stream, Window, select
from striking import Struck

import mpicoll as dist
from mpicoll.memory.device import pool as device_pool
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.pytest_plugin import collective_raises
from mpicoll.transports.device import ipc

pytestmark = pytest.mark.mpi

Array = np.ndarray[Any, Any]
several = pytest.mark.mpi(min_size=2)
BUFFER = 64 * 1024
LEAST = 20 * 1024


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of a few pages, so that small arrays take many chunks."""
    monkeypatch.setattr(ipc, "LEAST_BYTES", LEAST)
    monkeypatch.setattr(ipc, "LARGEST_BUFFER", BUFFER)
    monkeypatch.setattr(ipc, "SMALLEST_BUFFER", 4096)


@pytest.fixture(params=[pytest.param("eager", marks=pytest.mark.slow), "lazy"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """The stand-in, as the GPU of this rank."""
    found = Gpu(request.param)
    select(found, monkeypatch)
    yield found
    device_pool.close()


@pytest.fixture
def group(gpu: Gpu) -> Iterator[Any]:
    """A group that has no window yet; when the test is over, nothing is left of it."""
    found = dist.new_group()
    yield found
    leave(found)


def leave(group: Any) -> None:
    """Destroy a group on all ranks, after which nothing of its window is left."""
    if group.broken is None:
        dist.barrier(group)
    dist.destroy_process_group(group)
    dist.barrier()
    ipc.free_closed(5)
    dist.barrier()
    assert not ipc._closing
    assert not ipc._open
    assert not Window.named


def ready(group: Any) -> bool:
    """Whether the group's window has been proven."""
    return "device_ipc" in group.opened and group.opened["device_ipc"].usable is True


@several
@pytest.mark.parametrize("dtype", "?bBhHiIlLqQfdFDe")
def test_every_op(dtype: str, gpu: Gpu, group: Any) -> None:
    """Every op on every dtype, of sizes about the bounds, is what NumPy makes of it; all ranks hold the same bits."""
    size = group.size()
    itemsize = np.dtype(dtype).itemsize
    per = BUFFER // itemsize
    for op in dist.ReduceOp.SUM, *OTHERS:
        for count in (LEAST // itemsize, per - 1, per, per + 1, 3 * per + size - 1):
            if op is not dist.ReduceOp.SUM and count != per + 1:
                continue
            everybody = np.array([cases.values(dtype, count, rank, 3) for rank in range(size)])
            try:
                expected = expectation(op, everybody)
            except TypeError:
                continue
            x = everybody[group.rank()].copy()
            before = gpu.taken
            dist.all_reduce(gpu.array_of(x), op, group=group)
            gpu.finish()
            assert gpu.taken > before, (op, count)
            np.testing.assert_allclose(x, expected, rtol=1e-3 if dtype == "e" else 1e-5, err_msg=f"{op} {count}")
            same_everywhere(x)
    assert ready(group)


OTHERS = (
    dist.ReduceOp.AVG,
    dist.ReduceOp.PRODUCT,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
    dist.ReduceOp.BAND,
    dist.ReduceOp.BOR,
    dist.ReduceOp.BXOR,
)


def expectation(op: Any, values: Array) -> Array:
    """Return the reduction over the first axis; TypeError where it has no meaning."""
    kind, ops = values.dtype.kind, dist.ReduceOp
    logical = {
        ops.SUM: np.logical_or,
        ops.MAX: np.logical_or,
        ops.BOR: np.logical_or,
        ops.PRODUCT: np.logical_and,
        ops.MIN: np.logical_and,
        ops.BAND: np.logical_and,
        ops.BXOR: np.logical_xor,
    }
    if (kind == "c" and op not in (ops.SUM, ops.AVG)) or (kind in "iub" and op is ops.AVG):
        raise TypeError
    ufunc = logical[op] if kind == "b" else cases.UFUNCS[op]
    wide = values.astype(np.float32) if values.dtype == np.float16 else values
    result = ufunc.reduce(wide, 0)
    if op is ops.AVG:
        result = result / len(values)
    return np.asarray(result.astype(values.dtype))


def same_everywhere(x: Array) -> None:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, x.tobytes())
    assert len(set(everybody)) == 1


@several
def test_the_order_is_fixed(gpu: Gpu, group: Any) -> None:
    """Sums whose rounding depends on the order have the same bits on all ranks, and each time: those of the ranks' order."""
    everybody = np.random.default_rng(5).standard_normal((group.size(), 50_001)).astype(np.float32)
    expected = everybody[0].copy()
    for each in everybody[1:]:
        expected += each
    for _ in range(3):
        x = everybody[group.rank()].copy()
        dist.all_reduce(gpu.array_of(x), group=group)
        gpu.finish()
        assert (x == expected).all()
    assert ready(group)


@several
def test_bfloat16(gpu: Gpu, group: Any) -> None:
    """bfloat16 is reduced as float32, and rounded once."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    everybody = np.random.default_rng(6).standard_normal((group.size(), 40_000)).astype(ml_dtypes.bfloat16)
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, group.size())):
        expected = everybody[0].astype(np.float32)
        for each in everybody[1:]:
            expected += each.astype(np.float32)
        x = everybody[group.rank()].copy()
        before = gpu.taken
        dist.all_reduce(gpu.array_of(x), op, group=group)
        gpu.finish()
        assert gpu.taken > before
        assert (x == (expected / np.float32(divisor)).astype(ml_dtypes.bfloat16)).all()


@several
def test_layouts(gpu: Gpu, group: Any) -> None:
    """Arrays whose elements do not stand in C order."""
    size = group.size()
    whole = np.ones((210, 220))
    for view in (whole[:, ::2], whole.T, whole[::-1]):
        whole[:] = 1
        before = gpu.taken
        dist.all_reduce(gpu.array_of(view), group=group)
        gpu.finish()
        assert gpu.taken > before
        assert (view == size).all()
        assert whole.sum() == whole.size + view.size * (size - 1)


@several
def test_small_arrays_and_other_calls(gpu: Gpu, group: Any) -> None:
    """What is too small, and other calls, go by way of the host."""
    x = np.ones(LEAST // 8 - 1)
    dist.all_reduce(gpu.array_of(x), group=group)
    y = np.ones(LEAST)
    dist.broadcast(gpu.array_of(y), 0, group=group)
    dist.all_reduce(gpu.array_of(y), dist.ReduceOp.PREMUL_SUM(2.0), group=group)
    gpu.finish()
    assert (x == group.size()).all()
    assert (y == 2 * group.size()).all()
    assert "device_ipc" not in group.opened


@several
def test_off(gpu: Gpu, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICOLL_CUDA_IPC=off, on one rank alone: all go by way of the host."""
    from dataclasses import replace

    from mpicoll.groups import registry

    state = registry.state()
    if group.rank() == 0:
        monkeypatch.setattr(state, "settings", replace(state.settings, cuda_ipc="off"))
    x = np.ones(LEAST)
    dist.all_reduce(gpu.array_of(x), group=group)
    gpu.finish()
    assert (x == group.size()).all()
    assert "device_ipc" not in group.opened


@several
@pytest.mark.parametrize("odd", ["host", "device"])
@pytest.mark.parametrize("proven", [False, True])
def test_one_rank_elsewhere(odd: str, proven: bool, gpu: Gpu, group: Any) -> None:
    """One rank has its array on the host, or on another GPU: all go by way of the host, before the proof and after it."""
    last = group.rank() == group.size() - 1
    if proven:
        dist.all_reduce(gpu.array_of(np.ones(LEAST)), group=group)
        assert ready(group)
    for average in (False, True):
        x, before = np.full(LEAST, 2.0), gpu.taken
        array = (x if odd == "host" else gpu.array_of(x, number=1)) if last else gpu.array_of(x)
        dist.all_reduce(array, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, group=group)
        gpu.finish()
        assert (x == 2 * (1 if average else group.size())).all()
        assert gpu.taken == before
    assert ready(group) == proven
    y, before = np.ones(LEAST), gpu.taken
    dist.all_reduce(gpu.array_of(y), group=group)
    gpu.finish()
    assert (y == group.size()).all()
    # The first call with all arrays on the GPUs said that they are several; one with the host's said nothing.
    assert (gpu.taken > before) == (proven or odd == "host")


@several
@pytest.mark.parametrize("refused", ["window", "export", "open", "share"])
@pytest.mark.parametrize("where", ["first", "last"])
def test_what_cannot_be_proven(refused: str, where: str, gpu: Gpu, group: Any) -> None:
    """One rank cannot share memory of the device: all go by way of the host, at once and later, and nothing is left."""
    if group.rank() == (0 if where == "first" else group.size() - 1):
        gpu.refuses.add(refused)
    works = (refused in ("window", "export")) == (where == "last")  # what that rank does not do in any case
    for turn in range(3):
        x = np.full(LEAST, turn + 1.0)
        dist.all_reduce(gpu.array_of(x), group=group)
        gpu.finish()
        assert (x == (turn + 1.0) * group.size()).all()
        assert group.opened["device_ipc"].usable == works
        if not works:
            assert group.opened["device_ipc"].why
            assert not gpu.taken
            dist.barrier()
            assert not Window.named


@several
def test_asynchronous_calls(gpu: Gpu, group: Any) -> None:
    """Calls that are not waited for take the same way once it has been proven, several at a time and with others between."""
    size = group.size()
    arrays = [np.full(LEAST + turn, turn + 1.0) for turn in range(6)]
    works = [dist.all_reduce(gpu.array_of(x), group=group, async_op=True) for x in arrays[:2]]
    assert "device_ipc" not in group.opened
    dist.all_reduce(gpu.array_of(arrays[2]), group=group)
    assert ready(group)
    before = gpu.taken
    works += [dist.all_reduce(gpu.array_of(x), group=group, async_op=True) for x in arrays[3:5]]
    works.append(dist.all_reduce(arrays[5], group=group, async_op=True))
    for work in works[::-1]:
        assert work is not None
        work.wait()
    gpu.finish()
    assert gpu.taken > before
    for turn, x in enumerate(arrays):
        assert (x == size * (turn + 1.0)).all(), turn


@several
def test_two_groups(gpu: Gpu, group: Any) -> None:
    """Each group has a window of its own; calls on them alternate."""
    other = dist.new_group()
    x, y = np.ones(LEAST), np.ones(LEAST)
    for turn in range(3):
        dist.all_reduce(gpu.array_of(x), group=group)
        dist.all_reduce(gpu.array_of(y), dist.ReduceOp.MAX, group=other)
        gpu.finish()
        assert (x == group.size() ** (turn + 1.0)).all()
        assert (y == 1).all()
    assert ready(group)
    assert ready(other)
    dist.barrier()
    dist.destroy_process_group(other)
    dist.all_reduce(gpu.array_of(y), group=group)
    gpu.finish()
    assert (y == group.size()).all()


@several
def test_windows_are_bounded(gpu: Gpu, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the windows of other groups take what there may be, a group goes by way of the host."""
    monkeypatch.setattr(ipc, "MOST_BYTES", 1000)
    x = np.ones(LEAST)
    dist.all_reduce(gpu.array_of(x), group=group)
    gpu.finish()
    assert (x == group.size()).all()
    assert not group.opened["device_ipc"].usable
    assert "as many windows" in group.opened["device_ipc"].why


def test_buffers() -> None:
    """A window is bounded whatever the number of its members, and there is none for too many."""
    for size in range(2, 200):
        buffer = ipc.buffer_bytes(size)
        part = 2 * buffer + device_runtime.SCRATCH
        assert not buffer or part * size <= ipc.WINDOW_BYTES
        assert buffer % 16 == 0
        assert buffer <= ipc.LARGEST_BUFFER
    assert ipc.buffer_bytes(2)
    assert not ipc.buffer_bytes(64)


class Failing(Gpu):
    """A GPU that fails when it is told to reduce for the second time in a call."""

    left = 2**30

    def fold(self, *args: Any) -> None:
        self.left -= 1
        if not self.left:
            raise RuntimeError("cudaErrorIllegalAddress")
        super().fold(*args)


@several
def test_a_rank_that_fails_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises what its GPU says, the others that the group is broken, at once; everything is closed."""
    gpu = Failing("lazy")
    select(gpu, monkeypatch)
    group = dist.new_group()
    dist.all_reduce(gpu.array_of(np.ones(LEAST)), group=group)
    if group.rank() == 0:
        gpu.left = 2
    expected = (
        (RuntimeError, "cudaErrorIllegalAddress")
        if group.rank() == 0
        else (dist.DistError, "group up: RuntimeError: cuda")
    )
    with pytest.raises(expected[0], match=expected[1]):
        dist.all_reduce(gpu.array_of(np.ones(4 * BUFFER)), group=group)
    assert group.broken
    with pytest.raises(dist.GroupBrokenError):
        dist.all_reduce(gpu.array_of(np.ones(LEAST)), group=group)
    leave(group)
    device_pool.close()


@several
def test_wrong_calls(gpu: Gpu, group: Any) -> None:
    """Calls that differ, and arrays that cannot be written, are found before anything moves; the group is still good."""
    dist.all_reduce(gpu.array_of(np.ones(LEAST)), group=group)
    with pytest.raises(dist.CollectiveMismatchError):
        dist.all_reduce(gpu.array_of(np.ones(LEAST + group.rank())), group=group)
    with collective_raises(ValueError, match="read-only", group=group):
        dist.all_reduce(gpu.array_of(np.ones(LEAST), readonly=True), group=group)
    with collective_raises(RuntimeError, match="AVG", group=group):
        dist.all_reduce(gpu.array_of(np.ones(LEAST, int)), dist.ReduceOp.AVG, group=group)
    with collective_raises(TypeError, match="stream must be", group=group):
        dist.all_reduce(gpu.array_of(np.ones(LEAST)), group=group, stream=3)
    x = np.ones(LEAST)
    dist.all_reduce(gpu.array_of(x), group=group)
    gpu.finish()
    assert (x == group.size()).all()


@several
def test_rounds_through_mpi(gpu: Gpu, rounds_of_mpi: None) -> None:
    """Where the calls are agreed on through MPI: used if all members can, and not if one cannot."""
    group = dist.new_group()
    for host in (False, True, False):
        x, before = np.ones(LEAST), gpu.taken
        dist.all_reduce(x if host and group.rank() == 0 else gpu.array_of(x), group=group)
        gpu.finish()
        assert (x == group.size()).all()
        assert (gpu.taken > before) != host
    leave(group)


@several
@pytest.mark.parametrize("level", ["roll", "off"])
def test_levels(level: Any, gpu: Gpu) -> None:
    """At the levels that compare less, too; arrays of unequal size raise on all ranks, or are refused."""
    dist.destroy_process_group()
    dist.init_process_group(check=level)
    for turn in range(20):
        x = np.ones(LEAST)
        dist.all_reduce(gpu.array_of(x), group=dist.group.WORLD)
        gpu.finish()
        assert (x == dist.get_world_size()).all(), turn
    assert gpu.taken
    group = dist.new_group()
    with pytest.raises((dist.DistError, ValueError)):
        dist.all_reduce(gpu.array_of(np.ones(LEAST + group.rank())), group=group)
    dist.destroy_process_group()
    assert not ipc._closing
    assert not Window.named


def check_kernels_before_and_after(gpu: Gpu, group: Any) -> None:
    """A call reads what kernels before it write, and kernels after it read its results, on the stream of the call."""
    size = group.size()
    x, seen = np.zeros(LEAST), []
    other = Stream()
    for turn in range(4):
        stream = (None, other)[turn % 2]
        gpu.launch(lambda turn=turn: x.fill(turn + 1.0), stream)  # type: ignore[misc]
        dist.all_reduce(gpu.array_of(x), group=group, stream=stream)
        gpu.launch(lambda: seen.append((x.min(), x.max())), stream)
        gpu.finish(stream)
    assert seen == [(size * (turn + 1.0),) * 2 for turn in range(4)]


def check_many_chunks(gpu: Gpu, group: Any) -> None:
    """Every chunk of every call is right, on ranks of unequal speed."""
    size, rank, wrong = group.size(), group.rank(), []
    for count in (LEAST, BUFFER // 2):
        for turn in range(2):
            values = np.arange(count, dtype=np.float64) * (turn + 1)
            x = values + rank
            dist.all_reduce(gpu.array_of(x), group=group)
            gpu.finish()
            wrong += [(count, turn)] * bool((x != size * values + size * (size - 1) / 2).any())
    assert not wrong


@several
def test_kernels_before_and_after(gpu: Gpu, group: Any) -> None:
    """As it says."""
    check_kernels_before_and_after(gpu, group)
    assert ready(group)


@several
@pytest.mark.parametrize("slow", [0, 1])
def test_many_chunks(slow: int, gpu: Gpu, group: Any) -> None:
    """As it says."""
    if group.rank() == slow:
        gpu.seconds = 0.01
    check_many_chunks(gpu, group)
    assert ready(group)


@several
@pytest.mark.parametrize("last", [False, True])
def test_a_call_that_is_struck_leaves_no_copy_behind(last: bool, gpu: Gpu, group: Any) -> None:
    """Nothing is copied into an array after what the program does next, when a call ends between two of its chunks."""
    dist.all_reduce(gpu.array_of(np.ones(LEAST)), group=group)
    count = 5 * ipc.buffer_bytes(dist.get_world_size()) // 16
    assert count * 8 >= ipc.LEAST_BYTES
    x, puts = np.ones(count), 0
    found = gpu.put

    def put(*arguments: Any) -> None:
        nonlocal puts
        found(*arguments)
        puts += 1
        if dist.get_rank() == 0 and puts == (3 if last else 1):
            raise Struck

    gpu.put = put  # type: ignore[method-assign]
    with suppress(Struck, dist.DistError):
        dist.all_reduce(gpu.array_of(x), group=group)
    gpu.put = found  # type: ignore[method-assign]
    assert puts or dist.get_rank()
    gpu.launch(lambda: x.fill(5))
    gpu.finish()
    for stream in gpu.copy_streams.values():
        stream.run(len(stream.work))
    assert (x == 5).all()
    dist.barrier()
    if group.broken is None:
        group.give_up("a call on it was struck")


NOTICED_BY: dict[int, Callable[[Gpu, Any], None]] = {
    1: check_kernels_before_and_after,
    2: check_many_chunks,
    3: check_many_chunks,
    4: check_many_chunks,
    5: check_many_chunks,
    6: check_many_chunks,
    7: check_kernels_before_and_after,
}


@several
@pytest.mark.parametrize("wait", [0, *NOTICED_BY])
def test_every_wait_is_needed(wait: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one of the lines numbered in the source a check fails on some rank, at some pace; with all, none."""
    lines = inspect.getsource(ipc.DeviceWindow.all_reduce).splitlines()
    kept = [line[4:] for line in lines if not line.endswith(f"# {wait}")]
    assert len(lines) - len(kept) == (1 if wait else 0)
    space = dict(vars(ipc))
    exec(compile("from __future__ import annotations\n" + "\n".join(kept), ipc.__file__, "exec"), space)
    monkeypatch.setattr(ipc.DeviceWindow, "all_reduce", space["all_reduce"])
    failed = []
    for check in [NOTICED_BY[wait]] if wait else dict.fromkeys(NOTICED_BY.values()):
        for pace, slow in (("eager", 0), ("lazy", 0), ("lazy", 1), ("lazy", -1)):
            gpu = Gpu(pace)  # type: ignore[arg-type]
            if dist.get_rank() == slow:
                gpu.seconds = 0.02
            select(gpu, monkeypatch)
            group = dist.new_group()
            try:
                check(gpu, group)
            except AssertionError:
                failed.append((pace, slow))
            dist.barrier()
            leave(group)
            device_pool.close()
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, failed)
            if wait and any(found):
                return
    assert any(found) == bool(wait), found
