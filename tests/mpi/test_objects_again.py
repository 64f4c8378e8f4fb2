"""Calls of objects that are made again: on one node their pickles come with the round, unless a member's are too long."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from ranks import Unloadable, Unpicklable, give_up, run_threads

import mpicoll as dist
from mpicoll.groups import registry
from mpicoll.operations.object_transfer import SHARED_BYTES, ObjectTransfer
from mpicoll.operations.prepare.objects import PreparedObjects
from mpicoll.pytest_plugin import collective_raises
from mpicoll.transports.base import EAGER_BYTES

pytestmark = pytest.mark.mpi(min_size=2)


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Give the calls whose objects move in the general way."""
    calls: list[str] = []
    steps = ObjectTransfer.steps

    def counting(self: ObjectTransfer, agreed: Any) -> Any:
        calls.append(self.call.op)
        return steps(self, agreed)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectTransfer, "steps", counting)
        yield calls


def make_all(values: list[Any], root: int, group: Any = None, name: str | None = None) -> None:
    """Make each call once, with an object of each rank, and compare what has come."""
    me, size = dist.get_rank(group), dist.get_world_size(group)
    given: list[Any] = [values[me], "second"]
    dist.broadcast_object_list(given, group=group, group_src=root, name=name)
    assert given == [values[root], "second"]
    came: list[Any] = [None] * (size + 1)
    dist.all_gather_object(came, values[me], group, name=name)
    assert came == [*values, None]
    came = [None] * size
    dist.gather_object(values[me], came if me == root else None, group=group, group_dst=root, name=name)
    assert came == (values if me == root else [None] * size)
    into: list[Any] = ["old", "stays"]
    dist.scatter_object_list(into, values if me == root else None, group=group, group_src=root, name=name)
    assert into == [values[me], "stays"]


@pytest.mark.parametrize("count", [0, 100, 2_200, 20_000])
def test_later_calls_move_with_their_round(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first calls of objects of such a size later calls are prepared, and small ones never go the general way."""
    group = dist.new_group()
    size = group.size()
    if count == 20_000 and (count + 100) * size > SHARED_BYTES:
        pytest.skip("the objects of a scatter have no room")
    values = [{"rank": rank, "bytes": bytes(range(256)) * (count // 256)} for rank in range(size)]
    for _ in range(2):  # what is made twice is prepared
        make_all(values, 0, group)
    if group.pair.agreement.channel.carries_data:
        prepared = [each for each in group.prepared.values() if type(each) is PreparedObjects]
        assert len(prepared) == 4
        assert count in (0, 100) or any(each.room == SHARED_BYTES for each in prepared)
    with counted(monkeypatch) as general:
        for _ in range(20):
            make_all(values, 0, group)
    # In the segment a member that is late to read lets the others make the next call in the general way.
    assert general == [] or count > 100 or not group.pair.agreement.channel.carries_data
    dist.destroy_process_group(group)


def test_rooms_follow_the_sizes() -> None:
    """Objects that grow, and shrink again, are prepared for the larger and the smaller room."""
    group = dist.new_group()
    size = group.size()
    for count, room in ((10, EAGER_BYTES), (1_500, SHARED_BYTES), (10, SHARED_BYTES), (120_000, 0), (10, EAGER_BYTES)):
        for _ in range(4):
            make_all([bytes(count)] * size, 0, group)
        prepared = [each for each in group.prepared.values() if type(each) is PreparedObjects and each.parts == size]
        if group.pair.agreement.channel.carries_data and 1 < size < 5:
            assert [each.room for each in prepared] == ([room] if room else [])
    dist.destroy_process_group(group)


def test_any_sizes_in_any_order() -> None:
    """Objects of any size on each rank, at random, with arrays of their own inside."""
    together = random.Random(9)
    size = dist.get_world_size()
    for _ in range(150):
        lengths = [together.choice([0, 3, 200, 240, 260, 2_000, 8_000, 9_000, 60_000]) for _ in range(size)]
        make_all(
            [list(range(rank, rank + length // 3)) for rank, length in enumerate(lengths)], together.randrange(size)
        )


def test_large_arrays_and_small_objects_in_turns() -> None:
    """An object with a large array moves in the general way, and the next small one does not get its bytes."""
    me, size = dist.get_rank(), dist.get_world_size()
    for turn in range(8):
        mine = np.full(30_000, me + turn) if turn % 3 == 2 and me == turn % size else me + turn
        came: list[Any] = [None] * size
        dist.all_gather_object(came, mine)
        for rank, got in enumerate(came):
            assert np.all(got == rank + turn)
            assert isinstance(got, np.ndarray) == (turn % 3 == 2 and rank == turn % size)


@pytest.mark.parametrize("level", ["full", "roll", "off"])
def test_at_every_level_and_with_names(level: str) -> None:
    """Results are right at every level, with and without names, whoever is the root."""
    group = dist.new_group()
    group.level = level
    size = group.size()
    for turn in range(30):
        values = [(turn, rank) for rank in range(size)]
        make_all(values, turn % size, group, f"step {turn}" if turn % 2 else None)
    group.level = "full"
    dist.destroy_process_group(group)


def test_members_that_are_late() -> None:
    """Whoever is late gets and gives the same objects, of all lengths."""
    me, size = dist.get_rank(), dist.get_world_size()
    for length in (1, 3_000, 100_000):
        for late in range(size):
            for _ in range(2):
                if me == late:
                    time.sleep(0.02)
                make_all([str(rank) * length for rank in range(size)], size - 1)


def test_beside_asynchronous_calls() -> None:
    """A member with a call under way moves its objects in the general way, and all members with it."""
    me, size = dist.get_rank(), dist.get_world_size()
    alone = random.Random(me)
    for turn in range(60):
        x = np.full(100, float(me))
        work = dist.all_reduce(x, async_op=True)
        if alone.random() < 0.5:
            assert work is not None
            work.wait()
        make_all([(turn, rank) for rank in range(size)], turn % size)
        assert work is not None
        work.wait()
        assert (x == size * (size - 1) / 2).all()


def test_arguments_that_differ() -> None:
    """After equal calls another root, another length, another function or another name is reported on all ranks."""
    me, size = dist.get_rank(), dist.get_world_size()
    odd = me == size - 1
    for _ in range(3):
        make_all(list(range(size)), 0)
    came: list[Any] = [None] * size
    with collective_raises(dist.CollectiveMismatchError, match="root 1"):
        dist.broadcast_object_list([1, "second"], 1 if odd else 0)
    with collective_raises(dist.CollectiveMismatchError, match="objects 2"):
        dist.broadcast_object_list([1, 2, 3] if odd else [1, "second"], 0)
    with collective_raises(dist.CollectiveMismatchError, match="gather_object"):
        if odd:
            dist.gather_object(1, None, 0)
        else:
            dist.all_gather_object(came, 1)
    with collective_raises(dist.CollectiveMismatchError, match="name one"):
        dist.all_gather_object(came, 1, name="one" if odd else "other")
    with collective_raises(dist.CollectiveMismatchError, match="weights_only True"):
        dist.all_gather_object(came, 1, weights_only=odd)
    make_all(list(range(size)), 0)


def test_arguments_that_are_equal_to_others_are_not_taken_for_them() -> None:
    """True and 1.0 are no ranks, though they are equal to 1; a tuple is no list."""
    me, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        dist.broadcast_object_list([me], 1)
        dist.scatter_object_list([None], list(range(size)) if me == 1 else None, 1)
    for wrong in (1.0, "1"):
        with collective_raises((TypeError, ValueError)):
            dist.broadcast_object_list([me], wrong)  # type: ignore[arg-type]
    with collective_raises(TypeError, match="type list"):
        dist.broadcast_object_list((me,), 1)  # type: ignore[arg-type]
    with collective_raises(ValueError, match="list of size at least 1"):
        dist.scatter_object_list((None,), list(range(size)) if me == 1 else None, 1)  # type: ignore[arg-type]
    with collective_raises(ValueError, match="one place for each"):
        dist.all_gather_object([None] * (size - 1), me)


def test_errors_of_pickle() -> None:
    """What cannot be pickled raises on all ranks; what cannot be unpickled raises there, with a note, and loses nothing."""
    me, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        make_all(list(range(size)), 0)
    came: list[Any] = ["old"] * size
    with collective_raises(RuntimeError, match=r"cannot\s+be\s+pickled|could not be pickled"):
        dist.all_gather_object(came, Unpicklable() if me == 0 else 1)
    assert came == ["old"] * size
    for _ in range(3):
        came = ["old"] * size
        with (
            pytest.raises(LookupError, match="cannot be unpickled here")
            if me == 1
            else contextlib.nullcontext() as caught
        ):
            dist.all_gather_object(came, Unloadable(1) if me == 0 else me)
        assert came == (["old"] * size if me == 1 else ["loaded", *range(1, size)])
        if me == 1 and hasattr(caught.value, "__notes__"):  # type: ignore[union-attr]
            assert "all_gather_object: the object of rank 0 cannot be unpickled" in str(caught.value.__notes__)  # type: ignore[union-attr]
        objects = [Unloadable(1) if me == 0 else "old"]
        with pytest.raises(LookupError) if me == 1 else contextlib.nullcontext() as caught:
            dist.broadcast_object_list(objects, 0)
        if me == 1 and hasattr(caught.value, "__notes__"):  # type: ignore[union-attr]
            assert "the list of rank 0" in str(caught.value.__notes__)  # type: ignore[union-attr]


class Counts:
    """An object that counts how often it is pickled, and whose array may be large."""

    def __init__(self, count: int) -> None:
        self.array, self.pickled = np.zeros(count), 0

    def __getstate__(self) -> Any:
        self.pickled += 1
        return {"array": self.array, "pickled": self.pickled}


@pytest.mark.parametrize("count", [10, 4_000, 40_000, 400_000])
def test_each_object_is_pickled_once(count: int) -> None:
    """Pickling runs code of the program once for each call, whatever the size of the object, and the size before."""
    size = dist.get_world_size()
    for few in (10, count):
        for _ in range(4):
            mine, came = Counts(few), [None] * size
            dist.all_gather_object(came, mine)
            assert mine.pickled == 1
            assert all(each.pickled == 1 and each.array.size == few for each in came)  # type: ignore[attr-defined]


def test_code_that_pickling_runs() -> None:
    """Code that pickling runs may make a call, and may change the list that is sent: the objects are those of the call."""
    me, size = dist.get_rank(), dist.get_world_size()
    inputs: list[Any] = []
    for turn in range(5):
        values = [CallsAllReduce(40_000 if turn == 3 else 10), *["old"] * (size - 1)]
        inputs[:] = values
        values[0].inputs = inputs
        into: list[Any] = [None]
        if me != 0:
            dist.all_reduce(np.ones(2))
        dist.scatter_object_list(into, inputs if me == 0 else None)
        assert into[0] == ("old" if me else 40_000 if turn == 3 else 10)


class CallsAllReduce:
    """An object whose pickling makes a collective call and shortens a list."""

    def __init__(self, count: int) -> None:
        self.count, self.inputs = count, [None]

    def __reduce__(self) -> Any:
        dist.all_reduce(np.ones(2))
        self.inputs.pop()
        return len, (np.zeros(self.count),)


def test_an_array_that_a_call_under_way_writes() -> None:
    """An object with an array that a pending call writes is refused, also if such a call was made before."""
    me, size = dist.get_rank(), dist.get_world_size()
    came: list[Any] = [None] * size
    x = np.zeros(8_000)
    for _ in range(3):
        dist.all_gather_object(came, x)
    work = dist.all_reduce(x, async_op=True)
    with collective_raises(dist.DistError, match="still writes|arguments are wrong"):
        dist.all_gather_object(came, x if me < 2 else 1)
    assert work is not None
    work.wait()


class OfBuffer:
    """An object that gives pickle a buffer, and wants an array back."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return kind_of, (pickle.PickleBuffer(np.zeros(5_000)),)


def kind_of(buffer: Any) -> str:
    """Return the type of a received buffer."""
    return type(buffer).__name__


def test_a_buffer_has_the_same_type_in_each_call() -> None:
    """A large buffer is received as the same type in the first call and in later ones, and can be written."""
    size = dist.get_world_size()
    for _ in range(5):
        came: list[Any] = [None] * size
        dist.all_gather_object(came, [OfBuffer(), np.zeros(5_000)])
        assert [each[0] for each in came] == ["ndarray"] * size
        for _, array in came:
            array[:] = 1.0


def test_lists_of_many_lengths_leave_prepared_calls() -> None:
    """Lists that have other lengths at each call do not push other prepared calls out."""
    group = dist.new_group()
    for _ in range(3):
        dist.all_reduce(np.ones(4), group=group)
    before = len(group.prepared)
    for length in range(1, 300):
        dist.broadcast_object_list([0] * length, group=group, group_src=0)
    assert len(group.prepared) == before
    dist.destroy_process_group(group)


def test_a_handler_that_raises_while_an_object_is_pickled() -> None:
    """What a signal handler raises in the code that pickling runs is raised on its rank, and the other ranks are told."""
    me, size = dist.get_rank(), dist.get_world_size()
    came: list[Any] = [None] * size
    for _ in range(3):
        dist.all_gather_object(came, me)
    before = signal.signal(signal.SIGUSR1, raise_key_error)
    try:
        with collective_raises((KeyError, dist.CollectiveMismatchError)) as caught:
            dist.all_gather_object(came, Signals() if me == 0 else me)
        assert isinstance(caught.value, KeyError) == (me == 0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    dist.all_gather_object(came, me)
    assert came == list(range(size))


class Calls:
    """An object whose pickling makes a collective."""

    def __reduce__(self) -> Any:
        dist.barrier()
        return str, ()


@pytest.mark.mpi(min_size=2)
def test_an_object_whose_pickling_makes_a_call() -> None:
    """The report of the call that could not be prepared does not blame its arguments, and has the headline of the first error."""
    me, size = dist.get_rank(), dist.get_world_size()
    came: list[Any] = [None] * size
    with pytest.raises(dist.CollectiveMismatchError) as first:
        dist.all_gather_object(came, Calls() if me == 0 else me)
    assert "its ranks made different calls" in str(first.value)
    if me:  # rank 0 made two calls above
        with pytest.raises(
            dist.CollectiveMismatchError, match="an error between ranks ended the call on rank 0"
        ) as caught:
            dist.barrier()
        assert "arguments" not in str(caught.value)
        assert "the error on rank 0 is about the calls of several ranks" in str(caught.value).replace("\n        ", " ")
    dist.all_gather_object(came, me)
    assert came == list(range(size))


class Signals:
    """An object whose pickling sends this process a signal."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return str, ()


def raise_key_error(number: int, frame: Any) -> None:
    """Raise."""
    raise KeyError("of a handler")


def test_a_late_member_after_equal_calls_is_named() -> None:
    """A member that leaves after equal calls is reported at the limit, with the call of the others."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    for _ in range(3):
        dist.all_gather_object([None] * size, me, group)
    if me == 0:
        time.sleep(1)
    else:
        with pytest.raises(dist.DistError, match=r"all_gather_object #4|time limit|broken") as caught:
            dist.all_gather_object([None] * size, me, group)
        assert "rank 0" in str(caught.value) or size > 2
    give_up(group, "rank 0 did not make the call")


def test_threads_with_groups_of_their_own() -> None:
    """Threads make calls of objects on groups of their own at a time."""
    if not registry.state().thread_multiple:
        pytest.skip("this MPI has no MPI_THREAD_MULTIPLE")
    groups = [dist.new_group() for _ in range(3)]

    done: list[int] = []

    def work(thread: int) -> None:
        for turn in range(60):
            make_all([(thread, turn, rank) for rank in range(dist.get_world_size())], turn % 2, groups[thread])
        done.append(thread)

    run_threads(work, range(3))
    assert sorted(done) == [0, 1, 2]
    for group in groups:
        dist.destroy_process_group(group)
