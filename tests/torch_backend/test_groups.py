"""Groups of torch.distributed: rendezvous, subgroups, names, limits, and their end."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import mpicoll
import mpicoll.torch
from mpicoll.pytest_plugin import collective_raises

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("job")]
WORLD = MPI.COMM_WORLD


def summed(group: Any = None) -> int:
    """Return the sum over the members of a group of their ranks + 1."""
    tensor = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(tensor, group=group)
    return int(tensor)


ALL = sum(range(1, WORLD.size + 1))


@pytest.fixture
def over(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Destroy the default group, and return arguments for another one."""
    folder = WORLD.bcast(str(tmp_path))
    dist.destroy_process_group()
    assert not mpicoll.is_initialized()
    given: dict[str, Any] = {"rank": WORLD.rank, "world_size": WORLD.size}
    if request.param == "default":
        monkeypatch.delenv("RANK", raising=False)  # PyTorch's tests leave it
        given = {}
    elif request.param == "file":
        given["init_method"] = f"file://{folder}/store"
    elif request.param == "store":
        given["store"] = dist.FileStore(f"{folder}/store", WORLD.size)
    else:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = WORLD.bcast(free.getsockname()[1])
        if request.param == "tcp":
            given["init_method"] = f"tcp://localhost:{port}"
        elif request.param == "env":
            given = {"init_method": "env://"}
            place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": WORLD.rank, "WORLD_SIZE": WORLD.size}
            for name, value in place.items():
                monkeypatch.setenv(name, str(value))
        else:
            given = {**given, "init_method": "mpi://"} if request.param == "numbers" else {"init_method": "mpi://"}
    return given


@pytest.mark.parametrize("over", ["mpi", "numbers", "default", "file", "store", "tcp", "env"], indirect=True)
def test_rendezvous(over: dict[str, Any]) -> None:
    """Each way to meet makes a group of all ranks of MPI, also after the end of another group."""
    for _ in range(2 if "mpi" in str(over.get("init_method")) else 1):
        dist.init_process_group("mpicoll", timeout=timedelta(seconds=15), **over)
        assert (dist.get_rank(), dist.get_world_size()) == (WORLD.rank, WORLD.size)
        assert dist.get_backend() == "mpicoll"
        assert summed() == ALL
        dist.destroy_process_group()
        assert not mpicoll.is_initialized()


@pytest.mark.parametrize("over", ["file"], indirect=True)
def test_numbers_that_contradict_mpi(over: dict[str, Any]) -> None:
    """A rank or world size that is not MPI's is an error that names both."""
    over["rank"] = (WORLD.rank + 1) % WORLD.size
    with collective_raises(ValueError, match=r"contradict|rank=\d"):
        dist.init_process_group("mpicoll", timeout=timedelta(seconds=15), **over)


def test_group_that_the_library_has_made() -> None:
    """torch.distributed joins a default group of the library, and leaves it when it ends."""
    dist.destroy_process_group()
    mpicoll.init_process_group()
    dist.init_process_group("mpicoll", init_method="mpi://")
    assert mpicoll.torch.group_of() is mpicoll.group.WORLD
    assert summed() == ALL
    dist.destroy_process_group()
    assert mpicoll.is_initialized()
    mpicoll.barrier()
    mpicoll.destroy_process_group()


def test_wrap() -> None:
    """wrap and group_of give the two faces of one group: their calls are numbered together."""
    world = dist.group.WORLD
    assert mpicoll.torch.wrap() is world
    assert mpicoll.torch.group_of(world) is mpicoll.torch.group_of() is mpicoll.group.WORLD
    group = mpicoll.new_group([0, 1])
    if WORLD.rank < 2:
        wrapped = mpicoll.torch.wrap(group)
        assert mpicoll.torch.wrap(group) is wrapped
        assert mpicoll.torch.group_of(wrapped) is group
        assert dist.get_process_group_ranks(wrapped) == [0, 1]
        before = group.calls
        assert summed(wrapped) == 3
        mpicoll.barrier(group)
        assert group.calls == wrapped._get_sequence_number_for_group() == before + 2
        dist.destroy_process_group(wrapped)
        mpicoll.barrier(group)  # belongs to the library
        mpicoll.destroy_process_group(group)
    else:
        with pytest.raises(ValueError, match="not in the group"):
            mpicoll.torch.wrap(group)
    made = dist.new_group([1, 0])
    if WORLD.rank < 2:
        assert mpicoll.torch.group_of(made).ranks == tuple(dist.get_process_group_ranks(made))
        dist.destroy_process_group(made)
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(TypeError, match="backend 'mpicoll'"):
        mpicoll.torch.group_of(gloo)
    assert summed(gloo) == ALL
    dist.destroy_process_group(gloo)


def test_wrap_without_torch() -> None:
    """wrap makes the default group of the library that of torch.distributed."""
    dist.destroy_process_group()
    mpicoll.init_process_group()
    assert mpicoll.torch.wrap() is dist.group.WORLD
    assert summed() == ALL
    dist.destroy_process_group()
    mpicoll.destroy_process_group()


@pytest.mark.parametrize("local", [False, True])
def test_new_group(local: bool) -> None:
    """A group of some ranks, made by all ranks or by its members alone, with name, description and numbers of its own."""
    members = [WORLD.size - 1, 0]
    group = None
    if WORLD.rank in members or not local:
        group = dist.new_group(members, group_desc="ends", use_local_synchronization=local)
    if WORLD.rank in members:
        assert dist.get_process_group_ranks(group) == sorted(members)
        assert group.group_desc == "ends"
        assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
        assert dist.get_group_rank(group, WORLD.size - 1) == 1
        assert summed(group) == WORLD.size + 1
        dist.destroy_process_group(group)
        assert mpicoll.torch.group_of().broken is None
    elif not local:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
    dist.barrier()


def split(parent: Any, parts: list[list[int]], **more: Any) -> Any:
    """Split a group by torch's function; before torch 2.15, where that needs an accelerator, by the method of the group."""
    if parent.supports_splitting:
        return dist.split_group(parent, parts, **more)
    return parent.split_group(next((part for part in parts if parent.rank() in part), parts[0]), **more)


def test_split_group() -> None:
    """A group of some members is a group of its own; only they communicate."""
    assert dist.group.WORLD is not None
    halves = [list(range(each, WORLD.size, 2)) for each in range(2)]
    mine = halves[WORLD.rank % 2]
    made = split(dist.group.WORLD, halves, timeout=timedelta(seconds=12), group_desc="half")
    assert made.group_desc == "half"
    made.get_group_store().set("key", "value")
    assert made.get_group_store().get("key") == b"value"
    assert made.size() == len(mine)
    assert made.rank() == mine.index(WORLD.rank)
    assert mpicoll.torch.group_of(made).timeout == 12
    tensor = torch.ones(3)
    made.allreduce([tensor]).wait()
    assert (tensor == len(mine)).all()
    assert dist.get_rank(made) == made.rank()
    assert dist.get_process_group_ranks(made) == mine
    dist.broadcast(tensor, mine[-1], group=made)
    inner = split(made, [[0]])
    assert isinstance(inner, dist.ProcessGroup) == (made.rank() == 0)
    if made.rank() == 0:
        assert dist.group.WORLD.size() == WORLD.size
        inner.barrier().wait()
        dist.destroy_process_group(inner)
    dist.destroy_process_group(made)


def test_new_subgroups() -> None:
    """new_subgroups and groups by enumeration make groups of which each rank has one."""
    mine, groups = dist.new_subgroups(1)
    assert len(groups) == WORLD.size
    assert summed(mine) == WORLD.rank + 1
    pairs = [list(range(first, min(first + 2, WORLD.size))) for first in range(0, WORLD.size, 2)]
    mine, _ = dist.new_subgroups_by_enumeration(pairs)
    assert summed(mine) == sum(rank + 1 for rank in pairs[WORLD.rank // 2])
    dist.barrier()


def test_names_and_numbers() -> None:
    """A group has torch's names; its sequence number counts its calls, alike on all ranks."""
    world = dist.group.WORLD
    assert world is not None
    assert (world.name(), world.group_name, world.group_desc) == ("mpicoll", "0", "default_pg")
    assert dist.get_pg_count() >= 1
    first = world._get_sequence_number_for_group()
    for number in range(3):
        dist.barrier()
        assert world._get_sequence_number_for_group() == first + number + 1
    numbers: list[Any] = [None] * WORLD.size
    dist.all_gather_object(numbers, world._get_sequence_number_for_group())
    assert len(set(numbers)) == 1


def test_limits() -> None:
    """set_timeout and the limit of a group end a wait for a rank that does not come; other groups stay usable."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    assert mpicoll.torch.group_of(group).timeout == 60
    group.set_timeout(timedelta(seconds=0.5))
    if WORLD.rank:
        with pytest.raises(mpicoll.CollectiveTimeoutError, match=r"test_groups\.py"):
            dist.all_reduce(torch.ones(1), group=group)
    else:
        time.sleep(1)  # a rank that waits would be found to be deadlocked with the others
    dist.barrier()
    with collective_raises(mpicoll.GroupBrokenError):
        dist.barrier(group)
    dist.destroy_process_group(group)
    assert summed() == ALL


def test_limit_of_a_barrier() -> None:
    """monitored_barrier of a process group (the function of torch takes only gloo) names the ranks that do not come in time."""
    group = dist.new_group()
    for _ in range(2):
        group.monitored_barrier()
    if WORLD.rank == 0:
        with pytest.raises(mpicoll.DistError, match=r"ranks? 1"):
            group.monitored_barrier(timedelta(seconds=0.5))
    else:
        time.sleep(1)
    dist.barrier()
    dist.destroy_process_group(group)


def test_mismatch() -> None:
    """Different calls raise on all ranks, with the line of the program: in the call, in wait(), and in the future."""
    for asynchronous in (False, True):
        with collective_raises(mpicoll.CollectiveMismatchError, match=r"test_groups\.py"):
            work = dist.all_reduce(torch.ones(2 + WORLD.rank % 2), async_op=asynchronous)
            work.wait()
    work = dist.all_reduce(torch.ones(2 + WORLD.rank % 2), async_op=True)
    with collective_raises(RuntimeError, match=r"test_groups\.py"):
        work.get_future().wait()
    with collective_raises(mpicoll.CollectiveMismatchError, match=r"test_groups\.py"):
        work.wait()
    assert summed() == ALL


def test_abort() -> None:
    """abort gives a group up on all members: a call that waits raises, and so do later calls."""
    group = dist.new_group()
    dist.barrier()  # a member that is still making the group would raise there
    if WORLD.rank:
        with pytest.raises(mpicoll.DistError, match="abort"):
            dist.all_reduce(torch.ones(1), group=group)
    else:
        group.abort()
    with collective_raises(mpicoll.GroupBrokenError, match="abort"):
        dist.barrier(group)
    dist.barrier()
    dist.destroy_process_group(group)


def test_end_with_works_under_way() -> None:
    """The end of a group waits for its works, also those that nothing has waited for."""
    group = dist.new_group()
    tensors = [torch.full((1000,), WORLD.rank + 1.0) for _ in range(5)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.destroy_process_group(group)
    assert all(work.is_completed() for work in works)
    assert all((tensor == ALL).all() for tensor in tensors)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[0].get_future()
    dist.destroy_process_group()
    assert all((tensor == ALL * WORLD.size).all() for tensor in tensors)
    assert not dist.is_initialized()
    assert not mpicoll.is_initialized()


def test_wrong_options() -> None:
    """Arguments that the backend does not know are errors on all ranks."""
    with collective_raises(TypeError, match="pg_options"):
        dist.new_group(pg_options=object())
