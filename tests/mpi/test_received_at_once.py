"""Messages that have arrived are received at once, without an operation: lists of objects, and few elements from any rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from ranks import give_up

import mpicoll as dist
from mpicoll.operations import object_messages, operation
from mpicoll.operations.operation import Operation

pytestmark = pytest.mark.mpi(min_size=2)

LONG = 3000
"""Bytes of an object whose list fits into one message; twice as many do not."""


@pytest.fixture
def group() -> Iterator[Any]:
    made = dist.new_group()
    yield made
    dist.barrier(made)
    dist.destroy_process_group(made)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the messages that become operations from now on."""
    made: list[str] = []

    class Noted(Operation):
        __slots__ = ()

        def __init__(self, group: Any, call: Any, *rest: Any, **more: Any) -> None:
            made.append(call.name)
            super().__init__(group, call, *rest, **more)

    monkeypatch.setattr(object_messages, "Operation", Noted)
    monkeypatch.setattr(operation, "Operation", Noted)
    return made


def arrive(group: Any, *sends: Callable[[], Any]) -> None:
    """Rank 1 makes each send; afterwards all messages are on their way, and rank 0 has waited for them."""
    if dist.get_rank() == 1:
        for send in sends:
            send()
    dist.barrier(group)


@pytest.mark.parametrize("source", [1, None])
def test_lists_that_have_arrived(source: int | None, group: Any, operations: list[str]) -> None:
    """Lists in one message need no operation to be received, once the receiver knows the line of the send."""
    values = [{"step": 1}, "text", b"x" * LONG, np.arange(3.0)]
    for turn in range(4):
        arrive(group, lambda turn=turn: [dist.send_object_list([values, turn, i], 0, group) for i in range(3)])
        if dist.get_rank() == 0:
            for i in range(3):
                got = [None] * 3
                assert dist.recv_object_list(got, source, group) == 1
                assert got[1:] == [turn, i]
                assert got[0][:3] == values[:3]
                assert (got[0][3] == values[3]).all()
    assert group.objects_sent == ({0: 12} if dist.get_rank() == 1 else {})
    assert group.objects_received == ({1: 12} if dist.get_rank() == 0 else {})
    assert dist.get_rank() or len(operations) < 6  # the first one, and what arrives late


def test_short_and_long_lists_are_received_in_their_order(group: Any) -> None:
    """Long lists, lists with large buffers and short lists of one sender may follow each other in any order."""
    sizes = [1, 2 * LONG, 10, 50_000, 2, 3, 2 * LONG, 1]
    for source in (1, None):
        if dist.get_rank() == 1:
            for i, size in enumerate(sizes):
                dist.send_object_list([i, b"x" * size, np.full(size, i)], 0, group)
        elif dist.get_rank() == 0:
            for i, size in enumerate(sizes):
                got: list[Any] = [None] * 3
                dist.recv_object_list(got, source, group)
                assert got[:2] == [i, b"x" * size]
                assert (got[2] == i).all()
                assert got[2].size == size
        dist.barrier(group)


@pytest.mark.parametrize("source", [1, None])
@pytest.mark.parametrize("size", [1, 2 * LONG])
def test_a_list_that_does_not_fit_stays(size: int, source: int | None, group: Any) -> None:
    """A list of another length, and a list where an array is expected, is refused, and the right receive gets the list."""
    for _ in range(3):
        if dist.get_rank() == 1:
            dist.send_object_list([b"x" * size, 5], 0, group)
        elif dist.get_rank() == 0:
            with pytest.raises(dist.CollectiveMismatchError, match="sent a list of 2 objects"):
                dist.recv_object_list([None], source, group)
            with pytest.raises(dist.CollectiveMismatchError, match="sent a list of 2 objects"):
                dist.recv(np.empty(4), source, group)
            got: list[Any] = [None, None]
            assert dist.recv_object_list(got, source, group) == 1
            assert got == [b"x" * size, 5]
        dist.barrier(group)


def test_arrays_from_any_rank(group: Any, operations: list[str]) -> None:
    """Few elements that have arrived are received without an operation; arrays of another kind go the general way."""
    size = group.size()
    for dtype in (np.float64, np.int8, np.bool_, np.complex64):
        for shape in ((), (0,), (3, 2)):
            for _ in range(2):
                if dist.get_rank() != 0:
                    dist.send(np.full(shape, dist.get_rank(), dtype), 0, group, tag=7)
                dist.barrier(group)
                if dist.get_rank() == 0:
                    got = {}
                    for _ in range(size - 1):
                        x = np.zeros(shape, dtype)
                        got[dist.recv(x, group=group, tag=7)] = x
                    assert sorted(got) == list(range(1, size))
                    assert all((x == np.full(shape, rank, dtype)).all() for rank, x in got.items())
                dist.barrier(group)  # no message of the next turn is received in this turn
    if dist.get_rank() == 0:
        assert sum(group.received.values()) == 24 * (size - 1)
        assert len(operations) < 12 * (size - 1)  # the first one of each rank, and what arrives late


def test_arrays_that_do_not_fit_stay(group: Any) -> None:
    """Another dtype, number of elements or list is refused, and nothing is written or lost; a layout of its own is filled."""
    sent = np.arange(6.0).reshape(2, 3)
    arrive(group, lambda: dist.send(sent, 0, group), lambda: dist.send_object_list([1], 0, group))
    if dist.get_rank() == 0:
        for wrong in (np.zeros(6, np.int64), np.zeros(5), np.zeros(7), np.zeros(6, "S8")):
            with pytest.raises(dist.CollectiveMismatchError, match="float64, 6 elements"):
                dist.recv(wrong, group=group)
            assert not wrong.astype(bool).any()
        with pytest.raises(dist.CollectiveMismatchError, match="float64, 6 elements"):
            dist.recv_object_list([None], group=group)
        with pytest.raises(ValueError, match="tag must be between"):
            dist.recv(np.zeros(6), group=group, tag=-1)
        x = np.zeros((3, 4)).T[:2, :3]
        dist.recv(x, group=group)
        assert (x == sent).all()
        got = [None]
        dist.recv_object_list(got, group=group)
        assert got == [1]
    dist.barrier(group)


def test_an_earlier_receive_gets_its_message_first(group: Any) -> None:
    """A receive that is pending gets the first message that both match, whichever rank the later receive names."""
    for source in (None, 1):
        arrive(group, *(lambda i=i: dist.send(np.full(2, float(i)), 0, group) for i in range(2)))
        if dist.get_rank() == 0:
            first, second = np.zeros(2), np.zeros(2)
            work = dist.irecv(first, group=group)
            dist.recv(second, source, group)
            work.wait()
            assert first[0] == 0
            assert second[0] == 1
        dist.barrier(group)


def test_threads_that_receive_lists(group: Any) -> None:
    """Several threads may receive lists of one sender, short and long ones: each list is received once and whole."""
    if not dist.get_world_size() or dist.get_rank() > 1:
        dist.barrier(group)
        return
    count, threads = 40, 3
    if dist.get_rank() == 1:
        for i in range(threads * count):
            dist.send_object_list([i, b"x" * (LONG * (i % 3))], 0, group)
    else:
        got: list[tuple[int, int]] = []

        def receive() -> None:
            for _ in range(count):
                objects: list[Any] = [None, None]
                dist.recv_object_list(objects, None, group)
                got.append((objects[0], len(objects[1])))

        started = [threading.Thread(target=receive) for _ in range(threads)]
        for each in started:
            each.start()
        for each in started:
            each.join()
        assert sorted(got) == [(i, LONG * (i % 3)) for i in range(threads * count)]
    dist.barrier(group)


def receive(group: Any, what: str, source: int | None = None) -> None:
    if what == "array":
        dist.recv(np.zeros(2), source, group)
    else:
        dist.recv_object_list([None], source, group)


def poll(monkeypatch: pytest.MonkeyPatch, group: Any, act: Callable[[], None]) -> None:
    """Call ``act`` once in a poll for a message, as a signal handler may be called there."""
    receiver = group.pair.receiver
    take, left = receiver._take, [act]

    def taking(*given: Any) -> Any:
        if left:
            left.pop()()
        return take(*given)

    monkeypatch.setattr(receiver, "_take", taking)


@pytest.mark.parametrize("what", ["array", "list"])
def test_mpi_fails_in_a_poll(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the call, and the group is given up."""
    group: Any = dist.new_group()
    if dist.get_rank() == 0:

        def fail() -> None:
            raise MPI.Exception(MPI.ERR_OTHER)

        poll(monkeypatch, group, fail)
        with pytest.raises(dist.DistBackendError, match=r"recv\w*\(from any rank.*at .*test_received_at_once.py:"):
            receive(group, what)
        assert group.broken is not None
        monkeypatch.undo()
    dist.barrier()
    give_up(group, "MPI failed in a call on it")
    dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.parametrize("what", ["array", "list"])
def test_a_handler_raises_in_a_poll(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception is raised, and a rank that waits for this rank learns that the group was given up."""
    group: Any = dist.new_group()
    dist.barrier(group)
    if dist.get_rank() == 0:

        def fail() -> None:
            raise ZeroDivisionError("of a handler")

        poll(monkeypatch, group, fail)
        with pytest.raises(ZeroDivisionError, match="of a handler"):
            receive(group, what)
        assert "of a handler" in group.broken
        monkeypatch.undo()
        time.sleep(0.7)  # otherwise the barrier and the receive would be a deadlock, which is found first
    elif dist.get_rank() == 1:
        with pytest.raises(dist.GroupBrokenError, match=r"rank 0 gave the group up: .*of a handler"):
            receive(group, what, 0)
    dist.barrier()
    give_up(group, "a handler raised in a call on it")
    dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.parametrize("what", ["array", "list"])
def test_a_handler_makes_a_call_in_a_poll(what: str, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of the handler is refused, and the receive goes on."""
    refused: list[str] = []

    def call() -> None:
        for kind in ("array", "list"):
            with pytest.raises(RuntimeError, match="a signal handler has made this call") as caught:
                receive(group, kind)
            refused.append(str(caught.value))

    arrive(group, lambda: dist.send(np.ones(2), 0, group) if what == "array" else dist.send_object_list([1], 0, group))
    if dist.get_rank() == 0:
        poll(monkeypatch, group, call)
        receive(group, what)
        assert len(refused) == 2
        monkeypatch.undo()
    dist.barrier(group)
