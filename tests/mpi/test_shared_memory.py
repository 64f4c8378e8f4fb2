"""Shared memory against MPI and NumPy: every call, dtype and op, sizes around each limit, whoever is late."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import signal
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import left_in_memory
from reductions import fold, is_same, values

import mpicoll as dist
from mpicoll.operations import dispatch, prepared
from mpicoll.pytest_plugin import collective_raises
from mpicoll.runtime import native
from mpicoll.transports.base import Kind
from mpicoll.transports.selection import Selection
from mpicoll.transports.shm import mapping, transport
from mpicoll.transports.shm.control import EAGER_BYTES, MASK
from mpicoll.transports.shm.transport import PIECE, WHOLE_BYTES

pytestmark = pytest.mark.mpi(min_size=2)

Op = dist.ReduceOp
ROOM = 4096
"""Bytes of a buffer of the fixture ``group``, so that little data takes many pieces."""
SIZES = (1, 5, ROOM // 8, ROOM // 8 + 1, 3 * ROOM // 8 + 17)


@pytest.fixture(autouse=True)
def _shared() -> None:
    world = dist.group.WORLD
    assert world is not None
    if not world.pair.agreement.channel.carries_data:
        pytest.skip("the ranks share no memory")


@pytest.fixture
def fresh() -> Iterator[Callable[..., Any]]:
    """Return a function that makes a group of all ranks, whose calls go through shared memory or through MPI."""
    made: list[tuple[Any, Any, Any]] = []

    def make(shared: bool = True) -> Any:
        group = dist.new_group()
        pair = group.pair
        made.append((group, pair.node, pair.agreement.channel))
        if not shared:
            pair.agreement.use(None)
            pair.node = None
        return group

    yield make
    for group, node, channel in made:
        if group.pair.node is not node:
            dist.barrier(group)
            group.pair.agreement.use(channel)
            group.pair.node = node
        dist.destroy_process_group(group)


class Small(transport.Budget):
    def room(self) -> int:
        return ROOM


@pytest.fixture(params=["whole", "parts"])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a group that moves all data through small buffers, and reduces the whole or in parts."""
    most = 1 << 30 if request.param == "whole" else -1
    monkeypatch.setattr(transport, "WHOLE_BYTES", most)
    monkeypatch.setattr(transport, "WHOLE_BYTES_OVERSUBSCRIBED", most)
    made = dist.new_group()
    pair = made.pair
    pair.node = transport.SharedMemoryTransport(pair.data, Small(1 << 24), dist.get_world_size() > 2)
    pair.selection = Selection("node")
    yield made
    assert pair.node.ready
    pair.node = None
    pair.selection = Selection()
    dist.destroy_process_group(made)


MPI_NAMES = {Op.SUM: "SUM", Op.PRODUCT: "PROD", Op.MAX: "MAX", Op.MIN: "MIN"} | {
    op: op.name for op in (Op.BAND, Op.BOR, Op.BXOR)
}
OF_BOOLS = {"SUM": "LOR", "MAX": "LOR", "BOR": "LOR", "BXOR": "LXOR"}


def ops_of(dtype: str) -> list[Any]:
    kind = np.dtype(dtype).kind
    if kind == "c":
        return [Op.SUM, Op.AVG]
    return list(MPI_NAMES) if kind in "iub" else [Op.SUM, Op.PRODUCT, Op.MAX, Op.MIN, Op.AVG]


def name_of(op: Any) -> str:
    """Return the name of the MPI operation of a reduction; an average is a sum."""
    return MPI_NAMES.get(op, "SUM")


def oracle(op: Any, terms: list[Any]) -> Any:
    """Return what NumPy gives in the order of the ranks."""
    name = name_of(op)
    result = fold(OF_BOOLS.get(name, "LAND") if terms[0].dtype.kind == "b" else name, terms)
    if op is Op.AVG:
        with np.errstate(all="ignore"):
            result = np.divide(result, len(terms), dtype=result.dtype)
    return result


def assert_same_on_all(*found: Any) -> None:
    """Assert that all ranks have the same bits, of zeros and NaNs as well."""
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, [zlib.crc32(each.tobytes()) for each in found])
    assert all(each == others[0] for each in others)


COMMON = {"f8", "i1", "?", "c8", "g"}
DTYPES = [
    name if name in COMMON else pytest.param(name, marks=pytest.mark.slow)
    for name in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "g", "c8", "c16", "G", "?")
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_numpy(dtype: str, fresh: Callable[[], Any]) -> None:
    """all_reduce, made first and again, and reduce, of each op, and sizes around what goes beside a record and in one step."""
    me, size, itemsize = dist.get_rank(), dist.get_world_size(), np.dtype(dtype).itemsize
    group = fresh()
    eager, whole = EAGER_BYTES // itemsize, WHOLE_BYTES // itemsize
    for op in ops_of(dtype):
        results = []
        for count in (0, 1, 7, eager, eager + 1, 5 * eager + 3, whole, whole + 1):
            terms = [values(dtype, count, rank) for rank in range(size)]
            expected = oracle(op, terms)
            for turn in range(4):
                x, y = terms[me].copy(), terms[me].copy()
                dist.all_reduce(x, op, group=group)
                assert is_same(x, expected, name_of(op)), (op, count, turn)
                dist.reduce(y, turn % size, op, group=group)
                assert is_same(y, expected if me == turn % size else terms[me], name_of(op)), (op, count, turn)
                results.append(x)
        if dtype not in "gG":  # whose elements have bytes that are not used
            assert_same_on_all(*results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_in_pieces(group: Any, dtype: str) -> None:
    """all_reduce, reduce to each rank, and reduce_scatter, in place and not."""
    me, world = dist.get_rank(), dist.get_world_size()
    for op, size in itertools.product(ops_of(dtype), SIZES):
        terms = [values(dtype, size, rank) for rank in range(world)]
        expected = oracle(op, terms)
        for again in range(3):
            x = terms[me].copy()
            dist.all_reduce(x, op, group=group)
            assert is_same(x, expected, name_of(op)), (op, size, again)
        for root in range(world):
            x = terms[me].copy()
            dist.reduce(x, root, op, group=group)
            assert is_same(x, expected if me == root else terms[me], name_of(op)), (op, size, root)
        blocks = [values(dtype, size * world, rank) for rank in range(world)]
        out = np.empty(size, dtype)
        dist.reduce_scatter_single(out, blocks[me], op, group=group)
        part = slice(me * size, (me + 1) * size)
        assert is_same(out, oracle(op, [each[part] for each in blocks]), name_of(op)), (op, size)


@pytest.mark.parametrize(
    "dtype", ["float64", pytest.param("uint8", marks=pytest.mark.slow), pytest.param("S7", marks=pytest.mark.slow)]
)
def test_movements(group: Any, dtype: str) -> None:
    """broadcast, all_gather, gather, scatter and all_to_all from and to each rank."""
    me, world = dist.get_rank(), dist.get_world_size()

    def made(rank: int, size: int) -> Any:
        return (values("u1", size, rank) % 100).astype(dtype)

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


def whole_numbers(rank: int, count: int) -> Any:
    return np.random.default_rng([rank, count]).integers(1, 4, count).astype("f8")


def test_uneven_reduce_scatter(group: Any) -> None:
    """Blocks of unequal size, some of them empty."""
    me, world = dist.get_rank(), dist.get_world_size()
    for scale in (1, 300, 900):
        counts = [scale * (rank % 3) + (rank == 1) for rank in range(world)]
        everybody = [[whole_numbers(10 * rank + i, count) for i, count in enumerate(counts)] for rank in range(world)]
        out = np.full(counts[me], -1.0)
        dist.reduce_scatter(out, everybody[me], group=group)
        assert (out == sum(everybody[rank][me] for rank in range(world))).all(), scale


def test_uneven_movements(group: Any) -> None:
    """Blocks of unequal size, some of them empty, and lists of arrays."""
    me, world = dist.get_rank(), dist.get_world_size()
    for scale in (1, 400, 1100):
        counts = [scale * ((rank + 1) % 3) for rank in range(world)]
        outs = [np.full(count, -1.0) for count in counts]
        dist.all_gather(outs, whole_numbers(me, counts[me]), group=group)
        for rank, out in enumerate(outs):
            assert (out == whole_numbers(rank, counts[rank])).all(), (scale, rank)
        sends = [whole_numbers(5 * me + r, scale * ((me + r) % 3)) for r in range(world)]
        recvs = [np.full(scale * ((me + r) % 3), -1.0) for r in range(world)]
        dist.all_to_all(recvs, sends, group=group)
        for rank, out in enumerate(recvs):
            assert (out == whole_numbers(5 * rank + me, out.size)).all(), (scale, rank)


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


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "c8"])
def test_the_same_bits_for_who_waits(dtype: str, fresh: Callable[[], Any]) -> None:
    """One rank comes late, and the others wait in Python: all have the same bits, of zeros and of NaNs as well."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = fresh()
    for op in ops_of(dtype):
        for turn in range(2 * size):
            x = values(dtype, 100, 7 * turn + me)
            if turn % size == me:
                time.sleep(0.005)
            dist.all_reduce(x, op, group=group)
            assert_same_on_all(x)


def every_call(group: Any, count: int, dtype: str, turn: int) -> list[Any]:
    """Make every collective once, and return what this rank got."""
    me, size = group.rank(), group.size()
    root = turn % size

    def mine(offset: int = 0) -> Any:
        return ((np.arange(count) + 3 * me + turn + offset) % 100).astype(dtype)

    results: list[Any] = []
    x = mine()
    dist.all_reduce(x, group=group)
    results.append(x)
    x = mine()
    dist.broadcast(x, root, group=group)
    results.append(x)
    x = mine()
    dist.reduce(x, root, group=group)
    results.append(x if me == root else None)
    many = [np.zeros(count, dtype) for _ in range(size)]
    dist.all_gather(many, mine(), group=group)
    results += many
    whole = np.zeros((size, count), dtype)
    dist.all_gather_single(whole, mine(), group=group)
    results.append(whole)
    many = [np.zeros(count, dtype) for _ in range(size)]
    dist.gather(mine(), many if me == root else None, root, group=group)
    results += many
    x = np.zeros(count, dtype)
    dist.scatter(x, [mine(5 * rank) for rank in range(size)] if me == root else None, root, group=group)
    results.append(x)
    x = np.zeros(count, dtype)
    dist.reduce_scatter(x, [mine(5 * rank) for rank in range(size)], group=group)
    results.append(x)
    x = np.zeros(count, dtype)
    dist.reduce_scatter_single(x, np.concatenate([mine(5 * rank) for rank in range(size)]), group=group)
    results.append(x)
    many = [np.zeros(count, dtype) for _ in range(size)]
    dist.all_to_all(many, [mine(5 * rank) for rank in range(size)], group=group)
    results += many
    whole = np.zeros(size * count, dtype)
    dist.all_to_all_single(whole, np.concatenate([mine(5 * rank) for rank in range(size)]), group=group)
    results.append(whole)
    dist.barrier(group=group)
    return results


def alike(one: list[Any], other: list[Any]) -> bool:
    return all(a is b is None or a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", ["f8", "i2", "c16", "f2"])
def test_every_call_beside_one_through_mpi(dtype: str, fresh: Callable[..., Any]) -> None:
    """Each call gives the same through shared memory and through MPI, whoever is late."""
    me, size = dist.get_rank(), dist.get_world_size()
    groups = [fresh(), fresh(False)]
    for count in (0, 1, 9, 200, 3000, 20_000):
        for turn in range(3 * size):
            found = []
            for group in groups:
                if turn % 3 == 2 and me == (turn + count) % size:
                    time.sleep(0.002)
                found.append(every_call(group, count, dtype, turn))
            assert alike(*found), (count, turn)


def test_in_pieces(fresh: Callable[[], Any]) -> None:
    """What is larger than a piece, also by one element, late in turn: NumPy's bits on all ranks."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = fresh()
    for count in (PIECE // 8, PIECE // 8 + 1, 3 * PIECE // 8 - 5, 1_000_003):
        for turn in range(2 * size):
            root = turn % size
            terms = [np.random.default_rng(1000 * turn + rank).standard_normal(count) for rank in range(size)]
            if turn >= size and me == root:
                time.sleep(0.003)
            x, y, z = (terms[me].copy() for _ in range(3))
            dist.all_reduce(x, group=group)
            dist.broadcast(y, root, group=group)
            dist.reduce(z, root, group=group)
            expected = oracle(Op.SUM, terms)
            assert x.tobytes() == expected.tobytes(), (count, turn)
            assert y.tobytes() == terms[root].tobytes(), (count, turn)
            assert z.tobytes() == (expected if me == root else terms[me]).tobytes(), (count, turn)


def test_the_same_bytes_as_other_elements(fresh: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """At check level ``off`` members may see the same bytes as elements of other sizes: the pieces are the same."""
    dist.barrier()
    monkeypatch.setattr(dist.group.WORLD, "level", "off")
    group = fresh()
    assert group.level == "off"
    sent = np.random.default_rng(3).integers(0, 256, 3 * 1024 * 1024 + 64, np.uint8)
    for turn in range(5):
        x = sent.copy() if dist.get_rank() == 0 else np.zeros(sent.size // 8)
        dist.broadcast(x, 0, group=group)
        assert (x.view(np.uint8) == sent).all(), turn


def test_a_rank_that_is_gone_in_the_midst_of_pieces(fresh: Callable[[], Any]) -> None:
    """A member makes the round and never comes to the next piece: the others wait as for any call, and raise."""
    me = dist.get_rank()
    group = fresh()
    x = np.ones(2 * PIECE)
    for _ in range(4):
        dist.broadcast(x, 0, group=group)
    kept = next(iter(group.prepared.values()))
    if not kept.width:
        pytest.skip("not moved in pieces")
    dist.barrier()
    group.set_timeout(timedelta(seconds=1))
    if me == 1:  # comes first, and so goes on in Python

        def gone(*given: Any) -> None:
            raise KeyError("gone")

        known = (dispatch._await, dispatch._pending, dispatch._active, dispatch._threads, dispatch._inside)
        native.found.configure(gone, lambda *given: None, *known)  # as if it were stopped for good
        try:
            with pytest.raises(KeyError):
                dist.broadcast(x, 0, group=group)
        finally:
            native.found.configure(dispatch._finish, dispatch._give_up, *known)
        with pytest.raises(dist.DistError):
            dist.barrier(group)
    else:
        time.sleep(0.1)
        with pytest.raises(dist.DistError):
            dist.broadcast(x, 0, group=group)
            dist.broadcast(x, 0, group=group)
    assert group.broken is not None or me not in (0, 1)
    y = np.ones(1)
    dist.all_reduce(y)
    assert y[0] == dist.get_world_size()


def test_it_is_used(fresh: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every collective that is made again is prepared for the extension, and small ones are made by it."""
    group, made = fresh(), []

    class Counted:
        """The operation of the extension, whose runs are counted."""

        def __init__(self, shared: Any) -> None:
            self._shared = shared

        def __getattr__(self, name: str) -> Any:
            return getattr(self._shared, name)

        def run(self, *given: Any) -> Any:
            made.append(self._shared.run(*given))
            return made[-1]

    bind = prepared.PreparedOperation.bind

    def counted(*given: Any) -> Any:
        found = bind(*given)
        found.shared = found.shared and Counted(found.shared)
        return found

    monkeypatch.setattr(prepared.PreparedOperation, "bind", counted)
    for count in (9, 3000):
        for _ in range(3):
            every_call(group, count, "f8", 0)
        names = {key if isinstance(key, str) else key[0]: each.shared for key, each in group.prepared.items()}
        assert len(names) >= 10, names
        assert all(names.values()), names
    x, most = np.zeros(EAGER_BYTES + 1, np.uint8), 3 * (MASK + 1)
    for part, wanted in ((x[:-1], most), (x, 0)):
        made.clear()
        for _ in range(most + 2):
            dist.all_reduce(part, group=group)
        assert made.count(True) >= wanted


def test_lists_of_arrays_that_came_as_bytes(fresh: Callable[[], Any]) -> None:
    """The dtype of an array that was pickled is equal to NumPy's own, and another object."""
    size = dist.get_world_size()
    group = fresh()
    for _ in range(3 * (MASK + 1)):
        many = [pickle.loads(pickle.dumps(np.zeros(3))) for _ in range(size)]
        dist.all_gather(many, pickle.loads(pickle.dumps(np.full(3, float(dist.get_rank())))), group=group)
        assert all((each == rank).all() for rank, each in enumerate(many))


def test_a_mismatch_names_the_call(fresh: Callable[[], Any]) -> None:
    """Calls that were made many times, and then not by all: the report says who called what, and the group is still good."""
    me = dist.get_rank()
    group = fresh()
    for turn in range(40):
        x = np.ones(2)
        dist.all_reduce(x, group=group)
        dist.barrier(group=group)
        if turn % 8 == 7:
            with collective_raises(dist.CollectiveMismatchError, match=r"(?s)barrier.*all_reduce|all_reduce.*barrier"):
                if me == 0:
                    dist.barrier(group=group)
                else:
                    dist.all_reduce(x, group=group)
    x = np.ones(2)
    dist.all_reduce(x, group=group)
    assert (x == dist.get_world_size()).all()


def test_arrays_that_grow_meanwhile(fresh: Callable[[], Any]) -> None:
    """What is passed has another number of elements than the call that was made before: it is another call."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = fresh()
    for turn in range(30):
        x = np.zeros(4)
        dist.all_reduce(x, group=group)
        x.resize(4 + turn % 5, refcheck=False)
        x[:] = me
        dist.all_reduce(x, group=group)
        assert (x == size * (size - 1) / 2).all(), turn


def test_members_run_ahead_of_each_other() -> None:
    """Ranks that come late in turn, by more rounds than the ring has places: nobody reads another round's elements."""
    me, size = dist.get_rank(), dist.get_world_size()
    for turn in range(400):
        if turn % (MASK + 4) == 3 and turn // (MASK + 4) % size == me:
            time.sleep(0.003)
        x = np.array([turn + me, me], np.int64)
        dist.all_reduce(x)
        assert (x == (size * turn + size * (size - 1) // 2, size * (size - 1) // 2)).all(), turn
        y = np.full(3, float(turn if me == turn % size else -1))
        dist.broadcast(y, turn % size)
        assert (y == turn).all(), turn


def test_a_handler_that_raises_while_it_looks_for_the_others(
    fresh: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals that come meanwhile are handled as Python goes on: the group is given up, on all ranks, and no other."""

    class Struck(Exception):
        pass

    def strike(number: int, frame: object) -> None:
        raise Struck

    monkeypatch.setattr(prepared, "poll_ns", lambda *given: 300_000_000)
    group = fresh()
    x = np.ones(4)
    for _ in range(4):
        dist.all_reduce(x, group=group)
    before = signal.signal(signal.SIGALRM, strike)
    try:
        if dist.get_rank() == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Struck):
                dist.all_reduce(x, group=group)
            assert "Struck" in (group.broken or "")
        else:
            time.sleep(0.6)
            with contextlib.suppress(dist.DistError):  # what has been posted may come to its end
                dist.all_reduce(x, group=group)
        with pytest.raises(dist.GroupBrokenError):
            dist.all_reduce(x, group=group)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    x = np.ones(4)
    dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()


def test_code_that_runs_when_the_last_call_is_forgotten(fresh: Callable[[], Any]) -> None:
    """The place of the call before may be the last that knows of a function: what its end runs finds the call over."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = fresh()
    out, x = [np.zeros(3) for _ in range(size)], np.full(3, float(me))
    for _ in range(4):
        dist.all_gather(out, x, group=group)
    seen: list[Any] = []
    names: dict[str, Any] = {"dist": dist, "group": group}
    exec("def call():\n    dist.barrier(group=group)\n", names)
    for _ in range(3):
        names["call"]()

    def emptied(_: object) -> None:
        seen.extend(out)
        out.clear()

    alive = weakref.ref(names["call"].__code__, emptied)
    del names["call"]
    assert alive() is not None
    for each in out:
        each[:] = -1
    dist.all_gather(out, x, group=group)
    assert alive() is None
    assert [each[0] for each in seen] == list(range(size))


def test_code_that_runs_in_a_search_for_cycles(fresh: Callable[[], Any]) -> None:
    """A finalizer that empties the list of results, at whatever allocation it comes: an error on all ranks, or none."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = fresh()
    out, x = [np.zeros(3) for _ in range(size)], np.full(3, float(me))
    for _ in range(4):
        dist.all_gather(out, x, group=group)

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            out.clear()

    kept: list[Any] = [(1, 2, number) for number in range(4000)]  # there is no tuple to be used again
    threshold = gc.get_threshold()
    try:
        for turn in range(21):
            out[:] = [np.zeros(3) for _ in range(size)]
            gc.disable()
            Cycle()
            gc.set_threshold(1 + turn % 7)
            gc.enable()
            try:
                dist.all_gather(out, x, group=group)
            except (ValueError, IndexError, dist.CollectiveMismatchError):
                pass
            gc.disable()
            kept.append((1, me, turn))
            gc.collect()
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    y = np.ones(2)
    dist.all_reduce(y)
    assert (y == size).all()


@pytest.mark.parametrize("missing", ["folder", "space", "budget"])
def test_without_shared_memory(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where one rank has no shared memory, all use MPI, say so in one line, and leave nothing behind."""
    me, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    monkeypatch.setattr("mpicoll.operations.schedules._told", [])
    budget = transport.Budget(0 if missing == "budget" and me == 1 else 1 << 24)
    group.pair.node = transport.SharedMemoryTransport(group.pair.data, budget, False)
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
    assert not Selection("mpi").node(Kind.ALL_REDUCE, 1 << 30)
    assert Selection("node").node(Kind.BROADCAST, 1)
    assert not Selection("node").node(Kind.BARRIER, 0)
    chosen = Selection("auto", ranges={Kind.REDUCE: [(1000, 2000), (4000, 5000)]})
    assert [size for size in (999, 1000, 2000, 2001, 4500, 5001) if chosen.node(Kind.REDUCE, size)] == [
        1000,
        2000,
        4500,
    ]
    assert not chosen.node(Kind.GATHER, 1 << 40)


@pytest.mark.parametrize("size", [1, 3000, 70_001, 400_001])
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


def test_what_is_reduced_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all_reduce of shared arrays is, from a size on; smaller ones and other arrays are copied."""
    least = transport.DIRECT_BYTES_OF_TWO if dist.get_world_size() == 2 else transport.DIRECT_BYTES
    group = dist.new_group()
    x, plain = dist.empty(least // 8, group=group), np.ones(least // 8)
    node, kinds = group.pair.node, []
    if node is None or not node.usable or group.pair.selection.mode == "mpi":
        pytest.skip("the ranks share no memory")
    transfer = node._transfer
    monkeypatch.setattr(
        node, "_transfer", lambda kind, *rest, **more: kinds.append(kind) or transfer(kind, *rest, **more)
    )
    for array, in_place in ((x, True), (x[1:], False), (plain, False)):
        array[...] = 1
        dist.all_reduce(array, group=group)
        assert (array == dist.get_world_size()).all()
        assert ("in place" in kinds) is in_place, kinds
        kinds.clear()
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


def test_ranks_that_are_bound_to_different_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether ranks of a node share cores is agreed, since what is done depends on it."""
    from mpi4py import MPI

    from mpicoll.transports.topology import discover

    me = dist.get_rank()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)) if me == 0 else {5})
    found = discover(MPI.COMM_WORLD)
    assert found.oversubscribed is (len({*found.local_ranks} - {0}) > 1)
