"""Point to point: send, recv, isend, irecv, P2POp and batch_isend_irecv."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import collective_cases as cases
import numpy as np
import pytest

import mpicoll as dist

pytestmark = pytest.mark.mpi

several = pytest.mark.mpi(min_size=2)


def neighbours(group: Any = None) -> tuple[int, int]:
    """Return the group ranks before and after this one on the ring."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return (rank - 1) % size, (rank + 1) % size


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


def test_a_message_may_be_shorter_than_the_array() -> None:
    """A short message fills the beginning of the array, of whatever shape."""
    before, after = neighbours()
    for nonblocking in (False, True):
        x = np.full((2, 3), -1.0)
        work = dist.isend(np.array([1.0, 2.0]), after)
        if nonblocking or before == dist.get_rank():
            dist.irecv(x, before).wait()
        else:
            dist.recv(x, before)
        work.wait()
        assert (x.ravel() == [1, 2, -1, -1, -1, -1]).all(), nonblocking


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


@several
def test_a_message_that_does_not_fit_names_both_sizes() -> None:
    """recv refuses a message larger than its array, naming both sizes, and the message is not lost."""
    rank = dist.get_rank()
    for count in (10, 20_000):
        if rank == 0:
            dist.send(np.arange(count) * 1.0, 1, tag=4)
        if rank == 1:
            for source in ({"src": 0}, {}):
                with pytest.raises(dist.DistBackendError, match=rf"{8 * count} bytes.* 24") as caught:
                    dist.recv(np.zeros(3), tag=4, **source)
                assert "recv" in str(caught.value)
                assert "test_p2p.py" in str(caught.value)
            x = np.zeros(count)
            assert dist.recv(x, 0, tag=4) == 0
            assert (x == np.arange(count)).all()


@several
def test_a_message_that_does_not_fit_an_irecv_names_both_sizes() -> None:
    """irecv ends with an error that names both sizes, the message is not lost, and nothing is written past the array."""
    rank = dist.get_rank()
    # Open MPI 5.0.11 (pml ob1) would write all of a large message past the end of an array that was posted for it.
    for count in (10, 400, 20_000):
        room = np.full(count, -1.0)
        if rank == 1:
            work = dist.irecv(room[:3], 0, tag=4)
        dist.barrier()
        if rank == 0:
            sent = dist.isend(np.arange(count) * 1.0, 1, tag=4)
        if rank == 1:
            with pytest.raises(dist.DistBackendError, match=rf"{8 * count} bytes.* 24"):
                work.wait()
            assert not work.is_success()
            assert (room == -1).all(), f"{count} elements"
            assert dist.recv(room, 0, tag=4) == 0
            assert (room == np.arange(count)).all(), f"{count} elements"
        if rank == 0:
            sent.wait()
        x = np.ones(2)
        dist.all_reduce(x)
        assert (x == dist.get_world_size()).all()


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


@several
def test_messages_of_a_destroyed_group_do_not_reach_its_successor() -> None:
    """A message that nobody received is gone with its group, also when the next one has the same ranks."""
    rank = dist.get_rank()
    for turn in range(4):
        group = dist.new_group()
        if rank == 0:
            dist.send(np.array([turn, 0.0]), 1, group)
            dist.send(np.array([turn, 1.0]), 1, group)
        if rank == 1:
            x = np.zeros(2)
            dist.recv(x, 0, group)
            assert (x == [turn, 0]).all(), f"message of an earlier group: {x}, now {turn}"
        dist.barrier(group)
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
        for bad in ([1.0], (1.0,), 3.0, None, np.zeros(3, np.float16), np.zeros((4, 4))[:, 1], np.zeros(3, ">f8")):
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
    """A rank that is not in the group gets a warning, and None, or -1 from recv."""
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        dist.destroy_process_group(group)
        return
    x = np.zeros(2)
    for name in ("send", "isend", "irecv"):
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
