"""Plans: the results of all_reduce, started and waited for apart, whatever else is under way."""

from __future__ import annotations

import inspect
import random
import re
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from ranks import run_threads

import mpicoll as dist
from mpicoll.checks.memory_in_use import claims
from mpicoll.pytest_plugin import collective_raises
from mpicoll.runtime import waiting
from mpicoll.transports.shm.control import AHEAD, EAGER_BYTES

pytestmark = pytest.mark.mpi(min_size=2)


def made(array: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> dist.Plan:
    plan = dist.all_reduce_init(array, op, group)
    assert plan is not None
    return plan


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    """No test leaves a plan under way, or memory that counts as used."""
    yield
    world = dist.group.WORLD
    assert world is not None
    assert not world.unwaited
    assert not claims.reusable
    assert not claims.active
    assert not [item for item in waiting.pending if isinstance(item, dist.Plan)]


FOLDS = {
    dist.ReduceOp.SUM: np.add,
    dist.ReduceOp.PRODUCT: np.multiply,
    dist.ReduceOp.MAX: np.maximum,
    dist.ReduceOp.MIN: np.minimum,
}


@pytest.mark.parametrize("nbytes", [0, 8, EAGER_BYTES, EAGER_BYTES + 8, 1 << 16, 1 << 20])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "u1", "c16", "f2", "g"])
def test_results(dtype: str, nbytes: int) -> None:
    """Every dtype, op and size gives what the fold of all contributions gives, at each start anew."""
    me, size = dist.get_rank(), dist.get_world_size()
    count = nbytes // np.dtype(dtype).itemsize
    for op in [dist.ReduceOp.SUM] if dtype == "c16" else list(FOLDS):
        x = np.empty(count, dtype)
        plan = made(x, op)
        for turn in range(3):
            all_of_them = [
                np.random.default_rng(100 * turn + rank).integers(1, 4, count).astype(dtype) for rank in range(size)
            ]
            expected = all_of_them[0]
            for term in all_of_them[1:]:
                expected = FOLDS[op](expected, term)
            x[...] = all_of_them[me]
            plan.start()
            plan.wait()
            assert (x == expected).all(), (op, turn)


def test_averages_factors_bools_and_bits() -> None:
    """AVG divides, PREMUL_SUM multiplies, bools are or-ed, bits combined."""
    me, size = dist.get_rank(), dist.get_world_size()
    x = np.empty((2, 3))
    average, scaled = made(x, dist.ReduceOp.AVG), made(x, dist.ReduceOp.PREMUL_SUM(2.0))
    flags, bits = np.empty(4, bool), np.empty(4, np.int16)
    either, both = made(flags), made(bits, dist.ReduceOp.BOR)
    for turn in range(3):
        x[...] = me + turn
        average.start()
        average.wait()
        assert (x == turn + (size - 1) / 2).all()
        x[...] = me + turn
        scaled.start()
        scaled.wait()
        assert (x == 2 * (size * turn + size * (size - 1) / 2)).all()
        flags[...] = [me == 0, False, True, me == size - 1]
        bits[...] = 1 << me
        either.start()
        both.start()
        either.wait()
        both.wait()
        assert flags.tolist() == [True, False, True, True]
        assert (bits == (1 << size) - 1).all()


def test_arrays_of_other_layouts() -> None:
    """Strided, reversed, foreign and zero-dimensional memory holds the result; what lies between its elements stays."""
    me, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    whole = np.full((4, 6), -1.0)
    single, plain = np.zeros(()), np.zeros(3, ">f8")
    arrays: list[Any] = [whole[::2, ::-3], single, plain, memoryview(bytearray(16)).cast("d")]
    plans = [made(array) for array in arrays]
    for _ in range(3):
        for array, plan in zip(arrays, plans, strict=True):
            np.asarray(array)[...] = me + 1
            plan.start()
        for array, plan in zip(arrays, plans, strict=True):
            plan.wait()
            assert (np.asarray(array) == total).all()
        assert (whole[1::2] == -1).all()


@pytest.mark.parametrize("count", [1, 200, 3000, 40_000])
def test_other_calls_in_between(count: int) -> None:
    """Between start and wait: calls on the same group and another, waited for or not, messages, objects and barriers."""
    me, size = dist.get_rank(), dist.get_world_size()
    other = dist.new_group()
    x, y, z = np.empty(count), np.empty(7), np.empty(20_000)
    plan = made(x)
    for turn in range(4):
        x[...] = me + turn
        plan.start()
        y[...] = me
        dist.all_reduce(y)
        assert (y == size * (size - 1) / 2).all()
        dist.broadcast(y, turn % size, group=other)
        z[...] = me + 1
        work = dist.all_reduce(z, group=other, async_op=True)
        assert work is not None
        if me == 0:
            dist.send(y, size - 1)
        elif me == size - 1:
            dist.recv(y, 0)
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, (me, turn))
        assert objects == [(rank, turn) for rank in range(size)]
        dist.barrier()
        work.wait()
        assert (z == size * (size + 1) / 2).all()
        plan.wait()
        assert (x == size * turn + size * (size - 1) / 2).all()
    dist.destroy_process_group(other)


@pytest.mark.parametrize("count", [1, 100, 5000])
def test_against_plain_calls_of_other_ranks(count: int) -> None:
    """On some ranks a plan, on others a call that is waited for, or one that is not: the same call, the same result."""
    me, size = dist.get_rank(), dist.get_world_size()
    alone = random.Random(me)
    x = np.empty(count)
    plan, average = made(x), made(x, dist.ReduceOp.AVG)
    for turn in range(200):
        op, handle = (dist.ReduceOp.AVG, average) if turn % 3 == 0 else (dist.ReduceOp.SUM, plan)
        x[...] = me + turn
        way = alone.randrange(3)
        if way == 0:
            handle.start()
            handle.wait()
        else:
            work = dist.all_reduce(x, op, async_op=way == 2)
            if work is not None:
                work.wait()
        expected = size * turn + size * (size - 1) / 2
        assert (x == (expected / size if turn % 3 == 0 else expected)).all(), turn


def test_many_under_way() -> None:
    """More plans under way than rounds may be posted, waited for in another order on each rank."""
    me, size = dist.get_rank(), dist.get_world_size()
    arrays = [np.empty(1 + i) for i in range(3 * AHEAD)]
    plans = [made(array) for array in arrays]
    for turn in range(20):
        for i, (array, plan) in enumerate(zip(arrays, plans, strict=True)):
            array[...] = me + turn + i
            plan.start()
        order = list(range(len(plans)))
        random.Random(10 * turn + me).shuffle(order)
        for i in order:
            plans[i].wait()
            assert (arrays[i] == size * (turn + i) + size * (size - 1) / 2).all(), (turn, i)


def test_a_rank_that_is_late_by_turns() -> None:
    """Hundreds of starts, one rank late by turns before start or before wait: nobody reads another round's elements."""
    me, size = dist.get_rank(), dist.get_world_size()
    x = np.empty(2, np.int64)
    plan = made(x)
    for turn in range(600):
        late = turn % 20 == 3 and turn // 20 % size == me
        x[:] = turn + me, me
        if late and turn % 40 == 3:
            time.sleep(0.003)
        plan.start()
        if late and turn % 40 != 3:
            time.sleep(0.003)
        plan.wait()
        assert x.tolist() == [size * turn + size * (size - 1) // 2, size * (size - 1) // 2], turn


def test_later_than_a_stall() -> None:
    """A rank that is late by more than what counts as stalled."""
    me, size = dist.get_rank(), dist.get_world_size()
    x = np.empty(3)
    plan = made(x)
    for late in range(size):
        x[...] = me
        if late == me:
            time.sleep(0.12)
        plan.start()
        plan.wait()
        assert (x == size * (size - 1) / 2).all()


def test_completion_without_wait() -> None:
    """is_completed is False while a rank is missing and comes true later; wait is needed all the same."""
    me, size = dist.get_rank(), dist.get_world_size()
    x = np.full(3, me + 1.0)
    plan = made(x)
    assert plan.is_completed()
    assert repr(plan).endswith("at rest>")
    if me == 0:
        plan.start()
        assert not plan.is_completed()
        assert "under way" in repr(plan)
        dist.send(np.zeros(1), 1)
    elif me == 1:
        dist.recv(np.zeros(1), 0)
        plan.start()
    else:
        plan.start()
    until = time.monotonic() + 20
    while not plan.is_completed():
        assert time.monotonic() < until
    assert "complete, started at " in repr(plan)
    assert "test_plans.py:" in repr(plan)
    assert (x == size * (size + 1) / 2).all()
    with pytest.raises(RuntimeError, match="has not been waited for"):
        plan.start()
    plan.wait()


@pytest.mark.parametrize("count", [2, 5000])
def test_misuse(count: int) -> None:
    """Started twice, waited for unstarted, or for no timedelta: an error of this rank alone, and nothing is begun."""
    me, size = dist.get_rank(), dist.get_world_size()
    x = np.empty(count)
    plan = made(x)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="was not started"):
            plan.wait()
        x[...] = me
        plan.start()
        with pytest.raises(RuntimeError, match="has not been waited for"):
            plan.start()
        with pytest.raises(TypeError, match="timedelta"):
            plan.wait(3)  # type: ignore[arg-type]
        plan.wait(timedelta(seconds=20))
        assert (x == size * (size - 1) / 2).all()


def test_wrong_arguments_of_one_rank() -> None:
    """All ranks raise when the plan is made, the one with wrong arguments what is wrong with them; then the group is good."""
    me = dist.get_rank()
    frozen = np.zeros(3)
    frozen.setflags(write=False)
    cases: list[tuple[Any, Any, type[Exception]]] = [
        ([1.0, 2.0, 3.0], dist.ReduceOp.SUM, TypeError),
        (frozen, dist.ReduceOp.SUM, ValueError),
        (np.zeros(3), dist.ReduceOp.BAND, RuntimeError),
        (np.zeros(3), "sum", Exception),
    ]
    for array, op, kind in cases:
        with collective_raises((kind, dist.CollectiveMismatchError)) as caught:
            if me == 1:
                dist.all_reduce_init(array, op)
            else:
                dist.all_reduce_init(np.zeros(3))
        assert issubclass(caught.type, dist.CollectiveMismatchError) == (me != 1), caught.value
    with collective_raises(dist.CollectiveMismatchError, match="all_reduce_init"):
        dist.all_reduce_init(np.zeros(3 + (me == 1)))
    with collective_raises(dist.CollectiveMismatchError, match="all_reduce_init"):
        dist.all_reduce_init(np.zeros(3)) if me else dist.barrier()
    dist.barrier()


@pytest.mark.parametrize("count", [2, 5000])
def test_another_call_of_one_rank(count: int) -> None:
    """A plan of another op or size, or another call: all ranks raise in wait, and can start again."""
    me, size = dist.get_rank(), dist.get_world_size()
    x = np.empty(count)
    plan, product, largest = made(x), made(x, dist.ReduceOp.PRODUCT), made(np.empty(count + 1))
    for other in (product, largest, None):
        with collective_raises(dist.CollectiveMismatchError, match="all_reduce") as caught:
            if me == 1 and other is None:
                dist.broadcast(x, 0)
            else:
                chosen = other if me == 1 and other is not None else plan
                x[...] = 1
                chosen.start()
                chosen.wait()
        assert re.search(r"test_plans\.py", str(caught.value))
        x[...] = me
        plan.start()
        plan.wait()
        assert (x == size * (size - 1) / 2).all()


@pytest.mark.parametrize("same_group", [False, True])
def test_a_mismatch_that_another_wait_finds(same_group: bool) -> None:
    """A round that another call's wait has seen end in a mismatch is raised by the plan's wait, and the group is broken."""
    me = dist.get_rank()
    x = np.ones(2)
    group = dist.new_group()
    plan, product = made(x, group=group), made(x, dist.ReduceOp.PRODUCT, group=group)
    started = product if me == 1 else plan
    started.start()
    if same_group:
        with pytest.raises(dist.GroupBrokenError, match="asynchronous calls of it were pending"):
            dist.barrier(group)
    else:
        dist.barrier()
    with collective_raises(dist.CollectiveMismatchError, match="all_reduce") as found:
        started.wait()
    if same_group or "The group is broken now" in str(found.value):
        with pytest.raises(dist.GroupBrokenError, match="asynchronous calls of it were pending"):
            started.start()
    else:  # the barrier was over before the exchange had begun
        dist.barrier(group)


def test_mismatches_of_a_plan() -> None:
    """The plan's own wait raises each of them, and the group can still be used."""
    x = np.ones(2)
    plan, product = made(x), made(x, dist.ReduceOp.PRODUCT)
    started = product if dist.get_rank() == 1 else plan
    for _ in range(2):
        started.start()
        with collective_raises(dist.CollectiveMismatchError, match=r"all_reduce(.|\n)*can still be used"):
            started.wait()
    dist.barrier()


@pytest.mark.parametrize("count", [2, 5000])
def test_memory_in_use(count: int) -> None:
    """Memory of a plan under way is refused to other calls, and a plan refuses that of other operations."""
    world, me, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert world is not None
    if not world.compares:
        pytest.skip("memory is compared at check level full alone")
    x = np.full(count, 1.0)
    plan, again = made(x), made(x[: count - 1])
    plan.start()
    with collective_raises(dist.BufferInUseError, match="memory"):
        dist.all_reduce(x[1:])
    with collective_raises(dist.BufferInUseError, match="memory"):
        again.start()
    with collective_raises((dist.BufferInUseError, dist.CollectiveMismatchError)) as caught:
        dist.all_reduce(x if me == 1 else np.empty(count))
    assert issubclass(caught.type, dist.BufferInUseError) == (me == 1)
    plan.wait()
    assert (x == size).all()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    with collective_raises(dist.BufferInUseError, match="memory"):
        plan.start()
    work.wait()
    x[...] = 2
    again.start()
    again.wait()
    assert (x[:-1] == 2 * size).all()


@pytest.mark.parametrize("count", [2, 5000])
@pytest.mark.parametrize("early", [True, False], ids=["before the others come", "after it is complete"])
def test_memory_that_is_written_in_between(count: int, early: bool) -> None:
    """A write of the program to the array before wait raises there, on that rank alone; the plan can be started again."""
    world, me, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert world is not None
    if not world.compares:
        pytest.skip("memory is compared at check level full alone")
    x = np.full(count, 1.0)
    plan = made(x)
    for _ in range(2):
        x[...] = 1
        plan.start()
        if early and me == 0:
            x[0] = 7
        dist.barrier()
        if not early and me == 0:
            x[0] = 7
        if me == 0:
            with pytest.raises(dist.BufferInUseError, match="was written before its wait"):
                plan.wait()
        else:
            plan.wait()
            assert (x[1:] == size).all()


def test_threads_with_a_group_each() -> None:
    """Threads that start and wait on groups of their own, all at once."""
    me, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    arrays = [np.empty(1 + 40 * i) for i in range(3)]
    plans = [made(array, group=group) for array, group in zip(arrays, groups, strict=True)]
    wrong: list[Any] = []

    def loop(index: int) -> None:
        try:
            for turn in range(300):
                arrays[index][...] = me + turn
                plans[index].start()
                plans[index].wait()
                if not (arrays[index] == size * turn + size * (size - 1) / 2).all():
                    wrong.append((index, turn))
        except BaseException as error:
            wrong.append((index, error))

    run_threads(loop, range(3))
    assert not wrong
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


def test_not_a_member_and_groups_that_are_gone() -> None:
    """A rank outside the group gets None; a group with a plan under way is kept, and a destroyed one refuses a start."""
    me = dist.get_rank()
    part = dist.new_group([0, 1])
    x = np.full(2, 1.0)
    if me > 1:
        with pytest.warns(UserWarning, match="does not belong"):
            assert dist.all_reduce_init(x, group=part) is None
    else:
        plan = made(x, group=part)
        frame = inspect.currentframe()
        assert frame is not None
        plan.start()
        line = frame.f_lineno - 1
        with pytest.raises(dist.DistError, match=rf"never waited for: all_reduce issued at .*test_plans\.py:{line}\b"):
            dist.destroy_process_group(part)
        plan.wait()
        assert (x == 2).all()
        dist.destroy_process_group(part)
        with pytest.raises(ValueError, match="destroyed"):
            plan.start()
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_memory_is_given_back_when_a_plan_is_found_complete() -> None:
    """After ``is_completed`` said so the array may be used by others, and ``wait`` has nothing to complain of."""
    x = np.ones(4)
    plan = dist.all_reduce_init(x)
    assert plan is not None
    for _ in range(3):
        x[:] = 1
        plan.start()
        while not plan.is_completed():
            pass
        assert (x == dist.get_world_size()).all()
        dist.broadcast(x, 0)
        x[:] = 5
        plan.wait()
        assert (x == 5).all()
