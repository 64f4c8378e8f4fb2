"""Point to point: send, recv, isend, irecv, P2POp and batch_isend_irecv."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import collective_cases as cases
import numpy as np
import pytest
from ranks import neighbours

import mpicoll as dist
from mpicoll.runtime import waiting
from mpicoll.transports.mpi.messages import MOST_PAYLOADS

pytestmark = pytest.mark.mpi

several = pytest.mark.mpi(min_size=2)


@several
def test_send_and_recv_around_a_ring() -> None:
    """Every dtype and size arrives unchanged; send returns None, recv the sender's rank."""
    rank = dist.get_rank()
    before, after = neighbours()
    for dtype in cases.DTYPES:
        for count in (0, 1, 7, 3000):
            x, y = cases.values(dtype, count, rank), cases.values(dtype, count, 99)
            if rank % 2:
                got = dist.recv(y, before)
                assert dist.send(x, after) is None
            else:
                work = dist.isend(x, after)
                got = dist.recv(y, before)
                assert isinstance(work, dist.Work)
                assert work.wait() is True
            assert got == before, f"{dtype}, {count}"
            assert y.dtype.char == dtype
            assert (y == cases.values(dtype, count, before)).all(), f"{dtype}, {count}"


@several
def test_isend_and_irecv_around_a_ring() -> None:
    """Nonblocking messages of every size arrive; source_rank tells the sender afterwards."""
    rank = dist.get_rank()
    before, after = neighbours()
    for count in (0, 1, 3000, 300_000):
        y = np.zeros(count)
        works = [dist.irecv(y, before), dist.isend(np.full(count, float(rank)), after)]
        for work in works:
            work.wait()
        assert (y == before).all(), count
        assert works[0].source_rank() == before
        assert works[0].result()[0] is y


@several
def test_recv_from_anybody_says_from_whom() -> None:
    """recv and irecv without a source take what comes, and say who sent it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for nonblocking in (False, True):
        dist.barrier()
        if rank:
            dist.send(np.array([10.0 * rank, 1.0]), 0)
            continue
        seen = {}
        for _ in range(size - 1):
            x = np.zeros(2)
            if nonblocking:
                work = dist.irecv(x)
                work.wait()
                source = work.source_rank()
            else:
                source = dist.recv(x)
            seen[source] = x[0]
        assert seen == {r: 10.0 * r for r in range(1, size)}, f"nonblocking={nonblocking}"


@several
def test_tags_choose_messages_out_of_order() -> None:
    """A receive takes the message of its tag, and among those of one tag the one that was sent first."""
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.isend(np.array([float(tag), turn]), 1, tag=tag) for turn in (0, 1) for tag in (5, 0, 32767, 3)]
        for work in works:
            work.wait()
    if rank == 1:
        for tag in (3, 32767, 5, 0):
            for turn in (0, 1):
                x = np.zeros(2)
                assert dist.recv(x, 0, tag=tag) == 0
                assert (x == [tag, turn]).all(), f"tag {tag}, message {turn}: {x}"


def test_a_rank_may_send_to_itself_without_waiting() -> None:
    """isend to oneself is allowed and meets irecv; send and recv with oneself are refused."""
    rank = dist.get_rank()
    for count in (3, 100_000):
        x, y = np.full(count, 7.0 + rank), np.zeros(count)
        works = [dist.isend(x, rank), dist.irecv(y, rank)]
        for work in reversed(works):
            work.wait()
        assert (y == 7 + rank).all(), count
        assert works[1].source_rank() == rank
    with pytest.raises(ValueError, match="Invalid destination rank: destination rank should not be the same"):
        dist.send(x, rank)
    with pytest.raises(ValueError, match="Invalid source rank: source rank should not be the same"):
        dist.recv(x, rank)


def test_batches() -> None:
    """batch_isend_irecv moves rings, in both directions at once, and large messages head to head."""
    rank = dist.get_rank()
    before, after = neighbours()
    for count in (1, 700_000):
        forth, back = np.zeros(count), np.zeros(count)
        ops = [
            dist.P2POp(dist.isend, np.full(count, 1.0 * rank), after, tag=1),
            dist.P2POp(dist.isend, np.full(count, 2.0 * rank), before, tag=2),
            dist.P2POp(dist.irecv, back, after, tag=2),
            dist.P2POp(dist.irecv, forth, group_peer=before, tag=1),
        ]
        works = dist.batch_isend_irecv(ops)
        assert len(works) == 4
        for work in works:
            assert work.wait() is True
        assert (forth == before).all(), count
        assert (back == 2 * after).all(), count


def test_scalars_and_read_only_arrays_can_be_sent() -> None:
    """0-d arrays move; what is sent may be read-only, what is received into may not."""
    before, after = neighbours()
    x, y = np.array(4.5), np.zeros(())
    x.flags.writeable = False
    work = dist.isend(x, after)
    dist.irecv(y, before).wait()
    work.wait()
    assert y == 4.5
    with pytest.raises(ValueError, match="read-only"):
        dist.irecv(x, before)


# dtype and size of what is sent, and of what it is received into; sizes in parts of 4 or 30,000 elements.
MISFITS = (
    ("d", 1.0, "d", 0.5),
    ("d", 1.0, "d", 2.0),
    ("d", 1.0, "d", 0),
    ("d", 0, "d", 1.0),
    ("f", 1.0, "d", 1.0),
    ("f", 2.0, "d", 1.0),
    ("i", 1.0, "f", 1.0),
    ("?", 1.0, "b", 1.0),
    ("q", 1.0, "Q", 1.0),
    ("G", 1.0, "D", 1.0),
)


@several
def test_a_message_that_does_not_fit_names_both_sides() -> None:
    """A recv of another size or dtype raises on the receiver, names both sides and places, and the message is not lost."""
    rank = dist.get_rank()
    for count in (4, 30_000):
        for sent, by, wanted, into in MISFITS:
            case = f"{int(by * count)} x {sent} into {int(into * count)} x {wanted}"
            x = cases.values(sent, int(by * count), 1)
            for nonblocking in (False, True):
                if rank == 0:
                    works = [dist.isend(x, 1, tag=4), dist.isend(x[:1], 1, tag=4)]
                    for work in works:
                        work.wait()
                if rank != 1:
                    continue
                room = cases.values(wanted, int(into * count) + 8, 2)
                before = room.copy()
                for source in ({"src": 0}, {}):
                    with pytest.raises(dist.CollectiveMismatchError) as caught:
                        if nonblocking:
                            dist.irecv(room[:-8], tag=4, **source).wait()
                        else:
                            dist.recv(room[:-8], tag=4, **source)
                    text = str(caught.value)
                    assert f"rank 0 sent {x.dtype}, {x.size} element" in text, (case, text)
                    assert "(tag 4, isend at " in text, (case, text)
                    assert text.count("test_p2p.py:") == 2, (case, text)
                    error = caught.value
                    assert (list(error.ranks), error.group) == ([0, 1], "WORLD")
                    assert [call["arguments"]["elements"] for call in error.calls] == [str(x.size), str(room.size - 8)]
                    assert [call["arguments"]["dtype"] for call in error.calls] == [str(x.dtype), str(room.dtype)]
                    assert f" of {room.dtype}, {room.size - 8} element" in text, (case, text)
                    assert (room == before).all(), case
                y, z = np.empty_like(x), np.empty_like(x[:1])
                assert dist.recv(y, 0, tag=4) == 0
                assert (y == x).all(), case
                dist.recv(z, 0, tag=4)
                assert (z == x[:1]).all(), case
        x = np.ones(2)
        dist.all_reduce(x)
        assert (x == dist.get_world_size()).all()


@several
def test_a_message_that_does_not_fit_an_irecv_started_before_it_came() -> None:
    """The irecv ends with the error, a later one that fits takes the message, and nothing is written past the array."""
    rank = dist.get_rank()
    # Open MPI 5.0.11 (pml ob1) would write all of a large message past the end of an array that was posted for it.
    for count in (10, 400, 20_000):
        room, short = np.full(count, -1.0), np.full(count, -1.0)
        if rank == 1:
            work = dist.irecv(short[:3], 0, tag=4)
            second = dist.irecv(room, 0, tag=4)
        dist.barrier()
        if rank == 0:
            dist.isend(np.arange(count) * 1.0, 1, tag=4).wait()
        if rank == 1:
            second.wait()
            with pytest.raises(
                dist.CollectiveMismatchError, match=f"float64, {count} elements .* of float64, 3 elements"
            ):
                work.wait()
            assert not work.is_success()
            assert (room == np.arange(count)).all(), f"{count} elements"
            assert (short == -1).all(), f"{count} elements"


@several
def test_a_dtype_by_another_name_and_another_shape_fit() -> None:
    """int64 is "l" and "q", and a message has elements, not a shape."""
    if dist.get_rank() == 0:
        for count in (6, 60_000):
            dist.send(np.arange(count, dtype="l").reshape(2, -1), 1)
            dist.send(np.arange(count, dtype="L"), 1)
    if dist.get_rank() == 1:
        for count in (6, 60_000):
            for char in "qQ":
                x = np.zeros((3, 2, count // 6), char)
                dist.recv(x, 0)
                assert (x.ravel() == np.arange(count)).all()


@several
def test_every_place_is_named() -> None:
    """Messages of two places and two tags, received in another order than sent, each name their own place."""
    if dist.get_rank() == 0:
        for tag in (1, 2):
            dist.send(np.zeros(1), 1, tag=tag)
            dist.send(np.zeros(2), 1, tag=tag)
    if dist.get_rank() == 1:
        for tag in (2, 1):
            lines = set()
            for count in (1, 2):
                with pytest.raises(dist.CollectiveMismatchError, match=f"{count} element.* send at .*py:") as caught:
                    dist.recv(np.zeros(5), 0, tag=tag)
                lines.add(str(caught.value).split("send at ")[1].split(")")[0])
                dist.recv(np.zeros(count), 0, tag=tag)
            assert len(lines) == 2


def test_the_largest_tag() -> None:
    """Tags go up to MPI_TAG_UB - 32, at least 32735; those above are refused before anything moves."""
    from mpi4py import MPI

    most = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) - 32
    assert most >= 32767 - 32
    before, after = neighbours()
    x = np.zeros(1)
    for count in (1, 5000):
        work = dist.isend(np.ones(count), after, tag=most)
        x = np.zeros(count)
        dist.irecv(x, before, tag=most).wait()
        work.wait()
        assert x[0] == 1
    for start in (dist.isend, dist.irecv):
        for tag in (most + 1, most + 33):
            with pytest.raises(ValueError, match=f"tag must be between 0 and {most}"):
                start(x, after, tag=tag)


@several
def test_receives_take_messages_in_the_order_in_which_they_were_started() -> None:
    """Of several receives that a message fits the first started gets it, in whatever order one waits for them."""
    rank = dist.get_rank()
    for sizes in ((1, 1, 1, 1), (3000, 1, 3000, 1)):
        if rank == 0:
            works = [dist.isend(np.full(n, float(turn)), 1, tag=turn % 2) for turn, n in enumerate(sizes)]
            for work in works:
                work.wait()
        if rank == 1:
            arrays = [np.zeros(n) for n in sizes]
            sources = (0, None, 0, None)
            works = [
                dist.irecv(x, source, tag=turn % 2)
                for turn, (x, source) in enumerate(zip(arrays, sources, strict=True))
            ]
            for work in reversed(works):
                work.wait()
            assert [x[0] for x in arrays] == [0, 1, 2, 3], sizes
            assert [work.source_rank() for work in works] == [0] * 4
    dist.barrier()


@several
def test_a_group_has_its_own_ranks_and_messages() -> None:
    """src and dst are global ranks, group_src and group_dst those of the group; recv returns a global rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    ranks = list(range(size))[::-1]
    group = dist.new_group(ranks, sort_ranks=False)
    before, after = neighbours(group)
    for by_group in (False, True):
        to = {"group_dst": after} if by_group else {"dst": ranks[after]}
        source = {"group_src": before} if by_group else {"src": ranks[before]}
        on_world = dist.isend(np.array([-1.0]), ranks[after])
        work = dist.isend(np.array([float(rank)]), group=group, **to)
        x = np.zeros(1)
        assert dist.recv(x, group=group, **source) == ranks[before], by_group
        assert x[0] == ranks[before], f"a message of the world came on the group, by_group={by_group}"
        y = np.zeros(1)
        dist.recv(y, ranks[before])
        assert y[0] == -1
        work.wait()
        on_world.wait()
        received = dist.irecv(x, group=group, **source)
        dist.send(np.array([rank + 0.5]), group=group, **to) if rank % 2 else dist.isend(
            np.array([rank + 0.5]), group=group, **to
        ).wait()
        received.wait()
        assert x[0] == ranks[before] + 0.5
        assert received.source_rank() == before
    dist.destroy_process_group(group)


def test_wrong_arguments() -> None:
    """Wrong peers, tags and arrays raise on this rank before anything moves."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = np.zeros(3)
    peer = (rank + 1) % size
    functions = [(dist.isend, "dst"), (dist.irecv, "src")]
    if size > 1:
        functions += [(dist.send, "dst"), (dist.recv, "src")]
    for function, name in functions:
        for tag in (-1, 2**31, 10**30):
            with pytest.raises(ValueError, match="tag"):
                function(x, peer, tag=tag)
        for tag in (1.0, "1", None, True):
            with pytest.raises((TypeError, ValueError)):
                function(x, peer, tag=tag)
        for wrong in (size, -1, 100):
            with pytest.raises(ValueError, match=rf"{wrong} is not part of group"):
                function(x, wrong)
            with pytest.raises(ValueError, match="is not a rank of group"):
                function(x, **{f"group_{name}": wrong})
        for wrong in (0.0, "0", True):
            with pytest.raises(TypeError, match="integer"):
                function(x, wrong)
        with pytest.raises(ValueError, match="Can't specify both group_rank and global_rank"):
            function(x, peer, **{f"group_{name}": peer})
        for bad in ([1.0], (1.0,), 3.0, None, np.array([None]), np.zeros(3, "i4,O"), np.ma.zeros(3)):
            with pytest.raises(TypeError):
                function(bad, peer)
            if peer != rank:
                with pytest.raises(TypeError):
                    function(bad, peer)
        if name == "dst":
            with pytest.raises(ValueError, match="Must specify global_rank or group_rank"):
                function(x)
    if size > 1:
        with pytest.raises(TypeError, match="timedelta"):
            dist.send(x, peer, timeout=3)
        with pytest.raises(TypeError, match="timedelta"):
            dist.recv(x, peer, timeout=3)
    dist.all_reduce(x)


def test_p2pop_checks_its_arguments() -> None:
    """P2POp takes the functions isend and irecv themselves, arrays, and ranks of the group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.zeros(3)
    for op in (dist.send, dist.recv, "isend", None, print):
        with pytest.raises(ValueError, match="Invalid ``op``"):
            dist.P2POp(op, x, rank)
    with pytest.raises(TypeError):
        dist.P2POp(dist.isend, [1.0], rank)
    with pytest.raises(ValueError, match="not part of group"):
        dist.P2POp(dist.isend, x, size)
    with pytest.raises(ValueError, match="Can't specify both"):
        dist.P2POp(dist.isend, x, rank, group_peer=rank)
    with pytest.raises(ValueError, match="Must specify"):
        dist.P2POp(dist.isend, x)
    op = dist.P2POp(dist.irecv, x, rank, tag=3)
    assert (op.op, op.peer, op.group_peer, op.tag, op.group) == (dist.irecv, rank, rank, 3, dist.group.WORLD)
    assert op.tensor is x
    assert "irecv" in repr(op)


def test_batch_checks_its_list() -> None:
    """An empty batch is an IndexError, and anything but a list of P2POp of one group a ValueError, as in torch."""
    rank = dist.get_rank()
    op = dist.P2POp(dist.isend, np.zeros(3), rank)
    with pytest.raises(IndexError):
        dist.batch_isend_irecv([])
    for wrong in ((op,), op, None, [op, None], [dist.isend]):
        with pytest.raises(ValueError, match="Invalid ``p2p_op_list``"):
            dist.batch_isend_irecv(wrong)
    group = dist.new_group()
    with pytest.raises(ValueError, match="same group"):
        dist.batch_isend_irecv([op, dist.P2POp(dist.irecv, np.zeros(3), rank, group)])
    dist.destroy_process_group(group)


@several
def test_ranks_outside_the_group_are_warned() -> None:
    """A rank that is not in the group gets a warning, and None, or -1 from recv; send raises, as in torch."""
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        dist.destroy_process_group(group)
        return
    x = np.zeros(2)
    with pytest.raises(ValueError, match="Invalid process group specified"):
        dist.send(x, group=group, group_dst=0)
    for name in ("isend", "irecv"):
        with pytest.warns(UserWarning, match=rf"Running {name} on global rank {dist.get_rank()} which does not belong"):
            assert getattr(dist, name)(x, group=group, **{"group_src" if name == "irecv" else "group_dst": 0}) is None
    with pytest.warns(UserWarning, match="Running recv on global rank"):
        assert dist.recv(x, group=group) == -1


@several
def test_a_limit_of_its_own() -> None:
    """send and recv take a limit for one call, which does not pass when the message comes."""
    before, after = neighbours()
    limit = timedelta(seconds=20)
    x = np.zeros(1)
    if dist.get_rank() == 0:
        time.sleep(0.05)
        dist.send(np.ones(1), after, timeout=limit)
        dist.recv(x, before, timeout=limit)
    else:
        dist.recv(x, before, timeout=limit)
        dist.send(x, after, timeout=limit)
    assert x[0] == 1


@several
def test_calls_that_are_made_again() -> None:
    """Whatever the size, what is sent again and again arrives; one that does not fit is refused, and the next one is right."""
    rank = dist.get_rank()
    for count in (0, 1, 500, 501, 2048, 2049, 40_000):
        x, y = np.zeros((count, 1)), np.full((count, 1), -1.0)
        for turn in range(8):
            x[...] = turn
            if rank == 0:
                dist.send(x, 1)
                dist.recv(y, 1)
                assert (y == turn + 0.5).all(), (count, turn)
            if rank == 1:
                if turn == 5:
                    for wrong in (np.zeros(count + 1), np.zeros(count, "q"), np.zeros(1, "f")):
                        for _ in range(3):
                            with pytest.raises(
                                dist.CollectiveMismatchError, match=r"rank 0 sent float64.* send at .*py:"
                            ):
                                dist.recv(wrong, 0)
                dist.recv(y, 0)
                assert (y == turn).all(), (count, turn)
                dist.send(y + 0.5, 0)
        # The persistent receive itself gets the message that does not fit, from another line than those before.
        if rank == 0:
            dist.send(np.ones(count + 3, "f"), 1)
            dist.send(x + 1, 1)
        if rank == 1:
            with pytest.raises(dist.CollectiveMismatchError, match=f"rank 0 sent float32, {count + 3} elements"):
                dist.recv(y, 0)
            z = np.zeros(count + 3, "f")
            dist.recv(z, 0)
            assert (z == 1).all()
            dist.recv(y, 0)
            assert (y == 8).all(), count
    dist.barrier()


@several
def test_calls_made_again_beside_others() -> None:
    """Receives from anybody, nonblocking ones, other tags and groups do not come in the way of calls that are made again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    for count in (3, 5000):
        x, y, z = np.zeros(count), np.zeros(count), np.zeros(count)
        for turn in range(10):
            if rank == 0:
                x[...] = turn
                for to in range(1, size):
                    dist.send(x, to)
                    dist.send(x + 1, to, group)
                works = [dist.isend(x + 2, to, tag=7) for to in range(1, size)]
                for to in range(1, size):
                    dist.send(x + 3, to, tag=7)
                for work in works:
                    work.wait()
                for _ in range(1, size):
                    assert dist.recv(y, tag=1) in range(1, size)
                    assert (y == turn).all()
            else:
                work = dist.irecv(z, 0, group) if turn % 3 == 0 else None
                dist.recv(y, 0)
                assert (y == turn).all()
                if work is not None:
                    work.wait()
                else:
                    dist.recv(z, None if turn % 3 == 1 else 0, group)
                assert (z == turn + 1).all()
                for more in (2, 3):
                    dist.recv(z, 0, tag=7)
                    assert (z == turn + more).all(), (count, turn, more)
                dist.send(y, 0, tag=1)
    dist.barrier()
    dist.destroy_process_group(group)


@several
def test_ever_new_tags_and_sizes() -> None:
    """More different calls than are kept, each made several times."""
    rank = dist.get_rank()
    x = np.zeros(1)
    for turn in range(3):
        for tag in range(300):
            if rank == 0:
                dist.send(np.array([float(tag + turn)]), 1, tag=tag)
            if rank == 1:
                dist.recv(x, 0, tag=tag)
                assert x[0] == tag + turn
    dist.barrier()
    world = dist.group.WORLD
    assert sum(world.sent.values()) >= (900 if rank == 0 else 0)
    assert sum(world.received.values()) >= (900 if rank == 1 else 0)
    assert max(len(world.sends), len(world.receives)) <= 128


@several
def test_threads_that_send_and_receive_the_same() -> None:
    """Several threads with the same peer, tag and shape lose and mix up nothing."""
    rank = dist.get_rank()
    if rank > 1:
        return
    for count in (2, 5000):
        got: list[float] = []
        failures: list[BaseException] = []
        threads = [threading.Thread(target=_exchange, args=(number, count, got, failures)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        if rank == 1:
            assert sorted(got) == [100.0 * number + turn for number in range(3) for turn in range(30)]


def _exchange(number: int, count: int, got: list[float], failures: list[BaseException]) -> None:
    try:
        for turn in range(30):
            if dist.get_rank() == 0:
                dist.send(np.full(count, 100.0 * number + turn), 1, tag=11)
            else:
                x = np.zeros(count)
                dist.recv(x, 0, tag=11)
                assert (x == x[0]).all()
                got.append(x[0])
    except BaseException as error:
        failures.append(error)


@pytest.mark.mpi(min_size=2)
def test_a_send_made_again_with_another_layout() -> None:
    """A transposed array is sent in C order, however often one of its shape and dtype was sent from here as it was."""
    me = dist.get_rank()
    for side in (4, 64):
        a, b = np.arange(float(side * side)).reshape(side, side), np.empty((side, side))
        for _ in range(4):
            if me == 0:
                dist.send(a, 1)
                dist.send(a.T, 1)
            elif me == 1:
                dist.recv(b, 0)
                assert (b == a).all()
                dist.recv(b.T, 0)
                assert (b == a).all()


@several
@pytest.mark.parametrize("nbytes", [8_000, 40_000])
def test_messages_from_and_into_ever_other_memory(nbytes: int) -> None:
    """What is kept of an address serves whatever array is there next, and only so many addresses are kept."""
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    if rank > 1:
        return
    store = np.zeros(10 * nbytes + 1, np.uint8)
    offsets = np.random.default_rng(0).integers(0, 9 * nbytes, 60)
    repeated = np.repeat(offsets, 2) + np.tile([0, 1], 60)  # every second one is not aligned
    for turn, offset in enumerate(repeated.tolist()):
        for dtype in (np.uint8, np.float64):
            x = store[offset : offset + nbytes].view(dtype)
            if rank == 0:
                x[:] = turn % 200
                dist.send(x, 1, tag=3)
            else:
                store[:] = 255
                dist.recv(x, 0, tag=3)
                assert (x == turn % 200).all()
                assert (store[:offset] == 255).all()
                assert (store[offset + nbytes :] == 255).all()
    kept = [again for again in world.persistent if again.tag == 3 and again.payloads]
    assert kept
    assert all(len(again.payloads) <= MOST_PAYLOADS for again in kept)


@several
def test_nobody_looks_for_messages_after_the_last_receive() -> None:
    """A receive that its message met while it waited leaves nothing behind that would slow down those after it."""
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    if rank > 1:
        return
    for turn in range(60):
        x = np.zeros(1 + 200 * turn)
        if rank == 0:
            time.sleep(0.0001 * (turn % 4))
            dist.send(x, 1, tag=3)
        else:
            dist.recv(x, 0, tag=3)
            assert world.pair.receiver not in waiting.pending
