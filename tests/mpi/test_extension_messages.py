"""Messages that the extension starts and completes: what other threads and signal handlers do meanwhile, and many elements."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from ranks import give_up, neighbours

import mpicoll as dist
from mpicoll.api import messages as api
from mpicoll.checks.memory_in_use import claims
from mpicoll.operations import messages
from mpicoll.runtime import native, signals, waiting

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(native.found is None, reason=f"these are messages of the extension: {native.why_not}"),
]


class Struck(Exception):
    """What a signal handler of a program raises."""


class Failing:
    """A persistent request that MPI cannot start."""

    def __init__(self, request: Any) -> None:
        self.request = request

    def Start(self) -> None:
        raise MPI.Exception(MPI.ERR_OTHER)


APART = 3000
"""Number of elements of a message whose elements move apart from its envelope."""


def exchange(x: Any, y: Any, tag: int = 0) -> tuple[Any, Any]:
    """Start to receive from the rank before this one and to send to the next one; return both Works."""
    before, after = neighbours()
    return dist.irecv(y, before, tag=tag), dist.isend(x, after, tag=tag)


def learn_exchange(x: Any, y: Any, tag: int = 0) -> None:
    """Make both messages until persistent requests for these arrays are known."""
    for _ in range(3):
        for work in exchange(x, y, tag):
            work.wait()
    dist.barrier()


def is_of_extension(work: Any) -> bool:
    """Whether the extension started the message, and Python has not progressed its elements."""
    return work._request.held.current is work._request


def pair(tag: int) -> tuple[bool, Callable[[], Any], np.ndarray[Any, Any]]:
    """Practise a message from rank 0 to rank 1; return whether this rank takes part, how it starts the message, and its array."""
    rank = dist.get_rank()
    x = np.full(4, 1.0 - rank)

    def one() -> Any:
        return dist.isend(x, 1, tag=tag) if rank == 0 else dist.irecv(x, 0, tag=tag)

    for _ in range(4 if rank < 2 else 0):
        one().wait()
    dist.barrier()
    return rank < 2, one, x


def test_a_future_while_another_thread_waits() -> None:
    """A future that is asked for while the extension polls MPI is done with its message."""
    mine, one, x = pair(1)
    if mine:
        work = one()
        again = work._request.held
        assert again.current is work._request
        test, polled, go = again.test, threading.Event(), threading.Event()

        def slow() -> bool:
            polled.set()
            go.wait(10)
            return bool(test())

        again.test = slow
        thread = threading.Thread(target=work.wait)
        thread.start()
        assert polled.wait(10)
        future = work.get_future()
        go.set()
        thread.join()
        again.test = test
        assert future.result(10) == [x]
        assert (x == 1).all()
    dist.barrier()


def test_ctrl_c_in_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message goes its way without a Work, and nothing of it is left; the next messages are as usual."""
    mine, one, _ = pair(2)
    group: Any = dist.group.WORLD
    if dist.get_rank() == 0:
        real = messages.Work

        def struck(*given: Any) -> Any:
            signals.guard.noted = KeyboardInterrupt()  # as the handler of Ctrl-C does inside a call
            return real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(messages, "Work", struck)
            with pytest.raises(KeyboardInterrupt):
                one()
        assert not group.unwaited
    elif mine:
        one().wait()
    dist.barrier()
    waiting.progress()
    assert not claims.active
    assert group.broken is None
    if mine:
        one().wait()


def test_a_handler_in_a_start_that_starts_nothing() -> None:
    """An exception after the extension has declined, as the same array is being sent, leaves the earlier send and the group."""
    mine, one, _ = pair(3)
    group: Any = dist.group.WORLD
    if dist.get_rank() == 0:
        work, again = one(), group.sends.last

        class Declined:
            def __getattr__(self, name: str) -> Any:
                return getattr(again, name)

            def begin(self, *given: Any) -> None:
                assert again.begin(*given) is None
                raise Struck

        group.sends.last = Declined()
        try:
            with pytest.raises(Struck):
                one()
        finally:
            group.sends.last = again
        work.wait()
    elif mine:
        one().wait()
    assert group.broken is None
    dist.barrier()


def test_a_handler_before_the_end_of_a_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send that is struck just before its end still has the message: another send of it takes none of its place."""
    mine, one, x = pair(4)
    if dist.get_rank() == 0:
        work = one()

        def struck(self: Any) -> None:
            raise Struck

        with monkeypatch.context() as patch:
            patch.setattr(messages._PreparedSend, "_complete", struck)
            with pytest.raises(Struck):
                while not work.is_completed():
                    pass
        x[...] = 1
        other = dist.isend(np.full(4, 7.0), 1, tag=4)
        work.wait()
        other.wait()
    elif mine:
        one().wait()
        one().wait()
        assert (x == 7).all()
    dist.barrier()


@pytest.mark.parametrize("count", [1, APART, 40_000])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the receive first", "the send first"])
def test_an_exchange(count: int, order: tuple[int, int]) -> None:
    """The extension starts both messages and completes what is waited for first, at check level full with contents compared."""
    rank, (before, _) = dist.get_rank(), neighbours()
    x, y = np.full(count, rank + 1.0), np.zeros(count)
    learn_exchange(x, y, tag=11)
    for turn in range(30):
        x[...] = 100 * turn + rank
        works = exchange(x, y, tag=11)
        assert all(map(is_of_extension, works))
        for which in order:
            works[which].wait()
        assert (y == 100 * turn + before).all()
        assert works[0].source_rank() == before
    assert not claims.active
    assert not waiting.pending
    dist.barrier()


def test_sizes_that_alternate() -> None:
    """Each size has its persistent message; the extension starts each of them at one peer and tag."""
    rank, (before, _) = dist.get_rank(), neighbours()
    arrays = [(np.full(count, rank + 1.0), np.zeros(count)) for count in (3, APART, 2 * APART)]
    for x, y in arrays:
        learn_exchange(x, y, tag=12)
    for x, y in arrays * 5:
        y[...] = 0
        works = exchange(x, y, tag=12)
        assert all(map(is_of_extension, works))
        for work in works:
            work.wait()
        assert (y == before + 1).all()
    dist.barrier()


def test_receives_that_are_waited_for_in_another_order() -> None:
    """While one message is waited for, the elements of the others are requested, so no rank waits for another for ever."""
    rank, (before, _) = dist.get_rank(), neighbours()
    tags = range(20, 24)
    arrays = {tag: (np.full(APART, rank + tag), np.zeros(APART, np.int64)) for tag in tags}
    for tag, (x, y) in arrays.items():
        learn_exchange(x, y, tag)
    for turn in range(20):
        works = {tag: exchange(x, y, tag) for tag, (x, y) in arrays.items()}
        for tag in tags if turn % 2 else reversed(tags):
            for work in works[tag] if rank % 2 else reversed(works[tag]):
                work.wait()
            if all(work.is_completed() for work in works[tag]):
                assert (arrays[tag][1] == before + tag).all()
    assert not claims.active
    dist.barrier()


@pytest.mark.parametrize("count", [1, APART, 40_000])
@pytest.mark.parametrize("beside", ["a message", "a collective"])
def test_a_blocking_message_beside_what_is_pending(count: int, beside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocking message keeps its persistent request while other memory is claimed and other requests are pending."""
    rank, size, (before, after) = dist.get_rank(), dist.get_world_size(), neighbours()
    x, y, z = np.full(count, rank + 1.0), np.zeros(count), np.ones(300_000)

    def receives_first() -> None:
        work = dist.irecv(y, before, tag=14)
        dist.send(x, after, tag=14)
        work.wait()

    def sends_first() -> None:
        work = dist.isend(x, after, tag=14)
        dist.recv(y, before, tag=14)
        work.wait()

    for _ in range(3):
        receives_first()
        sends_first()
    dist.barrier()
    monkeypatch.setattr(api, "start_send", None)
    monkeypatch.setattr(api, "start_receive", None)
    for one in (receives_first, sends_first) * 6:
        y[...], z[...] = 0, 1
        reduced = dist.all_reduce(z, async_op=True) if beside == "a collective" else None
        one()
        if reduced is not None:
            reduced.wait()
            assert (z == size).all()
        assert (y == before + 1).all()
    assert not claims.active
    assert not waiting.pending
    dist.barrier()


@pytest.mark.parametrize("count", [4, APART])
def test_a_blocking_message_of_memory_in_use(count: int) -> None:
    """A send of an array that a pending receive writes, whose persistent request is known, is refused; the receive goes on."""
    before, after = neighbours()
    x, y = np.ones(count), np.zeros(count)
    learn_exchange(x, y, tag=15)
    for _ in range(3):
        work = dist.isend(x, after, tag=15)
        dist.recv(y, before, tag=15)
        work.wait()
        work = dist.irecv(y, before, tag=15)
        dist.send(x, after, tag=15)
        work.wait()
    dist.barrier()
    receiving = dist.irecv(y, before, tag=15)
    with pytest.raises(dist.BufferInUseError, match=r"send at .* reads memory that irecv at"):
        dist.send(y, after, tag=15)
    dist.send(x, after, tag=15)
    receiving.wait()
    assert (y == 1).all()
    dist.barrier()


def test_beside_a_collective_that_is_pending() -> None:
    """A wait for a message progresses what only Python progresses, too."""
    rank, size, (before, _) = dist.get_rank(), dist.get_world_size(), neighbours()
    x, y, z = np.full(APART, rank + 1.0), np.zeros(APART), np.ones(300_000)
    learn_exchange(x, y, tag=13)
    for turn in range(6):
        z[...] = 1
        reduced = dist.all_reduce(z, async_op=True)
        works = exchange(x, y, tag=13)
        for work in works if turn % 2 else reversed(works):
            work.wait()
        assert reduced is not None
        reduced.wait()
        assert (z == size).all()
        assert (y == before + 1).all()


def test_another_shape_meanwhile() -> None:
    """A program that changes the shape of an array between start and wait gets its elements."""
    rank, (before, _) = dist.get_rank(), neighbours()
    x, y = np.full(APART, rank + 1.0), np.zeros(APART)
    learn_exchange(x, y, tag=14)
    for shape in ((3, APART // 3), (APART // 6, 6)):
        y[...] = 0
        received, sent = exchange(x, y, tag=14)
        x.resize(shape, refcheck=False)
        y.resize(shape, refcheck=False)
        sent.wait()
        received.wait()
        assert (y == before + 1).all()
        x.resize(APART, refcheck=False)
        y.resize(APART, refcheck=False)
    assert not claims.active
    dist.barrier()


def test_mpi_fails_while_elements_are_requested() -> None:
    """The error of MPI is that of the message whose elements it is about, also in a wait for another message."""
    group: Any = dist.new_group()
    rank, x = dist.get_rank(), np.ones(501)  # move apart, and MPI copies them
    arrays = {tag: np.zeros(501) for tag in (15, 16)}
    for turn in range(5):
        dist.barrier()
        for tag, y in arrays.items():
            if rank == 1:
                dist.send(x, 0, group, tag)
            elif rank == 0 and turn < 4:
                dist.irecv(y, 1, group, tag).wait()  # type: ignore[union-attr]
    if rank == 0:
        works: list[Any] = [dist.irecv(y, 1, group, tag) for tag, y in arrays.items()]
        assert all(map(is_of_extension, works))
        message = works[1]._request.held
        for address, payload in message.payloads.items():
            message.payloads[address] = Failing(payload)
        works[0].wait()
        assert (arrays[15] == 1).all()
        with pytest.raises(dist.DistBackendError):
            works[1].wait()
        assert group.broken is not None
        message.payloads.clear()
    dist.barrier()
    give_up(group, "MPI failed in a call on it")
    dist.destroy_process_group(group)
    assert not claims.active
    assert not waiting.pending


@pytest.mark.parametrize("tag_of_wait", [30, 31], ids=["that receive", "another receive"])
def test_a_write_after_the_elements_have_come(tag_of_wait: int) -> None:
    """``wait`` finds the write also if the elements came while the program waited for another message."""
    rank, x = dist.get_rank(), np.full(APART, 7.0)
    arrays = {tag: np.zeros(APART) for tag in (30, 31)}
    for turn in range(8):
        dist.barrier()
        if rank == 1:
            for tag in arrays:
                dist.send(x, 0, tag=tag)
        if rank == 0:
            for y in arrays.values():
                y[...] = 0
            works: dict[int, Any] = {tag: dist.irecv(y, 1, tag=tag) for tag, y in arrays.items()}
            other = 61 - tag_of_wait
            works[tag_of_wait].wait()
            if turn > 3:
                request, claim = works[other]._request, works[other]._claim
                assert request.held is not None
                while not (request.after or request.done):
                    waiting.progress()
                assert request.after or claim.results
                arrays[other][-1] = 8
                with pytest.raises(dist.BufferInUseError, match=r"irecv at .* was written before its wait"):
                    works[other].wait()
            else:
                works[other].wait()
            assert arrays[tag_of_wait].sum() == 7 * APART
    assert not claims.active
    assert not waiting.pending
    dist.barrier()


def test_a_receive_that_another_thread_ends() -> None:
    """No wait for another message tests a request of MPI while a thread gives its message up."""
    rank, x = dist.get_rank(), np.ones(APART)
    arrays = {tag: np.zeros(APART) for tag in (32, 33)}
    for turn in range(4):
        dist.barrier()
        if rank == 1:
            for tag in arrays:
                dist.send(x, 0, tag=tag)
        elif rank == 0:
            first, second = [dist.irecv(y, 1, tag=tag) for tag, y in arrays.items()]  # type: ignore[misc]
            assert first is not None
            assert second is not None
            if turn == 3:
                assert is_of_extension(first)
                with first._request.still():
                    thread = threading.Thread(target=waiting.progress)
                    thread.start()
                    thread.join()
                    other = threading.Thread(target=second._request.finish)
                    other.start()
                    other.join()
                    assert first._request._current is None
            first.wait()
            second.wait()
            assert (arrays[32] == 1).all()
            assert (arrays[33] == 1).all()
    dist.barrier()
