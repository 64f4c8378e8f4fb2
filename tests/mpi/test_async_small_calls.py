"""Small asynchronous calls whose data comes with their round: what their handles say, whatever else is pending."""

from __future__ import annotations

import gc
import random
import sys
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
from ranks import run_threads

import mpicoll as dist
from mpicoll.checks.memory_in_use import claims
from mpicoll.operations.prepared import PreparedOperation
from mpicoll.operations.request import Request
from mpicoll.operations.work import Work
from mpicoll.pytest_plugin import collective_raises
from mpicoll.runtime import waiting
from mpicoll.transports.shm.control import AHEAD, EAGER_BYTES

pytestmark = pytest.mark.mpi(min_size=2)


def group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    """No test leaves a call under way, or memory that counts as used."""
    yield
    gc.collect()
    claims._sweep()
    assert not group().unwaited
    assert not claims.reusable
    assert not claims.active
    assert not [item for item in waiting.pending if is_eager(item)]


def is_eager(item: Any) -> bool:
    """Return whether something pending is a request whose data comes with its round."""
    prepared = item.prepared if isinstance(item, Request) else None
    return isinstance(prepared, PreparedOperation) and prepared.shared is not None and prepared.segment is None


def begun(x: Any, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
    work = dist.all_reduce(x, op, async_op=True, **options)
    assert work is not None
    # Over MPI, as between nodes, no data comes with a round; nor if so many are pending that one more would have to wait.
    if sum(is_eager(item) for item in waiting.pending) < AHEAD:
        assert is_eager(work._request) == (group().pair.agreement.channel.carries_data)
    return work


FOLDS = {
    dist.ReduceOp.SUM: np.add,
    dist.ReduceOp.PRODUCT: np.multiply,
    dist.ReduceOp.MAX: np.maximum,
    dist.ReduceOp.MIN: np.minimum,
    dist.ReduceOp.BAND: np.bitwise_and,
}


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "u1", "c16", "g"])
def test_results(dtype: str) -> None:
    """Every dtype, op and shape gives the fold of all contributions, again and again, however many are under way."""
    me, size = dist.get_rank(), dist.get_world_size()
    for op, fold in FOLDS.items():
        if (dtype == "c16" and fold is not np.add) or (fold is np.bitwise_and and dtype not in ("i4", "u1")):
            continue
        for shape in ((1,), (), (3, 5), (EAGER_BYTES // np.dtype(dtype).itemsize,)):
            for many in (1, 3, 2 * AHEAD + 1):
                arrays = [np.full(shape, (me + turn) % 5 + 1, dtype) for turn in range(many)]
                works = [begun(x, op) for x in arrays]
                for turn, (work, x) in enumerate(zip(works, arrays, strict=True)):
                    assert work.wait() is True
                    terms = [np.full(shape, (rank + turn) % 5 + 1, dtype) for rank in range(size)]
                    expected = terms[0]
                    for term in terms[1:]:
                        expected = fold(expected, term)
                    np.testing.assert_array_equal(x, expected, err_msg=f"{op} {shape} {turn} of {many}")


def test_averages_and_bools() -> None:
    """AVG divides once; on bool SUM is logical or."""
    me, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        x, y = np.full(5, me + 1.0), np.array([me == 0, False, True])
        works = begun(x, dist.ReduceOp.AVG), begun(y)
        for work in works[::-1]:
            work.wait()
        assert (x == (size + 1) / 2).all()
        assert y.tolist() == [True, False, True]


def calls_of_two_memories(size: int, me: int) -> dict[str, Any]:
    """Return calls that read other memory than they write, or only read; each with the arrays that it reads."""
    one, row, many = np.full(3, me + 1.0), np.zeros(3), np.arange(3.0 * size)
    whole = np.zeros(3 * size) if me == 0 else None
    calls: dict[str, Any] = {
        "broadcast": (lambda **how: dist.broadcast(one, 0, **how), one if me == 0 else None),
        "all_gather_single": (lambda **how: dist.all_gather_single(np.zeros(3 * size), one, **how), one),
        "reduce_scatter_single": (lambda **how: dist.reduce_scatter_single(row, many, **how), many),
        "all_to_all_single": (lambda **how: dist.all_to_all_single(np.zeros(3 * size), many, **how), many),
        "reduce": (lambda **how: dist.reduce(one, 0, **how), None if me == 0 else one),
        "gather_single": (lambda **how: dist.gather_single(one, whole, 0, **how), one),
    }
    return calls


def test_calls_that_read_other_memory_than_they_write() -> None:
    """The extension starts them, too, and a write of the program to what they read is found by the wait."""
    me, size = dist.get_rank(), dist.get_world_size()
    for name, (call, reads) in calls_of_two_memories(size, me).items():
        for _ in range(3):
            call()
        for writes in (False, True, False):
            work = call(async_op=True)
            assert is_eager(work._request) == group().pair.agreement.channel.carries_data, name
            if writes and reads is not None:
                reads[-1] += 1
                with pytest.raises(dist.BufferInUseError, match="written before its wait"):
                    work.wait()
            else:
                work.wait()
            dist.barrier()


def test_a_list_that_is_reduced_where_it_stands() -> None:
    """A list of few small arrays moves as one array does, also while calls on other memory are pending."""
    me, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    lists = [[np.full(3, me + 1.0), np.full((2, 2), 1.0), np.full((), me + 1.0)] for _ in range(3)]
    for arrays in lists * 2:
        for array in arrays:
            array[...] = me + 1
        dist.all_reduce_coalesced(arrays)
        assert all((array == total).all() for array in arrays)
    for arrays in lists:
        for array in arrays:
            array[...] = me + 1
    other, whole = np.ones(1), group().pair.agreement.channel.carries_data
    works = [dist.all_reduce_coalesced(arrays, async_op=True, name="a list") for arrays in lists]
    assert all(work is not None and is_eager(work._request) == whole for work in works)
    begun(other).wait()
    with collective_raises(dist.BufferInUseError, match=r"all_reduce at .* writes memory that all_reduce_coalesced"):
        dist.all_reduce(lists[1][0])
    for work, arrays in zip(works[::-1], lists[::-1], strict=True):
        assert work is not None
        assert work.wait()
        assert all((array == total).all() for array in arrays)
        assert all(one is array for one, array in zip(work.result(), arrays, strict=True))
    shared = np.ones(4)
    with collective_raises(ValueError, match="overlap|share|common"):
        dist.all_reduce_coalesced([shared[:3], shared[1:].reshape(3)])


def list_calls(me: int, size: int, turn: int) -> dict[str, Any]:
    """Return calls of lists of 12 KB arrays, what each writes, what it reads, and what it gives."""
    ins = [np.full(1500, 100.0 * turn + 10 * me + peer) for peer in range(size)]
    outs = [np.zeros((3, 500)) for _ in range(size)]
    one, root = np.zeros(1500), turn % size
    of_all, at_root = [100.0 * turn + 10 * peer for peer in range(size)], me == root
    return {
        "all_gather": (lambda **more: dist.all_gather(outs, ins[0], **more), outs, ins[0], of_all),
        "all_to_all": (
            lambda **more: dist.all_to_all(outs, ins, **more),
            outs,
            ins[-1],
            [each + me for each in of_all],
        ),
        "gather": (
            lambda **more: dist.gather(ins[0], outs if at_root else None, root, **more),
            outs if at_root else [],
            ins[0],
            of_all if at_root else [],
        ),
        "scatter": (
            lambda **more: dist.scatter(one, ins if at_root else None, root, **more),
            [one],
            ins[-1] if at_root else None,
            [of_all[root] + me],
        ),
    }


def test_lists_of_one_step() -> None:
    """Lists that the segment takes in one step: prepared calls, alone and several at once, whose lists the program may change."""
    me, size = dist.get_rank(), dist.get_world_size()
    is_shared = group().pair.agreement.channel.carries_data
    for name in list_calls(me, size, 0):
        for turn in range(4 * size):
            call, outs, _, expected = list_calls(me, size, turn)[name]
            if turn < 2 * size:
                call()  # prepares the call, with each root
                continue
            work = call(async_op=True)
            if is_shared:
                assert isinstance(work._request.prepared, PreparedOperation), name
            results = [*outs]
            if name != "scatter":
                outs.clear()
            work.wait()
            assert [each.reshape(-1).tolist() for each in results] == [[value] * 1500 for value in expected], name
        several = [list_calls(me, size, turn)[name] for turn in range(2 * size)]
        works = [call(async_op=True, name=f"turn {turn}") for turn, (call, *_) in enumerate(several)]
        for work, (_, outs, _, expected) in zip(works[::-1], several[::-1], strict=True):
            work.wait()
            assert [each.reshape(-1).tolist() for each in outs] == [[value] * 1500 for value in expected], name


def test_writes_of_lists_of_one_step() -> None:
    """The wait finds writes of what such a call reads, and of what it writes; no other call gets memory in use."""
    me, size = dist.get_rank(), dist.get_world_size()
    for name in list_calls(me, size, 0):
        for turn in range(2 * size):
            list_calls(me, size, turn)[name][0]()
        call, outs, reads, _ = list_calls(me, size, size)[name]
        for memory in (reads, outs[-1].reshape(-1) if outs else None):
            work = call(async_op=True)
            if memory is None:
                work.wait()
            else:
                memory[-1] += 1
                with pytest.raises(dist.BufferInUseError, match="written before its wait"):
                    work.wait()
            dist.barrier()
        work = call(async_op=True)
        with collective_raises(dist.BufferInUseError, match=f"memory that {name}"):
            dist.all_reduce(outs[0] if outs else reads)
        work.wait()


def test_what_is_not_eager() -> None:
    """Large arrays, and what is wrong, move after the round; arrays that are packed may come with the round."""
    size = dist.get_world_size()
    strided, large, half = np.ones((4, 4))[:, 1], np.ones(EAGER_BYTES // 8 + 1), np.ones(3, np.float16)
    for x in (strided, large, half, np.ones(0)):
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        assert x is not large or not is_eager(work._request)
        work.wait()
        assert (x == size).all()
    with collective_raises(RuntimeError, match=r"BAND|bitwise"):
        dist.all_reduce(np.ones(3), dist.ReduceOp.BAND, async_op=True)


def test_everything_that_a_handle_says() -> None:
    """Asked before it is over, after it, and after the wait, a handle says what that of any call says."""
    me, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    for asks in ("wait", "poll", "result", "future", "synchronize", "exception", "success"):
        for late in (False, True):
            x = np.full(4, me + 1.0)
            work = begun(x)
            assert re_site(work) == "under way" or late or work.is_completed()
            if late:
                work.wait()
            if asks == "wait":
                assert work.wait() is True
            elif asks == "poll":
                while not work.is_completed():
                    pass
            elif asks == "result":
                while not work.is_completed():
                    pass
                assert work.result()[0] is x
            elif asks == "future":
                told: list[Any] = []
                future = work.get_future()
                future.add_done_callback(lambda done: told.append(done.result()))  # noqa: B023
                assert future.result()[0] is x
                assert [each[0] is x for each in told] == [True]
            elif asks == "synchronize":
                work.synchronize()
            elif asks == "exception":
                while not work.is_completed():
                    pass
                assert work.exception() is None
            else:
                while not work.is_success():
                    pass
            assert work.wait() is True
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
            assert work.result()[0] is x
            assert work.source_rank() == -1
            assert "completed" in repr(work)
            assert (x == total).all(), asks


def re_site(work: Any) -> str:
    """Return the state in the words of a handle."""
    text = repr(work)
    assert "all_reduce issued at" in text
    assert "test_async_small_calls.py" in text
    return text.rpartition(": ")[2].rstrip(">")


def test_against_other_forms_of_the_call() -> None:
    """Others may wait at once, start a plan, pass an array that cannot ride, or be asynchronous in the other way."""
    me, size = dist.get_rank(), dist.get_world_size()
    whole = np.ones((6, 2))
    plan_array = np.ones(6)
    plan = dist.all_reduce_init(plan_array)
    assert plan is not None
    for odd in range(size):
        for how in ("sync", "plan", "strided", "none"):
            x = np.full(6, 1.0)
            if me != odd or how == "none":
                work = begun(x)
                work.wait()
            elif how == "sync":
                dist.all_reduce(x)
            elif how == "plan":
                plan_array[:] = 1
                plan.start()
                plan.wait()
                x = plan_array
            else:
                x = whole[:, 0]
                x[:] = 1
                other = dist.all_reduce(x, async_op=True)
                assert other is not None
                other.wait()
            assert (x == size).all(), (odd, how)


def test_a_mismatch_is_told_by_wait() -> None:
    """Calls that differ raise where they are waited for, on all ranks; the group can be used, and so can the handles."""
    me, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        x = np.ones(4 + (me == 0))
        work = begun(x)
        with collective_raises(dist.CollectiveMismatchError, match="elements"):
            work.wait()
        assert isinstance(work.exception(), dist.CollectiveMismatchError)
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(dist.CollectiveMismatchError):
            work.wait()
        good = np.ones(4)
        begun(good).wait()
        assert (good == size).all()


def test_memory_in_use_and_written() -> None:
    """Memory under way is not given to another call, and a write of it before the wait is noticed."""
    size = dist.get_world_size()
    x, y = np.ones(4), np.ones(4)
    for _ in range(2):
        work = begun(x)
        with collective_raises(dist.BufferInUseError, match="writes memory that all_reduce"):
            dist.all_reduce(x[1:3], async_op=True)
        begun(y).wait()
        work.wait()
    assert (x == size**2).all()
    work = begun(x)
    x[2] = -1
    with pytest.raises(dist.BufferInUseError, match="was written before"):
        work.wait()
    x[:] = 1
    begun(x).wait()
    assert (x == size).all()


def test_memory_is_let_go() -> None:
    """An array that was waited for is kept by its handle only."""
    x = np.ones(7)
    seen = weakref.ref(x)
    work = begun(x)
    work.wait()
    del x
    gc.collect()
    assert seen() is not None  # result() gives it
    del work
    gc.collect()
    assert seen() is None


def test_a_handle_that_is_dropped() -> None:
    """It is warned of, its memory is in use until it is over, and to destroy the group is refused."""
    size = dist.get_world_size()
    other = dist.new_group()
    x = np.ones(5)
    with pytest.warns(ResourceWarning, match=r"all_reduce issued at .* was dropped without wait"):
        dist.all_reduce(x, group=other, async_op=True)
    dist.barrier()
    with pytest.raises(dist.DistError, match="never waited for: all_reduce issued at"):
        dist.destroy_process_group(other)
    while any(getattr(item, "group", None) is other for item in waiting.pending):
        waiting.progress()
    assert (x == size).all()
    other.unwaited.clear()
    dist.barrier()
    dist.destroy_process_group(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work = begun(x)
        while not work.is_completed():
            pass
        del work
        gc.collect()


def test_in_the_midst_of_everything() -> None:
    """Random calls, small and large, waited for in any order, on two groups; the same on all ranks."""
    me, size = dist.get_rank(), dist.get_world_size()
    other = dist.new_group()
    chance = random.Random(5)
    under_way: list[Any] = []
    for turn in range(400):
        kind, count = chance.choice("llllsbxg"), chance.choice((1, 3, 200, 300, 5000))
        where = chance.choice((None, other))
        x = np.full(count, float(me + turn))
        expected = float(sum(rank + turn for rank in range(size)))
        if kind == "l":
            under_way.append((dist.all_reduce(x, group=where, async_op=True), x, expected))
        elif kind == "s":
            dist.all_reduce(x, group=where)
            assert (x == expected).all()
        elif kind == "b":
            dist.barrier(group=where)
        elif kind == "x":
            under_way.append((dist.broadcast(x, turn % size, group=where, async_op=True), x, turn % size + turn))
        elif under_way:
            work, done, result = under_way.pop(chance.randrange(len(under_way)))
            work.wait()
            assert (done == result).all()
        if len(under_way) > 20:
            for work, done, result in chance.sample(under_way, len(under_way)):
                work.wait()
                assert (done == result).all()
            under_way.clear()
    for work, done, result in under_way:
        work.wait()
        assert (done == result).all()
    dist.destroy_process_group(other)


def test_threads_with_a_group_each() -> None:
    """Threads whose calls are under way at once, each on a group of its own."""
    me, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    wrong: list[Any] = []

    def loop(index: int) -> None:
        try:
            for turn in range(200):
                arrays = [np.full(1 + 40 * index, float(me + turn + i)) for i in range(3)]
                works = [dist.all_reduce(x, group=groups[index], async_op=True) for x in arrays]
                for i, (work, x) in enumerate(zip(works, arrays, strict=True)):
                    assert work is not None
                    work.wait()
                    if not (x == size * (turn + i) + size * (size - 1) / 2).all():
                        wrong.append((index, turn))
        except BaseException as error:
            wrong.append((index, error))

    run_threads(loop, range(3))
    assert not wrong
    dist.barrier()
    for each in groups:
        dist.destroy_process_group(each)


def test_struck_before_it_waits() -> None:
    """A handler that raises as a wait begins leaves the call under way: it can be waited for again."""

    class Boom(Exception):
        pass

    def strike(frame: Any, event: str, arg: Any) -> Any:
        if event == "call" and frame.f_code in (Work._observe.__code__, Request.complete.__code__):
            sys.settrace(None)
            raise Boom
        return None

    size = dist.get_world_size()
    x = np.ones(4)
    work = begun(x)
    if is_eager(work._request):
        before = sys.gettrace()
        sys.settrace(strike)
        try:
            with pytest.raises(Boom):
                work.wait()
        finally:
            sys.settrace(before)
    assert work.wait()
    assert (x == size).all()
    y = np.ones(4)
    begun(y).wait()
    assert (y == size).all()


def test_the_extension_completes_a_call_once() -> None:
    """The result is there, the request is not pending any more, and a second time there is nothing to complete."""
    size = dist.get_world_size()
    x = np.ones(4)
    work = begun(x)
    request = work._request
    if not is_eager(request):
        assert not request.finish()
        assert work.wait()
        return
    dist.barrier(async_op=True).wait()  # all members have started the call; this call is over only after the first
    assert request.done
    assert not request.finish()
    assert work.wait()
    assert (x == size).all()
    for value in range(1, 50):
        y = np.full(4, float(value))
        work = begun(y)
        request = work._request
        assert request in waiting.pending
        while not request.finish():
            pass
        assert request not in waiting.pending
        assert request.done
        assert not request.finish()
        assert not claims.active
        assert work.wait()
        assert (y == value * size).all()


def test_the_extension_starts_calls_while_others_are_under_way() -> None:
    """It starts them on memory that nobody claims, whoever has claimed other memory, and completes them in their order."""
    size = dist.get_world_size()
    whole, empty, scalar = np.ones(32), np.ones(0), np.ones(())
    large, lists = np.ones(EAGER_BYTES), [np.ones(3) for _ in range(size)]
    for turn in range(3):
        whole[:] = scalar[...] = large[:] = 1
        dist.barrier()
        works = [begun(x) for x in (whole[:4], whole[8:12], empty, whole[4:8], whole[12:13], whole[13:14], scalar)]
        if is_eager(works[0]._request):
            for work in works:
                while not work._request.finish():
                    pass
        for work in works:
            assert work.wait()
        assert (whole[:14] == size).all()
        assert (whole[14:] == 1).all()
        assert scalar == size
        others = [
            dist.all_reduce(large, async_op=True),
            dist.all_gather(lists, np.full(3, float(turn)), async_op=True),
            dist.broadcast(whole[20:], 0, async_op=True),
        ]
        for i in range(20):  # the last are started over the claims of 20 others
            whole[i] = i
            others.append(dist.all_reduce(whole[i : i + 1], async_op=True))
        for other in others:
            assert other is not None
            other.wait()
        assert whole[:20].tolist() == [size * i for i in range(20)]
        assert (large == size).all()
        assert all((each == turn).all() for each in lists)


def test_the_extension_starts_calls_with_names() -> None:
    """Names that are equal make one call, also with others; calls whose names differ are told by the wait, with the names."""
    me, size = dist.get_rank(), dist.get_world_size()
    x, y, z = (np.ones(2) for _ in range(3))
    for turn in range(3):
        for each in (x, y, z):
            each[:] = 1
        dist.barrier()
        works = [begun(x, name=f"step {turn}"), begun(y), begun(z, name="last")]
        if is_eager(works[0]._request):
            for work in works:
                while not work._request.finish():
                    pass
        for work in works:
            assert work.wait()
        assert (x == size).all()
        assert (y == size).all()
        assert (z == size).all()
        work = begun(x, name=f"step {turn} of {min(me, 1)}")
        with collective_raises(dist.CollectiveMismatchError, match=rf"step {turn} of [01]"):
            work.wait()
        work = begun(y, name="one") if me else begun(y)
        with collective_raises(dist.CollectiveMismatchError, match="one"):
            work.wait()


def test_memory_apart_and_memory_in_use() -> None:
    """A call on a slice raises if and only if the slice has bytes in common with that of a call under way."""
    whole = np.ones(40, np.int8)
    chance = random.Random(7)
    under_way: dict[tuple[int, int], Any] = {}
    raised = 0
    for _ in range(100):
        start = chance.randrange(36)
        end = start + chance.randrange(1, 5)
        part = whole[start:end]
        if any(start < its_end and its_start < end for its_start, its_end in under_way):
            raised += 1
            with collective_raises(dist.BufferInUseError, match="writes memory that all_reduce"):
                dist.all_reduce(part, dist.ReduceOp.MAX, async_op=True)
        else:
            under_way[start, end] = begun(part, dist.ReduceOp.MAX)
        while under_way and (len(under_way) > 6 or chance.random() < 0.3):
            under_way.pop(chance.choice(list(under_way))).wait()
    for work in under_way.values():
        work.wait()
    assert raised > 10
    assert (whole == 1).all()


def test_the_extension_leaves_a_call_that_differs() -> None:
    """What the members do not make alike, and what the program has written meanwhile, is told by the wait."""
    rank = dist.get_rank()
    x = np.ones(4)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):  # both are prepared
        for _ in range(3):
            dist.all_reduce(np.ones(4), op)
    with collective_raises(dist.CollectiveMismatchError, match="all_reduce"):
        dist.all_reduce(x, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, async_op=True).wait()
    work = begun(x)
    x[0] = 5
    with pytest.raises(dist.BufferInUseError, match="was written before its wait"):
        work.wait()
    dist.all_reduce(x)


def test_several_threads_wait_for_one_handle() -> None:
    """A request is over once, whoever waits for it, and however many do."""
    size = dist.get_world_size()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(100):
            x = np.ones(4)
            work = begun(x)
            other = threading.Thread(target=work.wait)
            other.start()
            work.wait()
            other.join()
            assert (x == size).all()
    finally:
        sys.setswitchinterval(interval)
    a, b = np.ones(4), np.full(4, 10.0)
    works = begun(a), begun(b)
    for each in works:
        each.wait()
    assert (a == size).all()
    assert (b == 10 * size).all()


def test_memory_after_it_was_found_complete() -> None:
    """The program may write it then, whatever else it asks; what was only polled leaves nothing behind."""
    size = dist.get_world_size()
    for asks in (dist.Work.result, dist.Work.exception, dist.Work.is_success, repr):
        x = np.ones(4)
        work = begun(x)
        while not work.is_completed():
            pass
        asks(work)
        x += 1
        assert work.wait()
        assert (x == size + 1).all()
    seen = []
    for _ in range(50):
        x = np.ones(4)
        seen.append(weakref.ref(x))
        work = begun(x)
        while not work.is_completed():
            pass
        del x, work
    gc.collect()
    assert sum(each() is not None for each in seen) == 0
    assert not claims.dropped


def test_memory_of_a_future() -> None:
    """It is free when the call is over, though nobody asks; a write before the result is asked for is noticed."""
    size = dist.get_world_size()
    x = np.ones(4)
    future = dist.all_reduce(x, async_op=True).get_future()  # type: ignore[union-attr]
    dist.barrier()
    dist.all_reduce(x, async_op=True).wait()  # type: ignore[union-attr]
    assert (x == size**2).all()
    assert future.result()[0] is x
    y = np.ones(4)
    work = begun(y)
    dist.barrier()
    dist.barrier()
    y[:] = -1
    with pytest.raises(dist.BufferInUseError):
        work.get_future().result()


def test_dtypes_that_are_equal_and_not_the_same() -> None:
    """C has two types for int64: what was kept for one is not used for the other."""
    size = dist.get_world_size()
    for count in (0, 3):
        for first, second in ("lq", "ql", "LQ", "QL"):
            dist.all_reduce(np.ones(count, first))
            for dtype in (second, first, second):
                x = np.ones(count, dtype)
                work = dist.all_reduce(x, async_op=True)
                assert work is not None
                work.wait()
                assert (x == size).all()
