"""Calls that are made again, whose arguments are known: the results of the first time, whatever else is pending."""

from __future__ import annotations

import gc
import random
import time
import weakref
from typing import Any

import collective_cases as cases
import numpy as np
import pytest
from ranks import run_threads

import mpicoll as dist
from mpicoll.checks.memory_in_use import claims
from mpicoll.groups import registry
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi(min_size=2)


def test_an_average_and_shapes() -> None:
    """AVG divides once; 0-d, empty and two-dimensional arrays keep their shape."""
    me, size = dist.get_rank(), dist.get_world_size()
    for shape in ((), (0, 3), (2, 3), (1,)):
        for turn in range(3):
            x = np.full(shape, float(me + turn))
            dist.all_reduce(x, dist.ReduceOp.AVG)
            assert x.shape == shape
            assert (x == turn + (size - 1) / 2).all(), (shape, turn)
            dist.broadcast(x, size - 1)
            y = np.full(shape, float(me + turn))
            dist.broadcast(y, size - 1)
            assert (y == size - 1 + turn).all(), (shape, turn)


def test_not_where_an_array_is_no_plain_one() -> None:
    """Strided, reversed, read-only and foreign arrays of a shape that was passed before go their own way, and agree."""
    me, size = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        dist.all_reduce(np.zeros((2, 3)))
        dist.broadcast(np.zeros((2, 3)), 0)
    for odd in range(size):
        whole = np.full((3, 2), me + 1.0)
        x: Any = whole.T if me == odd else np.full((2, 3), me + 1.0)
        dist.all_reduce(x)
        assert (x == size * (size + 1) / 2).all()
        backwards = np.full((2, 6), float(me))[:, ::-2]
        y = backwards if me == odd else np.full((2, 3), float(me))
        if me == 0:
            y.setflags(write=False)
        dist.broadcast(y, 0)
        assert (y == 0).all()


def test_beside_asynchronous_calls() -> None:
    """At random asynchronous on some ranks, and not on others; up to a dozen under way; with barriers between them."""
    me, size = dist.get_rank(), dist.get_world_size()
    together, alone = random.Random(5), random.Random(me)
    works: list[tuple[Any, Any, float]] = []
    for turn in range(600):
        kind = together.choice(["all_reduce", "broadcast", "barrier", "wait"])
        count = together.choice([1, 4, 100, 2000, 5000])
        root = together.randrange(size)
        x = np.full(count, float(me + turn))
        work: Any = None
        expected = 0.0
        if kind == "all_reduce":
            work = dist.all_reduce(x, async_op=alone.random() < 0.4)
            expected = size * turn + size * (size - 1) / 2
        elif kind == "broadcast":
            work = dist.broadcast(x, root, async_op=alone.random() < 0.4)
            expected = root + turn
        elif kind == "barrier":
            work = dist.barrier(async_op=alone.random() < 0.4)
            x, expected = np.zeros(1), 0
        else:
            x = np.zeros(1)
        works.append((work, x, expected))
        if kind == "wait" or len(works) > 12:
            for each, array, value in works:
                if each is not None:
                    each.wait()
                assert (array == value).all(), turn
            works.clear()
    for each, _, _ in works:
        if each is not None:
            each.wait()


def test_threads_with_a_group_each() -> None:
    """Each thread has a group of its own; none takes another's elements."""
    size = dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    wrong: list[Any] = []

    def work(number: int) -> None:
        try:
            for turn in range(150):
                x = np.full(2, float(number + turn))
                dist.all_reduce(x, group=groups[number])
                if not (x == size * (number + turn)).all():
                    wrong.append((number, turn, x))
        except BaseException as error:
            wrong.append(error)

    run_threads(work, range(3))
    assert not wrong
    for group in groups:
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="destroyed"):
            dist.all_reduce(np.ones(2), group=group)


def test_a_buffer_that_is_under_way() -> None:
    """A call with memory of an asynchronous one is refused, and the others are told."""
    me = dist.get_rank()
    x = np.ones(4)
    for _ in range(2):
        dist.all_reduce(np.ones(4))
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    with collective_raises((dist.BufferInUseError, dist.CollectiveMismatchError), match="all_reduce"):
        dist.all_reduce(x if me == 0 else np.ones(4))
    work.wait()
    dist.all_reduce(np.ones(4))


def test_overflow_is_silent() -> None:
    """As in MPI: no warning and no FloatingPointError, whatever NumPy is told to say."""
    with np.errstate(all="raise"):
        for _ in range(3):
            x = np.full(2, np.finfo("f4").max, "f4")
            dist.all_reduce(x)
            assert np.isinf(x).all()
            y = np.array([np.nan, np.inf, -np.inf])
            dist.all_reduce(y)
            assert np.isnan(y[0])
        with pytest.raises(FloatingPointError):
            np.float32(3e38) * np.float32(3e38)


@pytest.mark.parametrize("name", sorted({*cases.ALL}))
def test_every_collective_made_again(name: str) -> None:
    """Sizes below, at and above what goes beside a record, and what goes through one step of the segment."""
    for count in (1, 200, 3000, 40_000):
        for root in range(min(2, dist.get_world_size())):
            for turn in range(4):
                cases.run(name, iter([cases.Case("d", count, root=root, seed=turn)]))


def call(kind: str, count: int, turn: int, async_op: bool) -> tuple[Any, list[tuple[Any, Any]]]:
    """Make a collective, and return its Work and what each result is to be."""
    me, size = dist.get_rank(), dist.get_world_size()
    root = turn % size
    mine = np.full(count, float(me + turn))
    every = [float(rank + turn) for rank in range(size)]
    parts = np.repeat(np.arange(size) * 10.0 + me + turn, count)
    others = [np.zeros(count) for _ in range(size)]
    into = np.zeros(count * size)
    if kind == "reduce":
        return dist.reduce(mine, root, async_op=async_op), [(mine, sum(every) if me == root else me + turn)]
    if kind == "all_gather":
        return dist.all_gather(others, mine, async_op=async_op), list(zip(others, every, strict=True))
    if kind == "all_gather_single":
        return dist.all_gather_single(into, mine, async_op=async_op), [(into, np.repeat(every, count))]
    if kind == "gather":
        work = dist.gather(mine, others if me == root else None, root, async_op=async_op)
        return work, list(zip(others, every, strict=True)) if me == root else []
    if kind == "gather_single":
        work = dist.gather_single(mine, into if me == root else None, root, async_op=async_op)
        return work, [(into, np.repeat(every, count))] if me == root else []
    if kind == "scatter":
        work = dist.scatter(mine, list(parts.reshape(size, count)) if me == root else None, root, async_op=async_op)
        return work, [(mine, 10.0 * me + root + turn)]
    if kind == "reduce_scatter":
        work = dist.reduce_scatter_single(mine, parts, async_op=async_op)
        return work, [(mine, 10.0 * me * size + sum(every))]
    if kind == "all_to_all":
        expected = np.repeat([10.0 * me + value for value in every], count)
        return dist.all_to_all_single(into, parts, async_op=async_op), [(into, expected)]
    if kind == "all_to_all list":
        work = dist.all_to_all(others, list(parts.reshape(size, count)), async_op=async_op)
        return work, [(other, 10.0 * me + value) for other, value in zip(others, every, strict=True)]
    return dist.all_reduce(mine, async_op=async_op), [(mine, sum(every))]


KINDS = (
    "all_reduce",
    "reduce",
    "all_gather",
    "all_gather_single",
    "gather",
    "gather_single",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "all_to_all list",
)


def test_all_kinds_in_any_order() -> None:
    """Small, larger and asynchronous ones, the last on some ranks only, one behind the other as they come; some come late."""
    me, size = dist.get_rank(), dist.get_world_size()
    together, alone = random.Random(11), random.Random(100 + me)
    under_way: list[tuple[int, Any, list[tuple[Any, Any]]]] = []
    for turn in range(500):
        kind, count = together.choice(KINDS), together.choice([1, 30, 200, 1500, 9000, 70_000 if turn % 7 == 0 else 3])
        if turn % 29 == me:
            time.sleep(0.002 * alone.random())
        work, results = call(kind, count, turn, alone.random() < 0.2)
        under_way.append((turn, work, results))
        if together.random() < 0.4 or len(under_way) > 6:
            for number, each, expected in under_way:
                if each is not None:
                    each.wait()
                for array, value in expected:
                    assert (array == value).all(), (number, size)
            under_way.clear()
    for _, each, _ in under_way:
        if each is not None:
            each.wait()
    dist.barrier()


def test_lists_that_are_not_as_before() -> None:
    """Other shapes, layouts and lengths of the lists of a call that was made before go the long way, or raise on all ranks."""
    me, size = dist.get_rank(), dist.get_world_size()
    x = np.full((2, 3), float(me))
    for _ in range(3):
        dist.all_gather([np.zeros((2, 3)) for _ in range(size)], x)
        dist.gather(x, [np.zeros((2, 3)) for _ in range(size)] if me == 0 else None, 0)
        dist.scatter(x.copy(), [x.copy() for _ in range(size)] if me == 0 else None, 0)
    flat: list[Any] = [np.zeros(6) for _ in range(size)]
    dist.all_gather(flat, x)
    assert all((each == rank).all() for rank, each in enumerate(flat))
    strided = [np.zeros((3, 2)).T for _ in range(size)]
    dist.all_gather(strided, x)
    assert all((each == rank).all() for rank, each in enumerate(strided))
    same = np.zeros((2, 3))
    for wrong in ([same] * size, [np.zeros((2, 3)) for _ in range(size + 1)], [np.zeros((2, 2)) for _ in range(size)]):
        with collective_raises((ValueError, dist.CollectiveMismatchError)):
            dist.all_gather(wrong if me == 0 else [np.zeros((2, 3)) for _ in range(size)], x)
    with collective_raises((ValueError, dist.CollectiveMismatchError)):
        dist.scatter(x.copy(), [x] * size if me in (0, 1) else None, 0)
    with collective_raises((ValueError, dist.CollectiveMismatchError)):
        dist.gather(x, [np.zeros((2, 3)) for _ in range(size)] if me == 1 else None, 0)
    whole = np.zeros((size, 2, 3))
    for _ in range(3):  # in place, as torch allows
        whole[...] = -1
        whole[me] = me
        dist.all_gather_single(whole, whole[me])
        assert all((whole[rank] == rank).all() for rank in range(size))


def test_lists_that_are_parts_of_one_array() -> None:
    """They move without being packed, of every size, also where the other argument is one of the parts."""
    me, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 300, 5000, 200_000):
        every = np.repeat(np.arange(size) + 1.0, count)
        sent = np.repeat(10.0 * np.arange(size) + me, count)
        for turn in range(4):
            for async_op in (False, True):

                def done(work: Any) -> None:
                    if work is not None:
                        work.wait()

                whole, mine = np.zeros(size * count), np.full(count, me + 1.0)
                done(dist.all_gather(list(whole.reshape(size, count)), mine, async_op=async_op))
                assert (whole == every).all(), (count, turn)
                whole[:] = me + 1.0
                rows = list(whole.reshape(size, count))
                done(dist.all_gather(rows, rows[me], async_op=async_op))
                assert (whole == every).all(), (count, turn)
                whole[:] = -1
                done(dist.gather(mine, list(whole.reshape(size, -1)) if me == 0 else None, 0, async_op=async_op))
                assert (whole == (every if me == 0 else -1)).all(), (count, turn)
                parts = np.split(sent.copy(), size)
                done(dist.scatter(mine, parts if me == 0 else None, 0, async_op=async_op))
                assert (mine == 10.0 * me).all(), (count, turn)
                done(dist.scatter(parts[me], parts if me == 0 else None, 0, async_op=async_op))
                assert (parts[me] == 10.0 * me).all(), (count, turn)
                done(dist.reduce_scatter(mine, np.split(sent.copy(), size), async_op=async_op))
                assert (mine == 10.0 * me * size + size * (size - 1) / 2).all(), (count, turn)
                done(dist.all_to_all(list(whole.reshape(size, count)), np.split(sent.copy(), size), async_op=async_op))
                assert (whole == np.repeat(np.arange(size) + 10.0 * me, count)).all(), (count, turn)
    backwards = np.zeros((size, 3))
    dist.all_gather(list(backwards[::-1]), np.full(3, float(me)))
    assert (backwards[::-1] == np.arange(size)[:, None]).all()


@pytest.mark.parametrize("length", [5, 3_000, 200_000])
def test_unequal_blocks(length: int) -> None:
    """Made again with the same sizes, with others, and with sizes that differ on one rank; waited for at once and later."""
    me, size = dist.get_rank(), dist.get_world_size()
    for turn in range(12):
        counts = [length * ((each + turn // 4) % 3) + each for each in range(size)]
        outputs, mine = [np.zeros(count) for count in counts], np.full(counts[me], me + turn + 0.5)
        work = dist.all_gather(outputs, mine, async_op=turn % 2 == 1)
        if work is not None:
            work.wait()
        for rank, output in enumerate(outputs):
            assert (output == rank + turn + 0.5).all(), (turn, rank)
        inputs, result = [np.full(count, me + part + 1.0) for part, count in enumerate(counts)], np.zeros(counts[me])
        work = dist.reduce_scatter(result, inputs, dist.ReduceOp.AVG, async_op=turn % 2 == 1)
        if work is not None:
            work.wait()
        assert (result == me + 1 + (size - 1) / 2).all(), turn
        if turn % 4 == 2:
            odd = counts if me else [*counts[:-1], counts[-1] + 1]
            with collective_raises(dist.CollectiveMismatchError, match="all_gather"):
                dist.all_gather([np.zeros(count) for count in odd], np.zeros(odd[me]))
            with collective_raises(dist.CollectiveMismatchError, match="reduce_scatter"):
                dist.reduce_scatter(np.zeros(odd[me]), [np.zeros(count) for count in odd], dist.ReduceOp.AVG)


def test_what_looks_like_the_arguments_before() -> None:
    """Numbers equal to an op, arrays in the place of lists and the same object twice are refused, or right, as the first time."""
    me, size = dist.get_rank(), dist.get_world_size()
    x = np.ones(size)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        for _ in range(2):
            dist.all_reduce(x.copy(), op)
            dist.reduce(x.copy(), 0, op)
            dist.reduce_scatter_single(np.zeros(1), x, op)
            dist.reduce_scatter(np.zeros(1), list(x.reshape(size, 1).copy()), op)
    for wrong in (False, True, 0, 1.0, "all_gather"):
        for call in (
            lambda wrong=wrong: dist.all_reduce(x.copy(), wrong),
            lambda wrong=wrong: dist.reduce(x.copy(), 0, wrong),
            lambda wrong=wrong: dist.reduce_scatter_single(np.zeros(1), x, wrong),
            lambda wrong=wrong: dist.reduce_scatter(np.zeros(1), list(x.reshape(size, 1).copy()), wrong),
        ):
            with collective_raises((TypeError, dist.CollectiveMismatchError), match=r"ReduceOp|op must"):
                call()
    for _ in range(2):
        dist.all_gather(list(np.zeros((size, size))), x)
        dist.reduce_scatter(np.zeros(size), list(np.ones((size, size))))
        dist.gather(x, list(np.zeros((size, size))) if me == 0 else None, 0)
        dist.scatter(np.zeros(size), list(np.ones((size, size))) if me == 0 else None, 0)
    for call in (
        lambda: dist.all_gather(x, x),
        lambda: dist.reduce_scatter(x, x),
        lambda: dist.gather(x, np.zeros((size, size)), 0),
        lambda: dist.scatter(x, np.zeros((size, size)), 0),
        lambda: dist.scatter(x, np.ones(1) if me else list(np.ones((size, size))), 0),
    ):
        with collective_raises((TypeError, dist.CollectiveMismatchError), match="list"):
            call()
    parts = [np.full(2, 10.0 * me + rank) for rank in range(size)]
    for turn in range(4):
        dist.all_to_all(parts, parts)
        here = [10.0 * rank + me if turn % 2 == 0 else 10.0 * me + rank for rank in range(size)]
        assert [part.tolist() for part in parts] == [[value] * 2 for value in here], turn
    z, a, b = np.arange(4.0), np.ones(3), np.ones(3)
    for _ in range(3):
        dist.all_reduce_coalesced([a, b])
    with collective_raises((ValueError, dist.CollectiveMismatchError), match="share memory|arguments"):
        dist.all_reduce_coalesced([z[:3], z[1:]])


@pytest.mark.parametrize("count", [1, 3, 500, 5000])
def test_the_same_arithmetic_the_first_time_and_later(count: int) -> None:
    """Integers wrap around, a NaN stays one and sums have the same bits: asynchronous, made first, and made again."""
    me, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    if not world.pair.agreement.channel.carries_data:
        pytest.skip("the arithmetic is MPI's")
    parts = [
        np.random.default_rng(rank).standard_normal(count).astype("f4") * 10.0 ** (rank % 3) for rank in range(size)
    ]
    in_order = parts[0].copy()
    for part in parts[1:]:
        in_order += part
    for turn in range(4):
        small = np.full(count, 253 if me == 0 else 3, np.uint8)
        dist.all_reduce(small)
        assert (small == (253 + 3 * (size - 1)) % 256).all(), turn
        x = np.full(count, float(me))
        x[0 if me == 0 else -1] = np.nan
        dist.all_reduce(x, dist.ReduceOp.MAX)
        assert np.isnan(x[[0, -1]]).all(), turn
        for async_op in (False, True):
            y = parts[me].copy()
            work = dist.all_reduce(y, async_op=async_op)
            if work is not None:
                work.wait()
            assert y.tobytes() == in_order.tobytes(), (turn, async_op)
            z = parts[me].copy()
            work = dist.reduce(z, 0, async_op=async_op)
            if work is not None:
                work.wait()
            assert z.tobytes() == (in_order if me == 0 else parts[me]).tobytes(), (
                turn,
                async_op,
            )


@pytest.mark.parametrize("async_op", [False, True])
def test_the_order_of_bytes_in_other_words(async_op: bool) -> None:
    """NumPy writes the order of the machine in two ways: an array of the one is taken where the call was made with the other."""
    me, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    other = np.dtype("f8").newbyteorder("<" if np.little_endian else ">")
    assert other.byteorder != np.dtype("f8").byteorder
    for dtype in (np.dtype("f8"), other, np.dtype("f8"), other, other):
        x, gathered, part = np.full(3, me + 1.0).astype(dtype), np.zeros(3 * size), np.zeros(1)
        works = [
            dist.all_reduce(x.copy(), async_op=async_op),
            dist.all_gather_into_tensor(gathered, x, async_op=async_op),
            dist.reduce_scatter_tensor(part, np.full(size, me + 1.0).astype(dtype), async_op=async_op),
        ]
        for work in works:
            assert (work is not None) == async_op
            if work is not None:
                work.wait()
        assert gathered.reshape(size, 3).tolist() == [[rank + 1.0] * 3 for rank in range(size)]
        assert part[0] == total


def test_a_list_of_results_where_none_is_expected() -> None:
    """A rank that is not the destination of a prepared gather and passes a list raises; the group is still good."""
    me, size = dist.get_rank(), dist.get_world_size()
    for async_op in (False, True):
        for _ in range(3):
            dist.gather(np.ones(2), [np.zeros(2) for _ in range(size)] if me == 0 else None, dst=0)
        lists = [np.zeros(2) for _ in range(size)]
        with collective_raises((ValueError, dist.CollectiveMismatchError), match="gather_list|destination"):
            work = dist.gather(np.ones(2), lists, dst=0, async_op=async_op)
            if work is not None:
                work.wait()
        dist.barrier()


def test_arrays_of_calls_beside_a_pending_one_are_not_held() -> None:
    """A call that is waited for compares its memory with that of pending ones, and holds its arrays no longer."""
    size = dist.get_world_size()
    pending = np.ones(5)
    gc.collect()
    gc.disable()
    try:
        for turn in range(3):
            work = dist.all_reduce(pending, async_op=True)
            assert work is not None
            x, out = np.ones(4), np.zeros(4 * size)
            held = [weakref.ref(x), weakref.ref(out)]
            dist.all_gather_into_tensor(out, x)
            assert out.sum() == 4 * size
            del x, out
            work.wait()
            assert turn == 0 or [each() for each in held] == [None, None], turn
    finally:
        gc.enable()


def test_a_claim_without_a_handle_ends() -> None:
    """A handle that is dropped without a wait leaves its memory to others when its call is over."""
    for _ in range(2):
        dist.all_reduce(np.ones(6))
        dist.barrier()
    x = np.ones(6)
    with pytest.warns(ResourceWarning, match="dropped without wait"):
        dist.all_reduce(x, async_op=True)  # the handle goes at once
    registry.state().world.unwaited.clear()  # else the end of the session says that nobody waited for the call
    for turn in range(20):
        # The other ranks wait long for this rank, and a long wait progresses all calls.
        time.sleep(0.005 if turn % dist.get_world_size() == dist.get_rank() else 0.0)
        dist.all_reduce(np.ones(7))
        dist.barrier()
    assert not claims.active
