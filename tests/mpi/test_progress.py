"""MPICOLL_PROGRESS=thread: operations under way go on while the program computes."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from polling import until

import mpicoll as dist
from mpicoll.diagnosis.deadlock_search import describe_state
from mpicoll.pytest_plugin import collective_raises
from mpicoll.runtime import waiting
from mpicoll.runtime.progress import NAME

pytestmark = pytest.mark.mpi


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a default group with a progress thread."""
    dist.destroy_process_group()
    monkeypatch.setenv("MPICOLL_PROGRESS", "thread")
    dist.init_process_group(timeout=timedelta(seconds=15))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    assert not running()


def begin(count: int, op: Any = dist.ReduceOp.SUM) -> tuple[Any, dist.Work]:
    """Issue an all_reduce on rank 0 first, and then on the others."""
    x = np.full(count, dist.get_rank() + 1.0)
    if dist.get_rank() > 0:
        MPI.COMM_WORLD.Barrier()
    work = dist.all_reduce(x, op, async_op=True)
    if dist.get_rank() == 0:
        MPI.COMM_WORLD.Barrier()
    assert work is not None
    return x, work


def came(future: Any) -> bool:
    """Whether a future is done, without a look of the library, which would move it on."""
    return concurrent.futures.Future.done(future)


@pytest.mark.mpi(min_size=2)
def test_without_it_nothing_moves_until_the_wait() -> None:
    """The rank that has come first has nothing of the others while it computes, and no thread."""
    x, work = begin(400_000)
    done = partial(came, work.get_future())
    MPI.COMM_WORLD.Barrier()
    assert waiting.progress_thread is None
    assert not running()
    if dist.get_rank() == 0:
        assert not done()
    MPI.COMM_WORLD.Barrier()
    work.wait()
    assert (x == sum(range(1, dist.get_world_size() + 1))).all()


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize("count", [3, 20_000, 400_000, 5_000_000])
def test_data_moves_while_the_program_computes(count: int) -> None:
    """The result is there on all ranks though none of them has called the library again; wait has nothing left to do."""
    assert not running()
    x, work = begin(count)
    future = work.get_future()
    assert until(partial(came, future))
    assert (x == sum(range(1, dist.get_world_size() + 1))).all()
    assert work.wait() is True
    assert future.result()[0] is x


@pytest.mark.usefixtures("threaded")
def test_python_may_compute() -> None:
    """Work that keeps the interpreter's lock leaves it often enough."""
    x, work = begin(400_000)
    done, total = partial(came, work.get_future()), 0
    end = time.monotonic() + 30
    while not done() and time.monotonic() < end:
        total += sum(range(1000))
    assert done()
    work.wait()
    assert (x == sum(range(1, dist.get_world_size() + 1))).all()


@pytest.mark.usefixtures("threaded")
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [5, 200_000])
def test_messages_move_while_the_program_computes(count: int) -> None:
    """isend and irecv end without a call of the library; large elements, too, which travel apart."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, got = np.full(count, float(rank)), np.zeros(count)
    works = [dist.irecv(got, (rank - 1) % size), dist.isend(x, (rank + 1) % size)]
    futures = [work.get_future() for work in works if work is not None]
    assert until(lambda: all(came(future) for future in futures))
    assert (got == (rank - 1) % size).all()
    for work in works:
        assert work is not None
        work.wait()


@pytest.mark.usefixtures("threaded")
def test_many_calls_in_several_orders() -> None:
    """Calls of two groups, waited for in any order, and between calls that are waited for on the spot, give what they should."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.group.WORLD, dist.new_group()]
    for turn in range(12):
        count = (3, 3_000, 200_000)[turn % 3]
        arrays = [np.full(count, rank + 1.0 + k) for k in range(6)]
        works = [dist.all_reduce(x, group=groups[(k + turn) % 2], async_op=True) for k, x in enumerate(arrays)]
        small = np.full(2, 1.0)
        dist.all_reduce(small)
        assert (small == size).all()
        for work in works if rank % 2 else works[::-1]:
            assert work is not None
            work.wait()
        for k, x in enumerate(arrays):
            assert (x == size * (size + 1) / 2 + k * size).all()
    dist.destroy_process_group(groups[1])


@pytest.mark.usefixtures("threaded")
@pytest.mark.mpi(min_size=2)
def test_a_mismatch_is_raised_by_wait() -> None:
    """The thread has found it and keeps it for the wait, on all ranks, with one verdict on the group."""
    op = dist.ReduceOp.MAX if dist.get_rank() == 0 else dist.ReduceOp.SUM
    group = dist.new_group()
    work = dist.all_reduce(np.ones(4), op, group, async_op=True)
    assert work is not None
    assert until(partial(came, work.get_future()))
    with collective_raises(dist.CollectiveMismatchError, match=r"all_reduce") as found:
        work.wait()
    x = np.ones(2)
    if "The group is broken now" in str(found.value):  # the thread was faster than a program that asks for the future
        with pytest.raises(dist.GroupBrokenError, match="asynchronous calls of it were pending"):
            dist.all_reduce(x, group=group)
    else:
        dist.all_reduce(x, group=group)
        assert (x == dist.get_world_size()).all()


@pytest.mark.usefixtures("threaded")
def test_arguments_that_are_wrong_are_raised_by_wait() -> None:
    """An average of integers is refused, with the same error as without the thread."""
    x = np.ones(3, np.int64)
    with collective_raises(RuntimeError, match="AVG"):
        work = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True)
        assert work is not None
        work.wait()


@pytest.mark.usefixtures("threaded")
def test_buffers_are_watched_until_the_wait() -> None:
    """A write between the end of the call and its wait is an error as it is without the thread."""
    x, work = begin(3)
    assert until(lambda: work._request.done)
    x[0] = -1.0
    with collective_raises(dist.BufferInUseError, match="written before"):
        work.wait()


@pytest.mark.usefixtures("threaded")
def test_callbacks_run_in_it() -> None:
    """A callback of the future runs on the thread that makes the progress."""
    ran: list[str] = []
    comm = MPI.COMM_WORLD
    if dist.get_rank() > 0:
        comm.Barrier()
    work = dist.all_reduce(np.ones(400_000), async_op=True)
    assert work is not None
    future = work.get_future()
    future.add_done_callback(lambda _: ran.append(threading.current_thread().name))
    if dist.get_rank() == 0:
        comm.Barrier()
    assert until(lambda: bool(ran))
    assert ran[0] in (NAME, threading.current_thread().name)
    work.wait()


@pytest.mark.usefixtures("threaded")
def test_it_is_none_of_the_threads_of_the_program() -> None:
    """A search for deadlocks hears of the same threads with it as without, and no wait of its."""
    before = describe_state()
    _, work = begin(400_000)
    if dist.get_world_size() > 1:
        assert until(lambda: bool(running()) or work._request.done)
    after = describe_state()
    assert (after.doubtful, after.free, after.waits) == (before.doubtful, before.free, before.waits)
    work.wait()


@pytest.mark.usefixtures("threaded")
def test_it_ends_with_the_default_group() -> None:
    """It begins with the first operation, and destroy_process_group ends it; a new group begins it again."""
    for _ in range(2):
        assert not running()
        for _ in range(20):
            _, work = begin(50_000)
            work.wait()
        # The first to issue has something under way; what the others issue may be over at once.
        assert len(running()) == 1 if dist.get_rank() == 0 and dist.get_world_size() > 1 else len(running()) < 2
        dist.destroy_process_group()
        assert not running()
        dist.init_process_group(timeout=timedelta(seconds=15))


@pytest.mark.usefixtures("threaded")
def test_gradients() -> None:
    """average_gradients of several buckets ends while the program computes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arrays = [np.full(100_000, rank + k, np.float32) for k in range(5)]
    work = dist.average_gradients(arrays, async_op=True, bucket_bytes=1 << 20)
    assert work is not None
    future = work.get_future()
    assert until(partial(came, future))
    for k, array in enumerate(arrays):
        assert np.allclose(array, (size - 1) / 2 + k)
    work.wait()
