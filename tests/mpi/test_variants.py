"""Every collective on subgroups, in pieces, through every way of moving data, and on arrays of unusual shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import collective_cases as cases
import numpy as np
import pytest

import mpicoll as dist
from mpicoll.diagnosis.call import CallDescription
from mpicoll.memory import adapt, lists
from mpicoll.memory.memory import Memory
from mpicoll.operations import execution
from mpicoll.operations.prepare import collectives, gathering, run, scattering
from mpicoll.runtime.call_site import call_site
from mpicoll.transports.base import Kind, Movement
from mpicoll.transports.control import AS_IT_IS
from mpicoll.transports.mpi.collectives import MpiTransport

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("rounds_of_mpi")]


def memberships(size: int) -> Iterator[tuple[list[int], bool]]:
    """Yield lists of global ranks, and whether they are to be sorted."""
    everybody = list(range(size))
    yield everybody[::-1], False
    yield everybody[::2], True
    yield everybody[1:] or [0], True
    yield [size - 1], True
    yield [size - 1, *everybody[: size - 1]], False
    yield [size - 1, 0] if size > 1 else [0], False


def test_every_collective_on_subgroups() -> None:
    """On a subgroup, sorted or not, ranks, roots and lists are those of the group."""
    for ranks, sort_ranks in memberships(dist.get_world_size()):
        group = dist.new_group(ranks, sort_ranks=sort_ranks)
        if dist.get_rank() in ranks:
            assert dist.get_process_group_ranks(group) == (sorted(ranks) if sort_ranks else ranks)
            cases.every_collective(group, dtype="i")
            dist.destroy_process_group(group)
        else:
            assert group == dist.GroupMember.NON_GROUP_MEMBER


@pytest.mark.parametrize(
    "mode", ["pieces", "one piece", "one byte a piece", "owned buffers", "without MPI-4", "posted", "linear"]
)
def test_every_way_of_moving_gives_the_same(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocking calls whole or in pieces, posted and waited for, or polled, persistent or not: or linear: all agree with NumPy."""
    if mode == "without MPI-4":
        monkeypatch.setattr("mpicoll.transports.mpi.collectives.persistent_collectives", lambda: False)
        monkeypatch.setattr("mpicoll.transports.mpi.control.persistent_collectives", lambda: False)
    elif mode != "owned buffers":
        limit = {"pieces": 300, "one byte a piece": 1}.get(mode, 1 << 20)
        monkeypatch.setattr(execution, "SMALL_BYTES", 0)
        monkeypatch.setattr(execution, "NATIVE_BYTES", limit)
        monkeypatch.setattr(execution, "BLOCKS", 1)
        if mode == "linear":
            chosen = (Kind.GATHER, Kind.SCATTER)
            monkeypatch.setattr(MpiTransport, "_passes_counts", lambda _, move: move.vector or move.kind in chosen)
        if mode == "posted":
            monkeypatch.setattr("mpicoll.transports.mpi.collectives._is_posted", lambda name, arguments: True)
    group = dist.new_group()
    counts = (0, 1, 5) if mode == "one byte a piece" else (0, 5, 37)
    cases.every_collective(group, counts)
    if mode == "pieces":
        cases.every_collective(group, (11,), "G")
        cases.every_collective(group, (101,), "b")
    dist.destroy_process_group(group)


def test_the_same_call_again_and_again() -> None:
    """Plans that are kept for a repeated call give each call its own data, whatever was called between."""
    for turn in range(20):
        for count in (3, 4):
            for dtype in "fd":
                for name in ("all_reduce", "all_to_all", "broadcast", "reduce_scatter_tensor", "all_gather_single"):
                    cases.run(name, iter((cases.Case(dtype, count, seed=turn),)))


def test_more_calls_than_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are dropped when there are too many, and made again."""
    monkeypatch.setattr("mpicoll.groups.process_group.MOST_PLANS", 3)
    group = dist.new_group()
    for turn in range(12):
        cases.run("all_reduce", iter((cases.Case("d", 1 + turn % 5, group=group, seed=turn),)))
    assert len(group.plans) <= 3
    dist.destroy_process_group(group)


SHAPES: tuple[Any, ...] = ((), (0,), (0, 3), (3, 0, 2), (1,), (2, 3), (2, 1, 3, 2))


def test_arrays_of_every_shape() -> None:
    """0-d, empty and multi-dimensional arrays keep their shape, and every element of theirs takes part."""
    size, rank = dist.get_world_size(), dist.get_rank()
    total = size * (size + 1) // 2
    for shape in SHAPES:
        for async_op in (False, True):
            where = f"{shape}, async_op={async_op}"

            def done(work: Any, async_op: bool = async_op) -> None:
                if async_op:
                    work.wait()

            x = np.full(shape, rank + 1.0)
            done(dist.all_reduce(x, async_op=async_op))
            assert x.shape == shape, where
            assert (x == total).all(), where
            done(dist.broadcast(x, 0, async_op=async_op))
            done(dist.reduce(x, 0, async_op=async_op))
            assert rank or (x == total * size).all(), where
            mine, outputs = np.full(shape, float(rank)), [np.zeros(shape) for _ in range(size)]
            done(dist.all_gather(outputs, mine, async_op=async_op))
            assert all((output == r).all() and output.shape == shape for r, output in enumerate(outputs)), where
            stacked = np.zeros((size, *shape))
            done(dist.all_gather_single(stacked, mine, async_op=async_op))
            assert all((stacked[r] == r).all() for r in range(size)), where
            done(dist.gather(mine, outputs if rank == 0 else None, async_op=async_op))
            done(dist.scatter(mine, outputs if rank == 0 else None, async_op=async_op))
            assert (mine == rank).all(), where
            done(dist.reduce_scatter(mine, outputs, async_op=async_op))
            assert (mine == size * rank).all(), where
            done(dist.reduce_scatter_tensor(mine, stacked, async_op=async_op))
            assert (mine == size * rank).all(), where
            done(dist.all_to_all(outputs, [np.full(shape, 10.0 * rank + r) for r in range(size)], async_op=async_op))
            assert all((output == 10 * r + rank).all() for r, output in enumerate(outputs)), where


def test_lists_may_hold_arrays_of_different_shapes() -> None:
    """Only the number of elements matters: a list takes any shape of the right size."""
    size, rank = dist.get_world_size(), dist.get_rank()
    outputs = [np.zeros(shape) for _, shape in zip(range(size), ((6,), (2, 3), (3, 2), (1, 6), (6, 1)), strict=False)]
    dist.all_gather(outputs, np.full((2, 3), float(rank)))
    assert all((output == r).all() for r, output in enumerate(outputs))


def test_subclasses_of_ndarray_are_taken_as_memory(tmp_path: Any) -> None:
    """np.matrix and np.memmap take part as the arrays that they are."""
    size = dist.get_world_size()
    for async_op in (False, True):
        for x in (np.ones((2, 2)).view(np.matrix), np.memmap(tmp_path / "x", "d", "w+", shape=(2, 2))):
            x[...] = np.array([[1, 2], [3, 4]])
            work = dist.all_reduce(x, async_op=async_op)
            if work is not None:
                work.wait()
            assert (np.asarray(x) == size * np.array([[1, 2], [3, 4]])).all(), type(x)
            outputs = [np.zeros((2, 2)).view(type(x)) if isinstance(x, np.matrix) else np.zeros(4) for _ in range(size)]
            dist.all_gather(outputs, x)
            assert all((np.asarray(o).ravel() == np.asarray(x).ravel()).all() for o in outputs), type(x)


def test_an_output_may_be_its_own_input() -> None:
    """Input and output of one call may share memory, as torch allows."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for count in (2, 5000):
        everything = np.zeros((size, count))
        everything[rank] = rank + 1
        dist.all_gather_single(everything, everything[rank])
        for root in range(size):
            gathered = np.zeros((size, everything.shape[1]))
            gathered[rank] = rank + 1
            dist.gather_single(gathered[rank], gathered if rank == root else None, root)
            assert (gathered == [[r + 1 if root == rank or r == rank else 0] for r in range(size)]).all()
        assert (everything == np.arange(1, size + 1)[:, None]).all(), count
        dist.reduce_scatter_tensor(everything[rank], everything)
        assert (everything[rank] == size * (rank + 1)).all(), count
        x = np.repeat(np.arange(size) + 10.0 * rank, count)
        dist.all_to_all_single(x, x)
        assert (x == np.repeat(10.0 * np.arange(size) + rank, count)).all(), count
        parts = [np.full(count, 10.0 * rank + r) for r in range(size)]
        dist.all_to_all(parts, parts)
        assert all((part == 10 * r + rank).all() for r, part in enumerate(parts)), count
        dist.all_gather(parts, parts[rank])
        assert all((part == 11 * r).all() for r, part in enumerate(parts)), count


def test_inputs_are_left_as_they_were_and_may_be_read_only() -> None:
    """What is only read may be read-only, and is never written, not even for PREMUL_SUM or AVG."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for count in (3, 5000):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM(2.0)):
            x = np.full(size * count, rank + 1.0)
            x.flags.writeable = False
            part = np.zeros(count)
            dist.reduce_scatter_tensor(part, x, op)
            dist.reduce_scatter(part, list(x.reshape(size, count)), op)
            dist.all_to_all_single(np.zeros(size * count), x)
            dist.all_gather_single(np.zeros(size * size * count), x)
            dist.gather(x, [np.zeros(size * count) for _ in range(size)] if rank == 0 else None)
            dist.scatter(part, list(x.reshape(size, count)) if rank == 0 else None)
            dist.broadcast(x if rank == 0 else np.zeros(size * count), 0)
            if rank:
                dist.reduce(x, 0, op)
            else:
                dist.reduce(x.copy(), 0, op)
            assert (x == rank + 1).all(), f"{count}, {op}"


def test_per_call_options_of_the_factor() -> None:
    """PREMUL_SUM takes a number or an array of one element, and each rank its own."""
    size, rank = dist.get_world_size(), dist.get_rank()
    total = sum((r + 1) * 2.0 for r in range(size))
    for factor in (rank + 1, float(rank + 1), np.float32(rank + 1), np.array(rank + 1.0), np.array([[rank + 1.0]])):
        x = np.full(3, 2.0)
        dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(factor))
        assert (x == total).all(), f"{factor!r}: {x}"
        y = np.full(3, 2.0)
        dist.reduce(y, 0, dist.ReduceOp.PREMUL_SUM(factor))
        assert (y == (2.0 if rank else total)).all(), f"{factor!r}: {y}"


@pytest.mark.mpi(min_size=2)
def test_members_use_an_engine_that_serves_all_of_them() -> None:
    """The choice of the engine is part of the agreement: one that a single member cannot use is used by nobody."""
    group = dist.new_group()
    node, native = group.pair.node, group.pair.native
    if node is None or group.pair.selection.mode == "mpi":
        return  # its members are on several nodes, or all goes through MPI: nothing to choose
    used: list[str] = []

    class Named:
        def __init__(self, name: str, real: Any) -> None:
            self.name, self.real = name, real

        def __getattr__(self, method: str) -> Any:
            if method not in ("ready", "usable", "prepare"):
                used.append(self.name)
            return getattr(self.real, method)

    group.pair.node, group.pair.native = Named("node", node), Named("native", native)
    me, size = dist.get_rank(), dist.get_world_size()
    try:
        for elements in (30_000, 40_000):
            for everybody, able in ((True, True), (False, me > 0)):
                used.clear()
                flat = np.full(elements, me + 1.0)
                call = CallDescription(
                    "all_reduce", ("engine test", elements), call_site(), device=0 if able else AS_IT_IS
                )
                execution.run(group, call, Movement(Kind.ALL_REDUCE, recv=flat, op="SUM"), outputs=[flat])
                expected = "node" if everybody else "native"
                assert set(used) == {expected}, (elements, able, used)
                assert (flat == size * (size + 1) / 2).all()
    finally:
        group.pair.node, group.pair.native = node, native
        dist.destroy_process_group(group)


def test_memory_that_is_packed_and_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every collective gives the same through memory of the library's own that is packed when its transfer starts."""
    packs = unpacks = 0

    def owned(value: Any, name: str, *, writable: bool, **_: Any) -> Memory:
        nonlocal packs, unpacks
        direct = adapt.adapt(value, name, writable=writable).flat
        flat = np.full(direct.size, 85, direct.dtype)  # whoever reads it unpacked gets wrong results

        def pack() -> None:
            nonlocal packs
            packs += 1
            flat[...] = direct

        def unpack() -> None:
            nonlocal unpacks
            unpacks += 1
            direct[...] = flat

        return Memory(flat, value.shape, pack=pack, unpack=unpack if writable else None)

    def owned_list(values: Any, name: str, *, writable: bool, length: int | None = None, **_: Any) -> list[Memory]:
        adapt.adapt_list(values, name, writable=writable, length=length)
        return [owned(value, name, writable=writable) for value in values]

    for module in (collectives, gathering, scattering, lists):
        monkeypatch.setattr(module, "adapt", owned, raising=False)
        monkeypatch.setattr(module, "adapt_list", owned_list, raising=False)
    monkeypatch.setattr(run, "_cache", lambda *_: None)  # what is kept takes the array's own memory
    group = dist.new_group()
    cases.every_collective(group, dtype="d")
    assert packs > 10
    assert unpacks > 10
    dist.destroy_process_group(group)
