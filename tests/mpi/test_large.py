"""More elements than a C int can count: every call with a lowered limit, and some with buffers of more than 2 GiB."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import collective_cases as cases
import jobs
import numpy as np
import pytest

import mpicoll as dist
from mpicoll import ReduceOp
from mpicoll.groups import registry
from mpicoll.operations import dispatch
from mpicoll.transports import large_counts
from mpicoll.transports.mpi.collectives import MpiTransport

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("rounds_of_mpi")]

LOWERED = 1000
COUNTS = (60, 400)

Calls = list[tuple[str, int]]


def largest(arguments: tuple[Any, ...]) -> int:
    """Return the largest count or displacement among the arguments of a native call."""
    most = 0
    for argument in arguments:
        if isinstance(argument, tuple) and len(argument) == 3:
            counts, displs = argument[1]
            most = max(most, *counts, *displs)
        elif isinstance(argument, list):
            most = max(most, *argument)
        elif isinstance(argument, tuple):
            most = max(most, argument[0].size)
    return most


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Lower the limit, and note the name and the largest number of every native collective."""
    seen: Calls = []
    call, contiguous = MpiTransport.call, large_counts._contiguous

    def noted(self: MpiTransport, move: Any) -> tuple[str, tuple[Any, ...]]:
        name, arguments = call(self, move)
        seen.append((name, largest(arguments)))
        return name, arguments

    def derived(array: Any) -> Any:
        seen.append(("derived type", 1))
        return contiguous(array)

    monkeypatch.setattr(MpiTransport, "call", noted)
    monkeypatch.setattr(large_counts, "_contiguous", derived)
    monkeypatch.setattr(large_counts, "COUNT_LIMIT", LOWERED)
    monkeypatch.setattr(dispatch, "LARGEST", LOWERED)
    registry.state().world.prepared.clear()
    return seen


def test_collectives_below_a_lowered_limit(native: Calls) -> None:
    """Every collective gives what NumPy gives, waited for or not, and no native call sees a number above the limit."""
    for turn, name in enumerate(cases.ALL):
        dtype = "dfgi"[turn % 4]
        for count, async_op in ((COUNTS[0], True), (COUNTS[1], False), (COUNTS[1], True)):
            root = turn % dist.get_world_size()
            cases.run(name, iter([cases.Case(dtype, count, root=root, async_op=async_op, seed=turn)]))
            odd = [(call, most) for call, most in native if most > LOWERED]
            assert not odd, f"{name} of {count} {dtype}, async_op={async_op}: {odd}"
        if not name.endswith(("uneven", "splits")):  # these have few elements on few ranks
            assert len(native) > 3, f"{name} was not cut: {native}"
        native.clear()


@pytest.mark.slow
@pytest.mark.mpi_timeout(180)
def test_many_dtypes_below_a_lowered_limit(native: Calls) -> None:
    """Dtypes of every size and their operations, about the limit, from every root."""
    for name in cases.ALL:
        for dtype in "?dG":
            cases.run(name, cases.taste(name, dtype, (0, 60, 250, 1001)))
            assert max(most for _, most in native) <= LOWERED, (name, dtype)
            native.clear()


@pytest.mark.slow
@pytest.mark.mpi_timeout(180)
def test_at_other_check_levels(native: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not compared is cut alike."""
    for level in ("roll", "off"):
        monkeypatch.setattr(registry.state().world, "level", level)
        for name in cases.ALL:
            for count in COUNTS:
                cases.run(name, iter([cases.Case("d", count, async_op=count % 2 == 0)]))
                assert max((most for _, most in native), default=0) <= LOWERED, (level, name, count)
        dist.barrier()


def test_calls_that_follow_each_other(native: Calls) -> None:
    """Calls under way at once, large and small, keep their order, whichever is waited for first."""
    size, rank = dist.get_world_size(), dist.get_rank()
    xs = [np.full(count, float(rank + turn)) for turn, count in enumerate((2000, 3, 1500, 300))]
    outs = [np.zeros((size, x.size)) for x in xs]
    works = [
        work
        for x, out in zip(xs, outs, strict=True)
        for work in (dist.all_gather_single(out, x, async_op=True), dist.all_reduce(x.copy(), async_op=True))
    ]
    small = np.ones(2)
    dist.all_reduce(small)
    for work in reversed(works):
        assert work is not None
        work.wait()
    assert (small == size).all()
    for turn, out in enumerate(outs):
        assert (out == (np.arange(size) + turn)[:, None]).all()


def test_fused_below_a_lowered_limit(native: Calls) -> None:
    """Buckets, and gathers of lists."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for async_op in (False, True):
        arrays = [np.full(count, rank + 1.0, dtype) for count, dtype in ((700, "d"), (9, "f"), (2500, "f"), (30, "d"))]
        outs = [[np.zeros(7), np.zeros(800 + r)] for r in range(size)]
        mine = [np.full(7, float(rank)), np.full(800 + rank, float(-rank))]
        for work in (
            dist.average_gradients(arrays, async_op=async_op, bucket_bytes=8000),
            dist.all_gather_coalesced(outs, mine, async_op=async_op),
        ):
            if work is not None:
                work.wait()
        assert all((x == (size + 1) / 2).all() for x in arrays)
        assert all((a == r).all() and (b == -r).all() for r, (a, b) in enumerate(outs))
    assert max(most for _, most in native) <= LOWERED


@pytest.mark.mpi(min_size=2)
def test_messages_below_a_lowered_limit(native: Calls) -> None:
    """Messages keep their elements and their order, sent once or again and again, waited for or not, to any receive."""
    size, rank = dist.get_world_size(), dist.get_rank()
    to, source = (rank + 1) % size, (rank - 1) % size
    for dtype in "?bidDg":
        for count in (5000, 5120, 9999, 20_001):
            x, y = cases.values(dtype, count, rank), np.zeros(count, dtype)
            work = dist.isend(x, to)
            assert work is not None
            dist.recv(y, source if count % 2 else None)
            work.wait()
            assert (y == cases.values(dtype, count, source)).all(), (dtype, count)
    assert ("derived type", 1) in native
    native.clear()
    for turn in range(5):  # the last ones by persistent requests
        x, y = cases.values("f", 5001, rank, turn), np.zeros(5001, "f")
        for sends in (True, False):
            if (rank % 2 == 0) == sends and (sends or rank):
                if rank % 2 == 0 and rank + 1 < size:
                    dist.send(x, rank + 1)
                elif rank % 2:
                    dist.recv(y, rank - 1)
                    assert (y == cases.values("f", 5001, rank - 1, turn)).all(), turn
    assert len(native) == (5 if rank % 2 or rank + 1 < size else 0)


BIG = 2**31 + 1000
HALF = 1_100_000_000
FREE = 10 << 30  # two ranks take 8.6 GiB at most
FREE_WITHIN = 90.0  # seconds: what runs beside this gives its memory back some time
LONG = timedelta(seconds=150)
PATTERN = 101


def patterned(count: int, offset: int = 0) -> Any:
    """Return int8 elements that repeat themselves after a prime number of them."""
    return np.resize(((np.arange(PATTERN) + offset) % PATTERN).astype(np.int8), count)


def is_pattern(x: Any, offset: int = 0) -> bool:
    """Whether ``x`` is what :func:`patterned` gives, without another array of its size."""
    step = PATTERN << 16
    wanted = patterned(step, offset)
    return all(np.array_equal(x[at : at + step], wanted[: min(step, x.size - at)]) for at in range(0, x.size, step))


@pytest.fixture
def room() -> None:
    """Skip unless two ranks share a machine with enough memory, now or soon."""
    if dist.get_world_size() != 2:
        pytest.skip("buffers of more than 2 GiB, only on 2 ranks")
    until = time.monotonic() + FREE_WITHIN
    while True:
        state = np.array([available(), until - time.monotonic() > 0])
        dist.all_reduce(state, ReduceOp.MIN)
        if state[0] >= FREE:
            return
        if not state[1]:
            pytest.skip(f"this machine lacks {FREE >> 30} GiB of memory")
        time.sleep(1)


def available() -> int:
    """Return the bytes of memory that programs could have."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


def big_all_reduce(rank: int) -> None:
    x = patterned(BIG) if rank else np.zeros(BIG, np.int8)
    dist.all_reduce(x, ReduceOp.MAX, timeout=LONG)
    assert is_pattern(x)


def big_broadcast(rank: int) -> None:
    x = patterned(BIG) if rank else np.zeros(BIG, np.int8)
    dist.broadcast(x, 1, timeout=LONG)
    assert is_pattern(x)


def big_broadcast_async(rank: int) -> None:
    x = patterned(BIG) if rank == 0 else np.zeros(BIG, np.int8)
    work = dist.broadcast(x, 0, async_op=True, timeout=LONG)
    assert work is not None
    work.wait()
    assert is_pattern(x)


def big_all_gather(rank: int) -> None:
    out = np.zeros(2 * HALF, np.int8)
    dist.all_gather_single(out, patterned(HALF, rank), timeout=LONG)
    assert is_pattern(out[:HALF])
    assert is_pattern(out[HALF:], 1)


def big_gather(rank: int) -> None:
    blocks = [np.zeros(HALF, np.int8) for _ in range(2)] if rank == 0 else None
    dist.gather(patterned(HALF, rank), blocks, 0, timeout=LONG)
    for other, block in enumerate(blocks or ()):
        assert is_pattern(block, other)


def big_all_to_all(rank: int) -> None:
    x, y = patterned(2 * HALF, rank), np.zeros(2 * HALF, np.int8)
    work = dist.all_to_all_single(y, x, async_op=rank == 0, timeout=LONG)
    if work is not None:
        work.wait()
    assert is_pattern(y[:HALF], rank * HALF)
    assert is_pattern(y[HALF:], rank * HALF + 1)


def big_message(rank: int) -> None:
    if rank:
        dist.send(patterned(BIG), 0, timeout=LONG)
    else:
        y = np.zeros(BIG, np.int8)
        dist.recv(y, 1, timeout=LONG)
        assert is_pattern(y)


# They take 4 to 80 s each: on Open MPI the second and the third.
BIG_CALLS = [
    big_all_reduce,
    big_all_to_all,
    big_message,
    big_broadcast,
    big_broadcast_async,
    big_all_gather,
    big_gather,
]


@pytest.mark.slow
@pytest.mark.both_mpis
@pytest.mark.mpi_timeout(300)
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("call", BIG_CALLS if jobs.family() == "mpich" else BIG_CALLS[1:3])
def test_more_than_2_gib(call: Callable[[int], None]) -> None:
    """Buffers, or totals, of more than 2**31 - 1 bytes move as others do."""
    call(dist.get_rank())
    dist.barrier(timeout=LONG)
