"""isend and irecv that are made again: by requests that are kept, and as right and as watchful as the first time."""

from __future__ import annotations

import gc
import inspect
import time
import warnings
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from ranks import give_up, neighbours, run_threads
from striking import strike

import mpicoll as dist
from mpicoll.checks.memory_in_use import claims
from mpicoll.operations import messages
from mpicoll.runtime import waiting

pytestmark = pytest.mark.mpi(min_size=2)

COUNTS = (1, 500, 513, 3000, 40_000)  # in the message, apart from it, watched for writes, and not


def is_prepared(work: Any) -> bool:
    """Whether an operation took a request that is kept."""
    return type(work._request).__module__ == "mpicoll.operations.messages"


def receive(y: Any, group: Any = None, tag: int = 0) -> Any:
    """Start to receive from the rank before this one."""
    return dist.irecv(y, neighbours()[0], group, tag)


def send(x: Any, group: Any = None, tag: int = 0) -> Any:
    """Start to send to the next rank."""
    return dist.isend(x, neighbours()[1], group, tag)


def ring(x: Any, y: Any, group: Any = None, tag: int = 0) -> tuple[Any, Any]:
    """Start both."""
    return receive(y, group, tag), send(x, group, tag)


def practise(x: Any, y: Any, group: Any = None, tag: int = 0) -> None:
    """Make both calls often enough that requests are kept for them, at the places from which ``ring`` makes them."""
    for _ in range(3):
        for work in ring(x, y, group, tag):
            work.wait()
    dist.barrier()


@pytest.mark.parametrize("level", ["full", "roll", "off"])
def test_ring(level: str) -> None:
    """All that is sent arrives, from ever other memory too, whichever is waited for first; no request is left in use."""
    dist.destroy_process_group()
    dist.init_process_group(comm=MPI.COMM_WORLD, check=level)
    try:
        rank, (before, _) = dist.get_rank(), neighbours()
        for count in COUNTS:
            x, y = np.zeros(count), np.zeros(count)
            for turn in range(12):
                if turn % 4 == 3:
                    x, y = np.zeros(count), np.zeros(count)
                x[...] = 100 * rank + turn
                works = ring(x, y)
                assert [is_prepared(work) for work in works] == [turn > 1] * 2
                for work in works if turn % 2 else reversed(works):
                    assert work.wait() is True
                assert (y == 100 * before + turn).all()
                assert works[0].source_rank() == before
                assert not claims.active
                assert not waiting.pending
            world: Any = dist.group.WORLD
            for each in (*world.sends.values(), *world.receives.values()):
                each.take()
                each.give_back()
            assert not world.pair.receiver.posted
    finally:
        dist.destroy_process_group()
        dist.init_process_group(comm=MPI.COMM_WORLD)


def test_several_under_way_at_one_peer_and_tag() -> None:
    """Messages of several sizes at one peer and tag keep their order, whichever receive is waited for first."""
    rank, (before, _) = dist.get_rank(), neighbours()
    sizes = (3, 3000, 4, 3000, 3)
    for turn in range(5):
        xs = [np.full(n, 100.0 * rank + at + turn) for at, n in enumerate(sizes)]
        ys = [np.zeros(n) for n in sizes]
        works = [ring(x, y) for x, y in zip(xs, ys, strict=True)]
        for received, sent in works if turn % 2 else reversed(works):
            received.wait()
            sent.wait()
        for at, y in enumerate(ys):
            assert (y == 100 * before + at + turn).all(), (turn, at)


def test_beside_blocking_ones_and_receives_from_anybody() -> None:
    """The same requests serve send and recv; a receive from anybody that was started before gets its message first."""
    rank, (before, after) = dist.get_rank(), neighbours()
    for count in (2, 3000):
        x, y, z = np.full(count, rank + 1.0), np.zeros(count), np.zeros(count)
        for turn in range(6):
            y[...] = z[...] = 0
            if turn % 3 == 0:
                works = [dist.irecv(y), dist.irecv(z, before)]
                dist.isend(x, after).wait()
                dist.isend(x + 1, after).wait()
                for work in reversed(works):
                    work.wait()
                assert works[0].source_rank() == before
                assert (y == before + 1).all()
                assert (z == before + 2).all()
            elif turn % 3 == 1:
                sent = dist.isend(x, after)
                dist.recv(y, before)
                sent.wait()
                assert (y == before + 1).all()
            else:
                received = dist.irecv(y, before)
                if rank % 2 or rank == dist.get_world_size() - 1:
                    received.wait()
                    dist.send(x, after)
                else:
                    dist.send(x, after)
                    received.wait()
                assert (y == before + 1).all()
            dist.barrier()


@pytest.mark.parametrize("count", [1, 500, 3000])
def test_writes_are_noticed(count: int) -> None:
    """A write to what is sent, or received into, before wait raises there, before and after the message has come."""
    rank, (before, _) = dist.get_rank(), neighbours()
    x, y = np.full(count, float(rank)), np.full(count, -1.0)
    practise(x, y)
    received, sent = ring(x, y)
    assert is_prepared(received)
    assert is_prepared(sent)
    x[-1] = 77
    with pytest.raises(dist.BufferInUseError, match=r"isend at .*test_isend_irecv.py:\d+ was written before its wait"):
        sent.wait()
    received.wait()
    assert (y[:-1] == before).all()
    x[...] = rank
    dist.barrier()
    noticed = r"irecv at .*test_isend_irecv.py:\d+ was written before its wait"
    received = receive(y)
    y[0] = 77  # before it is sent
    dist.barrier()
    sent = send(x)
    sent.wait()
    with pytest.raises(dist.BufferInUseError, match=noticed):
        received.wait()
    dist.barrier()
    if count < 3000:  # nothing is compared while elements arrive in place
        received, sent = ring(x, y)
        sent.wait()
        y[0] = 78  # whether it has come or not
        with pytest.raises(dist.BufferInUseError, match=noticed):
            received.wait()
        dist.barrier()
    received, sent = ring(x, y)
    sent.wait()
    while not received._request.Test():
        pass
    y[0] = 79  # after it has come
    with pytest.raises(dist.BufferInUseError, match="irecv"):
        received.wait()
    practise(x, y)
    assert (y == before).all()
    assert not claims.active


@pytest.mark.parametrize("count", [1, 3000])
def test_memory_of_two_at_once(count: int) -> None:
    """Memory that one of them uses is refused to others, and both may read the same."""
    _, (before, after) = dist.get_rank(), neighbours()
    x, y = np.zeros(count), np.zeros(count)
    practise(x, y)
    practise(x, y, tag=1)
    received, sent = ring(x, y)
    assert is_prepared(received)
    assert is_prepared(sent)
    with pytest.raises(dist.BufferInUseError, match=r"irecv at .* writes memory that irecv at .* still writes"):
        dist.irecv(y, before, tag=1)
    with pytest.raises(dist.BufferInUseError, match=r"irecv at .* writes memory that isend at .* still reads"):
        dist.irecv(x, before, tag=1)
    with pytest.raises(dist.BufferInUseError, match=r"isend at .* reads memory that irecv at .* still writes"):
        dist.isend(y, after, tag=1)
    with pytest.raises(dist.BufferInUseError, match=r"all_reduce at .* writes memory that isend at .* still reads"):
        dist.all_reduce(x)
    z = np.zeros(count)
    again = ring(x, z, tag=1)
    for work in (received, sent, *again):
        work.wait()
    dist.barrier()


def test_messages_that_do_not_fit() -> None:
    """A message of another dtype or size is refused and kept, and the next receive that fits takes it."""
    rank, (before, after) = dist.get_rank(), neighbours()
    for count in (4, 3000):
        x, y = np.full(count, rank + 1.0), np.zeros(count)
        practise(x, y)
        for wrong in (np.full(count, rank + 1, np.int64), np.full(count + 1, rank + 1.0)):
            received = dist.irecv(y, before)
            sent = dist.isend(wrong, after)
            with pytest.raises(dist.CollectiveMismatchError, match="The message is not lost"):
                received.wait()
            into = np.zeros_like(wrong)
            assert dist.recv(into, before) == before
            assert (into == before + 1).all()
            sent.wait()
        practise(x, y)
        assert (y == before + 1).all()


def test_messages_from_other_places_and_ways() -> None:
    """What was sent from a new line, as another layout, or by send is received as well."""
    rank, (before, after) = dist.get_rank(), neighbours()
    for count in (4, 3000):
        x, y = np.full(count, rank + 1.0), np.zeros(count)
        practise(x, y)
        senders = [
            lambda x=x: dist.isend(x, after),
            lambda x=x: dist.isend(np.repeat(x, 2)[::2], after),
            lambda x=x: dist.isend(x.reshape(2, -1), after),
            lambda x=x: dist.isend(x, group_dst=after),
        ]
        for send in senders * 3:
            y[...] = 0
            received = dist.irecv(y, before)
            sent = send()
            received.wait()
            sent.wait()
            assert (y == before + 1).all()


def test_what_a_work_says() -> None:
    """is_completed, result, a future and repr answer as those of every Work."""
    rank, (before, _) = dist.get_rank(), neighbours()
    x, y = np.full(3, rank + 1.0), np.zeros(3)
    practise(x, y)
    received, sent = ring(x, y)
    assert is_prepared(received)
    assert "irecv issued at" in repr(received)
    assert "isend issued at" in repr(sent)
    dist.barrier()
    while not received.is_completed():
        pass
    assert not waiting.pending
    assert "completed" in repr(received)
    assert received.result() == [y]
    assert received.is_success()
    sent.wait()
    y[...] = 0
    x[...] = rank + 5
    received, sent = ring(x, y)
    assert is_prepared(received)
    futures = [received.get_future(), sent.get_future()]
    assert futures[0].result() == [y]
    assert futures[1].result() == [x]
    assert (y == before + 5).all()
    del received, sent
    assert not claims.active


def test_works_that_are_dropped() -> None:
    """They give a warning, are named when the group is destroyed, and leave their requests for others when they are over."""
    rank, (before, _) = dist.get_rank(), neighbours()
    group = dist.new_group()
    x, y = np.full(3, rank + 1.0), np.zeros(3)
    practise(x, y, group)
    works: Any = ring(x, y, group)
    assert all(map(is_prepared, works))
    operations = [work._request for work in works]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del works
        gc.collect()
    assert sorted(str(each.message).split()[0] for each in said) == ["irecv", "isend"]
    with pytest.raises(dist.DistError, match=r"never waited for: irecv issued at .*; isend issued at"):
        dist.destroy_process_group(group)
    while not all(operation.Test() for operation in operations):
        pass
    assert (y == before + 1).all()
    group.unwaited.clear()
    again = ring(np.zeros(3), np.zeros(3), group)
    for work in again:
        work.wait()
    dist.barrier()
    dist.destroy_process_group(group)


def test_a_receive_of_a_group_that_is_destroyed() -> None:
    """What was posted for it takes no message of a later group of the same ranks."""
    rank, (before, after) = dist.get_rank(), neighbours()
    x, y = np.full(3, rank + 1.0), np.zeros(3)
    group = dist.new_group()
    practise(x, y, group)
    lost = dist.irecv(y, before, group)
    assert is_prepared(lost)
    future = lost.get_future()
    dist.destroy_process_group(group)
    with pytest.raises(dist.GroupBrokenError, match="it was destroyed while an operation was under way"):
        future.result()
    assert not claims.active
    assert not waiting.pending
    group = dist.new_group()
    z = np.zeros(3)
    sent = dist.isend(x, after, group)
    dist.recv(z, before, group)
    sent.wait()
    assert (z == before + 1).all()
    assert (y == 0).all() or (y == before + 1).all()
    dist.barrier()
    dist.destroy_process_group(group)


def test_a_limit() -> None:
    """A receive that nobody sends to ends at its limit, and its group is broken."""
    rank, (before, _) = dist.get_rank(), neighbours()
    group = dist.new_group()
    x, y = np.full(3, rank + 1.0), np.zeros(3)
    practise(x, y, group)
    lost = dist.irecv(y, before, group)
    assert is_prepared(lost)
    with pytest.raises((dist.CollectiveTimeoutError, dist.GroupBrokenError, dist.DeadlockError)):
        lost.wait(timedelta(seconds=0.5))
    with pytest.raises(dist.GroupBrokenError):
        dist.isend(x, before, group)
    group.unwaited.clear()
    dist.destroy_process_group(group)
    dist.barrier()


def test_threads() -> None:
    """Threads with the same peer and shape, told apart by tags or not at all, lose and mix up nothing."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI gives no MPI_THREAD_MULTIPLE")
    rank, (before, _) = dist.get_rank(), neighbours()
    for count in (2, 3000):
        for tags in ((0, 1, 2), (0, 0, 0)):
            got: list[float] = []
            errors: list[BaseException] = []

            def run(tag: int, count: int = count, got: Any = got, errors: Any = errors) -> None:
                try:
                    for turn in range(20):
                        x, y = np.full(count, rank + 10.0 * turn), np.zeros(count)
                        for work in ring(x, y, tag=tag):
                            work.wait()
                        assert (y == y[0]).all()
                        got.append(y[0])
                except BaseException as error:
                    errors.append(error)

            run_threads(run, tags)
            assert not errors, errors
            assert sorted(got) == sorted(before + 10.0 * turn for turn in range(20) for _ in tags)
            dist.barrier()


def test_batches() -> None:
    """batch_isend_irecv takes requests that are kept, too, and its calls are named by the line that makes them."""
    rank, (before, after) = dist.get_rank(), neighbours()
    x, y = np.zeros(11), np.zeros(11)
    for turn in range(5):
        x[...] = rank + turn
        ops = [dist.P2POp(dist.irecv, y, before), dist.P2POp(dist.isend, x, after)]
        works = dist.batch_isend_irecv(ops)
        assert all("test_isend_irecv.py" in repr(work) for work in works)
        assert [is_prepared(work) for work in works] == [turn > 1] * 2
        for work in works:
            work.wait()
        assert (y == before + turn).all()


def test_arrays_go_with_their_works() -> None:
    """What was waited for is let go at once, and not when Python next looks for cycles."""
    x, y = np.zeros(3), np.zeros(3)
    practise(x, y)
    gc.collect()
    gc.disable()
    try:
        works = ring(x, y)
        assert all(map(is_prepared, works))
        for work in works:
            work.wait()
        gone = [weakref.ref(each) for each in (x, y, *works)]
        del x, y, works, work
        assert [each() is None for each in gone] == [True] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("async_op", [False, True])
def test_arrays_go_after_a_wait_that_looked_around(async_op: bool) -> None:
    """A rank that has looked for a deadlock keeps no frame of the program, and so nothing that was in use there."""

    def call() -> Any:
        x = np.ones(10_000)
        if dist.get_rank() == 1:
            time.sleep(0.4)  # the others look around after 0.1 s
        work = dist.all_reduce(x, async_op=async_op)
        if work is not None:
            work.wait()
        return weakref.ref(x)

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [10, 1000, 100_000])
def test_sends_that_nobody_waits_for_leave_their_memory_when_they_are_over(count: int) -> None:
    """The first time as when they are made again."""
    before, after = neighbours()
    x, y = np.ones(count), np.zeros(count)
    unwaited = dist.group.WORLD.unwaited
    for turn in range(4):
        known = set(unwaited)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            dist.isend(x, after)
        dist.recv(y, before)
        dist.barrier()
        dist.all_reduce(x)
        for ident in set(unwaited) - known:  # else they would be an error at the end
            del unwaited[ident]
        assert (y == dist.get_world_size() ** turn).all()


@pytest.mark.parametrize("early", [True, False], ids=["before they come", "after they have come"])
def test_a_later_receive_is_not_given_a_later_message(early: bool) -> None:
    """A message that does not fit the first receive is not overtaken by the next one on its way to the second."""
    rank, (before, after) = dist.get_rank(), neighbours()
    practise(np.zeros(2), np.zeros(2))
    p, q, r = np.zeros(2), np.zeros(2), np.zeros(4, np.int64)
    works = [dist.irecv(p, before), dist.irecv(q, before)] if early else []
    dist.barrier()
    sent = [dist.isend(np.arange(4), after), dist.isend(np.array([7.0, rank]), after)]
    dist.barrier()
    if not early:
        works = [dist.irecv(p, before), dist.irecv(q, before)]
    assert is_prepared(works[0])
    for work in reversed(works):
        with pytest.raises(dist.CollectiveMismatchError, match="The message is not lost"):
            work.wait()
    dist.recv(r, before)
    dist.recv(q, before)
    assert r.tolist() == [0, 1, 2, 3]
    assert q.tolist() == [7, before]
    for each in sent:
        each.wait()
    dist.barrier()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*dropped without wait:ResourceWarning")
@pytest.mark.parametrize("which", ["_begin", "_start_send", "_start_receive", "_work"])
def test_struck_at_every_line(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception between any two lines breaks the group or leaves it as it was; no other group, and no lock, is touched."""
    rank, (before, _) = dist.get_rank(), neighbours()
    if which != "_begin":
        monkeypatch.setattr(messages, "_begin", lambda *_: None)  # the extension starts no message
    other = dist.new_group()
    function = getattr(messages, which)
    source, first = inspect.getsourcelines(function)
    # Handlers run between calls: what stands behind a "finally" has begun to run by then.
    end = next((at for at, text in enumerate(source) if text.strip() == "finally:"), len(source))
    found = {line for *_, line in function.__code__.co_lines() if line}
    lines = sorted(line for line in found if first < line < first + end or line == first + len(source) - 1)
    struck = 0
    for count in (2, 3000):
        for line in lines:
            group: Any = dist.new_group()
            x, y, z = np.full(count, rank + 1.0), np.zeros(count), np.zeros(count)
            practise(x, y, group)
            works: list[Any] = []
            sent = group.sent
            if rank == 0:
                calls = {
                    "_start_send": lambda x=x, group=group, works=works: works.append(send(x, group)),
                    "_start_receive": lambda y=y, group=group, works=works: works.append(receive(y, group)),
                }
                struck += strike(function, line, calls.get(which, calls["_start_receive"]))
            assert not group.pair.receiver.lock.locked(), line
            begun = group.broken is not None or group.sent != sent or bool(group.pair.receiver.outstanding())
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, begun)
            if not told[0]:
                practise(x, z, group)
                assert (z == before + 1).all(), line
            for work in works:
                work.get_future()
            practise(x, z, other)
            assert other.broken is None, line
            dist.barrier()
            group.unwaited.clear()
            if told[0]:
                give_up(group, "a call on it was struck")
            dist.destroy_process_group(group)
    gc.collect()
    practise(np.zeros(2), np.zeros(2), other)
    dist.destroy_process_group(other)
    assert not waiting.pending
    if rank == 0:
        assert struck > len(lines) // 2
