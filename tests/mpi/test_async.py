"""async_op=True: calls that go on while the program does, and the Work that stands for one."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import inspect
import pickle
import time
import warnings
from datetime import timedelta
from typing import Any

import collective_cases as cases
import numpy as np
import pytest
from mpi4py import MPI
from polling import until

import mpicoll as dist
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi

LATE = 0.3  # seconds


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["all_reduce", "all_reduce large", "barrier", "broadcast", "all_to_all uneven"])
def test_a_call_is_under_way_until_the_last_rank_has_come(name: str) -> None:
    """is_completed is False while a rank is missing, and comes true later without wait."""
    size, rank = dist.get_world_size(), dist.get_rank()
    last = size - 1
    if rank == last:
        time.sleep(LATE)
    started = time.monotonic()
    x = np.full(100_000 if name.endswith("large") else 3, rank + 1.0)
    outputs = [np.zeros((r + rank) % 3) for r in range(size)]
    if name == "barrier":
        work = dist.barrier(async_op=True)
    elif name == "broadcast":
        work = dist.broadcast(x, last, async_op=True)
    elif name == "all_to_all uneven":
        work = dist.all_to_all(outputs, [np.full((r + rank) % 3, 1.0 * rank) for r in range(size)], async_op=True)
    else:
        work = dist.all_reduce(x, async_op=True)
    issued = time.monotonic() - started
    assert isinstance(work, dist.Work)
    if rank != last:
        assert issued < LATE / 2, f"the call returned only after {issued:.3f} s"
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        with pytest.raises(RuntimeError, match=r"wait\(\)"):
            work.result()
    assert until(work.is_completed), "it is not completed 20 s after the last rank has come"
    assert work.is_success()
    assert work.exception() is None
    if name.startswith("all_reduce"):
        assert (x == size * (size + 1) / 2).all()
    elif name == "broadcast":
        assert (x == size).all()
    elif name.startswith("all_to_all"):
        assert all((output == r).all() for r, output in enumerate(outputs))
    assert work.wait() is True


def test_groups_used_in_opposite_orders() -> None:
    """Ranks may issue async calls on two groups in opposite orders, and wait for them in any."""
    rank = dist.get_rank()
    groups = [dist.new_group(), dist.new_group()]
    for count in (3, 50_000):
        for turn in range(3):
            order = (0, 1) if (rank + turn) % 2 else (1, 0)
            arrays = [np.full(count, 1.0 + rank + which) for which in (0, 1)]
            works = {which: dist.all_reduce(arrays[which], group=groups[which], async_op=True) for which in order}
            for which in order if rank % 3 else order[::-1]:
                works[which].wait()
            for which in (0, 1):
                expected = sum(1.0 + r + which for r in range(dist.get_world_size()))
                assert (arrays[which] == expected).all(), f"group {which}, {count} elements, turn {turn}"
    for group in groups:
        dist.destroy_process_group(group)


def test_one_rank_is_async_while_the_others_wait() -> None:
    """A call may be async on some ranks and not on the others."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for name in cases.ALL:
        for odd in range(size):
            for count in (3, 5000):
                async_op = (rank == odd) != (count == 3)
                cases.run(name, iter((cases.Case("d", count, root=odd, async_op=async_op),)))


def test_sync_calls_while_async_ones_are_under_way() -> None:
    """A call that waits, on any group, completes while async ones issued before it are not waited for."""
    size, rank = dist.get_world_size(), dist.get_rank()
    other = dist.new_group()
    for count in (2, 5000):
        early = np.full(count, 1.0 + rank)
        work = dist.all_reduce(early, async_op=True)
        for group in (None, other):
            x = np.full(count, 2.0)
            dist.all_reduce(x, group=group)
            assert (x == 2 * size).all(), count
        assert until(work.is_completed)
        assert (early == size * (size + 1) / 2).all(), count
    dist.destroy_process_group(other)


def test_only_some_ranks_have_async_calls_on_another_group() -> None:
    """A rank that has calls under way on one group meets ranks that have none on another group."""
    size, rank = dist.get_world_size(), dist.get_rank()
    pair = dist.new_group(sorted({0, size - 1}))
    for count in (2, 5000):
        work = None
        if rank in (0, size - 1):
            x = np.full(count, 1.0)
            work = dist.all_reduce(x, group=pair, async_op=True)
        y = np.full(count, 1.0)
        dist.all_reduce(y)
        assert (y == size).all(), count
        if work is not None:
            work.wait()
            assert (x == len({0, size - 1})).all(), count
    if pair != dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(pair)


def test_many_calls_outstanding_on_one_group_waited_for_in_reverse() -> None:
    """Sixty async calls of several kinds and sizes go on at once, and end well in whatever order one waits."""
    size, rank = dist.get_world_size(), dist.get_rank()
    works: list[Any] = []
    for turn in range(60):
        count = (1, 7, 3000, 0)[turn % 4]
        x = np.full(count, float(turn + rank))
        if turn % 3 == 0:
            works.append((dist.all_reduce(x, async_op=True), x, sum(turn + r for r in range(size))))
        elif turn % 3 == 1:
            works.append((dist.broadcast(x, turn % size, async_op=True), x, turn + turn % size))
        else:
            out = np.zeros(size * count)
            expected = np.repeat([turn + r for r in range(size)], count)
            works.append((dist.all_gather_single(out, x, async_op=True), out, expected))
    for turn, (work, result, expected) in reversed(list(enumerate(works))):
        assert work.wait() is True
        assert (result == expected).all(), f"call {turn}: {result[:3]}, not {expected}"


def test_buffers_live_as_long_as_the_call() -> None:
    """The user may drop arrays and lists that a call still uses."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if rank == size - 1:
        time.sleep(0.1)
    for count in (3, 50_000):
        works = [dist.all_reduce(np.full(count, float(turn)), async_op=True) for turn in range(5)]
        gather = dist.all_gather([np.zeros(count) for _ in range(size)], np.full(count, float(rank)), async_op=True)
        gc.collect()
        junk = [np.full(count, -1.0) for _ in range(20)]
        for turn, work in enumerate(works):
            work.wait()
            assert (work.result()[0] == size * turn).all(), f"call {turn} of {count} elements"
        gather.wait()
        assert all((block == r).all() for r, block in enumerate(gather.result())), count
        del junk


def test_wait_says_true_every_time_and_takes_a_timedelta() -> None:
    """wait(timeout) takes a timedelta, zero means the group's limit, and a second wait is as good as the first."""
    for limit in (timedelta(0), timedelta(seconds=20)):
        work = dist.all_reduce(np.ones(2), async_op=True)
        assert work.wait(limit) is True
        assert work.wait(timeout=limit) is True
        work.synchronize()
    work = dist.all_reduce(np.ones(2), async_op=True)
    for wrong in (5, 0.5, None):
        with pytest.raises(TypeError, match="timedelta"):
            work.wait(wrong)
    with pytest.raises(ValueError, match="must not be negative"):
        work.wait(timedelta(seconds=-1))
    assert work.wait()


def test_futures() -> None:
    """get_future gives a Future of the outputs, whose result waits, and whose callbacks run once."""
    size = dist.get_world_size()
    for count in (2, 5000):
        x = np.ones(count)
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future()
        assert isinstance(future, concurrent.futures.Future)
        assert work.get_future() is future
        seen: list[Any] = []
        future.add_done_callback(lambda done, seen=seen: seen.append(done.result()))
        assert future.result(timeout=20)[0] is x
        assert (x == size).all()
        assert future.done()
        assert future.exception() is None
        assert len(seen) == 1
        assert seen[0][0] is x
        late: list[Any] = []
        future.add_done_callback(late.append)
        assert late == [future]
        assert work.wait()
    waited = dist.barrier(async_op=True)
    waited.wait()
    assert waited.get_future().result() == []


@pytest.mark.parametrize("count", [2, 5000, 400_000])
def test_a_future_that_is_polled(count: int) -> None:
    """done() makes progress, that of what then() returns, too."""
    x = np.ones(count)
    future: Any = dist.all_reduce(x, async_op=True).get_future()
    later = future.then(lambda done: done.value()[0][0])
    end = time.monotonic() + 20
    while (future.running() or not later.done()) and time.monotonic() < end:
        pass
    assert later.done()
    assert later.value() == future.value()[0][0] == dist.get_world_size()


@pytest.mark.mpi(min_size=2)
def test_a_future_that_is_polled_past_the_limit() -> None:
    """It ends with the error that a wait would have raised."""
    group = dist.new_group()
    if dist.get_rank():
        future: Any = dist.all_reduce(np.ones(3), group=group, async_op=True, timeout=timedelta(seconds=1)).get_future()
        end = time.monotonic() + 20
        while not future.done() and time.monotonic() < end:
            time.sleep(0.001)
        assert isinstance(future.exception(0), (dist.CollectiveTimeoutError, dist.GroupBrokenError))
    MPI.COMM_WORLD.Barrier()
    dist.destroy_process_group(group)


def test_groups_are_not_copied() -> None:
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot pickle or copy <ProcessGroup WORLD"):
            way(dist.group.WORLD)


def test_a_callback_may_communicate() -> None:
    """A callback of a future may make calls of its own."""
    x = np.ones(3)
    group = dist.new_group()
    work = dist.all_reduce(x, async_op=True)
    sums: list[float] = []

    def callback(done: Any) -> None:
        y = np.array([2.0])
        dist.all_reduce(y, group=group)
        sums.append(float(y[0]))

    work.get_future().add_done_callback(callback)
    work.wait()
    assert sums == [2.0 * dist.get_world_size()]
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_a_call_that_fails_says_so_in_every_way() -> None:
    """After a mismatch wait, result and the future raise, exception returns it, and is_success is False."""
    for way in ("wait", "poll", "future"):
        work = dist.all_reduce(np.ones(2 + dist.get_rank()), async_op=True)
        if way == "wait":
            for _ in range(2):
                with collective_raises(dist.CollectiveMismatchError):
                    work.wait()
        elif way == "future":
            with collective_raises(dist.CollectiveMismatchError):
                work.get_future().result(20)
            assert isinstance(work.get_future().exception(20), dist.CollectiveMismatchError)
        else:
            with collective_raises(dist.CollectiveMismatchError):
                until(work.is_completed)
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), dist.CollectiveMismatchError)
        with collective_raises(dist.CollectiveMismatchError):
            work.result()
        x = np.ones(1)
        dist.all_reduce(x)
        assert x[0] == dist.get_world_size()


def test_a_work_that_is_dropped_gives_a_warning_and_an_error_at_destroy() -> None:
    """A Work dropped without wait warns, and destroying its group then names the line that issued it."""
    group = dist.new_group()
    frame = inspect.currentframe()
    assert frame is not None
    works = [dist.all_reduce(np.ones(3), group=group, async_op=True)]
    line = frame.f_lineno - 1
    with pytest.warns(ResourceWarning, match=rf"all_reduce issued at .*test_async\.py:{line} was dropped"):
        works.clear()
    for doomed in (group, None):
        with pytest.raises(dist.DistError, match=rf"never waited for: all_reduce issued at .*test_async\.py:{line}\b"):
            dist.destroy_process_group(doomed)
    dist.barrier(group)  # the group was kept
    group.unwaited.clear()
    dist.destroy_process_group(group)


def test_destroy_refuses_while_a_work_is_held_and_takes_it_once_waited_for() -> None:
    """A group with calls that nobody has waited for is kept until somebody has."""
    group = dist.new_group()
    x = np.ones(3)
    work = dist.all_reduce(x, group=group, async_op=True)
    with pytest.raises(dist.DistError, match=r"all_reduce issued at .*test_async\.py"):
        dist.destroy_process_group(group)
    work.wait()
    assert (x == dist.get_world_size()).all()
    dist.destroy_process_group(group)


def test_a_work_that_was_waited_for_or_seen_complete_is_dropped_in_silence() -> None:
    """No warning for a Work that was waited for, or whose completion the program has seen."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        works = [dist.all_reduce(np.ones(3), async_op=True) for _ in range(3)]
        works[0].wait()
        assert until(works[1].is_completed)
        works[2].get_future().result(20)
        works.clear()
        gc.collect()


def test_repr_of_a_work_names_its_call() -> None:
    """The repr of a Work names the call, its line and its state."""
    work = dist.barrier(async_op=True)
    work.wait()
    assert "barrier issued at" in repr(work)
    assert "test_async.py" in repr(work)
    assert "completed" in repr(work)
