"""Many arrays in one call: the results are those of a call for each, and lists that differ raise on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import collective_cases as cases
import numpy as np
import pytest

import mpicoll as dist
from mpicoll import ReduceOp
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi

SHAPES: list[tuple[int, ...]] = [(3, 4), (), (0,), (7,), (2, 1, 5), (5000,), (20_000,), (1,)]


def drawn(dtype: str, rank: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[Any]:
    """Return the arrays that a rank brings."""
    return [cases.values(dtype, int(np.prod(shape)), rank, place).reshape(shape) for place, shape in enumerate(shapes)]


def done(work: Any, async_op: bool, outputs: list[Any]) -> None:
    """Wait for a call, and assert that it returned a Work of the whole where it was asked for one."""
    if not async_op:
        assert work is None
        return
    assert isinstance(work, dist.Work)
    assert work.wait() is True
    assert [id(x) for x in work.result()] == [id(x) for x in outputs]


def reduces(dtype: str, op: Any, async_op: bool, group: Any = None) -> None:
    ranks = dist.get_process_group_ranks(group)
    given = [drawn(dtype, rank) for rank in ranks]
    mine = drawn(dtype, dist.get_rank())
    done(dist.all_reduce_coalesced(mine, op, group, async_op), async_op, mine)
    for place, result in enumerate(mine):
        single = drawn(dtype, dist.get_rank())[place]
        dist.all_reduce(single, op, group)
        assert (result == single).all(), (dtype, op, async_op, place)
        if op is ReduceOp.SUM and np.dtype(dtype).kind in "iufc":
            total = np.sum([arrays[place] for arrays in given], axis=0, dtype=dtype)
            assert result.shape == SHAPES[place]
            assert (result == total).all(), (dtype, async_op, place)


@pytest.mark.parametrize("count", [3, 3000, 20_000, 100_000, 200_000])
def test_asynchronous_calls_that_are_made_again(count: int) -> None:
    """Results are in the arrays after the wait, also with several calls pending; a write before the wait is an error."""
    me, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    for turn in range(5):
        lists = [[np.full(count, me + 1.0), np.full((2, 2), (me + 1.0) * (turn + 1))] for _ in range(3)]
        works = [dist.all_reduce_coalesced(arrays, async_op=True, name=f"turn {turn}") for arrays in lists]
        for arrays, work in zip(lists, works, strict=True):
            done(work, True, arrays)
            assert (arrays[0] == total).all(), turn
            assert (arrays[1] == total * (turn + 1)).all(), turn
    for when in ("before", "after"):
        x, y = np.ones(4), np.ones(3)
        for _ in range(2):
            dist.all_reduce_coalesced([x, y])
        x[:] = y[:] = 1
        work = dist.all_reduce_coalesced([x, y], async_op=True)
        assert work is not None
        if when == "after":
            while not work._request.Test():
                pass
        y[0] = 7
        with pytest.raises(dist.BufferInUseError, match="written before its wait"):
            work.wait()
        dist.barrier()


@pytest.mark.parametrize("async_op", [False, True])
def test_large_arrays_beside_small_ones(async_op: bool) -> None:
    """Large arrays move by themselves, those of a dtype that are small together; each result is that of a call alone."""
    me, size = dist.get_rank(), dist.get_world_size()
    lengths = [("d", 200_000), ("d", 5), ("f", 300_001), ("d", 150_000), ("f", 70_000), ("f", 3), ("d", 131_072)]
    for turn in range(3):
        arrays = [np.full(length, me + place + turn, dtype) for place, (dtype, length) in enumerate(lengths)]
        done(dist.average_gradients(arrays, async_op=async_op), async_op, arrays)
        for place, array in enumerate(arrays):
            assert (array == place + turn + (size - 1) / 2).all(), (turn, place)
    for turn in range(3):
        arrays = [np.full(length, me + place + turn, "d") for place, (_, length) in enumerate(lengths)]
        done(dist.all_reduce_coalesced(arrays, ReduceOp.MAX, async_op=async_op), async_op, arrays)
        for place, array in enumerate(arrays):
            assert (array == place + turn + size - 1).all(), (turn, place)


@pytest.mark.parametrize("count", [3, 100_000, 200_000])
def test_the_list_changes_while_the_call_is_pending(count: int) -> None:
    """The arrays that the list held when the call was made are reduced, the first time and later."""
    size = dist.get_world_size()
    for turn in range(3):
        first, other = [np.ones(count), np.ones(4 + count)], [np.ones(count), np.ones(4 + count)]
        given = [*first]
        work = dist.all_reduce_coalesced(given, async_op=True)
        assert work is not None
        given[:] = other if turn else []
        work.wait()
        assert all((x == size).all() for x in first), turn
        assert all((x == 1).all() for x in other), turn


def test_an_array_that_cannot_be_written_any_more() -> None:
    """A rank that makes an array read-only while the call is pending may raise; the group is still good."""
    me, size = dist.get_rank(), dist.get_world_size()
    for call in (
        lambda x, y: dist.all_reduce_coalesced([x, y], async_op=True),
        lambda x, y: dist.all_gather([x, *(np.zeros(4) for _ in range(size - 1))], np.ones(4), async_op=True),
        lambda x, y: dist.all_reduce(x, async_op=True),
    ):
        for turn in range(4):
            x, y = np.ones(4), np.ones(4)
            dist.barrier()
            work = call(x, y)
            assert work is not None
            if me == 0 and turn == 3:
                x.flags.writeable = False
                try:
                    work.wait()  # what moves over MPI goes into memory that was found before
                except (ValueError, dist.DistError):
                    assert not isinstance(work.exception(), dist.GroupBrokenError)
            else:
                work.wait()
            dist.barrier()


def test_all_reduce_coalesced() -> None:
    """Each array holds what all_reduce of it alone gives; one array is taken as a list of one."""
    reduces("f", ReduceOp.SUM, async_op=False)
    reduces("d", ReduceOp.PREMUL_SUM(0.5), async_op=True)
    x = np.full((2, 3), 1.5)
    dist.all_reduce_coalesced(x)
    assert (x == 1.5 * dist.get_world_size()).all()


@pytest.mark.slow
def test_all_reduce_coalesced_in_every_dtype() -> None:
    """Every dtype and operation, waited for or not."""
    for dtype in cases.DTYPES:
        for op, factor in cases.operations(dtype):
            reduces(dtype, op if factor is None else ReduceOp.PREMUL_SUM(factor), async_op=op is ReduceOp.SUM)


@pytest.mark.slow
@pytest.mark.mpi(min_size=3)
def test_in_a_group() -> None:
    """The members of a group that leaves the first rank out."""
    group = dist.new_group(list(range(1, dist.get_world_size())))
    if dist.get_rank():
        reduces("d", ReduceOp.SUM, False, group)
        reduces("d", ReduceOp.AVG, True, group)
        dist.destroy_process_group(group)


def test_average_gradients() -> None:
    """Arrays of several dtypes are averaged in place, in few buckets or many, again and again, rounded once."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shapes: list[tuple[int, ...]] = [(3, 4), (5,), (), (40_000,), (0, 2), (2, 2), (10,)]
    dtypes = "dfdfdDf"
    for bucket in (1, 100, 1 << 20):
        for async_op in (False, True, False):
            mine = [
                np.full(shape, (rank + 1) / 4 + place, dtype)
                for place, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
            ]
            done(dist.average_gradients(mine, None, async_op, bucket_bytes=bucket), async_op, mine)
            for place, (x, dtype) in enumerate(zip(mine, dtypes, strict=True)):
                alone = np.full(1, (rank + 1) / 4 + place, dtype)
                dist.all_reduce(alone)
                alone /= size
                assert x.shape == shapes[place]
                assert (x == alone).all(), (bucket, async_op, place, x, alone)
    dist.average_gradients([])


def test_made_again() -> None:
    """A list of plain arrays in one bucket takes the short way the second time; one that differs then raises on all."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for count in (3, 30_000):
        for _ in range(3):
            x, y = np.full(count, rank + 1.0), np.full((2, 2), rank + 1.0)
            dist.average_gradients([x, y])
            assert (x == (size + 1) / 2).all()
            assert (y == (size + 1) / 2).all()
            dist.all_reduce_coalesced([x, y], ReduceOp.MIN)
            assert (y == (size + 1) / 2).all()
        if size > 1:
            with collective_raises(dist.CollectiveMismatchError, match="layout"):
                dist.average_gradients([x] if rank == 0 else [x, y])
            assert (x == (size + 1) / 2).all()


def test_several_under_way() -> None:
    """Calls on lists of the same shapes do not get into each other's buffers."""
    size, rank = dist.get_world_size(), dist.get_rank()
    lists = [[np.full(shape, float(rank * 10 + turn)) for shape in SHAPES] for turn in range(4)]
    works = [dist.average_gradients(arrays, async_op=True, bucket_bytes=1000) for arrays in lists]
    for turn in (3, 0, 2, 1):
        works[turn].wait()
        assert all((x == 5.0 * (size - 1) + turn).all() for x in lists[turn])


def test_gradients_of_parameters() -> None:
    """An object with parameters(): their gradients, but for those that have none, which must be the same on all ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()

    def model(without: int) -> Any:
        parameters = [SimpleNamespace(grad=None if i == without else np.full(3, float(rank))) for i in range(3)]
        return SimpleNamespace(parameters=lambda: iter(parameters))

    mine = model(1)
    dist.average_gradients(mine)
    held = [parameter.grad for parameter in mine.parameters()]
    assert held[1] is None
    assert all((held[i] == (size - 1) / 2).all() for i in (0, 2))
    if size > 1:
        with collective_raises(dist.CollectiveMismatchError, match="without gradient"):
            dist.average_gradients(model(2 if rank == size - 1 else 1))


def test_all_gather_coalesced() -> None:
    """Every list holds what its rank brought, also where the ranks bring other shapes."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for uneven in (False, True):
        for async_op in (False, True):
            shapes = [[(2, (r if uneven else 1) + 1), (), (0,), (3000 + (r if uneven else 0),)] for r in range(size)]
            outputs = [[np.full(shape, 99.0) for shape in row] for row in shapes]
            work = dist.all_gather_coalesced(outputs, drawn("d", rank, shapes[rank]), None, async_op)
            done(work, async_op, [x for row in outputs for x in row])
            for r, row in enumerate(outputs):
                for got, brought in zip(row, drawn("d", r, shapes[r]), strict=True):
                    assert got.shape == brought.shape
                    assert (got == brought).all(), (uneven, async_op, r)


@pytest.mark.mpi(min_size=2)
def test_lists_that_differ() -> None:
    """Another number, order, shape, dtype or bucket on one rank raises on all, changes nothing, and the group goes on."""
    size, rank = dist.get_world_size(), dist.get_rank()
    odd = rank == size - 1

    def arrays(*shapes: tuple[int, ...], dtype: str = "d") -> list[Any]:
        return [np.full(shape, 3.0, dtype) for shape in shapes]

    usual = [(4,), (2, 3)]
    long = [(i + 1,) for i in range(300)]
    others = [
        arrays((4,)),
        arrays(*usual, (1,)),
        arrays((2, 3), (4,)),
        arrays((4,), (3, 2)),
        arrays((4,), (6,)),
        arrays(*usual, dtype="f"),
    ]
    for other in others:
        for function in (dist.all_reduce_coalesced, dist.average_gradients):
            given = other if odd else arrays(*usual)
            with collective_raises(dist.CollectiveMismatchError, match="layout|float32") as caught:
                function(given)
            assert caught.value.ranks == ([size - 1] if size > 2 else [0, 1])
            assert all((x == 3.0).all() for x in given)
    with collective_raises(dist.CollectiveMismatchError, match="layout"):
        dist.average_gradients(arrays(*long[:200], (7,), *long[201:]) if odd else arrays(*long))
    with collective_raises(dist.CollectiveMismatchError, match="bucket_bytes"):
        dist.average_gradients(arrays(*usual), bucket_bytes=100 if odd else 200)
    with collective_raises(dist.CollectiveMismatchError, match="layout"):
        shapes = [(4,) if odd and r == 0 else (5,) for r in range(size - 1)] + [(5,)]
        dist.all_gather_coalesced([arrays(shape) for shape in shapes], arrays((5,)))
    x = arrays(*usual)
    dist.average_gradients(x)
    assert all((a == 3.0).all() for a in x)


def wrong_calls(async_op: bool) -> list[tuple[str, type[Exception], Callable[[], Any]]]:
    """Return (what is wrong, the exception, the call)."""
    size = dist.get_world_size()
    x, y = np.ones(4), np.ones(4, "f")
    fixed = np.ones(4)
    fixed.flags.writeable = False
    rows = [[np.ones(4)] for _ in range(size)]
    reduce, average, gather = dist.all_reduce_coalesced, dist.average_gradients, dist.all_gather_coalesced
    more: dict[str, Any] = {"async_op": async_op}
    return [
        ("an empty list", ValueError, lambda: reduce([], **more)),
        ("a tuple", TypeError, lambda: reduce((x,), **more)),
        ("no array inside", TypeError, lambda: reduce([x, 1.0], **more)),
        ("two dtypes", ValueError, lambda: reduce([x, y], **more)),
        ("a read-only array", ValueError, lambda: reduce([x, fixed], **more)),
        ("BAND on floats", RuntimeError, lambda: reduce([x], ReduceOp.BAND, **more)),
        ("MAX on complex", ValueError, lambda: reduce([np.ones(2, "D")], ReduceOp.MAX, **more)),
        ("no op", TypeError, lambda: reduce([x], "sum", **more)),
        ("no array inside", TypeError, lambda: average([x, None], **more)),
        ("a generator", TypeError, lambda: average(iter([x]), **more)),
        ("a read-only array", ValueError, lambda: average([fixed], **more)),
        ("integers", RuntimeError, lambda: average([x, np.ones(4, "i")], **more)),
        ("no bucket", ValueError, lambda: average([x], bucket_bytes=0, **more)),
        ("a bucket of text", TypeError, lambda: average([x], bucket_bytes="25", **more)),
        ("no inputs", ValueError, lambda: gather(rows, [], **more)),
        ("a tuple of lists", TypeError, lambda: gather(tuple(rows), [x], **more)),
        ("a tuple in the list", TypeError, lambda: gather([tuple(row) for row in rows], [x], **more)),
        ("too many lists", ValueError, lambda: gather([*rows, rows[0]], [x], **more)),
        ("too many inputs", ValueError, lambda: gather(rows, [x, x], **more)),
        ("another dtype", ValueError, lambda: gather(rows, [y], **more)),
        ("another shape", ValueError, lambda: gather(rows, [np.ones((2, 2))], **more)),
    ]


@pytest.mark.parametrize("async_op", [False, True])
def test_wrong_arguments(async_op: bool) -> None:
    """What is wrong on all ranks raises on all; what is wrong on one raises there, and a mismatch on the others."""
    size, rank = dist.get_world_size(), dist.get_rank()

    def finish(call: Callable[[], Any]) -> None:
        work = call()
        if work is not None:
            work.wait()

    for turn, (what, kind, call) in enumerate(wrong_calls(async_op)):
        with pytest.raises(kind) as caught:
            finish(call)
        assert not isinstance(caught.value, dist.DistError), what
        if size > 1:
            wrong = rank == turn % size
            with pytest.raises(kind if wrong else dist.CollectiveMismatchError):
                finish(call if wrong else lambda: dist.average_gradients([np.ones(4)], async_op=async_op))
    x = np.ones(3)
    dist.all_reduce(x)
    assert (x == size).all()


def test_memory_under_way() -> None:
    """An array of a list under way is not given to another call."""
    x, y = np.ones(4), np.ones(5)
    work = dist.average_gradients([x, y], async_op=True)
    with pytest.raises(dist.BufferInUseError):
        dist.all_reduce(y)
    work.wait()
    assert (y == 1.0).all()


def test_halves_layouts_and_byte_orders() -> None:
    """Halves are reduced as float32, and whatever cannot be moved as it is gives what a call of each array gives."""
    me, size = dist.get_rank(), dist.get_world_size()
    shapes = [(3, 4), (70, 120), (0, 2), (1, 1)]
    for turn, kind in enumerate(("e", ">f4", ">e")):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM(0.75)):
            plain = [x.astype(kind) for x in drawn("f", me, shapes)]
            mine = [x.T.copy().T if place % 2 == turn % 2 else x.copy() for place, x in enumerate(plain)]
            given = [x.copy() for x in mine]
            done(dist.all_reduce_coalesced(mine, op, async_op=turn > 1), turn > 1, mine)
            for got, x in zip(mine, given, strict=True):
                dist.all_reduce(x, op)
                assert got.tobytes() == x.tobytes(), (kind, op, x.shape)
    # 2048 + 1 is 2048 in float16: in halves the ones would be lost one by one.
    x = [np.full(3, 2048.0 if me == 0 else 1.0, np.float16), np.ones((2, 2), ">f8").T, np.full(40_000, me, np.float16)]
    total = np.float16(2048 + size - 1)
    dist.average_gradients([x[0].copy(), x[2].copy()], async_op=False)
    dist.all_reduce_coalesced([x[0]])
    assert (x[0] == total).all()
    x[0][...] = size * me
    dist.average_gradients(x)
    assert (x[0] == np.float16(np.float32(size * (size - 1) / 2))).all()
    assert (x[1] == 1).all()
    assert (x[2] == np.float16((size - 1) / 2)).all()
    outputs = [[np.zeros((4, 3), "e").T, np.zeros((5, 2), ">e")[:, 1]] for _ in range(size)]
    dist.all_gather_coalesced(outputs, [np.full((3, 4), me, "e"), np.full(5, -me, "e")])
    for rank, (one, other) in enumerate(outputs):
        assert (one == rank).all()
        assert (other == -rank).all()
    with collective_raises(RuntimeError, match="datetime64"):
        dist.all_reduce_coalesced([np.zeros(3, "M8[s]")])
    with collective_raises(RuntimeError, match="S3"):
        dist.average_gradients([np.zeros(3), np.zeros(3, "S3")])
    if size > 1:
        with collective_raises(dist.CollectiveMismatchError, match="float16"):
            dist.average_gradients([np.zeros(3, "e" if me else "f")])


def test_lists_of_arrays_that_share_memory() -> None:
    """A result that would be written twice is refused on all ranks, the first time and when the call was made before."""
    size, x = dist.get_world_size(), np.ones(8)
    apart = [np.ones(8), np.ones(8)]
    for _ in range(3):
        dist.all_reduce_coalesced(apart)
        for wrong in (
            lambda: dist.all_reduce_coalesced([x, x]),
            lambda: dist.average_gradients([x[:4], np.ones(3, "f"), x[2:6]]),
            lambda: dist.all_gather_coalesced([[x[:2], x[1:3]] for _ in range(size)], [np.ones(2), np.ones(2)]),
        ):
            with pytest.raises(ValueError, match="share memory"):
                wrong()
    assert (x == 1).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [3, 33, 40])
def test_writes_to_lists_of_any_length(count: int) -> None:
    """A write before the wait is found, whether the list is reduced where it stands or through a flat buffer."""
    for _ in range(5):
        arrays = [np.ones(1) for _ in range(count)]
        work = dist.all_reduce_coalesced(arrays, async_op=True)
        assert work is not None
        arrays[0][0] = 7
        with pytest.raises(dist.BufferInUseError, match="written before its wait"):
            work.wait()
        dist.barrier()
