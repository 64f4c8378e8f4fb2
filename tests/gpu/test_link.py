"""Ranks that share a GPU reduce on it: every op and dtype, in the order of their streams, and how fast beside staging."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from collective_cases import UFUNCS
from gpu.test_gpu import cupy, spin

import mpicoll as dist
from mpicoll.groups import registry
from mpicoll.transports.device import ipc

pytestmark = pytest.mark.mpi(min_size=2)

MIB = 1 << 20


@pytest.fixture
def group() -> Iterator[Any]:
    """A group that has no window yet, with all ranks on the first GPU; also where the job does without windows."""
    state = registry.state()
    settings = state.settings
    state.settings = replace(settings, cuda_ipc="auto")
    with cupy().cuda.Device(0):
        yield dist.new_group()
    state.settings = settings
    found = [each for each in registry.state().groups.values() if each is not registry.state().world]
    dist.barrier()
    for each in found:
        dist.destroy_process_group(each)
    dist.barrier()
    ipc.free_closed(5)
    assert not ipc._closing


def proven(group: Any) -> None:
    """Make the group's window; where this machine gives none, skip on all ranks, and say why."""
    dist.all_reduce(cupy().ones(MIB), group=group)
    if not group.opened["device_ipc"].usable:
        pytest.skip(f"no memory of the GPU in common: {group.opened['device_ipc'].why}")


def test_it_is_used(group: Any) -> None:
    """Ranks on one GPU of this machine have memory in common: what the others of these tests need."""
    dist.all_reduce(cupy().ones(MIB), group=group)
    assert group.opened["device_ipc"].usable, group.opened["device_ipc"].why


@pytest.mark.parametrize("dtype", "?bBhHiIlLqQefdFD")
def test_every_op(dtype: str, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op gives what NumPy does, below, at and above the bounds of a chunk, and the same bits on all ranks."""
    monkeypatch.setattr(ipc, "LARGEST_BUFFER", 2 * MIB)
    proven(group)
    xp, size, ops = cupy(), group.size(), dist.ReduceOp
    wanted = [ops.SUM]
    if dtype in "?qef":  # each op on each dtype is a kernel to be compiled
        wanted += [ops.PRODUCT, ops.MIN, ops.MAX]
    wanted += [ops.AVG] if dtype in "efdFD" else [ops.BAND, ops.BOR, ops.BXOR] if dtype in "?q" else []
    chunk = ipc.buffer_bytes(size) // np.dtype(dtype).itemsize
    counts = (MIB, chunk - 1, chunk, 2 * chunk + size + 1)
    for op in wanted:
        for count in counts if op is ops.SUM else counts[:1]:
            rng = np.random.default_rng(7)
            everybody = [rng.integers(0, 2, count).astype(dtype) for _ in range(size)]
            expected = UFUNCS[op].reduce(everybody, 0).astype(dtype)
            if op is ops.AVG:
                expected = (expected / np.dtype(dtype).type(size)).astype(dtype)
            x = xp.asarray(everybody[group.rank()])
            dist.all_reduce(x, op, group=group)
            np.testing.assert_allclose(x.get(), expected, rtol=1e-3, err_msg=f"{op} {count}")
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, hashlib.sha256(x.get().tobytes()).digest())
            assert len(set(found)) == 1


def test_not_a_number(group: Any) -> None:
    """MIN and MAX keep NaN, as on the host."""
    proven(group)
    xp = cupy()
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        x = xp.ones(MIB)
        x[group.rank()] = xp.nan
        dist.all_reduce(x, op, group=group)
        assert xp.isnan(x[: group.size()]).all()
        assert (x[group.size() :] == 1).all()


def test_bfloat16(group: Any) -> None:
    """torch's bfloat16 is reduced as float32, and rounded once."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch knows no GPU")
    proven(group)
    torch.manual_seed(8)
    everybody = torch.randn(group.size(), 5 * MIB, dtype=torch.float32).to(torch.bfloat16)
    x = everybody[group.rank()].to("cuda:0")
    dist.all_reduce(x, group=group)
    total = everybody[0].float()
    for each in everybody[1:]:
        total += each.float()
    assert (x.cpu() == total.to(torch.bfloat16)).all()


def test_layouts(group: Any) -> None:
    """Transposed, strided and backward views."""
    proven(group)
    xp, size = cupy(), group.size()
    for make in (lambda w: w.T, lambda w: w[:, ::2], lambda w: w[::-1]):
        whole = xp.ones((1500, 1600))
        view = make(whole)
        dist.all_reduce(view, group=group)
        assert (view == size).all()
        assert float(whole.sum()) == whole.size + view.size * (size - 1)


@pytest.mark.parametrize("async_op", [False, True])
def test_behind_kernels(async_op: bool, group: Any) -> None:
    """A call reads what slow kernels before it write, and those after it read its results; on several streams."""
    proven(group)
    xp, size = cupy(), group.size()
    for stream in (xp.cuda.Stream.null, xp.cuda.Stream(), xp.cuda.Stream(non_blocking=True)):
        with stream:
            x = xp.zeros(20 * MIB)
            for turn in range(4):
                spin()
                x[:] = turn + 1.0
                work = dist.all_reduce(x, group=group, async_op=async_op)
                if work is not None:
                    work.wait()
                y = x * 2
                x[:] = -1
                assert (y == 2 * size * (turn + 1.0)).all()


def test_memory_of_the_asynchronous_allocator(group: Any) -> None:
    """Memory that could not be exported itself is reduced all the same."""
    proven(group)
    xp = cupy()
    try:
        pool = xp.cuda.MemoryAsyncPool()
    except Exception as error:
        pytest.skip(f"no asynchronous allocator: {error}")
    with xp.cuda.using_allocator(pool.malloc):
        x = xp.ones(3 * MIB)
        dist.all_reduce(x, group=group)
        assert (x == group.size()).all()


def test_two_groups_in_turn(group: Any) -> None:
    """Calls on two groups, each with a window of its own."""
    proven(group)
    xp, other = cupy(), dist.new_group()
    x, y = xp.ones(MIB), xp.ones(MIB)
    for turn in range(10):
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(y, dist.ReduceOp.AVG, group=other)
        assert (x == 1).all(), turn
        assert (y == 1).all(), turn


@pytest.mark.timed
def test_how_fast(group: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed, for the report: all_reduce of float32 on the GPU and by way of the host, in turn, median of nine calls each."""
    proven(group)
    xp, state = cupy(), registry.state()
    on, off = (replace(state.settings, cuda_ipc=choice) for choice in ("auto", "off"))
    lines = []
    for mib in (1, 4, 16, 64, 256):
        x = xp.zeros(mib * MIB // 4, xp.float32)
        times: dict[str, list[float]] = {"auto": [], "off": []}
        for turn in range(11):
            for settings in (on, off):
                monkeypatch.setattr(state, "settings", settings)
                xp.cuda.get_current_stream().synchronize()
                dist.barrier(group)
                start = time.perf_counter()
                dist.all_reduce(x, group=group)
                xp.cuda.get_current_stream().synchronize()
                took = np.array([time.perf_counter() - start])
                dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
                if turn > 1:
                    times[settings.cuda_ipc].append(float(took[0]) * 1e3)
        middle = {name: statistics.median(values) for name, values in times.items()}
        spread = {name: f"{min(values):.2f} to {max(values):.2f}" for name, values in times.items()}
        lines.append(
            f"{mib:4} MiB: on the GPU {middle['auto']:8.2f} ms ({spread['auto']}), by way of the host {middle['off']:8.2f} ms "
            f"({spread['off']}): {middle['off'] / middle['auto']:.1f}x"
        )
    if group.rank() == 0:
        with capsys.disabled():
            print(f"\nall_reduce of {group.size()} ranks that share a GPU", *lines, sep="\n")
