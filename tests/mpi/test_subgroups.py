"""new_subgroups, new_subgroups_by_enumeration and split_group: who is in which, and what is wrong with them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from ranks import sum_of_ranks
from standin_gpu import Gpu

import mpicoll as dist
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5])
def test_equal_parts(group_size: int) -> None:
    """Each rank is in the group of its neighbours; sizes that do not divide the world raise on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size % group_size:
        words = "must not exceed" if group_size > size else "must be divisible by"
        with collective_raises(ValueError, match=words):
            dist.new_subgroups(group_size)
        return
    mine, every = dist.new_subgroups(group_size, timeout=timedelta(seconds=20), group_desc="part")
    assert len(every) == size // group_size
    assert every[rank // group_size] is mine
    assert [each for each in every if each is not mine] == [dist.GroupMember.NON_GROUP_MEMBER] * (len(every) - 1)
    first = rank // group_size * group_size
    assert dist.get_process_group_ranks(mine) == list(range(first, first + group_size))
    assert sum_of_ranks(mine) == sum(range(first, first + group_size))
    assert mine.group_desc == "part"
    dist.destroy_process_group(mine)


@pytest.mark.mpi(min_size=2)
def test_parts_of_a_group() -> None:
    """The parts of a group are of its ranks, in its order."""
    size = dist.get_world_size()
    backwards = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    mine, every = dist.new_subgroups(1, group=backwards)
    assert dist.get_process_group_ranks(mine) == [dist.get_rank()]
    assert every.index(mine) == size - 1 - dist.get_rank()


def test_size_by_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a size it is the number of GPUs, and an error where there is none."""
    gpu = Gpu()
    gpu.devices = dist.get_world_size()
    monkeypatch.setattr(device_runtime, "_runtime", gpu)
    mine, every = dist.new_subgroups()
    assert every == [mine]

    def none() -> Any:
        raise ImportError("CuPy finds no GPU")

    monkeypatch.setattr(device_runtime, "runtime", none)
    with collective_raises(ValueError, match="Default group size only takes effect when CUDA is available"):
        dist.new_subgroups()


@pytest.mark.parametrize(("wrong", "kind"), [(0, ValueError), (-1, ValueError), ("2", TypeError), (True, TypeError)])
def test_wrong_sizes(wrong: Any, kind: type[Exception]) -> None:
    """What is no size raises on all ranks."""
    with collective_raises(kind):
        dist.new_subgroups(wrong)


@pytest.mark.mpi(min_size=3)
def test_by_enumeration() -> None:
    """The groups that are listed, and None for a rank that is in none of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, every = dist.new_subgroups_by_enumeration([[0, size - 1], [1]])
    assert [each is mine for each in every] == [rank in (0, size - 1), rank == 1]
    if rank in (0, size - 1):
        assert sum_of_ranks(mine) == size - 1
    elif rank != 1:
        assert mine is None


@pytest.mark.mpi(min_size=2)
def test_wrong_lists() -> None:
    """Nothing, a rank in two groups, and a rank that there is not: on all ranks, before a group is made."""
    size = dist.get_world_size()
    made = dist.get_pg_count()
    for wrong, words in (
        ([], "cannot be empty"),
        (None, "cannot be empty"),
        ([[0, 1], [1]], r"Rank 1 has appeared in both subgroup \[0, 1\] and \[1\]"),
        ([[0], [size]], "out of range"),
    ):
        with collective_raises(ValueError, match=words):
            dist.new_subgroups_by_enumeration(wrong)  # type: ignore[arg-type]
    with collective_raises((ValueError, dist.CollectiveMismatchError), match="cannot be empty"):
        dist.new_subgroups_by_enumeration([] if dist.get_rank() == 0 else [[0]])
    assert dist.get_pg_count() == made


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("wrong", "kind"), [(5, "int"), ("01", "str"), ([0, 1], "list with a value of type int"), ([None], "NoneType")]
)
def test_what_is_no_list_of_lists(wrong: Any, kind: str) -> None:
    """The error has the name of the argument, and is raised on all ranks."""
    for op, name in ((dist.new_subgroups_by_enumeration, "ranks_per_subgroup_list"), (dist.split_group, "split_ranks")):
        with collective_raises(TypeError, match=f"{name} must be a list of lists of integers, not .*{kind}"):
            op(**{name: wrong})
        with collective_raises((TypeError, dist.CollectiveMismatchError), match="list of lists"):
            op(**{name: wrong if dist.get_rank() == 0 else [[0], [1]]})


@pytest.mark.mpi(min_size=2)
def test_split() -> None:
    """Ranks are those of the parent; who is in no part gets None."""
    size = dist.get_world_size()
    parent = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    half = size // 2
    place = size - 1 - dist.get_rank()
    mine = dist.split_group(parent, [list(range(half)), list(range(half, 2 * half))], group_desc="half")
    if place >= 2 * half:
        assert mine is None
    else:
        first = place // half * half
        assert mine is not None
        assert dist.get_process_group_ranks(mine) == [size - 1 - each for each in range(first, first + half)]
        assert sum_of_ranks(mine) == sum(size - 1 - each for each in range(first, first + half))
        assert mine.group_desc == "half"
    for wrong in (None, [], [[]], [[0], [0]], [[size]]):
        with collective_raises(ValueError):
            dist.split_group(parent, wrong)
    only = dist.split_group(split_ranks=[[0]])
    assert (only is None) == (dist.get_rank() != 0)
