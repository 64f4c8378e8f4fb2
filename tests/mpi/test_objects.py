"""Objects of every size and layout by every call, what arrives of them, and what is refused."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from ranks import Unloadable, Unpicklable, run_threads

import mpicoll as dist
from mpicoll.checks.levels import EVERY
from mpicoll.memory import pickled
from mpicoll.operations import object_transfer as implementation
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi

MANY = 50_000  # float64: a buffer that stays out of the stream


def of(rank: int) -> list[Any]:
    """Return objects of every kind that differ by rank in what they hold and how large they are."""
    table = np.arange(MANY + 100 * rank, dtype=float) + rank
    return [
        None,
        {"rank": rank, "loss": 0.5},
        "x" * (200_000 * (rank % 2)),
        table,
        {
            "a": table[:3],
            "table": table.reshape(-1, 4),
            "again": table,
            "order": np.asfortranarray(table.reshape(4, -1)),
        },
        [np.full((100, 100), rank, np.int16), np.zeros(0), table[::-2], bytes(70_000), bytearray(rank + 40_000)],
        [table[i : i + 3000].copy() for i in range(0, MANY // 3, 3000)] if rank else [],
        np.array([rank, "text", None], object),
    ]


def same(a: Any, b: Any) -> bool:
    """Whether two of these objects are equal, dtypes and layouts of their arrays too."""
    if isinstance(a, np.ndarray):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.flags.fnc == b.flags.fnc
        return alike and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


@contextlib.contextmanager
def chunks_of(nbytes: int) -> Iterator[None]:
    before, pickled.CHUNK_BYTES = pickled.CHUNK_BYTES, nbytes
    try:
        yield
    finally:
        pickled.CHUNK_BYTES = before


@contextlib.contextmanager
def level_of(level: Any) -> Iterator[Any]:
    group = dist.new_group()
    group.level = level
    try:
        yield group
    finally:
        group.level = "full"
        dist.destroy_process_group(group)


def every_call(make: Callable[[int], Any], group: Any = None, **more: Any) -> Iterator[tuple[str, Any, Any]]:
    """Make every call, collectives with every root: yield (what, what came, what should have come).

    Args:
        more: further arguments of every call.
    """
    me, size = dist.get_rank(group), dist.get_world_size(group)
    gathered: list[Any] = ["old"] * size
    dist.all_gather_object(gathered, make(me), group, **more)
    yield "all_gather_object", gathered, [make(rank) for rank in range(size)]
    for root in range(size):
        at_root = me == root
        objects = [make(root), 1] if at_root else ["old", "old"]
        dist.broadcast_object_list(objects, group=group, group_src=root, **more)
        yield f"broadcast_object_list from {root}", objects, [make(root), 1]
        gathered = ["old"] * size
        dist.gather_object(make(me), gathered if at_root else None, group=group, group_dst=root, **more)
        yield f"gather_object to {root}", gathered, [make(rank) for rank in range(size)] if at_root else ["old"] * size
        into = ["old", "kept"]
        inputs = [make(rank) for rank in range(size)] if at_root else None
        dist.scatter_object_list(into, inputs, group=group, group_src=root, **more)
        yield f"scatter_object_list from {root}", into, [make(me), "kept"]
    if size > 1:
        after, before = (me + 1) % size, (me - 1) % size
        came: list[Any] = ["old", "old"]
        if me:
            sender = dist.recv_object_list(came, group=group, group_src=before, **more)
            assert dist.get_group_rank(group, sender) == before
        dist.send_object_list([make(me), me], group=group, group_dst=after, **more)
        if not me:
            dist.recv_object_list(came, group=group, group_src=before, **more)
        yield "messages", came, [make(before), before]


def test_data_only() -> None:
    """With ``weights_only=True`` every call moves data, and refuses other objects on the ranks that receive them."""
    me, size = dist.get_rank(), dist.get_world_size()
    for which in range(8):
        for what, came, wanted in every_call(lambda rank, which=which: of(rank)[which], weights_only=True):
            assert same(came, wanted), (what, which)
    refused = pytest.raises(pickle.UnpicklingError, match=r"weights_only=True: the object needs \w+\.Fraction")
    for root in range(size):
        objects: list[Any] = [Fraction(1, 3) if me == root else "old"]
        with refused if me != root else contextlib.nullcontext():
            dist.broadcast_object_list(objects, root, weights_only=True)
        assert objects == [Fraction(1, 3) if me == root else "old"]
        gathered = ["old"] * size
        with refused:
            dist.all_gather_object(gathered, Fraction(1, 3) if me == root else me, weights_only=True)
        assert gathered == ["old"] * size
        with refused if me == root else contextlib.nullcontext():
            dist.gather_object(Fraction(1, 3), gathered if me == root else None, root, weights_only=True)
        into = ["old"]
        with refused if me == size - 1 else contextlib.nullcontext():
            inputs = [*range(size - 1), Fraction(1, 3)] if me == root else None
            dist.scatter_object_list(into, inputs, root, weights_only=True)
        assert into == ["old" if me == size - 1 else me]
    if size > 1:
        with collective_raises(dist.CollectiveMismatchError, match="weights_only True"):
            dist.all_gather_object([None] * size, me, weights_only=me == 0)
    with collective_raises(ValueError, match="weights_only: The truth value"):
        dist.all_gather_object([None] * size, me, weights_only=np.ones(2))  # type: ignore[arg-type]
    if me == 0 and size > 1:
        dist.send_object_list([Fraction(1, 3)], 1)
    if me == 1:
        with refused:
            dist.recv_object_list(into, 0, weights_only=True)
        assert into == ["old" if me == size - 1 else me]
    dist.barrier()


@pytest.mark.parametrize("which", range(8))
def test_every_call_takes_every_object(which: int) -> None:
    """What is received is equal to what was passed, in its layout, whatever the sizes of the ranks."""
    for what, came, wanted in every_call(lambda rank: of(rank)[which]):
        assert same(came, wanted), what


@pytest.mark.mpi(min_size=2)
def test_large_objects_move_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and buffers that are larger than one message may be, to the last byte, are received whole; from one at a time."""
    monkeypatch.setattr(implementation, "PEERS", 1)
    with chunks_of(30_000):
        for what, came, wanted in every_call(lambda rank: [of(rank)[2], of(rank)[4]]):
            assert same(came, wanted), what


def test_received_arrays_stand_by_themselves() -> None:
    """Arrays that were received can be written, share no memory with each other or the sender's, and hold no more than theirs."""
    me, size = dist.get_rank(), dist.get_world_size()
    for count in (100, MANY):
        mine = [np.full(count, me + 1.0), np.full(count, me + 2.0)]
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, mine)
        into: list[Any] = [None]
        dist.scatter_object_list(into, [mine] * size if me == 0 else None)
        came = [array for pair in (*gathered, into[0]) for array in pair]
        for i, array in enumerate(came):
            array += i
            assert not any(np.shares_memory(array, other) for other in (*came[:i], *mine)), i
            assert array.base is None or memoryview(array.base).nbytes == array.nbytes
        assert (mine[0] == me + 1).all()
        assert all((array == array[0]).all() for array in came)
    fixed = np.arange(float(MANY))
    fixed.flags.writeable = False
    gathered = [None] * size
    dist.all_gather_object(gathered, fixed)
    assert not any(array.flags.writeable for array in gathered)


def test_the_same_array_twice_is_one() -> None:
    """An object that an object holds twice is still one."""
    array = np.ones(MANY)
    objects = [array, array] if dist.get_rank() == 0 else [None, None]
    dist.broadcast_object_list(objects)
    assert objects[0] is objects[1]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("level", ["full", "roll", "off"])
def test_what_does_not_pickle_raises_on_all(level: str) -> None:
    """At every level the rank at fault raises its own error and the others say so, also beside large objects."""
    me, size = dist.get_rank(), dist.get_world_size()
    with level_of(level) as group:
        for what, came, wanted in every_call(lambda rank: of(rank)[4], group):
            assert same(came, wanted), what
        for odd in range(size):
            mine = Unpicklable() if me == odd else np.ones(MANY)
            calls = (
                lambda mine=mine: dist.all_gather_object([None] * size, mine, group),
                lambda mine=mine: dist.gather_object(mine, [None] * size if me == 0 else None, group=group),
                lambda mine=mine, odd=odd: dist.broadcast_object_list([mine], odd, group),
                lambda mine=mine, odd=odd: dist.scatter_object_list(
                    [0], [mine] * size if me == odd else None, odd, group
                ),
            )
            for call in calls:
                with collective_raises(RuntimeError, match=r"cannot\s+be\s+pickled|could not be pickled") as caught:
                    call()
                assert isinstance(caught.value, dist.CollectiveMismatchError) == (me != odd)
                assert me == odd or f"rank {odd}" in str(caught.value)
            gathered: list[Any] = [None] * size
            dist.all_gather_object(gathered, me, group)
            assert gathered == list(range(size))
        for _ in range(EVERY):
            dist.all_reduce(np.ones(2), group=group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("odd", ["kind", "number"])
def test_what_is_no_object_of_the_call(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of another kind or number raises on all that get it, and the group, out of step, is given up."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    if me == 1 and odd == "kind":
        monkeypatch.setattr(implementation.AllGather, "kind", b"?")
    if me == 1 and odd == "number":
        group.calls += 1
    with collective_raises(
        dist.DistError, match=r"no object of this call, since the header (is of kind|belongs to number)"
    ):
        dist.all_gather_object([None] * size, np.ones(MANY), group)
    with pytest.raises(dist.GroupBrokenError):
        dist.all_gather_object([None] * size, 1, group)
    dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_what_does_not_unpickle_raises_there_alone() -> None:
    """The other ranks get the object, the group goes on, and the list of the rank at fault is as it was."""
    me, size = dist.get_rank(), dist.get_world_size()
    for odd in range(size):
        kept: list[Any] = ["old"] * size
        into: list[Any] = ["old"]
        one = ["old"] if me else [Unloadable(odd)]
        objects = [np.ones(MANY), Unloadable(odd)]
        calls = [
            (kept, lambda kept=kept, objects=objects: dist.all_gather_object(kept, objects)),
            (into, lambda into=into, odd=odd: dist.scatter_object_list(into, None if me else [Unloadable(odd)] * size)),
        ]
        if odd:
            calls.append((one, lambda one=one: dist.broadcast_object_list(one)))
        for values, call in calls:
            if me == odd:
                with pytest.raises(LookupError, match="cannot be unpickled here"):
                    call()
                assert set(values) == {"old"}
            else:
                call()
                assert "old" not in values
        dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_messages_of_objects() -> None:
    """They come in order among themselves and among arrays, from a rank or from any; the sender's rank is returned."""
    me, size = dist.get_rank(), dist.get_world_size()
    if me == 0:
        for sender in range(1, size):
            for turn in range(3):
                came: list[Any] = [None, None]
                assert dist.recv_object_list(came, sender, use_batch=bool(turn)) == sender
                assert same(came, [turn, of(sender)[turn + 2]])
                x = np.zeros(1)
                dist.recv(x, sender)
                assert x[0] == turn
        senders = []
        for _ in range(1, size):
            came = [None]
            sender = dist.recv_object_list(came)
            assert came == [sender]
            senders.append(sender)
        assert sorted(senders) == list(range(1, size))
    else:
        for turn in range(3):
            assert dist.send_object_list([turn, of(me)[turn + 2]], 0) is None
            dist.send(np.full(1, float(turn)), group_dst=0)
        dist.send_object_list([me], group_dst=0)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_messages_that_are_of_something_else() -> None:
    """A list of another length, an array for a list or a list for an array is refused, and can still be received."""
    me = dist.get_rank()
    if me == 1:
        dist.send_object_list([1, 2], 0)
        dist.send(np.ones(3), 0)
        for _ in range(4):
            dist.send(np.ones(3), 0, tag=1)
        dist.send_object_list([3], 0)
    if me == 0:
        came: list[Any] = [None] * 3
        with pytest.raises(
            dist.CollectiveMismatchError, match=r"a list of 2 objects \(tag 0, send_object_list at .*py:"
        ):
            dist.recv_object_list(came, 1)
        with pytest.raises(dist.CollectiveMismatchError, match=r"a recv_object_list of a list of 2 objects takes it"):
            dist.recv(np.zeros(3), 1)
        assert dist.recv_object_list(came[:2], 1) == 1
        with pytest.raises(dist.CollectiveMismatchError, match=r"float64, 3 elements .* of a list of 3 objects"):
            dist.recv_object_list(came, 1)
        x = np.zeros(3)
        dist.recv(x, 1)
        for _ in range(4):
            dist.recv(x, 1, tag=1)
        dist.recv_object_list(came[:1], 1)
        with pytest.raises(TypeError, match="object_list"):
            dist.recv_object_list((1,), 1)
        with pytest.raises(TypeError, match="object_list"):
            dist.send_object_list((1,), 1)
        with pytest.raises(ValueError, match="Invalid source rank"):
            dist.recv_object_list([1], 0)
        with pytest.raises(ValueError, match="Invalid destination rank"):
            dist.send_object_list([1], 0)
        with pytest.raises(ValueError, match="Must specify"):
            dist.send_object_list([1])
        with pytest.raises(RuntimeError, match="cannot be pickled"):
            dist.send_object_list([Unpicklable()], 1)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_message_out_of_step() -> None:
    """One that is not the next of its sender raises, and its group is given up."""
    me, group = dist.get_rank(), dist.new_group()
    if me == 1:
        group.objects_sent[0] = 5
        dist.send_object_list([1], 0, group)
    if me == 0:
        came = ["old"]
        with pytest.raises(
            dist.DistError, match=r"from rank 1 are no list of objects, since the header belongs to number 6, not 1"
        ):
            dist.recv_object_list(came, 1, group)
        assert came == ["old"]
        with pytest.raises(dist.GroupBrokenError):
            dist.recv_object_list(came, 1, group)
    dist.barrier()
    dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_an_array_under_way_is_not_sent_within_an_object() -> None:
    """An array that an operation under way writes is refused inside an object, too, before anything moves."""
    me, size = dist.get_rank(), dist.get_world_size()
    x = np.ones(MANY)
    work = dist.all_reduce(x, async_op=True)
    with collective_raises(dist.DistError) as caught:
        dist.all_gather_object([None] * size, {"x": x} if me == 0 else 1)
    assert isinstance(caught.value, dist.BufferInUseError) == (me == 0)
    work.wait()
    if me == 0:
        work = dist.irecv(x, 1)
        with pytest.raises(dist.BufferInUseError):
            dist.send_object_list([x], 1)
    if me == 1:
        dist.send(x, 0)
    if me == 0:
        work.wait()
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_objects_beside_operations_under_way() -> None:
    """Large objects move while some ranks have asynchronous collectives under way."""
    size = dist.get_world_size()
    x = np.ones(MANY)
    work = dist.all_reduce(x, async_op=True) if dist.get_rank() else dist.all_reduce(x)
    for what, came, wanted in every_call(lambda rank: of(rank)[4]):
        assert same(came, wanted), what
    if work is not None:
        work.wait()
    assert (x == size).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.mpi_timeout(240)
@pytest.mark.slow
@pytest.mark.both_mpis
def test_objects_of_more_than_2_gib() -> None:
    """An array and bytes of 2**31 + 1000 bytes are received to the last byte."""
    if dist.get_world_size() != 2:
        pytest.skip("2 ranks take 8 GiB already")
    me, count = dist.get_rank(), 2**31 + 1000
    group = dist.new_group(timeout=timedelta(seconds=100))  # to fill them takes long on a busy machine
    marks = (0, 1, 2**30 - 1, 2**30, 2**31 - 1, 2**31, count - 1)
    objects: list[Any] = [None]
    if me == 0:
        objects = [np.zeros(count, np.uint8)]
        for i, mark in enumerate(marks):
            objects[0][mark] = i + 1
    dist.broadcast_object_list(objects, group=group)
    assert objects[0].size == count
    assert [objects[0][mark] for mark in marks] == list(range(1, len(marks) + 1))
    assert np.count_nonzero(objects[0]) == len(marks)
    if me == 0:
        dist.send_object_list([objects.pop().tobytes()], 1, group=group)
    else:
        objects.clear()
        came: list[Any] = [None]
        assert dist.recv_object_list(came, 0, group=group) == 0
        assert sys.getsizeof(came[0]) > count
        assert [came[0][mark] for mark in marks] == list(range(1, len(marks) + 1))
    dist.barrier(group)
    dist.destroy_process_group(group)


def test_the_pickle_is_of_protocol_5() -> None:
    """What is sent of an object with a large array is a short stream and the array's own memory."""
    array = np.ones(MANY)
    packed = pickled.Packed(*pickled.stream_of({"array": array}))
    assert packed.memory[:2].tobytes() == pickle.PROTO + b"\x05"
    assert packed.head_bytes < 1000
    assert np.shares_memory(packed.parts[0], array)


@pytest.mark.mpi(min_size=2)
def test_threads_that_receive_lists_at_once() -> None:
    """Each gets the arrays of its own list, however late it comes to take them."""
    me, wrong = dist.get_rank(), []

    def work(thread: int) -> None:
        for turn in range(25):
            if me == 0:
                dist.send_object_list([thread, turn, np.full(5000 + 500 * thread, 100.0 * thread + turn)], 1)
            else:
                got: list[Any] = [None] * 3
                dist.recv_object_list(got, 0)
                if got[2].size != 5000 + 500 * got[0] or (got[2] != 100.0 * got[0] + got[1]).any():
                    wrong.append(got[:2])

    if me < 2:
        run_threads(work, range(4))
    dist.barrier()
    assert not wrong, wrong
