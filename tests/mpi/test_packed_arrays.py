"""Prepared calls and messages of arrays that cannot be moved as they are: of other layouts and byte orders, and half types."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import neighbours

import mpicoll as dist
from mpicoll.api import messages as api
from mpicoll.checks.memory_in_use import claims
from mpicoll.operations.prepare import run
from mpicoll.pytest_plugin import collective_raises
from mpicoll.runtime import native

Array = np.ndarray[Any, Any]

# Each gives an array of some rows and four columns, and all of the memory in which it stands.
LAYOUTS: dict[str, Callable[[int], tuple[Array, Array]]] = {
    "every other column": lambda rows: (lambda own: (own[:, ::2], own))(np.full((rows, 8), 7.0)),
    "rows backwards": lambda rows: (lambda own: (own[::-1], own))(np.full((rows, 4), 7.0)),
    "Fortran order": lambda rows: (lambda own: (own, own))(np.asfortranarray(np.full((rows, 4), 7.0))),
    "other byte order": lambda rows: (lambda own: (own, own))(np.full((rows, 4), 7, ">f8")),
    "not aligned": lambda rows: (lambda own: (own[4:].view("f8").reshape(rows, 4), own))(np.zeros(rows * 32 + 4, "u1")),
    "float16": lambda rows: (lambda own: (own, own))(np.full((rows, 4), 7, "f2")),
    "every other float16": lambda rows: (lambda own: (own[:, 1::2], own))(np.full((rows, 8), 7, "f2")),
}


def calls(me: int, size: int, of: Callable[[int], Array], rows: int, turn: int) -> dict[str, tuple[Any, Any]]:
    """Return for each name a function that starts the call, and a function that checks the result."""

    def filled(value: float, count: int = rows) -> Array:
        array = of(count)
        array[...] = value
        return array

    def equal(array: Array, *values: float) -> None:
        for block, value in zip(np.array_split(array, len(values)), values, strict=True):
            assert (block == value).all(), (block, value)

    x, every = filled(me + turn + 1), filled(0, rows * size)
    parts = filled(0, rows * size)
    for to in range(size):
        parts[to * rows : (to + 1) * rows] = 10 * me + to + turn
    outputs, inputs = [filled(0) for _ in range(size)], [filled(10 * me + to + turn) for to in range(size)]
    root = turn % size
    ranks = range(size)
    total, mine = size * (size + 1) / 2 + size * turn, 10 * sum(ranks) + size * (me + turn)
    to_me = [10 * source + me + turn for source in ranks]
    at_root = me == root
    return {
        "broadcast": (lambda **k: dist.broadcast(x, root, **k), lambda: equal(x, root + turn + 1)),
        "all_reduce": (lambda **k: dist.all_reduce(x, **k), lambda: equal(x, total)),
        "all_reduce MAX": (lambda **k: dist.all_reduce(x, dist.ReduceOp.MAX, **k), lambda: equal(x, size + turn)),
        "all_reduce AVG": (lambda **k: dist.all_reduce(x, dist.ReduceOp.AVG, **k), lambda: equal(x, total / size)),
        "reduce": (lambda **k: dist.reduce(x, root, **k), lambda: equal(x, total if at_root else me + turn + 1)),
        "all_gather": (
            lambda **k: dist.all_gather(outputs, x, **k),
            lambda: [equal(each, source + turn + 1) for source, each in enumerate(outputs)],
        ),
        "all_gather_single": (
            lambda **k: dist.all_gather_single(every, x, **k),
            lambda: equal(every, *(source + turn + 1 for source in ranks)),
        ),
        "gather": (
            lambda **k: dist.gather(x, outputs if at_root else None, root, **k),
            lambda: [equal(each, source + turn + 1 if at_root else 0) for source, each in enumerate(outputs)],
        ),
        "scatter": (
            lambda **k: dist.scatter(x, inputs if at_root else None, root, **k),
            lambda: equal(x, 10 * root + me + turn),
        ),
        "reduce_scatter": (lambda **k: dist.reduce_scatter(x, inputs, **k), lambda: equal(x, mine)),
        "reduce_scatter_single": (lambda **k: dist.reduce_scatter_single(x, parts, **k), lambda: equal(x, mine)),
        "all_to_all": (
            lambda **k: dist.all_to_all(outputs, inputs, **k),
            lambda: [equal(each, value) for each, value in zip(outputs, to_me, strict=True)],
        ),
        "all_to_all_single": (
            lambda **k: dist.all_to_all_single(every, parts, **k),
            lambda: equal(every, *to_me),
        ),
    }


@pytest.mark.parametrize("rows", [3, 1500, 9000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results(layout: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right on each turn, bytes between the elements stay, and repeated calls that are waited for are prepared."""
    me, size = dist.get_rank(), dist.get_world_size()
    owners: list[tuple[Array, Array]] = []

    def of(count: int) -> Array:
        array, own = LAYOUTS[layout](count)
        owners.append((array, own))
        return array

    for name in calls(me, size, of, rows, 0):
        for turn in range(2 * size + 2):
            owners.clear()
            start, check = calls(me, size, of, rows, turn)[name]
            with monkeypatch.context() as patched:
                # By then each root has been seen twice. Larger calls make their memory first, and may move in the general way.
                if turn >= 2 * size and rows == 3 and "through" not in vars(dist.group.WORLD.pair):
                    patched.setattr(run, "run_prepared", None)
                start()
            check()
            start, check = calls(me, size, of, rows, turn)[name]
            start(async_op=True).wait()
            check()
            for array, own in owners:
                array[...] = 7
                if own.dtype != np.uint8:
                    assert (own == 7).all(), name
    assert not claims.active


def test_one_rank_packs() -> None:
    """Ranks with arrays of other layouts meet in one call, also in calls with a name and a time limit."""
    me, size = dist.get_rank(), dist.get_world_size()
    for turn in range(6):
        x = np.full((3, 8), me + 1.0)[:, ::2] if me == turn % size else np.full((3, 4), me + 1.0)
        dist.all_reduce(x)
        assert (x == size * (size + 1) / 2).all()
        dist.all_reduce(x, name="again", timeout=dist.default_pg_timeout)
        assert (x == size * size * (size + 1) / 2).all()
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        assert (x == size**3 * (size + 1) / 2).all()


def test_the_average_of_half_types_is_rounded_once() -> None:
    """The sum of float16 would overflow, and its average does not."""
    x = np.full(5, 60_000, np.float16)
    for _ in range(4):
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert (x == np.float16(60_000)).all()


@pytest.mark.mpi(min_size=2)
def test_memory_in_use() -> None:
    """Memory of packed arrays is claimed: conflicts, and writes before the wait, are found as for other arrays."""
    grid = np.ones((6, 6))
    column, row = grid[:, 1], grid[1]
    for _ in range(4):
        grid[...] = 1
        for x in (column, row.copy()):
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
    for pending, other in ((column, row), (row, column)):
        grid[...] = 1
        work = dist.all_reduce(pending, async_op=True)
        with collective_raises(dist.BufferInUseError, match="bytes in common"):
            dist.all_reduce(other)
        with collective_raises(dist.BufferInUseError, match="bytes in common"):
            dist.all_reduce(other, async_op=True)
        assert work is not None
        work.wait()
    work = dist.all_reduce(column, async_op=True)
    column[-1] += 1
    assert work is not None
    with pytest.raises(dist.BufferInUseError, match="written before its wait"):
        work.wait()
    dist.barrier()
    out = np.empty((dist.get_world_size(), 6))
    for turn in range(4):
        work = dist.all_gather_single(out, column, async_op=True)
        assert work is not None
        if turn == 3:
            column[0] += 1
            with pytest.raises(dist.BufferInUseError, match="written before its wait"):
                work.wait()
        else:
            work.wait()
    dist.barrier()
    assert not claims.active


def test_what_cannot_be_packed() -> None:
    """Arguments that are wrong raise on all ranks after the call was prepared, and the next call is right."""
    me, size = dist.get_rank(), dist.get_world_size()
    x = np.full((4, 2), me + 1.0).T
    for _ in range(4):
        dist.all_reduce(x.copy())
        dist.all_reduce(x)
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(8), (2, 4), (8, 8))
    read_only = np.ones((4, 2)).T
    read_only.flags.writeable = False
    for wrong in (overlapping, read_only):
        with collective_raises((ValueError, dist.CollectiveMismatchError)):
            dist.all_reduce(wrong if me == 0 else np.ones((2, 4)))
    with collective_raises((TypeError, dist.CollectiveMismatchError)):
        dist.all_reduce(np.ma.masked_array(np.ones((2, 4))) if me == 0 else np.ones((2, 4)))
    dist.all_reduce(y := np.ones((4, 2)).T)
    assert (y == size).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rows", [3, 1500])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages(layout: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated messages of strided arrays use persistent requests, and all layouts meet arrays that are moved as they are."""
    persistent = native.found is not None and layout not in ("other byte order", "not aligned")
    me, (before, after) = dist.get_rank(), neighbours()
    group = dist.new_group()  # whose table of persistent requests is empty
    for turn in range(8):
        x, own_x = LAYOUTS[layout](rows)
        y, own_y = LAYOUTS[layout](rows)
        if me == turn % dist.get_world_size() and turn < 6:
            y = np.empty(y.shape, y.dtype.newbyteorder("="))
        x[...] = me + turn
        with monkeypatch.context() as patched:
            if turn >= 6 and persistent:  # by then each rank has sent and received three times with both kinds
                patched.setattr(api, "start_send", None)
                patched.setattr(api, "start_receive", None)
            sent = dist.isend(x, after, group, tag=1)
            dist.recv(y, before, group, tag=1)
            assert sent is not None
            sent.wait()
            assert (y == before + turn).all()
            y[...] = 0
            received = dist.irecv(y, before, group, tag=2)
            dist.send(x, after, group, tag=2)
            assert received is not None
            received.wait()
            assert (y == before + turn).all()
            assert received.result()[0] is y
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, y, before, group, tag=3), dist.P2POp(dist.isend, x, after, group, tag=3)]
            )
            for work in works:
                work.wait()
            assert (y == before + turn).all()
        for array, own in ((x, own_x), (y, own_y)):
            array[...] = 7
            assert own.dtype == np.uint8 or (own == 7).all()
    assert not claims.active
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rows", [4, 1500])
def test_memory_of_messages_in_use(rows: int) -> None:
    """Conflicts, and writes before the wait, of strided messages are found."""
    before, after = neighbours()
    grid = np.ones((rows, 6))
    mine, halo = grid[:, 1], grid[:, 0]
    for _ in range(4):
        sent, received = dist.isend(mine, after), dist.irecv(halo, before)
        assert sent is not None
        assert received is not None
        sent.wait()
        received.wait()
    dist.barrier()
    sent = dist.isend(mine, after)
    with pytest.raises(dist.BufferInUseError, match="bytes in common"):
        dist.recv(mine, before)
    with pytest.raises(dist.BufferInUseError, match="bytes in common"):
        dist.irecv(mine, before)
    dist.recv(halo, before)
    mine[-1] = 2
    assert sent is not None
    with pytest.raises(dist.BufferInUseError, match="written before its wait"):
        sent.wait()
    dist.barrier()
    mine[-1] = 1
    received = dist.irecv(halo, before)
    halo[0] = 3
    dist.send(mine, after)
    assert received is not None
    with pytest.raises(dist.BufferInUseError, match="written before its wait"):
        received.wait()
    dist.barrier()
    assert not claims.active


@pytest.mark.mpi(min_size=2)
def test_a_message_of_another_size() -> None:
    """A strided receive that gets another message says so, and the next receive gets that message."""
    before, after = neighbours()
    grid = np.ones((5, 6))
    for _ in range(4):
        sent = dist.isend(grid[:, 1], after)
        dist.recv(grid[:, 0], before)
        assert sent is not None
        sent.wait()
    sent = dist.isend(grid[:4, 1], after)
    with pytest.raises(dist.CollectiveMismatchError, match="5 elements"):
        dist.recv(grid[:, 0], before)
    dist.recv(grid[:4, 0], before)
    assert sent is not None
    sent.wait()
    sent = dist.isend(grid[:4, 1].astype(np.float16), after)
    received = dist.irecv(grid[:, 0], before)
    assert received is not None
    with pytest.raises(dist.CollectiveMismatchError, match="float16"):
        received.wait()
    dist.recv(np.empty((4, 2), np.float16)[:, 0], before)
    assert sent is not None
    sent.wait()
    dist.barrier()


STRUCT = np.dtype([("a", "i4"), ("b", "f4")])


@pytest.mark.parametrize(
    ("dtype", "other"),
    [("f2", "u2"), ("M8[s]", "M8[ms]"), ("M8[s]", "i8"), ("S8", "u8"), (STRUCT, "u8")],
    ids=str,
)
def test_lists_of_another_dtype(dtype: Any, other: Any) -> None:
    """Dtypes that move as the same words do not match after the call was prepared, also of one item."""
    me, size = dist.get_rank(), dist.get_world_size()
    x, right = np.zeros(4, dtype), [np.zeros(4, dtype) for _ in range(size)]
    wrong = [*right[1:], np.zeros(4, other)]
    for _ in range(3):
        dist.all_gather(right, x)
        dist.all_to_all(right, [x] * size)
    for async_op in (False, True):

        def made(work: Any) -> None:
            if work is not None:
                work.wait()

        with collective_raises((ValueError, dist.CollectiveMismatchError)):
            made(dist.all_gather(wrong if me == 0 else right, x, async_op=async_op))
        with collective_raises((ValueError, dist.CollectiveMismatchError)):
            made(dist.all_to_all(right, wrong if me == 0 else [x] * size, async_op=async_op))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("async_op", [False, True])
def test_outputs_that_share_memory(async_op: bool) -> None:
    """A strided array that stands in a list of outputs twice is refused after the call was prepared."""
    me, size = dist.get_rank(), dist.get_world_size()

    def column() -> Array:
        return np.zeros((4, 2))[:, 0]

    for _ in range(3):
        dist.all_gather([column() for _ in range(size)], column())
    wrong = [column()] * size
    with collective_raises(
        (ValueError, dist.CollectiveMismatchError), match="share memory|other ranks|another rank|rank 0"
    ):
        work = dist.all_gather(wrong if me == 0 else [column() for _ in range(size)], column(), async_op=async_op)
        if work is not None:
            work.wait()


@pytest.mark.parametrize("count", [3, 30_000, 300_000])
def test_lists_of_several_layouts(count: int) -> None:
    """Of an asynchronous call some outputs are packed, and others move as they are: no write of the program is seen."""
    me, size = dist.get_rank(), dist.get_world_size()
    for turn in range(5):
        out = [np.zeros((count, 2))[:, 0] if each % 2 else np.zeros(count) for each in range(size)]
        work: Any = dist.all_gather(out, np.full(count, me + turn + 1.0), async_op=True)
        work.wait()
        assert all((each == rank + turn + 1).all() for rank, each in enumerate(out))


@pytest.mark.mpi(min_size=2)
def test_memory_of_a_packed_input_in_use() -> None:
    """A packed input whose output is moved as it is: its memory is claimed, in both directions."""
    size, (before, after) = dist.get_world_size(), neighbours()
    for turn in range(4):
        grid = np.ones((4, 4))
        out: Any = np.zeros((size, 4)) if turn % 2 else [np.zeros(4) for _ in range(size)]
        gather: Any = dist.all_gather_single if turn % 2 else dist.all_gather
        work = gather(out, grid[:, 0], async_op=True)
        with collective_raises(dist.BufferInUseError, match="bytes in common"):
            dist.all_reduce(grid[0])
        work.wait()
        received = dist.irecv(grid[0], before)
        assert received is not None
        with collective_raises(dist.BufferInUseError, match="bytes in common"):
            gather(out, grid[:, 0], async_op=True)
        dist.send(np.ones(4), after)
        received.wait()
    assert not claims.active
    dist.barrier()


@pytest.mark.parametrize("count", [3, 400, 20_000])
def test_structures_that_are_complete_before_the_wait(count: int) -> None:
    """The result of a structured dtype is compared as it was held."""
    for turn in range(4):
        x = np.zeros(count, STRUCT)
        x["a"], x["b"] = dist.get_rank() + turn, 7
        work: Any = dist.broadcast(x, 0, async_op=True)
        until = time.monotonic() + 10
        while not work.is_completed() and time.monotonic() < until:
            pass
        work.wait()
        assert (x["a"] == turn).all()
        assert (x["b"] == 7).all()
        dist.barrier()


class Late(ValueError):
    """What a signal handler of a program raises."""


@pytest.mark.parametrize("dtype", ["f8", "f2"])
def test_a_handler_raises_while_an_array_is_packed(dtype: str) -> None:
    """Its exception reaches the program, although wrong arrays raise the same class."""

    def late(*_: object) -> None:
        raise Late

    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    x = np.ones((1500, 3000), dtype)[:, ::2]
    for _ in range(3):
        dist.all_reduce(x, group=alone)
    before = signal.signal(signal.SIGALRM, late)
    try:
        with pytest.raises(Late):
            signal.setitimer(signal.ITIMER_REAL, 1e-3)
            for _ in range(100):
                dist.all_reduce(x, group=alone)
    finally:
        signal.signal(signal.SIGALRM, before)
    alone.give_up("its call was left")


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", ["f8", "f2", "?", ">f4", "M8[s]", "S3", [("a", "i4"), ("b", "f8")]])
def test_an_input_is_packed_and_the_output_is_not(dtype: Any, async_op: bool) -> None:
    """The result has the bytes of the input, whatever the dtype, when the output moves as it is."""
    me, size = dist.get_rank(), dist.get_world_size()

    def part(source: int, to: int, count: int) -> Array:
        kind = np.dtype(dtype)
        values = np.arange(count * kind.itemsize) * 7 + source * 3 + to
        return (values % (2 if kind.kind == "b" else 97)).astype("u1").view(kind)

    def strided(array: Array) -> Array:
        return np.repeat(array, 2)[::2]

    def wait(work: Any) -> None:
        if work is not None:
            work.wait()

    for count in (5, 3000):
        for _ in range(4):
            outputs = [np.zeros(count, dtype) for _ in range(size)]
            wait(dist.all_gather(outputs, strided(part(me, 0, count)), async_op=async_op))
            assert all(each.tobytes() == part(source, 0, count).tobytes() for source, each in enumerate(outputs))
            whole = np.zeros(count * size, dtype)
            wait(dist.all_gather_single(whole, strided(part(me, 0, count)), async_op=async_op))
            assert whole.tobytes() == b"".join(part(source, 0, count).tobytes() for source in range(size))
            outputs = [np.zeros(count, dtype) for _ in range(size)]
            wait(dist.all_to_all(outputs, [strided(part(me, to, count)) for to in range(size)], async_op=async_op))
            assert all(each.tobytes() == part(source, me, count).tobytes() for source, each in enumerate(outputs))
            parts = [strided(part(0, to, count)) for to in range(size)] if me == 0 else None
            wait(dist.scatter(outputs[0], parts, 0, async_op=async_op))
            assert outputs[0].tobytes() == part(0, me, count).tobytes()
