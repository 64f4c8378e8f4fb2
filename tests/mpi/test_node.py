"""The node engine: what moves through shared memory is right for every kind, dtype, op, size and part of the ranks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import left_in_memory

import mpicoll as dist
from mpicoll.transports.base import Kind
from mpicoll.transports.selection import Choice
from mpicoll.transports.shm import mapping
from mpicoll.transports.shm import transport as node_engine

pytestmark = pytest.mark.mpi(min_size=2)

ROOM = 4096  # bytes of a buffer here, so that little data takes many pieces


def on_one_node() -> bool:
    return dist.node_group().size() == dist.get_world_size()


@pytest.fixture(params=["whole", "parts"])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A group whose data moves through small buffers only; reduced whole, and in parts."""
    monkeypatch.setattr(node_engine, "WHOLE_BYTES", 1 << 30 if request.param == "whole" else -1)
    monkeypatch.setattr(node_engine, "WHOLE_BYTES_OVERSUBSCRIBED", 1 << 30 if request.param == "whole" else -1)
    made = dist.new_group()
    pair = made.pair
    if pair.node is not None:  # else the members are on several nodes, and all goes through MPI
        pair.node = node_engine.SharedMemoryTransport(pair.data, Small(1 << 24), dist.get_world_size() > 2)
    pair.choice = Choice("node")
    yield made
    if pair.node is not None:
        assert pair.node.usable, pair.node.why
    pair.node = None
    pair.choice = Choice()
    dist.destroy_process_group(made)


class Small(node_engine.Budget):
    def room(self, size: int) -> int:
        return ROOM


def used(group: Any) -> bool:
    return group.pair.node is None or group.pair.node.ready


def values(rank: int, size: int, dtype: Any) -> Any:
    """What a rank contributes: small whole numbers, the same wherever they are made."""
    there = np.random.default_rng(1000 * rank + size).integers(1, 4, size)
    if np.dtype(dtype).kind == "b":
        return (there > 2).astype(dtype)
    if np.dtype(dtype).kind == "c":
        return (there + 1j * there[::-1]).astype(dtype)
    return there.astype(dtype)


SIZES = (1, 5, ROOM // 8, ROOM // 8 + 1, 3 * ROOM // 8 + 17)
NUMPY = {"SUM": np.add, "PRODUCT": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "BXOR": np.bitwise_xor}


def folded(op: str, parts: list[Any]) -> Any:
    result = parts[0].copy()
    for part in parts[1:]:
        result = NUMPY[op](result, part).astype(result.dtype)
    return result


@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        "int8",
        "bool",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("float32", "uint16", "int64", "complex64", "longdouble")
        ),
    ],
)
def test_reductions(group: Any, dtype: str) -> None:
    """all_reduce, reduce to each rank, and reduce_scatter, in place and not."""
    me, world = dist.get_rank(), dist.get_world_size()
    ops = {"c": ("SUM",), "b": ("MAX", "MIN", "BXOR"), "f": ("SUM", "PRODUCT", "MAX", "MIN")}
    for op, size in itertools.product(ops.get(np.dtype(dtype).kind, tuple(NUMPY)), SIZES):
        parts = [values(rank, size, dtype) for rank in range(world)]
        expected = folded(op, parts)
        x = parts[me].copy()
        for again in range(3):
            dist.all_reduce(x, getattr(dist.ReduceOp, op), group=group)
            assert (x == expected).all(), (op, size, again)
            x[...] = parts[me]
        for root in range(world):
            x = parts[me].copy()
            dist.reduce(x, root, getattr(dist.ReduceOp, op), group=group)
            assert (x == (expected if me == root else parts[me])).all(), (op, size, root)
        blocks = [values(rank, size * world, dtype) for rank in range(world)]
        out = np.empty(size, dtype)
        dist.reduce_scatter_single(out, blocks[me], getattr(dist.ReduceOp, op), group=group)
        assert (out == folded(op, blocks)[me * size : (me + 1) * size]).all(), (op, size)
    assert used(group)


def test_uneven_reduce_scatter(group: Any) -> None:
    """Blocks of unequal size, some of them empty."""
    me, world = dist.get_rank(), dist.get_world_size()
    for scale in (1, 300, 900):
        counts = [scale * (rank % 3) + (rank == 1) for rank in range(world)]
        everybody = [
            [values(10 * rank + i, count, "float64") for i, count in enumerate(counts)] for rank in range(world)
        ]
        out = np.full(counts[me], -1.0)
        dist.reduce_scatter(out, everybody[me], group=group)
        assert (out == sum(everybody[rank][me] for rank in range(world))).all(), scale
    assert used(group)


@pytest.mark.parametrize(
    "dtype", ["float64", pytest.param("uint8", marks=pytest.mark.slow), pytest.param("S7", marks=pytest.mark.slow)]
)
def test_movements(group: Any, dtype: str) -> None:
    """broadcast, all_gather, gather, scatter and all_to_all from and to each rank."""
    me, world = dist.get_rank(), dist.get_world_size()

    def made(rank: int, size: int) -> Any:
        return values(rank, size, "uint8").astype(dtype)

    for size in SIZES:
        for root in range(world):
            x = made(me, size)
            dist.broadcast(x, root, group=group)
            assert (x == made(root, size)).all(), (size, root)
            lists = [np.empty(size, dtype) for _ in range(world)] if me == root else None
            dist.gather(made(me, size), lists, root, group=group)
            for rank in range(world) if lists else ():
                assert (lists[rank] == made(rank, size)).all(), (size, root, rank)  # type: ignore[index]
            out = np.empty(size, dtype)
            dist.scatter(
                out, [made(7 * root + r, size) for r in range(world)] if me == root else None, root, group=group
            )
            assert (out == made(7 * root + me, size)).all(), (size, root)
        whole = np.empty(size * world, dtype)
        dist.all_gather_single(whole, made(me, size), group=group)
        assert (whole == np.concatenate([made(rank, size) for rank in range(world)])).all(), size
        dist.all_to_all_single(whole, np.concatenate([made(9 * me + r, size) for r in range(world)]), group=group)
        assert (whole == np.concatenate([made(9 * rank + me, size) for rank in range(world)])).all(), size
    assert used(group)


def test_uneven_movements(group: Any) -> None:
    """Blocks of unequal size, some of them empty, and lists of arrays."""
    me, world = dist.get_rank(), dist.get_world_size()
    for scale in (1, 400, 1100):
        counts = [scale * ((rank + 1) % 3) for rank in range(world)]
        outs = [np.full(count, -1.0) for count in counts]
        dist.all_gather(outs, values(me, counts[me], "float64"), group=group)
        for rank, out in enumerate(outs):
            assert (out == values(rank, counts[rank], "float64")).all(), (scale, rank)
        sends = [values(5 * me + r, scale * ((me + r) % 3), "float64") for r in range(world)]
        recvs = [np.full(scale * ((me + r) % 3), -1.0) for r in range(world)]
        dist.all_to_all(recvs, sends, group=group)
        for rank, out in enumerate(recvs):
            assert (out == values(5 * rank + me, out.size, "float64")).all(), (scale, rank)
    assert used(group)


def test_asynchronous_calls_in_any_order(group: Any) -> None:
    """Calls under way at once, waited for in another order, beside calls that are waited for."""
    me, world = dist.get_rank(), dist.get_world_size()
    arrays = [np.full(ROOM // 8 + number, me + number, np.float64) for number in range(6)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in arrays]
    x = np.full(2000, 1.0)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x)
    assert (x == world * world).all()
    for work in works[::-1] if me else works:
        work.wait()
    for number, array in enumerate(arrays):
        assert (array == sum(rank + number for rank in range(world))).all(), number


def test_bitwise_the_same_on_all_ranks(group: Any) -> None:
    """Sums whose rounding depends on the order: the same bits on all ranks, and each time; nothing is said of overflows."""
    me = dist.get_rank()
    mine = np.random.default_rng(me).normal(size=5000) * 10.0 ** np.random.default_rng(me + 50).integers(-8, 8, 5000)
    mine[:4] = [np.nan if me == 1 else 1.0, np.inf, -np.inf if me else np.inf, 1e308]
    results = []
    with np.errstate(all="raise"):
        for _ in range(3):
            x = mine.copy()
            dist.all_reduce(x, group=group)
            results.append(x.tobytes())
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, results)
    assert {text for texts in told for text in texts} == {results[0]}


def test_a_mismatch_leaves_the_group_good(group: Any) -> None:
    """A mismatch in the middle of calls through shared memory raises on all ranks; the next calls are right."""
    me, world = dist.get_rank(), dist.get_world_size()
    x = np.ones(4000)
    dist.all_reduce(x, group=group)
    with pytest.raises(dist.CollectiveMismatchError):
        dist.all_reduce(np.ones(4000 + me), group=group)
    with pytest.raises(dist.CollectiveMismatchError):
        (dist.all_reduce if me else dist.broadcast)(
            np.ones(4000), **({"group": group} if me else {"src": 0, "group": group})
        )
    dist.all_reduce(x, group=group)
    assert (x == world * world).all()


@pytest.mark.parametrize("missing", ["folder", "space", "budget"])
def test_without_shared_memory(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where one rank has no shared memory, all use MPI, say so in one line, and leave nothing behind."""
    me, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    if group.pair.node is None or group.pair.choice.mode == "mpi":
        return
    monkeypatch.setattr("mpicoll.operations.execution._said_why_not", [])
    budget = node_engine.Budget(0 if missing == "budget" and me == 1 else 1 << 24)
    group.pair.node = node_engine.SharedMemoryTransport(group.pair.data, budget, False)
    before = left_in_memory("segment")
    if missing == "folder" and me == 0:
        monkeypatch.setattr(mapping, "DIRECTORY", str(tmp_path / "missing"))
    if missing == "space" and me == 1:

        def full(descriptor: int, start: int, size: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(mapping, "reserve", full)
    for _ in range(2):
        x = np.full(50_000, me + 1.0)
        dist.all_reduce(x, group=group)
        assert (x == world * (world + 1) / 2).all()
    assert not group.pair.node.usable
    guilty = me == (0 if missing == "folder" else 1)
    said = capfd.readouterr().err
    assert said.count("no shared memory for group") == guilty, said
    dist.barrier()
    assert not left_in_memory("segment") - before
    group.pair.node = None
    dist.destroy_process_group(group)


def test_what_is_chosen() -> None:
    """auto is the table's word, mpi never, node always but for barriers."""
    assert not Choice("mpi").node(Kind.ALL_REDUCE, 1 << 30)
    assert Choice("node").node(Kind.BROADCAST, 1)
    assert not Choice("node").node(Kind.BARRIER, 0)
    chosen = Choice("auto", ranges={Kind.REDUCE: [(1000, 2000), (4000, 5000)]})
    assert [size for size in (999, 1000, 2000, 2001, 4500, 5001) if chosen.node(Kind.REDUCE, size)] == [
        1000,
        2000,
        4500,
    ]
    assert not chosen.node(Kind.GATHER, 1 << 40)


@pytest.mark.parametrize("size", [1, 3000, 70_001])
def test_arrays_in_shared_memory(size: int) -> None:
    """all_reduce in place of shared arrays, of parts of them, mixed with others, and again when arrays have gone."""
    me, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    x, y = (dist.empty((size, 2), "float64", group=group) for _ in range(2))
    assert (x.shape, x.dtype) == ((size, 2), np.float64)
    total = world * (world + 1) / 2
    for again in range(3):
        x[...] = me + 1
        y[...] = 2 * me + 2
        dist.all_reduce(x, group=group)
        assert (x == total).all(), again
        assert (y == 2 * me + 2).all(), again
        dist.all_reduce(y[size // 2 :], group=group)  # a part
        assert (y[size // 2 :] == 2 * total).all(), again
        assert (y[: size // 2] == 2 * me + 2).all(), again
        part = x if me else y  # not the same on all: copied
        part[...] = me + 1
        dist.all_reduce(part, group=group)
        assert (part == total).all(), again
        plain = np.full((size, 2), me + 1.0)
        dist.all_reduce(x if me == 0 and x.fill(1.0) is None else plain, group=group)
        assert ((plain if me else x) == total).all(), again
        x[...] = me + 1
        out = dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True)
        out.wait()
        assert (x == world).all(), again
    kept = x[1:] if size > 1 else x
    del x, y, part
    kept[...] = me
    dist.all_reduce(kept, group=group)
    assert (kept == world * (world - 1) / 2).all()
    dist.destroy_process_group(group)


def test_wrong_arguments_of_empty() -> None:
    """What cannot be allocated raises on all ranks; without ``shared`` nothing is communicated."""
    me = dist.get_rank()
    with pytest.raises((TypeError, ValueError, dist.CollectiveMismatchError)):
        dist.empty(-1 if me == 0 else 3)
    with pytest.raises((TypeError, dist.CollectiveMismatchError)):
        dist.empty(3, object if me == 1 else float)
    with pytest.raises(dist.CollectiveMismatchError):
        dist.empty(3 + me)
    if me == 0:
        assert dist.empty((2, 3), "int8", shared=False).shape == (2, 3)
    assert dist.empty(0).size == 0
    assert dist.empty((4, 0, 2), "float32").shape == (4, 0, 2)


def test_ranks_that_count_their_cores_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a node is crowded is agreed, since what is done depends on it."""
    from mpi4py import MPI

    from mpicoll.transports.topology import discover

    me = dist.get_rank()
    monkeypatch.setattr(os, "cpu_count", lambda: 64 if me == 0 else 1)
    found = discover(MPI.COMM_WORLD)
    assert found.cores == (1 if len(found.local_ranks) > 1 or me else 64)
