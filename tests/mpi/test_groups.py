"""Groups: making them in every way, asking about them, destroying them, and starting all over."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll as dist
from mpicoll.groups import registry
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi

NOBODY = dist.GroupMember.NON_GROUP_MEMBER


def total(group: Any = None) -> float:
    """Return the sum over a group of each member's global rank + 1."""
    x = np.array([dist.get_rank() + 1.0])
    dist.all_reduce(x, group=group)
    return float(x[0])


@contextmanager
def restarted() -> Iterator[None]:
    """Let a test destroy and make the default group, and leave one behind as the others want it."""
    dist.destroy_process_group()
    try:
        yield
    finally:
        if not dist.is_initialized():
            dist.init_process_group(timeout=timedelta(seconds=30))


def test_new_group_without_ranks_is_everybody() -> None:
    """None means all ranks, in a group of its own."""
    size = dist.get_world_size()
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    assert dist.get_process_group_ranks(group) == list(range(size))
    assert (group.rank(), group.size()) == (dist.get_rank(), size)
    assert group is not dist.group.WORLD
    assert total(group) == size * (size + 1) / 2
    dist.destroy_process_group(group)


def test_members_are_numbered_by_global_rank_unless_told_otherwise() -> None:
    """sort_ranks decides about the order of ranks in the group."""
    size, rank = dist.get_world_size(), dist.get_rank()
    backwards = list(range(size))[::-1]
    for sort_ranks in (True, False):
        group = dist.new_group(backwards, sort_ranks=sort_ranks)
        order = sorted(backwards) if sort_ranks else backwards
        assert dist.get_process_group_ranks(group) == order
        assert dist.get_rank(group) == order.index(rank)
        assert [dist.get_global_rank(group, r) for r in range(size)] == order
        assert [dist.get_group_rank(group, r) for r in order] == list(range(size))
        assert total(group) == size * (size + 1) / 2
        displayed = f"[0-{size - 1}]" if size > 1 else "[0]"
        assert f"<ProcessGroup {displayed if order == sorted(order) else order}: " in repr(group), repr(group)
        dist.destroy_process_group(group)
    group = dist.new_group(np.arange(size))
    assert dist.get_process_group_ranks(group) == list(range(size))
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_ranks_outside_get_what_torch_gives_them() -> None:
    """A rank that is not a member gets -100, -1 for its rank and size, and errors where torch raises them."""
    group = dist.new_group([0])
    assert NOBODY == -100
    if dist.get_rank() == 0:
        assert total(group) == 1
        dist.destroy_process_group(group)
        return
    assert group == NOBODY
    assert dist.get_rank(group) == -1
    assert dist.get_world_size(group) == -1
    with pytest.raises(ValueError, match="Invalid process group specified"):
        dist.get_backend(group)
    with pytest.raises(KeyError):
        dist.get_process_group_ranks(group)
    for function in (dist.get_global_rank, dist.get_group_rank):
        with pytest.raises(ValueError, match="not registered"):
            function(group, 0)
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_collectives_of_ranks_outside_warn_and_do_nothing() -> None:
    """Every collective on a group that a rank is not in warns as torch does, and returns None."""
    rank = dist.get_rank()
    group = dist.new_group([0])
    if rank == 0:
        dist.destroy_process_group(group)
        return
    x = np.full(2, 5.0)
    calls = {
        "all_reduce": lambda **more: dist.all_reduce(x, group=group, **more),
        "broadcast": lambda **more: dist.broadcast(x, group=group, group_src=0, **more),
        "reduce": lambda **more: dist.reduce(x, group=group, group_dst=0, **more),
        "all_gather": lambda **more: dist.all_gather([x], x, group, **more),
        "all_gather_single": lambda **more: dist.all_gather_single(x, x, group, **more),
        "all_gather_into_tensor": lambda **more: dist.all_gather_into_tensor(x, x, group, **more),
        "gather": lambda **more: dist.gather(x, group=group, group_dst=0, **more),
        "gather_single": lambda **more: dist.gather_single(x, group=group, group_dst=0, **more),
        "gather_into_tensor": lambda **more: dist.gather_into_tensor(x, group=group, group_dst=0, **more),
        "scatter": lambda **more: dist.scatter(x, group=group, group_src=0, **more),
        "reduce_scatter": lambda **more: dist.reduce_scatter(x, [x], group=group, **more),
        "reduce_scatter_single": lambda **more: dist.reduce_scatter_single(x, x, group=group, **more),
        "reduce_scatter_tensor": lambda **more: dist.reduce_scatter_tensor(x, x, group=group, **more),
        "all_to_all": lambda **more: dist.all_to_all([x], [x], group, **more),
        "all_to_all_single": lambda **more: dist.all_to_all_single(x, x, group=group, **more),
        "barrier": lambda **more: dist.barrier(group, **more),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], group=group, group_src=0),
        "all_gather_object": lambda: dist.all_gather_object([1], 1, group),
        "gather_object": lambda: dist.gather_object(1, group=group, group_dst=0),
        "scatter_object_list": lambda: dist.scatter_object_list([1], group=group, group_src=0),
    }
    for name, call in calls.items():
        for more in ({},) if "object" in name else ({}, {"async_op": True}):
            with pytest.warns(UserWarning, match=f"Running {name} on global rank {rank} which does not belong") as seen:
                assert call(**more) is None, name
            assert seen[0].filename == __file__, f"{name} blames {seen[0].filename}"
    assert (x == 5).all()


@pytest.mark.mpi(min_size=2)
def test_local_synchronisation_needs_the_members_alone() -> None:
    """With use_local_synchronization only the members call; others who do get None."""
    size, rank = dist.get_world_size(), dist.get_rank()
    ranks = list(range(1, size))
    for turn in range(3):
        if rank:
            group = dist.new_group(ranks, use_local_synchronization=True)
            assert dist.get_process_group_ranks(group) == ranks
            assert total(group) == sum(r + 1 for r in ranks), turn
            dist.destroy_process_group(group)
    if rank == 0:
        assert dist.new_group(ranks, use_local_synchronization=True) is None
    evens = list(range(0, size, 2))
    two = [dist.new_group(evens, use_local_synchronization=True) for _ in range(2)]
    if rank in evens:
        works = [dist.barrier(group, async_op=True) for group in (two if rank else two[::-1])]
        for work in works:
            work.wait()
        assert total(two[0]) == total(two[1]) == sum(r + 1 for r in evens)
        for group in two:
            dist.destroy_process_group(group)
    else:
        assert two == [None, None]
    dist.barrier()


def test_the_same_ranks_twice_are_two_groups() -> None:
    """Groups of the same ranks do not see each other's calls."""
    size, rank = dist.get_world_size(), dist.get_rank()
    one, two = dist.new_group(), dist.new_group()
    assert one is not two
    assert one.group_name != two.group_name
    x, y = np.full(3, 1.0), np.full(3, 10.0)
    first, second = (one, two) if rank % 2 else (two, one)
    works = [dist.all_reduce(x if group is one else y, group=group, async_op=True) for group in (first, second)]
    for work in works:
        work.wait()
    assert (x == size).all()
    assert (y == 10 * size).all()
    dist.destroy_process_group(one)
    z = np.ones(1)
    dist.all_reduce(z, group=two)
    assert z[0] == size
    dist.destroy_process_group(two)


def test_groups_made_and_destroyed_many_times() -> None:
    """A program may make and destroy groups without end, as their communicators are used again."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for turn in range(60):
        ranks = [None, [0], list(range(size))[::-1], list(range(0, size, 2))][turn % 4]
        group = dist.new_group(ranks, sort_ranks=False)
        members = list(range(size)) if ranks is None else ranks
        if rank in members:
            assert total(group) == sum(r + 1 for r in members), turn
            dist.destroy_process_group(group)
        else:
            assert group == NOBODY


@pytest.mark.slow
@pytest.mark.mpi_timeout(300)
def test_two_thousand_groups_one_after_the_other() -> None:
    """More groups than MPICH has communicators, a hundred of them alive at once."""
    size = dist.get_world_size()
    for _ in range(20):
        groups = [dist.new_group() for _ in range(100)]
        assert {total(group) for group in groups[::10]} == {size * (size + 1) / 2}
        for group in groups:
            dist.destroy_process_group(group)


def test_a_destroyed_group_is_refused() -> None:
    """Using a destroyed group, or destroying it again, is a ValueError at once; the others go on."""
    group, other = dist.new_group(), dist.new_group()
    dist.destroy_process_group(group)
    for call in (
        lambda: dist.all_reduce(np.ones(1), group=group),
        lambda: dist.barrier(group),
        lambda: dist.isend(np.ones(1), 0, group),
        lambda: dist.get_rank(group),
        lambda: dist.destroy_process_group(group),
    ):
        with collective_raises(ValueError, match="Invalid process group specified"):
            call()
    assert total(other) == total()
    dist.destroy_process_group(other)
    assert total() > 0


def test_limits_are_inherited_from_the_default_group() -> None:
    """A group has the limit that it was given, or that of the default group; set_timeout changes it."""
    world = dist.group.WORLD
    inherited, own = dist.new_group(), dist.new_group(timeout=timedelta(seconds=7))
    assert (inherited.timeout, own.timeout) == (world.timeout, 7)
    own.set_timeout(timedelta(minutes=1))
    assert own.timeout == 60
    with pytest.raises(TypeError, match="timedelta"):
        own.set_timeout(5)
    dist.set_timeout(timedelta(minutes=2), own)
    assert own.timeout == 120
    for wrong, error in ((5, TypeError), (timedelta(0), ValueError), (timedelta(seconds=-1), ValueError)):
        with pytest.raises(error, match=r"timedelta|positive"):
            dist.set_timeout(wrong, own)
    assert own.timeout == 120
    before = timedelta(seconds=world.timeout)
    dist.set_timeout(timedelta(seconds=77))
    later = dist.new_group()
    assert (world.timeout, later.timeout, inherited.timeout) == (77, 77, before.total_seconds())
    dist.set_timeout(before)
    dist.destroy_process_group(later)
    for group in (inherited, own):
        dist.destroy_process_group(group)


def test_new_group_refuses_wrong_arguments_on_all_ranks() -> None:
    """Repeated, unknown or no ranks, and wrong types, raise on all ranks, and the next group is made as if nothing was."""
    size = dist.get_world_size()
    wrong: list[tuple[Any, type[Exception]]] = [
        ([0, 0], ValueError),
        ([size], ValueError),
        ([-1], ValueError),
        (list(range(size + 1)), ValueError),
        ([], ValueError),
        (["0"], TypeError),
        ([0.0], TypeError),
        ([True], TypeError),
        (0, TypeError),
        ("0", TypeError),
    ]
    for ranks, kind in wrong:
        for local in (False, True):
            with collective_raises(kind):
                dist.new_group(ranks, use_local_synchronization=local)
    for more, kind in (
        ({"timeout": 5}, TypeError),
        ({"timeout": timedelta(0)}, ValueError),
        ({"timeout": timedelta(seconds=-1)}, ValueError),
        ({"backend": "smoke signals"}, ValueError),
        ({"backend": 3}, ValueError),
    ):
        with collective_raises(kind):
            dist.new_group(**more)
    group = dist.new_group(backend="mpi", pg_options=None, group_desc="a name")
    assert "a name" in repr(group)
    assert group.group_desc == "a name"
    assert total(group) == total()
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_new_group_notices_that_ranks_ask_for_different_groups() -> None:
    """Ranks that ask for different groups, and one alone with wrong ranks, raise on all; then groups are made again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with collective_raises(dist.CollectiveMismatchError, match="new_group"):
        dist.new_group([0] if rank == 0 else [0, 1])
    with collective_raises(ValueError if rank == 0 else dist.CollectiveMismatchError, match="duplicate"):
        dist.new_group([0, 0] if rank == 0 else [0, 1])
    with collective_raises(dist.CollectiveMismatchError, match=r"new_group[\s\S]*barrier|barrier[\s\S]*new_group"):
        if rank == 0:
            dist.barrier()
        else:
            dist.new_group()
    group = dist.new_group()
    assert total(group) == size * (size + 1) / 2
    dist.destroy_process_group(group)


def test_questions_about_the_world() -> None:
    """Rank, size, backend, ranks and node of the default group, and group.WORLD."""
    size, rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    assert dist.is_available()
    assert dist.is_mpi_available()
    assert dist.is_initialized()
    world = dist.group.WORLD
    assert world is dist.GroupMember.WORLD
    dist.group.WORLD = world
    for other in (None, object()):
        with pytest.raises(AttributeError, match="only be set by init_process_group"):
            dist.GroupMember.WORLD = other
    for group in (None, world):
        assert dist.get_rank(group) == rank
        assert dist.get_world_size(group) == size
        assert dist.get_backend(group) == "mpi"
        assert dist.get_process_group_ranks(group) == list(range(size))
        assert dist.get_global_rank(group, size + 5) == size + 5
        assert dist.get_group_rank(group, size + 5) == size + 5
    assert 0 <= dist.get_node_local_rank() < size
    assert (world.name(), world.group_desc) == ("mpi", "default_pg")
    group = dist.new_group()
    for function in (dist.get_global_rank, dist.get_group_rank):
        with pytest.raises(ValueError, match="not part of group"):
            function(group, size)
    for function in (dist.get_rank, dist.get_world_size, dist.get_backend, dist.barrier):
        with collective_raises(ValueError, match="Invalid process group specified"):
            function("world")
    dist.destroy_process_group(group)


def test_use_before_init_and_after_destroy() -> None:
    """Without a default group everything raises torch's ValueError, and group.WORLD is None."""
    kept, old_world = dist.new_group(), dist.group.WORLD
    x = np.zeros(2)
    with restarted():
        assert not dist.is_initialized()
        assert dist.group.WORLD is None
        assert dist.GroupMember.WORLD is None
        for call in (
            lambda: dist.all_reduce(x),
            lambda: dist.all_reduce(x, group=kept),
            lambda: dist.barrier(),
            lambda: dist.send(x, 0),
            lambda: dist.irecv(x),
            lambda: dist.get_rank(),
            lambda: dist.get_world_size(),
            lambda: dist.get_backend(),
            lambda: dist.get_process_group_ranks(None),
            lambda: dist.new_group(),
            lambda: dist.all_gather_object([None], 1),
            lambda: dist.broadcast_object_list([None], 0),
            lambda: dist.P2POp(dist.isend, x, 0),
        ):
            with collective_raises(
                ValueError, match="Default process group has not been initialized, please make sure"
            ):
                call()
        with pytest.raises(AssertionError, match="Process group cannot be None"):
            dist.destroy_process_group()
        dist.init_process_group(timeout=timedelta(seconds=30))
        for foreign in (kept, old_world):
            with collective_raises(
                ValueError, match=r"Invalid process group specified: group .* was destroyed at .*test_groups\.py:"
            ):
                dist.all_reduce(x, group=foreign)
        dist.all_reduce(x)


def test_init_twice_is_refused() -> None:
    """A second init_process_group raises torch's ValueError, and changes nothing."""
    with collective_raises(ValueError, match="trying to initialize the default process group twice!"):
        dist.init_process_group()
    assert total() > 0


def test_init_again_and_again() -> None:
    """The default group may be destroyed and made more than a hundred times; destroying it takes all groups along."""
    size = dist.get_world_size()
    with restarted():
        for turn in range(110):
            dist.init_process_group(timeout=timedelta(seconds=30))
            group = dist.new_group(list(range(size))[::-1], sort_ranks=False) if turn % 10 == 0 else None
            assert total(group) == size * (size + 1) / 2, turn
            dist.destroy_process_group(dist.group.WORLD if turn % 2 else None)
            if group is not None:
                assert not dist.is_initialized()


def test_init_on_any_communicator() -> None:
    """comm= takes any mpi4py intracommunicator; ranks are its ranks, and it is not spoken on."""
    world = MPI.COMM_WORLD
    size, rank = world.Get_size(), world.Get_rank()
    halves = world.Split(rank % 2, -rank)
    copy = world.Dup()
    with restarted():
        for comm in (halves, copy, MPI.COMM_SELF, halves, world):
            waiting = comm.Irecv(np.zeros(1), MPI.ANY_SOURCE, MPI.ANY_TAG)
            dist.init_process_group(comm=comm, timeout=timedelta(seconds=30))
            assert (dist.get_rank(), dist.get_world_size()) == (comm.Get_rank(), comm.Get_size())
            group = dist.new_group()
            assert total(group) == comm.Get_size() * (comm.Get_size() + 1) / 2
            x = np.array([float(rank)])
            dist.broadcast(x, comm.Get_size() - 1)
            assert x[0] == comm.bcast(rank, comm.Get_size() - 1)
            dist.destroy_process_group()
            assert not waiting.Test()
            waiting.Cancel()
            waiting.Wait()
    halves.Free()
    copy.Free()
    assert total() == size * (size + 1) / 2


def test_rank_and_world_size_are_checked_on_all_ranks() -> None:
    """Arguments that contradict MPI, on one rank or on all, raise on every rank; then init works."""
    size, rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    with restarted():
        for arguments in ({"world_size": size + 1}, {"rank": rank + 1}, {"rank": 100}):
            with collective_raises(ValueError):
                dist.init_process_group(**arguments)
            assert not dist.is_initialized()
            kind = ValueError if rank == size - 1 else dist.CollectiveMismatchError
            with collective_raises(kind):
                dist.init_process_group(**(arguments if rank == size - 1 else {}))
            assert not dist.is_initialized()
        for arguments in ({"rank": rank, "world_size": size}, {"rank": rank}, {"world_size": size}, {"rank": -1}):
            dist.init_process_group(timeout=timedelta(seconds=30), **arguments)
            assert total() == size * (size + 1) / 2
            dist.destroy_process_group()


def test_init_refuses_wrong_arguments_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong types and unknown values raise on the rank that passed them, and a mismatch on the others."""
    rank = MPI.COMM_WORLD.Get_rank()
    wrong: list[tuple[dict[str, Any], type[BaseException]]] = [
        ({"backend": "smoke signals"}, ValueError),
        ({"backend": 3}, ValueError),
        ({"timeout": 30}, TypeError),
        ({"timeout": timedelta(0)}, ValueError),
        ({"on_failure": "panic"}, ValueError),
        ({"rank": "0"}, TypeError),
        ({"world_size": 1.0}, TypeError),
        ({"init_method": "carrier://pigeon"}, RuntimeError),
        ({"init_method": 7}, TypeError),
        ({"store": object(), "init_method": "env://"}, AssertionError),
        ({"store": object()}, AssertionError),
        ({"device_id": "cpu"}, ValueError),
        ({"device_id": "cpu:0"}, ValueError),
        ({"enable_reconfigure": True}, ValueError),
        ({"enable_reconfigure": np.ones(2)}, ValueError),
    ]
    with restarted():
        for arguments, kind in wrong:
            with collective_raises(kind):
                dist.init_process_group(**arguments)
            with collective_raises(kind if rank == 0 else dist.CollectiveMismatchError):
                dist.init_process_group(**(arguments if rank == 0 else {}))
        for comm in ("world", MPI.COMM_NULL, 3):
            with collective_raises(TypeError, match="intracommunicator"):
                dist.init_process_group(comm=comm)
        monkeypatch.setenv("MPICOLL_TIMEOUT", "soon")
        with collective_raises(ValueError, match="MPICOLL_TIMEOUT"):
            dist.init_process_group()
        monkeypatch.setenv("MPICOLL_TIMEOUT", "17")
        dist.init_process_group()
        assert dist.group.WORLD.timeout == 17
        dist.destroy_process_group()


def test_names_of_other_backends_are_taken_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo, nccl and their kin mean MPI here, and say so once in a job."""
    monkeypatch.setattr("mpicoll.runtime.backend_names._warned", set())
    me = dist.get_rank()
    with restarted():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dist.init_process_group("gloo", "env://", timeout=timedelta(seconds=30))
        told = [str(each.message) for each in caught]
        assert told == (["backend='gloo': mpicoll moves everything over MPI instead"] if me == 0 else [])
        assert dist.get_backend() == "mpi"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dist.destroy_process_group()
            for backend in ("cpu:gloo,cuda:nccl", "mpi", "MPI", None):
                dist.init_process_group(backend, timeout=timedelta(seconds=30))
                dist.destroy_process_group()


@pytest.mark.mpi(min_size=2)
def test_wrong_arguments_reach_the_members_of_a_local_group() -> None:
    """With use_local_synchronization a wrong argument on one rank raises on all listed ranks, which can go on."""
    me, size = dist.get_rank(), dist.get_world_size()
    ranks = list(range(1, size)) or [0]
    members = dist.new_group(ranks)
    for wrong in {size - 1, 1}:
        if me not in ranks:
            continue
        expected = ValueError if me == wrong else dist.CollectiveMismatchError
        with collective_raises(expected, match="timeout must be positive", group=members):
            dist.new_group(ranks, timeout=timedelta(seconds=-1 if me == wrong else 5), use_local_synchronization=True)
        group = dist.new_group(ranks, use_local_synchronization=True)
        x = np.ones(1)
        dist.all_reduce(x, group=group)
        assert x[0] == len(ranks)
        dist.destroy_process_group(group)
    if me in ranks:
        dist.destroy_process_group(members)


@pytest.mark.mpi(min_size=2)
def test_messages_do_not_outlive_their_communicator() -> None:
    """What nobody received before a guest's communicator was freed does not come out of the next one."""
    me = dist.get_rank()
    dist.destroy_process_group()
    for turn in range(3):
        comm = MPI.COMM_WORLD.Dup()
        dist.init_process_group(comm=comm)
        if me == 0:
            dist.send(np.full(2, turn), 1, tag=turn % 2)
        if turn == 2 and me == 1:
            x = np.zeros(2, int)
            dist.recv(x, 0)
            assert x[0] == 2, x
        dist.barrier()
        dist.destroy_process_group()
        comm.Free()


def test_more_groups_than_mpi_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where MPI would hang for want of a communicator all members raise; what is destroyed makes room again."""
    world = dist.group.WORLD
    assert world is not None
    pool = registry.state().pool
    every = list(range(dist.get_world_size()))[::-1]
    for group in [dist.new_group(every, sort_ranks=False) for _ in range(4)]:
        dist.destroy_process_group(
            group
        )  # earlier tests may also have left communicators, which serve new groups first
    before = dist.new_group()
    monkeypatch.setattr("mpicoll.groups.communicators.MOST_PAIRS", len(pool.all()))
    made = []
    with collective_raises(dist.DistBackendError, match="could not make a communicator"):
        while True:
            made.append(dist.new_group(every, sort_ranks=False))
    assert len(made) >= 3
    dist.barrier(before)
    for group in (before, *made):
        dist.destroy_process_group(group)
    dist.destroy_process_group(dist.new_group())
    monkeypatch.undo()
    for group in [dist.new_group(every, sort_ranks=False) for _ in range(len(made) + 1)]:
        dist.destroy_process_group(group)
