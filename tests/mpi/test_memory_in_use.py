"""Buffers of operations under way: given away twice, or written by the program."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import neighbours

import mpicoll as dist
from mpicoll.checks.memory_in_use import claims
from mpicoll.operations.schedules import Sealed
from mpicoll.operations.states import MOVING
from mpicoll.pytest_plugin import collective_raises
from mpicoll.transports.base import Kind

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    """Every operation has left the registry in the end."""
    yield
    claims.check(registry_claim())
    assert not claims.active
    dist.barrier()


def registry_claim() -> Any:
    from mpicoll.checks.memory_in_use import Claim
    from mpicoll.runtime.call_site import call_site

    return Claim("check", call_site())


def test_an_overlap_raises_at_once_and_names_both_calls() -> None:
    """A message into, or out of, memory that a receive under way writes raises before anything is posted."""
    before, after = neighbours()
    for count in (4, 4000):
        x = np.zeros(2 * count)
        work = dist.irecv(x[:count], before)
        part = x[count - 1 : 2 * count - 1]
        for call in (
            lambda part=part: dist.irecv(part, before),
            lambda part=part: dist.recv(part, before),
            lambda part=part: dist.isend(part, after),
            lambda part=part: dist.send(part, after),
        ):
            with pytest.raises(
                dist.BufferInUseError, match=r"test_memory_in_use.py:\d+ .* memory that irecv at .*test_mem"
            ) as error:
                call()
            assert "(8 bytes in common)" in str(error.value)
        other = dist.irecv(x[count:], before, tag=1)
        works = [dist.isend(np.full(count, float(tag)), after, tag=tag) for tag in (0, 1)]
        for each in (work, other, *works):
            each.wait()
        assert (x[:count] == 0).all()
        assert (x[count:] == 1).all()
        # Now it is free again.
        work = dist.irecv(part, before)
        dist.isend(np.ones(count), after).wait()
        work.wait()


def test_reading_twice_is_right() -> None:
    """One array may be sent to several ranks at once, and be summed and broadcast from meanwhile on its own rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.full(3000, float(rank))
    works = [dist.isend(x, peer, tag=1) for peer in range(size)]
    y = np.zeros((size, 3000))
    works += [dist.irecv(y[peer], peer, tag=1) for peer in range(size)]
    gathered = [np.zeros(3000) for _ in range(size)]
    works.append(dist.all_gather(gathered, x, async_op=True))
    root = dist.broadcast(x.copy() if rank else x, 0, async_op=True)
    for work in (*works, root):
        work.wait()
    for peer in range(size):
        assert (y[peer] == peer).all()
        assert (gathered[peer] == peer).all()


def test_a_collective_on_memory_in_flight_raises_on_all_members() -> None:
    """One rank's overlap takes part in the agreement: every member raises, and the group is still good."""
    rank = dist.get_rank()
    x = np.zeros(5)
    work = dist.irecv(x, 0, tag=3) if rank == 1 else None
    for call in (
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, async_op=True).wait(),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather([np.zeros(5) for _ in range(dist.get_world_size())], x),
    ):
        for _ in range(2):
            with collective_raises(dist.BufferInUseError if rank == 1 else dist.CollectiveMismatchError) as caught:
                call()
            assert "still writes (40 bytes in common)" in str(caught.value).replace("\n", " ") or rank != 1
    if rank == 0:
        dist.send(np.ones(5), 1, tag=3)
    if work is not None:
        work.wait()
        assert (x == 1).all()
    first = dist.all_reduce(x, async_op=True)
    with collective_raises(
        dist.BufferInUseError, match=r"all_reduce at .* writes memory that all_reduce at .* still writes"
    ):
        dist.all_reduce(x, async_op=True)
    first.wait()


def test_a_write_to_what_is_sent_is_noticed() -> None:
    """wait raises and names the issuing line, whether the data had been copied away or not; what arrives may be either."""
    before, after = neighbours()
    for count in (1, 500, 501, 8000):
        x, y = np.zeros(count), np.zeros(count)
        work = dist.isend(x, after)
        x[-1] = 7
        dist.irecv(y, before).wait()
        for _ in range(2):
            with pytest.raises(
                dist.BufferInUseError, match=r"the tensor of isend at .*test_memory_in_use.py:\d+ was written"
            ):
                work.wait()
        assert isinstance(work.exception(), dist.BufferInUseError)
        assert not work.is_success()
    x, y = np.zeros(20_000), np.zeros(20_000)
    work = dist.isend(x, after)
    dist.irecv(y, before).wait()
    work.wait()
    work = dist.isend(x, after)
    dist.irecv(y, before).wait()
    while not work.is_completed():
        pass
    x[0] = 1  # seen complete: its own again
    work.wait()


def test_a_write_to_what_is_received_into_is_noticed() -> None:
    """wait of an irecv raises when its array was written before the message came."""
    before, after = neighbours()
    for count in (1, 500, 501, 8000):
        y = np.zeros(count)
        work = dist.irecv(y, before)
        y[0] = 3
        dist.barrier()
        dist.isend(np.ones(count), after).wait()
        with pytest.raises(dist.BufferInUseError, match=r"irecv at .*test_memory_in_use.py:\d+ was written"):
            work.wait()


def test_a_write_to_what_has_been_received_is_noticed() -> None:
    """The result of an irecv belongs to the program once it has waited, even if the message came long before."""
    before, after = neighbours()
    for count in (1, 500):
        y = np.zeros(count)
        work = dist.irecv(y, before)
        dist.isend(np.ones(count), after).wait()
        dist.barrier()
        other = dist.irecv(np.zeros(1), before, tag=1)
        dist.isend(np.ones(1), after, tag=1).wait()
        other.wait()
        y[0] = 2
        with pytest.raises(dist.BufferInUseError, match="irecv"):
            work.wait()


@pytest.mark.parametrize("count", [1, 1500])
def test_a_write_to_a_collective_s_buffers_is_noticed(count: int) -> None:
    """Inputs and results of asynchronous collectives, written by one rank while they are under way, raise on that rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for write in (False, True):
        x, into, each = np.ones(count), np.zeros(count * size), [np.zeros(count) for _ in range(size)]
        sums, part = np.ones(count), np.zeros(count)
        premul = np.ones(count)
        cases = [
            (dist.all_reduce(sums, async_op=True), sums, sums),
            (dist.all_reduce(premul, dist.ReduceOp.PREMUL_SUM(2.0), async_op=True), premul, premul),
            (dist.broadcast(x, 0, async_op=True), x, x),
            (dist.all_gather(each, x.copy(), async_op=True), each[-1], each[-1]),
            (dist.all_gather_single(into, y := np.ones(count), async_op=True), y, into),
            (dist.reduce_scatter_single(part, z := np.ones(count * size), async_op=True), z, part),
            (dist.reduce(w := np.ones(count), 1, async_op=True), w, w),
        ]
        for number, (work, buffer, result) in enumerate(cases):
            if write and rank == 1:
                buffer[0] += 5
                with pytest.raises(dist.BufferInUseError, match=r"of \w+ at .*test_memory_in_use.py:\d+ was written"):
                    work.wait()
            else:
                work.wait()
                if not write:
                    expected = {0: size, 1: 2 * size, 5: size, 6: size if rank == 1 else 1}.get(number, 1)
                    assert (result == expected).all(), (number, result)


def test_those_that_are_dropped_or_have_a_future() -> None:
    """A future's end frees the memory and tells of writes; so does the end of a Work that nobody holds any more."""
    before, after = neighbours()
    x, y = np.zeros(3), np.zeros(3)
    work = dist.irecv(y, before)
    future = work.get_future()
    dist.isend(x, after).wait()
    future.result()
    dist.isend(y, before, tag=1).wait()
    dist.recv(y, after, tag=1)
    work = dist.isend(x, after)
    future = work.get_future()
    del work
    future.result()
    dist.recv(x, before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        kept = dist.group.WORLD.unwaited
        found = set(kept)
        dist.isend(x, after, tag=2)
        gc.collect()
        for key in set(kept) - found:
            kept.pop(key)
    dist.recv(y, before, tag=2)
    dist.barrier()
    work = dist.irecv(x, before, tag=3)
    dist.isend(y, after, tag=3).wait()
    work.wait()


def test_many_under_way() -> None:
    """A thousand messages into the parts of one array."""
    before, after = neighbours()
    x, y = np.arange(1000.0), np.zeros(1000)
    works = [dist.irecv(y[i : i + 1], before, tag=i % 7) for i in range(1000)]
    works += [dist.isend(x[i : i + 1], after, tag=i % 7) for i in range(1000)]
    for work in works:
        work.wait()
    assert (x == y).all()


READ = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_single",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "gather_single",
    "isend",
    "reduce_scatter",
    "scatter",
]
IN_PLACE = ["all_reduce", "all_reduce_coalesced", "average_gradients"]


def asynchronous_calls(size: int) -> dict[str, Any]:
    """Return functions that start a call on new arrays; each returns the handles, and an array that is read or in place."""
    me, n = dist.get_rank(), dist.get_world_size()

    def full(count: int = size) -> Any:
        return np.full(count, me + 1.0)

    def blocks() -> list[Any]:
        return [full() for _ in range(n)]

    def started(call: Callable[..., Any], *given: Any, at: int = 0) -> Any:
        """Start a call, and return the array, or the last array of the list, that is its argument ``at``."""
        moves = given[at]
        return [call(*given, async_op=True)], moves[-1] if isinstance(moves, list) else moves

    def exchange() -> Any:
        x = full()
        return [dist.irecv(full(), (me - 1) % n), dist.isend(x, (me + 1) % n)], x

    root = me == 0
    return {
        "all_reduce": lambda: started(dist.all_reduce, full()),
        "broadcast": lambda: (
            started(dist.broadcast, full(), 0) if root else ([dist.broadcast(full(), 0, async_op=True)], None)
        ),
        "all_gather": lambda: started(dist.all_gather, blocks(), full(), at=1),
        "all_gather_single": lambda: started(dist.all_gather_single, full(n * size), full(), at=1),
        "all_to_all": lambda: started(dist.all_to_all, blocks(), blocks(), at=1),
        "all_to_all_single": lambda: started(dist.all_to_all_single, full(n * size), full(n * size), at=1),
        "reduce_scatter": lambda: started(dist.reduce_scatter, full(), blocks(), at=1),
        "scatter": lambda: (
            started(dist.scatter, full(), blocks(), 0, at=1)
            if root
            else ([dist.scatter(full(), None, 0, async_op=True)], None)
        ),
        "gather": lambda: started(dist.gather, full(), blocks() if root else None, 0),
        "gather_single": lambda: started(dist.gather_single, full(), full(n * size) if root else None, 0),
        "all_reduce_coalesced": lambda: started(dist.all_reduce_coalesced, [full(), full(3)]),
        "all_gather_coalesced": lambda: started(
            dist.all_gather_coalesced, [blocks() for _ in range(n)], blocks(), at=1
        ),
        "average_gradients": lambda: started(dist.average_gradients, [full(3), full()]),
        "isend": exchange,
    }


@pytest.mark.parametrize("size", [10, 20_000, 200_000])
@pytest.mark.parametrize("name", READ + IN_PLACE)
def test_an_array_of_any_size_or_in_a_list_is_written_before_the_wait(name: str, size: int) -> None:
    """The wait raises, the first time and later, also for arrays above 64 KiB and for the arrays of a list.

    Large arrays in place are not compared while their data moves, but for a write straight after the start on one node.
    """
    start = asynchronous_calls(size)[name]
    for writes in (True, False, True, False):
        dist.barrier()
        works, array = start()
        request = works[0]._request
        unseen = name in IN_PLACE and request.state is MOVING and not isinstance(request._current, Sealed)
        if writes and array is not None and not unseen:
            array[...] = 77
        errors = []
        for work in works:
            try:
                work.wait()
            except dist.BufferInUseError as error:
                errors.append(error)
        assert len(errors) == (writes and array is not None and not unseen), (name, size, writes)
    dist.barrier()


@pytest.mark.parametrize("nbytes", [160_000, 800_000, pytest.param(8_000_000, marks=pytest.mark.slow)])
def test_a_slice_of_a_tenth_is_written_before_the_wait(nbytes: int) -> None:
    """A sample of a large array, or of a list of arrays, has a place in every slice of a tenth."""
    size = nbytes // 8
    for name, start in asynchronous_calls(size).items():
        for tenth in (0, 3, 8):
            dist.barrier()
            works, array = start()
            request = works[0]._request
            unseen = name in IN_PLACE and request.state is MOVING and not isinstance(request._current, Sealed)
            writes = array is not None and array.size == size and not unseen
            if writes:
                array[tenth * size // 10 + 20 : (tenth + 1) * size // 10 + 20] += 8
            errors = []
            for work in works:
                try:
                    work.wait()
                except dist.BufferInUseError as error:
                    errors.append(error)
            assert len(errors) == writes, (name, nbytes, tenth)
    dist.barrier()


def test_a_late_rank_writes_straight_after_the_start_of_the_first_call() -> None:
    """The data of a large array in place may move at once, as the other members are there. On one node the write is found.

    The first call of a group is not prepared: it moves in the general way.
    """
    me = dist.get_rank()
    for size in (20_011, 150_001, 1_000_003):
        for late in range(dist.get_world_size()):
            group = dist.new_group()
            assert not isinstance(group, int)
            if group.pair.node is None or group.pair.through(Kind.ALL_REDUCE, 1 << 20) is None:
                dist.destroy_process_group(group)
                pytest.skip("the data moves through MPI, and MPI may read it during the start")
            x = np.full(size, me + 1.0)
            dist.barrier()
            if me == late:
                time.sleep(0.01)
            work = dist.all_reduce(x, group=group, async_op=True)
            if me != late:
                work.wait()
            else:
                x += 9
                with pytest.raises(dist.BufferInUseError, match="was written before its wait"):
                    work.wait()
            dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [10, 20_011, 150_001])
def test_scaled_input_is_no_write_of_the_program(size: int) -> None:
    """PREMUL_SUM scales the elements in place before they move."""
    n = dist.get_world_size()
    for op in (dist.ReduceOp.PREMUL_SUM(2.0), dist.ReduceOp.AVG):
        expected = 2.0 * n if op is not dist.ReduceOp.AVG else 1.0
        x, y, z = np.ones(size), np.ones(size), np.ones(3)
        for work in (
            dist.all_reduce(x, op, async_op=True),
            dist.reduce(y, 0, op, async_op=True),
            dist.all_reduce_coalesced([z], op, async_op=True),
        ):
            work.wait()
        assert (x == expected).all()
        assert dist.get_rank() != 0 or (y == expected).all()
        assert (z == expected).all()
