"""The C extension makes the calls that Python would make: the same bits, whoever waits, and beside ranks that have it not."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import mpicoll as dist
from mpicoll.operations import riding
from mpicoll.pytest_plugin import collective_raises
from mpicoll.transports.shm.control import EAGER_BYTES, MASK
from mpicoll.transports.shm.transport import PIECE

pytestmark = pytest.mark.mpi(min_size=2)

Op = dist.ReduceOp


@pytest.fixture(autouse=True)
def _built() -> None:
    world = dist.group.WORLD
    assert world is not None
    if riding.extension is None:
        pytest.skip(f"this machine lacks the extension: {riding.why_not}")
    if not world.pair.agreement.channel.carries_data:
        pytest.skip("the ranks make their rounds through MPI")


@pytest.fixture
def fresh() -> Iterator[Callable[[bool], Any]]:
    """Return a function that makes a group of all ranks, whose calls go through the extension on this rank, or not."""
    made: list[Any] = []
    found = riding.extension

    def make(with_extension: bool) -> Any:
        riding.extension = found if with_extension else None
        made.append(dist.new_group())
        if not with_extension:
            made[-1].pair.node._machine = None
        return made[-1]

    yield make
    riding.extension = found
    for group in made:
        dist.destroy_process_group(group)


def here() -> bool:
    """Whether this rank has not been told to do without."""
    return os.environ.get("MPICOLL_EXTENSION") != "off"


def values(dtype: str, count: int, rank: int) -> Any:
    """Elements of a rank: random bits for integers, and for others all that is special."""
    random = np.random.default_rng(rank)
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        return np.frombuffer(random.bytes(count * kind.itemsize), kind).copy()
    if kind.kind == "b":
        return random.integers(0, 2, count).astype(bool)
    real = kind if kind.kind == "f" else np.dtype(f"f{kind.itemsize // 2}")
    many = count if kind.kind == "f" else 2 * count
    tiny = np.finfo(real).smallest_subnormal
    special = np.array([0.0, -0.0, np.inf, -np.inf, tiny, -tiny, 1.5, -2.5, np.finfo(real).max, np.nan], real)
    found = np.where(random.random(many) < 0.5, random.choice(special, many), random.standard_normal(many).astype(real))
    return found.astype(real).view(kind)


FOLDS: dict[Any, Any] = {
    Op.SUM: np.add,
    Op.PRODUCT: np.multiply,
    Op.MAX: np.maximum,
    Op.MIN: np.minimum,
    Op.BAND: np.bitwise_and,
    Op.BOR: np.bitwise_or,
    Op.BXOR: np.bitwise_xor,
}
DTYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "c8", "c16", "?"]


def ops_of(dtype: str) -> list[Any]:
    kind = np.dtype(dtype).kind
    if kind == "c":
        return [Op.SUM, Op.AVG]
    return list(FOLDS) if kind in "iub" else [Op.SUM, Op.PRODUCT, Op.MAX, Op.MIN, Op.AVG]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_numpy(dtype: str, fresh: Callable[[bool], Any]) -> None:
    """Every op that the dtype has, of one element, of some and of many: what NumPy gives in the order of the ranks."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = fresh(here())
    most = EAGER_BYTES // np.dtype(dtype).itemsize
    for op in ops_of(dtype):
        for count in (1, 7, most, 5 * most + 3):
            every = [values(dtype, count, rank) for rank in range(size)]
            with np.errstate(all="ignore"):
                if dtype == "?":
                    either = {
                        Op.SUM: np.logical_or,
                        Op.MAX: np.logical_or,
                        Op.BXOR: np.logical_xor,
                        Op.BOR: np.logical_or,
                    }
                    fold = either.get(op, np.logical_and)
                else:
                    fold = FOLDS.get(op, np.add)
                expected = every[0].copy()
                for term in every[1:]:
                    expected = fold(expected, term)
                if op is Op.AVG:
                    expected = np.divide(expected, size, dtype=expected.dtype)
            for _ in range(4):
                x = every[me].copy()
                dist.all_reduce(x, op, group=group)
                # Of two zeros the one or the other is larger, and a NaN has the sign of its father.
                assert np.array_equal(x, expected, equal_nan=True), (op, count)
                if op not in (Op.MAX, Op.MIN) and not np.isnan(expected).any():
                    assert x.tobytes() == expected.tobytes(), (op, count)
                others: list[Any] = [None] * size
                dist.all_gather_object(others, x.tobytes(), group=group)
                assert all(each == others[0] for each in others), (op, count)


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "c8"])
def test_the_same_bits_for_who_waits(dtype: str, fresh: Callable[[bool], Any]) -> None:
    """One rank comes late, so that the others go on in Python: all have the same bits, of zeros and of NaNs as well."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = fresh(here())
    for op in ops_of(dtype):
        for turn in range(2 * size):
            x = values(dtype, 100, 7 * turn + me)
            if turn % size == me:
                time.sleep(0.005)
            dist.all_reduce(x, op, group=group)
            others: list[Any] = [None] * size
            dist.all_gather_object(others, x.tobytes(), group=group)
            assert all(each == others[0] for each in others), (op, turn)


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
def test_every_call_beside_ranks_without(dtype: str, fresh: Callable[[bool], Any]) -> None:
    """With the extension on all ranks, on every other one and on none: each call gives the same, whoever is late."""
    me, size = dist.get_rank(), dist.get_world_size()
    groups = [fresh(with_it and here()) for with_it in (True, me % 2 == 0, False)]
    for count in (0, 1, 9, 200, 3000, 20_000):
        for turn in range(3 * size):
            late = (turn + count) % size
            found = []
            for group in groups:
                if turn % 3 == 2 and me == late:
                    time.sleep(0.002)
                found.append(every_call(group, count, dtype, turn))
            assert alike(found[0], found[1]), (count, turn)
            assert alike(found[0], found[2]), (count, turn)


def test_in_pieces(fresh: Callable[[bool], Any]) -> None:
    """What is larger than a piece, also by one element, late in turn, and the same with extension and without."""
    me, size = dist.get_rank(), dist.get_world_size()
    groups = [fresh(here()), fresh(False)]
    for count in (PIECE // 8, PIECE // 8 + 1, 3 * PIECE // 8 - 5, 1_000_003):
        for turn in range(2 * size):
            root = turn % size
            mine = np.random.default_rng(1000 * turn + me).standard_normal(count)
            found: list[list[Any]] = []
            for group in groups:
                if turn >= size and me == root:
                    time.sleep(0.003)
                results = [mine.copy() for _ in range(3)]
                dist.all_reduce(results[0], group=group)
                dist.broadcast(results[1], root, group=group)
                dist.reduce(results[2], root, group=group)
                if me != root:
                    results.pop()
                found.append(results)
            assert alike(*found), (count, turn)
            same: list[Any] = [None] * size
            dist.all_gather_object(same, (hash(found[0][0].tobytes()), found[0][1].tobytes() == found[1][1].tobytes()))
            assert len({each[1] for each in same}) == 1


def test_the_same_bytes_as_other_elements(fresh: Callable[[bool], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """At check level ``off`` members may see the same bytes as elements of other sizes: the pieces are the same."""
    dist.barrier()
    monkeypatch.setattr(dist.group.WORLD, "level", "off")
    group = fresh(here())
    assert group.level == "off"
    sent = np.random.default_rng(3).integers(0, 256, 3 * 1024 * 1024 + 64, np.uint8)
    for turn in range(5):
        x = sent.copy() if dist.get_rank() == 0 else np.zeros(sent.size // 8)
        dist.broadcast(x, 0, group=group)
        assert (x.view(np.uint8) == sent).all(), turn


def test_a_rank_that_is_gone_in_the_midst_of_pieces(
    fresh: Callable[[bool], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that never comes to the next piece: the others wait as for any call, and run into its limit."""
    me = dist.get_rank()
    group = fresh(here())
    x = np.ones(2 * PIECE)
    for _ in range(4):
        dist.broadcast(x, 0, group=group)
    ride = next(iter(group.rides.values()))
    if not ride.width:
        pytest.skip("not moved in pieces")
    dist.barrier()
    group.set_timeout(timedelta(seconds=1))
    if me == 1:  # as if it were stopped for good: it makes the round, and no step
        monkeypatch.setattr(riding, "_end", lambda *given: (_ for _ in ()).throw(KeyError("gone")))
        monkeypatch.setattr(riding, "ride", lambda *given: riding.ride_in_python(*given))
        ride.views[(ride.segment.step + 1) & 1] = None, None
        with pytest.raises(KeyError):
            dist.broadcast(x, 0, group=group)
    else:
        with pytest.raises(dist.DistError):
            dist.broadcast(x, 0, group=group)
            dist.broadcast(x, 0, group=group)
    assert group.broken is not None or me not in (0, 1)
    y = np.ones(1)
    dist.all_reduce(y)
    assert y[0] == dist.get_world_size()


def test_it_is_used(fresh: Callable[[bool], Any]) -> None:
    """What is made again is prepared for it, and what it takes is not taken in Python."""
    if not here():
        pytest.skip("ranks were told to do without the extension")
    group = fresh(True)
    for turn in range(3):
        every_call(group, 9, "f8", 0)
        every_call(group, 3000, "f8", turn * 0)
    prepared = {key if isinstance(key, str) else key[0]: ride for key, ride in group.rides.items()}
    assert len(prepared) >= 10, list(prepared)
    for name, ride in prepared.items():
        assert ride.quick is not None, name
        assert ride.quick.takes == bool(ride.take), name


def test_lists_of_arrays_that_came_as_bytes(fresh: Callable[[bool], Any]) -> None:
    """The dtype of an array that was pickled is equal to NumPy's own, and another object."""
    size = dist.get_world_size()
    group = fresh(here())
    for _ in range(3 * (MASK + 1)):
        many = [pickle.loads(pickle.dumps(np.zeros(3))) for _ in range(size)]
        dist.all_gather(many, pickle.loads(pickle.dumps(np.full(3, float(dist.get_rank())))), group=group)
        assert all((each == rank).all() for rank, each in enumerate(many))


def test_a_mismatch_names_the_call(fresh: Callable[[bool], Any]) -> None:
    """Calls that were made many times, and then not by all: the report says who called what, and the group is still good."""
    me = dist.get_rank()
    group = fresh(here())
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


def test_a_thread_for_each_group(fresh: Callable[[bool], Any]) -> None:
    """Two threads, a group for each: none gets what is the other's."""
    size = dist.get_world_size()
    groups = [fresh(here()) for _ in range(2)]
    wrong: list[Any] = []

    def run(number: int) -> None:
        try:
            for turn in range(300):
                x = np.full(5, float(number * 1000 + turn))
                dist.all_reduce(x, group=groups[number])
                assert (x == size * (number * 1000 + turn)).all(), (number, turn)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def test_arrays_that_grow_meanwhile(fresh: Callable[[bool], Any]) -> None:
    """What is passed has another number of elements than the call that was made before: it is another call."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = fresh(here())
    for turn in range(30):
        x = np.zeros(4)
        dist.all_reduce(x, group=group)
        x.resize(4 + turn % 5, refcheck=False)
        x[:] = me
        dist.all_reduce(x, group=group)
        assert (x == size * (size - 1) / 2).all(), turn


def test_a_handler_that_raises_while_it_looks_for_the_others(
    fresh: Callable[[bool], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals that come meanwhile are handled as Python goes on: the group is given up, on all ranks, and no other."""

    class Struck(Exception):
        pass

    def strike(number: int, frame: object) -> None:
        raise Struck

    monkeypatch.setattr(riding, "PATIENCE", 300_000_000)
    monkeypatch.setattr(riding, "PATIENCE_CROWDED", 300_000_000)
    group = fresh(here())
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


def test_code_that_runs_when_the_last_call_is_forgotten(fresh: Callable[[bool], Any]) -> None:
    """The place of the call before may be the last that knows of a function: what its end runs finds the call over."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = fresh(here())
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


def test_code_that_runs_in_a_search_for_cycles(fresh: Callable[[bool], Any]) -> None:
    """A finalizer that empties the list of results, at whatever allocation it comes: an error on all ranks, or none."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = fresh(here())
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
        for turn in range(60):
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
