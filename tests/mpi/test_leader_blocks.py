"""Blocks that one rank runs first, on groups that are still good afterwards: who runs when, who raises what."""

# ruff: noqa: SIM117, PT017 (which statement is inside which is what is tested)

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from pickle import PicklingError
from typing import Any

import numpy as np
import pytest

import mpicoll as dist
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi
SCOPES = ("world", "node", "group")
LEVELS = ("full", "roll", "off")


@contextmanager
def scope_of(kind: str, level: str = "full") -> Iterator[tuple[Any, int]]:
    """Give a scope and its leader; the group has its ranks in reverse order, so the last rank goes first."""
    if kind != "group":
        yield kind, 0 if kind == "world" else node_leader()
        return
    world = dist.group.WORLD
    assert world is not None
    before, world.level = world.level, level  # type: ignore[assignment]
    try:
        group = dist.new_group(list(reversed(range(dist.get_world_size()))), sort_ranks=False)
    finally:
        world.level = before
    yield group, dist.get_world_size() - 1
    dist.destroy_process_group(group)


def node_leader() -> int:
    """Return the rank that goes first on this node, also where nodes have every other rank."""
    from mpicoll.groups.registry import state

    return state().topology.local_ranks[0]


@pytest.fixture
def shared() -> Iterator[Path]:
    """Give a folder that all ranks share."""
    paths: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    yield Path(paths[0])
    dist.barrier()
    if dist.get_rank() == 0:
        for path in sorted(Path(paths[0]).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        Path(paths[0]).rmdir()


def good(group: Any = None) -> None:
    """Assert that the group, and the world, can still be used."""
    for each in (group if isinstance(group, dist.ProcessGroup) else None, None):
        x = np.ones(1)
        dist.all_reduce(x, group=each)
        assert x[0] == dist.get_world_size()


def alone(scope: Any) -> bool:
    """Whether this rank is the only one of its scope."""
    from mpicoll.groups.registry import state

    return len(state().topology.local_ranks if scope == "node" else range(dist.get_world_size())) == 1


@pytest.mark.parametrize("kind", SCOPES)
def test_the_leader_goes_first(kind: str, shared: Path) -> None:
    """What it wrote is there when the others enter, and what it shares is theirs; small or large."""
    with scope_of(kind) as (scope, leader):
        path = shared / f"{leader}"
        for size in (1, 100, 100_000):
            with dist.zero_first("write", scope=scope) as turn:
                assert turn.leader == leader
                assert turn.is_leader == (dist.get_rank() == leader)
                if turn.is_leader:
                    assert not path.exists()
                    time.sleep(0.02)
                    path.write_text("here")
                    turn.share(np.arange(size))
                assert path.read_text() == "here"
                assert (turn.value == np.arange(size)).all()
            dist.barrier()
            if turn.is_leader:
                path.unlink()
            dist.barrier()
        good(scope)


@pytest.mark.parametrize("level", LEVELS)
def test_levels(level: str) -> None:
    """It works at every level."""
    with scope_of("group", level) as (scope, leader):
        for i in range(40):
            with dist.zero_first(scope=scope, rejoin=bool(i % 3)) as turn:
                if turn.is_leader:
                    turn.share(i)
            assert turn.value == i
            x = np.full(3, dist.get_rank())
            dist.broadcast(x, leader, group=scope)
            assert (x == leader).all()
        if dist.get_world_size() > 1:
            for who in (leader, 0):
                with pytest.raises((ValueError, dist.PeerFailedError)), dist.zero_first(scope=scope):
                    if dist.get_rank() == who:
                        raise ValueError("here")
        good(scope)


@pytest.mark.parametrize("kind", SCOPES)
def test_ways_out_of_the_block(kind: str) -> None:
    """return, break, continue, exceptions handled inside, generators read or left: all ranks go on together."""

    def by_return(scope: Any) -> int:
        with dist.zero_first("return", scope=scope):
            return 5

    def values(scope: Any) -> Iterator[int]:
        with dist.zero_first("generate", scope=scope):
            yield 1
            yield 2

    with scope_of(kind) as (scope, _):
        assert by_return(scope) == 5
        for i in range(4):
            with dist.zero_first(f"loop {i}", scope=scope):
                if i == 1:
                    continue
                if i == 2:
                    break
        assert i == 2
        with dist.zero_first(scope=scope), suppress(KeyError):
            raise KeyError("handled")
        assert list(values(scope)) == [1, 2]
        for value in values(scope):
            assert value == 1
            break
        block = dist.zero_first("used twice", scope=scope)
        for _ in range(2):
            with block as turn:
                if turn.is_leader:
                    turn.share("again")
            assert turn.value == "again"
        good(scope)


@pytest.mark.parametrize("kind", SCOPES)
def test_nested_in_the_same_scope(kind: str) -> None:
    """It is passed through, and each turn has its own value."""
    with scope_of(kind) as (scope, _):
        with dist.zero_first("outer", scope=scope) as outer:
            if outer.is_leader:
                outer.share("o")
            for i in range(3):
                with dist.zero_first(f"inner {i}", scope=scope) as inner:
                    assert inner.is_leader == outer.is_leader
                    if inner.is_leader:
                        inner.share(i)
                    with dist.zero_first("innermost", scope=scope) as innermost:
                        if innermost.is_leader:
                            innermost.share(10 * i)
                    assert innermost.value == 10 * i
                assert inner.value == i
            assert dist.run_first(os.getpid, scope=scope) == dist.run_first(lambda: os.getpid(), scope=scope)
        assert outer.value == "o"
        good(scope)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", SCOPES)
@pytest.mark.parametrize("what", [ValueError("no data"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_the_leader_fails(kind: str, what: BaseException) -> None:
    """It keeps its exception; the others do not run the block, and are told type, text and traceback."""
    with scope_of(kind) as (scope, leader):
        if alone(scope):
            return
        ran = False
        expected = type(what) if dist.get_rank() == leader else dist.FirstFailedError
        with pytest.raises(expected) as caught, dist.zero_first("prepare", scope=scope):
            ran = True
            if dist.get_rank() == leader:
                raise what
        assert ran == (dist.get_rank() == leader)
        if dist.get_rank() == leader:
            assert caught.value is what
        else:
            error = caught.value
            assert isinstance(error, dist.FirstFailedError)
            headline, _, trace = str(error).partition("\n")
            assert f"rank {leader} (" in headline
            assert "zero_first('prepare')" in headline
            assert f"{type(what).__name__}" in headline
            assert str(what) in headline
            assert f"{__file__}:" in headline
            assert "raise what" in trace
            assert (error.ranks, error.reporter) == ((leader,), leader)
        good(scope)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", SCOPES)
def test_a_follower_fails(kind: str) -> None:
    """It keeps its exception; with rejoin all others raise PeerFailedError at the end of the block, else none."""
    with scope_of(kind) as (scope, leader):
        if alone(scope):
            return
        ranks = [r for r in range(dist.get_world_size()) if r != leader]
        who = ranks[-1] if kind != "node" else max(_local_ranks())
        ended = False
        expected = OSError if dist.get_rank() == who else dist.PeerFailedError
        with pytest.raises(expected) as caught, dist.zero_first("read", scope=scope):
            if dist.get_rank() == who:
                raise OSError("disk is full")
            ended = True
        assert ended == (dist.get_rank() != who)
        if dist.get_rank() != who:
            assert not isinstance(caught.value, dist.FirstFailedError)
            assert str(caught.value).startswith(f"rank {who} failed in zero_first('read') at {__file__}:")
            assert f"OSError: disk is full (at {__file__}:" in str(caught.value)
        raised = False
        try:
            with dist.zero_first("read", scope=scope, rejoin=False):
                if dist.get_rank() == who:
                    raise OSError("disk is full")
        except OSError:
            raised = True
        assert raised == (dist.get_rank() == who)
        good(scope)


def _local_ranks() -> tuple[int, ...]:
    from mpicoll.groups.registry import state

    return state().topology.local_ranks


@pytest.mark.mpi(min_size=2)
def test_several_fail() -> None:
    """Each rank that failed keeps its own exception, the others hear of the first of them."""
    size, me = dist.get_world_size(), dist.get_rank()
    with pytest.raises((OSError, dist.PeerFailedError)) as caught, dist.zero_first():
        if me:
            raise OSError(str(me))
    assert str(caught.value) == str(me) if me else str(caught.value).startswith("rank 1 failed")
    assert isinstance(caught.value, OSError) == bool(me)
    assert size == dist.get_world_size()
    good()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["world", "group"])
@pytest.mark.parametrize("leads", [True, False])
def test_a_rank_skips_the_block(kind: str, leads: bool) -> None:
    """Its next call is compared with the block, and both are named."""
    with scope_of(kind) as (scope, leader):
        who = leader if leads else next(r for r in range(dist.get_world_size()) if r != leader)
        group = scope if isinstance(scope, dist.ProcessGroup) else None
        with collective_raises(dist.CollectiveMismatchError) as caught:
            if dist.get_rank() == who:
                dist.all_reduce(np.ones(1), group=group)
            else:
                with dist.zero_first("skipped", scope=scope):
                    pass
        text = str(caught.value)
        assert "zero_first" in text
        assert "skipped" in text
        assert "all_reduce" in text
        assert text.count(f"{Path(__file__).name}:") >= 2
        good(scope)


@pytest.mark.mpi(min_size=2)
def test_different_blocks() -> None:
    """Ranks that are in differently named blocks are told so."""
    with collective_raises(dist.CollectiveMismatchError, match="zero_first"):
        with dist.zero_first("tokenise" if dist.get_rank() else "download"):
            pass
    good()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["world", "group"])
def test_a_collective_inside(kind: str) -> None:
    """It raises at once on the leader and names its line; the others do not run the block."""
    with scope_of(kind) as (scope, leader):
        group = scope if isinstance(scope, dist.ProcessGroup) else None
        calls = [
            lambda: dist.barrier(group=group),
            lambda: dist.all_reduce(np.ones(1), group=group),
            lambda: dist.all_reduce(np.ones(1), group=group),
            lambda: dist.all_reduce(np.ones(1), group=group, async_op=True),
            lambda: dist.broadcast_object_list([1], 0, group=group),
        ]
        if group is None:
            calls.append(lambda: dist.new_group())
        for call in calls:
            with collective_raises((dist.CollectiveMismatchError, dist.FirstFailedError)) as caught:
                with dist.zero_first("work", scope=scope):
                    call()
            assert "inside zero_first('work')" in str(caught.value)
            assert f"{__file__}:" in str(caught.value)
            assert isinstance(caught.value, dist.FirstFailedError) == (dist.get_rank() != leader)
        with collective_raises((dist.CollectiveMismatchError, dist.PeerFailedError), match="all ranks meet at the end"):
            with dist.zero_first("work", scope=scope) as turn:
                if not turn.is_leader:
                    dist.barrier(group=group)
        good(scope)
        with dist.zero_first("no meeting", scope=scope, rejoin=False) as turn:
            if not turn.is_leader:
                dist.barrier(group=group)
        if turn.is_leader:
            dist.barrier(group=group)
        good(scope)


@pytest.mark.mpi(min_size=2)
def test_nested_in_another_scope() -> None:
    """Ranks that wait outside cannot come to an inner block; those that nobody waits for can."""
    pairs = (("world", "node"), ("node", "world"), ("world", "ordered"), ("ordered", "world"))
    for outer, inner in pairs:
        if alone("node") or len(_local_ranks()) != dist.get_world_size():
            return  # on several nodes other ranks are concerned, see the jobs in tests/hang
        with (
            collective_raises((dist.CollectiveMismatchError, dist.PeerFailedError), match="for the outer block to end"),
            dist.ordered() if outer == "ordered" else dist.zero_first("outer", scope=outer),
        ):
            with dist.ordered() if inner == "ordered" else dist.zero_first("inner", scope=inner):
                pass
        good()
    mine = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with dist.zero_first("outer"), dist.zero_first("inner", scope=mine) as turn:
        assert turn.is_leader
    good()


@pytest.mark.mpi(min_size=3)
def test_followers_among_themselves() -> None:
    """Ranks that do not go first may have a block of their own in theirs."""
    rest = dist.new_group(range(1, dist.get_world_size()))
    with dist.zero_first("outer") as turn:
        if not turn.is_leader:
            with dist.zero_first("inner", scope=rest) as inner:
                assert inner.leader == 1
                if inner.is_leader:
                    inner.share("from 1")
            assert inner.value == "from 1"
    good()


def test_run_first() -> None:
    """The function runs on one rank, its value is on all; an exception and what cannot be pickled reach all."""
    ran = []

    def work(a: int, *, b: int) -> dict[str, int]:
        ran.append(1)
        return {"sum": a + b, "rank": dist.get_rank()}

    for scope, leader in (("world", 0), ("node", node_leader())):
        ran.clear()
        assert dist.run_first(work, 2, b=3, scope=scope) == {"sum": 5, "rank": leader}
        assert len(ran) == (dist.get_rank() == leader)
        value = dist.run_first(work, 2, b=3, scope=scope, share=False)
        assert value == ({"sum": 5, "rank": leader} if dist.get_rank() == leader else None)

    @dist.first
    def doubled(x: int) -> int:
        """Say twice as much."""
        return 2 * x

    @dist.first(scope="node", share=False)
    def unshared() -> int:
        return 1

    assert doubled(4) == 8
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Say twice as much.")
    assert unshared() == (1 if dist.get_rank() == node_leader() else None)
    if dist.get_world_size() > 1:
        with collective_raises((ZeroDivisionError, dist.FirstFailedError), match="division by zero"):
            dist.run_first(lambda: 1 / 0)
        with collective_raises((AttributeError, TypeError, PicklingError, dist.FirstFailedError)):
            dist.run_first(lambda: lambda: None)
        with collective_raises(dist.CollectiveMismatchError, match="getp"):
            dist.run_first(os.getpid if dist.get_rank() else os.getppid)
    good()


def test_rank_zero_only() -> None:
    """Rank 0 runs it, the others return None and nobody waits; without a default group all run it."""

    @dist.rank_zero_only
    def where(x: int) -> int:
        return x + dist.get_rank() if dist.is_initialized() else -x

    assert where(7) == (7 if dist.get_rank() == 0 else None)
    dist.barrier()
    dist.destroy_process_group()
    assert where(7) == -7
    assert dist.run_first(where, 3) == -3
    with dist.zero_first() as turn, dist.ordered():
        assert (turn.is_leader, turn.leader) == (True, 0)
        turn.share(3)
        assert turn.value == 3


@pytest.mark.parametrize("kind", ["world", "group", "node"])
def test_ordered(kind: str, shared: Path) -> None:
    """One after the other, by rank in the group; and all leave together."""
    with scope_of(kind) as (scope, leader):
        path = shared / f"log {leader}"
        with dist.ordered(scope if kind != "world" else None):
            with path.open("a") as file:
                file.write(f"{dist.get_rank()} ")
            time.sleep(0.01)
        ranks = list(range(dist.get_world_size()))
        expected = {"world": ranks, "group": ranks[::-1], "node": list(_local_ranks())}[kind]
        assert [int(word) for word in path.read_text().split()] == expected
        dist.barrier()
        good(scope)


@pytest.mark.mpi(min_size=3)
def test_ordered_fails() -> None:
    """Those after the rank that failed do not run the block; those before it learn of it at the end of theirs."""
    me, ran = dist.get_rank(), False
    expected = ValueError if me == 1 else dist.PeerFailedError
    with pytest.raises(expected, match="in the middle") as caught, dist.ordered():
        ran = True
        if me == 1:
            raise ValueError("in the middle")
    assert ran == (me <= 1)
    assert isinstance(caught.value, dist.FirstFailedError) == (me > 1)
    with (
        collective_raises((dist.CollectiveMismatchError, dist.PeerFailedError), match="inside ordered"),
        dist.ordered(),
    ):
        dist.barrier()
    good()


def test_familiar_names() -> None:
    """They take the arguments that they take elsewhere, and go first where they go first there."""
    local = _local_ranks().index(dist.get_rank())
    for make in (
        lambda: dist.torch_distributed_zero_first(local),
        lambda: dist.torch_distributed_zero_first(local_rank=local),
        lambda: dist.wait_for_the_master(),
        lambda: dist.wait_for_the_master(local),
        lambda: dist.main_process_first(),
        lambda: dist.main_process_first(local=True, desc="tokenise"),
        lambda: dist.local_zero_first("cache", timeout=5.0, publish=[]),
    ):
        with make() as turn:
            assert turn.leader == node_leader()
    with dist.main_process_first(local=False, desc="tokenise") as turn:
        assert turn.leader == 0
    with dist.torch_distributed_zero_first(-1) as turn:
        assert turn.is_leader
    good()


@pytest.mark.mpi(min_size=2)
def test_a_local_rank_that_is_none() -> None:
    """A rank of the world, or anything else, given as local rank raises on all ranks of the node."""
    for wrong, expected in ((dist.get_rank() + 100, ValueError), ("0", TypeError)):
        if alone("node"):
            continue
        with collective_raises(expected, match="local_rank"):
            dist.torch_distributed_zero_first(wrong).__enter__()  # type: ignore[arg-type]
        with collective_raises((expected, dist.CollectiveMismatchError), match="local_rank"):
            last = dist.get_rank() == max(_local_ranks())
            with dist.wait_for_the_master(wrong if last else None):  # type: ignore[arg-type]
                pass
    good()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": 3}, TypeError, "name"),
    ({"timeout": "soon"}, TypeError, "timeout"),
    ({"timeout": 0}, ValueError, "timeout"),
    ({"timeout": timedelta(seconds=-1)}, ValueError, "timeout"),
    ({"visibility_timeout": None}, TypeError, "visibility_timeout"),
    ({"publish": 3}, TypeError, "publish"),
]


@pytest.mark.parametrize("kind", SCOPES)
def test_wrong_arguments(kind: str) -> None:
    """They raise on all ranks alike, before the block; if one rank alone gives them, the leader learns of it at its end."""
    with scope_of(kind) as (scope, _):
        for keywords, expected, word in WRONG:
            for somebody in (False, True):
                if somebody and alone(scope):
                    continue
                wrong = not somebody or dist.get_rank() == dist.get_world_size() - 1 or kind == "node"
                with collective_raises((expected, dist.CollectiveMismatchError), match=word) as caught:
                    with dist.zero_first(scope=scope, **(keywords if wrong else {})):
                        assert not wrong
                assert isinstance(caught.value, expected) == wrong
        good(scope)
    for no_scope, error in (("nodes", ValueError), (3, ValueError), (None, None)):
        if error is not None:
            with collective_raises(error, match="scope|group"):
                dist.zero_first(scope=no_scope).__enter__()  # type: ignore[arg-type]


@pytest.mark.mpi(min_size=2)
def test_not_a_member() -> None:
    """A rank that is not in the group is refused, the members are not disturbed."""
    group = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(ValueError, match="is not in the group given as scope"):
            dist.zero_first(scope=group).__enter__()
    else:
        with dist.zero_first(scope=group) as turn:
            assert turn.is_leader
    good()


def test_share_is_for_the_leader() -> None:
    """The others read; without anything shared the value is None."""
    with dist.zero_first() as turn:
        if not turn.is_leader:
            with pytest.raises(RuntimeError, match=r"rank 0 shares a value; this rank reads turn\.value"):
                turn.share(1)
    assert turn.value is None
    good()


@pytest.mark.parametrize("kind", SCOPES)
def test_publish(kind: str, shared: Path) -> None:
    """The others see what the leader wrote, also what it names in the block; what it did not write is an error on all."""
    with scope_of(kind) as (scope, leader):
        tree = shared / f"tree {leader}"
        file, more = tree / "a", shared / f"more {leader}"
        with dist.zero_first("write", scope=scope, publish=[tree]) as turn:
            if turn.is_leader:
                tree.mkdir()
                file.write_text("x" * 1000)
                more.write_text("y")
                turn.publish(more)
            assert file.stat().st_size == 1000
            assert more.exists()
        if not alone(scope):
            with collective_raises((FileNotFoundError, dist.FirstFailedError), match="missing"):
                with dist.zero_first("write", scope=scope, publish=shared / "missing"):
                    assert dist.get_rank() == leader
        good(scope)


@pytest.mark.mpi(min_size=2)
def test_publish_where_one_rank_does_not_see_it(shared: Path) -> None:
    """It says which path and which host; all others learn of it at the end of the block, and the group is good."""
    other = Path(tempfile.mkdtemp())
    here = os.getcwd()
    last = dist.get_rank() == dist.get_world_size() - 1
    os.chdir(other if last else shared)  # /proc/self/cwd is another folder on that rank
    try:
        with (
            collective_raises(
                (TimeoutError, dist.PeerFailedError), match=r"/proc/self/cwd/late does not exist"
            ) as caught,
            dist.zero_first("write", publish=["/proc/self/cwd/late"], visibility_timeout=0.3) as turn,
        ):
            if turn.is_leader:
                (shared / "late").write_text("here")
        assert isinstance(caught.value, TimeoutError) == last
        if last:
            assert os.uname().nodename in str(caught.value)
    finally:
        os.chdir(here)
        other.rmdir()
    good()


@pytest.mark.mpi(min_size=2)
def test_beside_other_calls(shared: Path) -> None:
    """Asynchronous calls under way, and messages between the ranks, go on around and inside the block."""
    me, size = dist.get_rank(), dist.get_world_size()
    x, y = np.full(1000, float(me)), np.empty(3)
    work = dist.all_reduce(x, async_op=True)
    sent = dist.isend(np.full(3, float(me)), (me + 1) % size)
    with dist.zero_first() as turn:
        if turn.is_leader:
            turn.share("beside")
    assert turn.value == "beside"
    dist.recv(y, (me - 1) % size)
    assert work is not None
    work.wait()
    assert sent is not None
    sent.wait()
    assert (y == (me - 1) % size).all()
    assert (x == size * (size - 1) / 2).all()
    with dist.zero_first() as turn:  # the leader sends out of its block to one that receives in its own
        if turn.is_leader:
            dist.send(np.full(3, 7.0), 1)
        elif me == 1:
            dist.recv(y, 0)
            assert (y == 7).all()
    good()


@pytest.mark.mpi(min_size=2)
def test_nested_blocks_are_paired_by_what_they_are(shared: Path) -> None:
    """Also where the leader enters blocks that the others do not: in the function that it runs, or since it works alone."""

    def deep() -> str:
        return "deep"

    def outer() -> str:
        return "outer+" + str(dist.run_first(deep))

    def other() -> str:
        return "other"

    with dist.zero_first():
        assert dist.run_first(outer) == "outer+deep"
        assert dist.run_first(other) == "other"
        path = shared / "prepared"
        if not path.exists():
            dist.run_first(path.touch)
        assert dist.run_first(other) == "other"
        with dist.zero_first("named") as named:
            if named.is_leader:
                named.share("in it")
            assert dist.run_first(deep) == "deep"
        assert named.value == "in it"
    with pytest.raises(
        (dist.CollectiveMismatchError, dist.PeerFailedError), match=r"has not entered the inner block there|failed in"
    ):
        with dist.zero_first("outer") as turn:
            if not turn.is_leader:
                dist.run_first(other)
    good()


@pytest.mark.mpi(min_size=2)
def test_a_nested_block_that_fails_on_the_leader_alone() -> None:
    """Where the leader handles it inside the outer block, the others are told at the same place, and can handle it too."""
    tries: list[int] = []

    def flaky() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")
        return "third"

    failures = 0
    value = None
    with dist.zero_first() as turn:
        while value is None:
            try:
                value = dist.run_first(flaky)
            except OSError:
                failures += 1
            except dist.FirstFailedError as error:
                assert "OSError: not yet" in str(error)
                failures += 1
        ran = False
        try:
            with dist.zero_first("inner", publish="/nowhere/at/all"):
                ran = True
                if turn.is_leader:
                    raise KeyError("inner")
        except (KeyError, dist.FirstFailedError) as error:
            assert isinstance(error, KeyError) == turn.is_leader
    assert (value, failures, ran) == ("third", 2, turn.is_leader)
    good()


@pytest.mark.mpi(min_size=2)
def test_whatever_strikes_the_leader_at_the_end_of_its_block() -> None:
    """What cannot be published is told, of whatever class the error is."""
    with collective_raises((ValueError, dist.FirstFailedError), match=r"null|embedded"):
        with dist.zero_first() as turn:
            turn.publish("/tmp/a\0b")
    good()


class Unloadable:
    """Can be pickled, but not loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


@pytest.mark.mpi(min_size=2)
def test_a_value_that_cannot_be_loaded() -> None:
    """It fails on those who load it, and the leader hears of it; inside another block it is not taken for the next one."""
    with pytest.raises((ValueError, dist.PeerFailedError), match=r"the value that rank 0 shared in zero_first"):
        with dist.zero_first() as turn:
            if turn.is_leader:
                turn.share(Unloadable())
    with dist.zero_first():
        try:
            dist.run_first(Unloadable)
        except ValueError as error:
            assert "cannot be loaded here" in str(error)
        assert dist.run_first(os.getppid) == dist.run_first(os.getppid)
    good()


class Interrupting:
    """Sends Ctrl-C to a rank that loads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.raise_signal, (signal.SIGINT,)


@pytest.mark.mpi(min_size=2)
def test_control_c_while_a_value_is_loaded() -> None:
    """The rank that loads it raises KeyboardInterrupt and still meets the others, which learn of it."""
    expected = KeyboardInterrupt if dist.get_rank() else dist.PeerFailedError
    with pytest.raises(expected), dist.zero_first() as turn:
        if turn.is_leader:
            turn.share(Interrupting())
    good()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["world", "group"])
def test_a_group_is_not_destroyed_in_its_block(kind: str) -> None:
    """It raises on the leader, and the others are told."""
    with scope_of(kind) as (scope, leader):
        with collective_raises((dist.CollectiveMismatchError, dist.FirstFailedError), match="destroy_process_group"):
            with dist.zero_first(scope=scope) as turn:
                if turn.is_leader:
                    dist.destroy_process_group(scope if kind == "group" else None)
        good(scope)
    assert leader in (0, dist.get_world_size() - 1)


@pytest.mark.mpi(min_size=2)
def test_threads_in_the_same_scope() -> None:
    """A second thread of a rank that enters a block of the same group is refused."""
    refused: list[BaseException] = []

    def enter() -> None:
        try:
            with dist.zero_first("second"):
                pass
        except dist.DistError as error:
            refused.append(error)

    with dist.zero_first("first") as turn:
        if turn.is_leader:
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
            assert "while another thread of this rank is in zero_first('first')" in str(refused[0])
    good()


def test_what_comes_too_late_or_is_misspelt() -> None:
    """Sharing after the block, and options of a decorator without their names, raise."""
    with dist.zero_first() as turn:
        pass
    if turn.is_leader and dist.get_world_size() > 1:
        with pytest.raises(RuntimeError, match="the block is over"):
            turn.share(1)
        with pytest.raises(RuntimeError, match="the block is over"):
            turn.publish("x")
    with pytest.raises(TypeError, match='@first\\(scope="node"\\)'):
        dist.first("node")  # type: ignore[call-overload]
    good()
