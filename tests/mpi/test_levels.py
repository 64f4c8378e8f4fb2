"""Check levels: what is compared, when, and that everything still moves right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import collective_cases as cases
import numpy as np
import pytest

import mpicoll as dist
from mpicoll.checks.levels import EVERY
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi
LEVELS = ("full", "roll", "off")


@contextmanager
def group_of_level(level: str) -> Iterator[Any]:
    """Make a group as an init_process_group(check=level) would lead to."""
    world = dist.group.WORLD
    assert world is not None
    before, world.level = world.level, level  # type: ignore[assignment]
    try:
        group = dist.new_group()
    finally:
        world.level = before
    yield group
    dist.destroy_process_group(group)


@pytest.mark.parametrize("rounds", ["as chosen", "of MPI"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_collective_at_every_level(level: str, rounds: str, request: pytest.FixtureRequest) -> None:
    """Sizes, roots and dtypes as ever, waited for or not, the same call again and again."""
    if rounds == "of MPI":
        request.getfixturevalue("rounds_of_mpi")
    me, size = dist.get_rank(), dist.get_world_size()
    with group_of_level(level) as group:
        assert group.level == level
        for dtype in "id":
            cases.every_collective(group, dtype=dtype)
        x = np.empty(3)
        for i in range(3 * EVERY):
            x[:] = me + i
            dist.all_reduce(x, group=group)
            assert (x == size * i + size * (size - 1) / 2).all(), i
            works = [dist.all_reduce(np.full(2, j + 1.0), group=group, async_op=True) for j in range(i % 5)]
            y = np.full(5, float(me))
            if me == i % size:  # asynchronous here, not there
                work = dist.broadcast(y, i % size, group=group, async_op=True)
                assert work is not None
                work.wait()
            else:
                dist.broadcast(y, i % size, group=group)
            assert (y == i % size).all()
            for j, work in reversed(list(enumerate(works))):
                assert work is not None
                work.wait()
                assert (work.result()[0] == size * (j + 1)).all()


@pytest.mark.mpi(min_size=2)
def test_levels_that_differ_raise_at_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that ask for different levels, by argument or by variable, raise at init on all ranks, and may try again."""
    odd = dist.get_world_size() - 1
    me = dist.get_rank()
    dist.destroy_process_group()
    for here, elsewhere in (("roll", None), ("off", "full"), ("off", "roll")):
        for by_variable in (False, True):
            level = here if me == odd else elsewhere
            if by_variable and level is not None:
                monkeypatch.setenv("MPICOLL_CHECK", level)
            with collective_raises(dist.CollectiveMismatchError, match=rf"rank {odd}: init_process_group.*{here}"):
                dist.init_process_group(check=None if by_variable else level)  # type: ignore[arg-type]
            assert not dist.is_initialized(), (here, elsewhere, by_variable)
            monkeypatch.delenv("MPICOLL_CHECK", raising=False)
    # The argument is what counts, and groups inherit it.
    monkeypatch.setenv("MPICOLL_CHECK", "off" if me == odd else "full")
    dist.init_process_group(check="roll")
    group = dist.new_group()
    assert (dist.group.WORLD.level, group.level) == ("roll", "roll")  # type: ignore[union-attr]
    dist.barrier(group)
    dist.destroy_process_group()


@pytest.mark.parametrize("wrong", ["most", "FULL", 1, True, ["full"], np.array(["full", "roll"])], ids=str)
def test_a_level_that_there_is_not(wrong: Any) -> None:
    """A level that there is not raises on all ranks, also when one rank alone asks for it."""
    odd = dist.get_world_size() - 1
    me = dist.get_rank()
    dist.destroy_process_group()
    with collective_raises(ValueError, match="check must be one of 'full', 'roll', 'off' or None, got "):
        dist.init_process_group(check=wrong)
    with collective_raises(ValueError if me == odd else dist.CollectiveMismatchError, match="check must be one of"):
        dist.init_process_group(check=wrong if me == odd else None)
    assert not dist.is_initialized()


def differ(group: Any, at: int, calls: int, **names: str) -> None:
    for i in range(calls):
        op = dist.ReduceOp.MAX if i == at and dist.get_rank(group) == 1 else dist.ReduceOp.SUM
        dist.all_reduce(np.ones(2), op, group=group)


@pytest.mark.usefixtures("rounds_of_mpi")
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("at", [0, 3, EVERY - 1, EVERY, EVERY + 5])
def test_the_rolling_fingerprint_finds_the_first_difference(at: int) -> None:
    """A call that differs is found after sixteen calls at most, at a barrier at the latest, and named by its number."""
    with group_of_level("roll") as group:
        calls = 0
        with collective_raises(dist.CollectiveMismatchError) as caught:
            for calls in range(1, 3 * EVERY):
                differ(group, 0 if calls == at + 1 else -1, 1)
        assert at + 1 <= calls <= at + EVERY
        assert f"call {at + 1} on group" in str(caught.value)
        moved = "Nothing was moved" if calls == at + 1 else f"data moved since call {at + 1} may be wrong"
        assert moved in str(caught.value), str(caught.value)
        assert "The group can still be used" in str(caught.value).replace("and the", "The"), str(caught.value)
        dist.all_reduce(np.ones(1), group=group)  # it goes on
        dist.barrier(group)
        differ(group, 1, 3)
        with collective_raises(dist.CollectiveMismatchError, match="MAX"):
            dist.barrier(group)
        dist.barrier(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "barrier"])
def test_where_rounds_cost_nothing_each_call_is_compared(call: str) -> None:
    """Members on one node find at ``roll``, too, what differs at the call itself; at ``off`` nothing is compared."""
    me, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    if not world.pair.agreement.channel.carries_data:
        pytest.skip("the ranks make their rounds through MPI")
    for level in ("roll", "full"):
        with group_of_level(level) as group:
            right = {
                "all_reduce": lambda: dist.all_reduce(np.ones(2), group=group),
                "broadcast": lambda: dist.broadcast(np.ones(2), 0, group=group),
                "barrier": lambda: dist.barrier(group),
            }
            for _ in range(3):
                right[call]()
            with collective_raises(dist.CollectiveMismatchError, match="call 4 on group") as caught:
                if me == 1:
                    dist.all_reduce(np.ones(2), dist.ReduceOp.MAX, group=group)
                else:
                    right[call]()
            assert "Nothing was moved, and the group can still be used" in str(caught.value), str(caught.value)
            for _ in range(3):
                right[call]()
    with group_of_level("off") as group:
        for _ in range(3):
            dist.all_reduce(np.ones(2), dist.ReduceOp.MAX if me == 1 else dist.ReduceOp.SUM, group=group)


@pytest.mark.usefixtures("rounds_of_mpi")
@pytest.mark.mpi(min_size=2)
def test_a_large_call_compares_what_came_before() -> None:
    """The rendezvous before a large transfer carries the rolling fingerprint, too."""
    with group_of_level("roll") as group:
        differ(group, 2, 4)
        with collective_raises(dist.CollectiveMismatchError, match=r"call 3 on group"):
            dist.all_reduce(np.ones(100_000), group=group)


@pytest.mark.usefixtures("rounds_of_mpi")
@pytest.mark.mpi(min_size=2)
def test_a_destroyed_group_is_compared_when_its_communicators_are_used_again() -> None:
    """Destroying waits for nobody; the next group of the same ranks finds what the last one's calls came to."""
    for _ in range(2):
        with group_of_level("roll") as group:
            differ(group, 1, 2)
        with collective_raises(dist.CollectiveMismatchError, match=r"call 2 on group \[0.*its ranks made") as caught:
            dist.new_group()
        text = str(caught.value)
        assert "all_reduce #2 float64[2] >MAX<" in text, text
        assert text.count("test_levels.py:") == 2, text
        assert "data moved since call 2 may be wrong." in text, text
    dist.destroy_process_group(dist.new_group())


@pytest.mark.usefixtures("rounds_of_mpi")
@pytest.mark.mpi(min_size=2)
def test_a_call_more_before_a_group_is_destroyed() -> None:
    """A call that one rank alone has made, and that ends by itself, is set against where the others destroyed the group."""
    with group_of_level("roll") as group:
        dist.all_reduce(np.ones(2), group=group)
        if dist.get_rank() == 0:
            dist.broadcast(np.ones(3), 0, group=group)
    with collective_raises(dist.CollectiveMismatchError, match="call 2 on group") as caught:
        dist.new_group()
    text = str(caught.value).replace(">", "").replace("<", "")
    for words in (
        "rank 0: broadcast #2 float64[3] root 0 at test_levels.py:",
        ": destroy_process_group at test_levels.py:",
    ):
        assert words in text, text
    still = dist.new_group()
    dist.all_reduce(np.ones(2), group=still)
    dist.destroy_process_group(still)


@pytest.mark.usefixtures("rounds_of_mpi")
@pytest.mark.mpi(min_size=2)
def test_a_call_more_before_the_next_comparison() -> None:
    """Ranks that have made unequal numbers of calls never get in step again: the group is broken."""
    with group_of_level("roll") as group:
        x = np.full(3, float(dist.get_rank()))
        if dist.get_rank() == 0:
            dist.broadcast(x, 0, group=group)
        with collective_raises(dist.CollectiveMismatchError, match="call 1 on group") as caught:
            dist.barrier(group)
        assert "broadcast" in str(caught.value), str(caught.value)
        assert "unequal numbers of calls: the group is broken now" in " ".join(str(caught.value).split()), str(
            caught.value
        )
        with collective_raises(dist.GroupBrokenError, match="unequal numbers of calls"):
            dist.broadcast(x, 0, group=group)


@pytest.mark.usefixtures("rounds_of_mpi")
@pytest.mark.mpi(min_size=2)
def test_a_wrong_argument_where_calls_roll() -> None:
    """What makes a group is compared at every level: a wrong argument on one rank raises on all, and nothing hangs."""
    me, odd = dist.get_rank(), dist.get_world_size() - 1
    world = dist.group.WORLD
    assert world is not None
    before = world.level
    for level in ("roll", "off"):
        world.level = level  # type: ignore[assignment]
        world.prepared.clear()
        try:
            dist.all_reduce(np.ones(2))
            with collective_raises(ValueError if me == odd else dist.CollectiveMismatchError, match="world_size"):
                dist.new_group([99] if me == odd else None)
            differ(None, 0, 1)
            with collective_raises(ValueError if me == odd else dist.CollectiveMismatchError) as caught:
                dist.new_group([99] if me == odd else None)
            if level == "roll" and me != odd:
                assert "MAX" in str(caught.value), str(caught.value)
            x = np.ones(2)
            dist.all_reduce(x)
            assert (x == dist.get_world_size()).all(), level
            dist.barrier()
        finally:
            world.level = before
            world.prepared.clear()


@pytest.mark.mpi(min_size=2)
def test_nothing_is_compared_when_off() -> None:
    """At level off calls that differ only in what MPI does not see go through; those that make a group are compared."""
    with group_of_level("off") as group:
        for i in range(2 * EVERY):
            dist.all_reduce(np.ones(2), group=group, name=f"{dist.get_rank()} {i}")
        dist.barrier(group, name=str(dist.get_rank()))


@pytest.mark.parametrize(
    "call",
    ["barrier", "all_reduce", "all_gather_object", "broadcast_object_list", "gather_object", "all_to_all_single"],
)
def test_named_calls(call: str) -> None:
    """The same name on all ranks is right; another name, or one on some ranks only, is a mismatch."""
    me, size = dist.get_rank(), dist.get_world_size()
    arguments: dict[str, tuple[Any, ...]] = {
        "barrier": (),
        "all_reduce": (np.ones(2),),
        "all_gather_object": ([None] * size, me),
        "broadcast_object_list": ([me], 0),
        "gather_object": (me, None if me else [None] * size, 0),
        "all_to_all_single": (np.ones(size), np.ones(size)),
    }
    function = getattr(dist, call)
    function(*arguments[call], name="epoch 1")
    for name in ("epoch 1" if me else "epoch 2", "epoch 1" if me else None):
        if size == 1:
            function(*arguments[call], name=name)
            continue
        with collective_raises(dist.CollectiveMismatchError, match="epoch 1"):
            function(*arguments[call], name=name)
    with collective_raises(TypeError, match="name must be a string"):
        function(*arguments[call], name=1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("level", ["roll", "off"])
def test_plans_of_calls_that_are_not_compared(level: str) -> None:
    """More different calls than plans are kept, asynchronous on one rank alone: calls that are compared keep in step."""
    me, size = dist.get_rank(), dist.get_world_size()
    with group_of_level(level) as group:
        mine, others = np.full(size, float(me)), np.empty(size)
        for _ in range(2):
            dist.all_to_all_single(others, mine, group=group)  # always agreed, with a plan that all make
            assert (others == np.arange(size)).all()
            for n in range(1, 140):
                x = np.ones(n)
                if me:
                    work = dist.all_reduce(x, group=group, async_op=True)
                    assert work is not None
                    work.wait()
                else:
                    dist.all_reduce(x, group=group)
                assert (x == size).all()


@pytest.mark.mpi(min_size=2)
def test_wrong_arguments_while_rolling() -> None:
    """Calls that are always agreed raise on all ranks, with calls before them that nobody has compared yet."""
    me, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    x = np.ones(2)
    with group_of_level("roll") as group:
        dist.all_reduce(x, group=group)
        splits = [1] * size
        more = [1] * (size - 1) + [2]
        with collective_raises(dist.CollectiveMismatchError, match="do not fit"):
            dist.all_to_all_single(
                np.zeros(size), np.ones(size + (me == 0)), splits, more if me == 0 else splits, group=group
            )
        for _ in range(2 * EVERY):
            dist.all_reduce(x, group=group)
    before, world.level = world.level, "roll"
    world.prepared.clear()  # what is kept was prepared for the level before
    try:
        dist.all_reduce(x)
        with collective_raises((ValueError, dist.CollectiveMismatchError)):
            dist.new_group([0, 1 if me else size + 7])
        for _ in range(2 * EVERY):
            dist.all_reduce(x)
    finally:
        world.level = before
        world.prepared.clear()
    dist.barrier()
