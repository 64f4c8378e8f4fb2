"""Blocks that move from process to process: the results are those of other ways, and nothing else is read or written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import collective_cases as cases
import numpy as np
import pytest
from collective_cases import Case
from mpi4py import MPI

import mpicoll as dist
from mpicoll.groups import registry
from mpicoll.transports.base import Kind
from mpicoll.transports.selection import single_copy_from

pytestmark = pytest.mark.mpi

MOVED = [*cases.ROOTED, *cases.ROOTLESS]
KINDS = tuple(single_copy_from(False))
COUNTS = (0, 1, 7, 300, 9_000, 70_000)


@pytest.fixture
def group() -> Iterator[Any]:
    """A group of all ranks whose calls copy once, whatever the size."""
    if not registry.state().pool.single_copy:
        pytest.skip("the ranks cannot read each other's memory, or are on several nodes")
    made: Any = dist.new_group()
    if made.pair.node is None:
        pytest.skip("the ranks are on several nodes, or use no shared memory")
    usual, once = made.pair.selection, dict.fromkeys(KINDS, 1)
    made.pair.selection, made.pair.node._single_copy = replace(usual, mode="node", single_copy=once), once
    yield made
    made.pair.selection, made.pair.node._single_copy = usual, usual.single_copy
    dist.destroy_process_group(made)


@pytest.mark.parametrize("dtype", ["d", "b", "g"])
@pytest.mark.parametrize("name", MOVED)
def test_results(group: Any, name: str, dtype: str) -> None:
    """Every kind and size, first calls and later ones, blocking and asynchronous, with all roots."""
    for _ in range(2):
        cases.run(name, cases.sweep(name, dtype, COUNTS, group))


@pytest.mark.parametrize("name", MOVED)
def test_every_call_takes_two_steps(group: Any, name: str) -> None:
    """A call of 5 MB copies once, also the first: copies in pieces would take 20 steps.

    From the second call on a gather of unequal blocks is prepared.

    The members of a prepared exchange of unequal parts compare the lengths of the parts in a step of its own before.
    """
    count = 5_000_000 // 8 // dist.get_world_size()
    tiny = name == "all_gather_uneven" and dist.get_world_size() == 2  # of 0 and 1 elements, which come with the round
    for turn in range(3):
        before = 0 if group.pair.node._segment is None else group.pair.node._segment.step
        cases.run(name, iter([Case("d", count, group=group, seed=turn)]))
        found = group.pair.node._segment.step - before
        if name in ("all_to_all_uneven", "all_to_all_single_splits"):
            assert found in (2, 3), turn
        else:
            assert found == (0 if tiny and turn else 2), turn


def test_lists_of_arrays_that_stand_apart(group: Any) -> None:
    """Prepared calls of lists in any order, with gaps, which are not touched, and of which a list is changed between calls."""
    n, me, count = dist.get_world_size(), dist.get_rank(), 5_001
    memory = np.full(3 * n * (count + 3), -1.0)
    places = [memory[i * (count + 3) :][:count] for i in np.random.default_rng(5).permutation(3 * n)]
    inputs, outputs, others = places[:n], places[n : 2 * n], places[2 * n :]
    for turn in range(6):
        outs = outputs if turn % 2 else others
        for peer in range(n):
            inputs[peer][:] = 100 * turn + 10 * me + peer
            outs[peer][:] = -2
        dist.all_to_all(outs, inputs, group=group)
        assert all((outs[peer] == 100 * turn + 10 * peer + me).all() for peer in range(n))
        dist.all_gather(outs, inputs[0], group=group)
        assert all((outs[peer] == 100 * turn + 10 * peer).all() for peer in range(n))
        root = turn % n
        dist.gather(inputs[0], outs if me == root else None, root, group=group)
        dist.scatter(outs[0], inputs if me == root else None, root, group=group)
        assert (outs[0] == 100 * turn + 10 * root + me).all()
    assert (memory.reshape(3 * n, -1)[:, count:] == -1).all()


def test_blocks_that_overlap(group: Any) -> None:
    """The input may be this rank's part of the output; any other overlap gives what separate arrays give."""
    n, me, count = dist.get_world_size(), dist.get_rank(), 6_000
    for _ in range(4):
        out = np.arange(n * count, dtype=float) * 0
        own = out[me * count :][:count]
        own[:] = me + 1
        dist.all_gather_single(out, own, group=group)
        assert (out.reshape(n, count) == np.arange(1, n + 1)[:, None]).all()
        moved = out[(me + 1) % n * count :][:count]  # the place of another rank's block
        moved[:] = me + 5
        dist.all_gather_single(out, moved, group=group)
        assert (out.reshape(n, count) == np.arange(5, n + 5)[:, None]).all()
        both = np.zeros(n * count + 8)
        source, target = both[:-8], both[8:]
        source.reshape(n, count)[:] = 10 * me + np.arange(n)[:, None]
        dist.all_to_all_single(target, source, group=group)
        assert (target.reshape(n, count) == 10 * np.arange(n)[:, None] + me).all()


def test_blocks_that_overlap_whole(group: Any) -> None:
    """The place of this rank's result is its block for another rank, in prepared calls as well."""
    n, me, count = dist.get_world_size(), dist.get_rank(), 6_000
    for turn in range(4):
        parts = np.zeros((n, count))
        parts[:] = 10 * turn + np.arange(n)[:, None]
        result = parts[1] if me == 0 else np.zeros(count)
        dist.scatter(result, list(parts) if me == 0 else None, 0, group=group)
        assert (result == 10 * turn + me).all(), turn
        both = np.zeros((n + 1, count))
        both[:-1] = 100 * turn + 10 * me + np.arange(n)[:, None]
        dist.all_to_all_single(both[1:], both[:-1], group=group)
        assert (both[1:] == 100 * turn + 10 * np.arange(n)[:, None] + me).all(), turn
        ins = [np.full(count, 100.0 * turn + 10 * me + peer) for peer in range(n)]
        outs = [ins[1] if peer == me else np.zeros(count) for peer in range(n)]
        dist.all_to_all(outs, ins, group=group)
        assert all((outs[peer] == 100 * turn + 10 * peer + me).all() for peer in range(n)), turn


@pytest.mark.parametrize("late", [0, 1])
def test_a_wait_long_after_the_start(group: Any, late: int) -> None:
    """Other members write into the results between start and wait: that is no write of the program."""
    n, me, count = dist.get_world_size(), dist.get_rank(), 300_000
    out, block, one = np.zeros((n, count)), np.zeros(count), np.zeros(count)
    for turn in range(6):
        block[:], out[:], one[:] = 10 * turn + me + 1, -1, -1
        dist.barrier()
        for call in (
            lambda: dist.all_gather_single(out, block, group=group, async_op=True),
            lambda: dist.scatter(one, list(out) if me == late else None, late, group=group, async_op=True),
        ):
            time.sleep(0.0005 if me == late else 0)
            work = call()
            time.sleep(0.02 if turn % 2 else 0)
            work.is_completed()
            time.sleep(0.02 if me != late else 0)
            work.wait()
        assert (out == 10 * turn + np.arange(n)[:, None] + 1).all(), turn
        assert (one == 10 * turn + me + 1).all(), turn


def test_a_member_that_gives_up(group: Any) -> None:
    """The memory of a call that has raised is not written any more, also if the other members go on later."""
    n, me, count = dist.get_world_size(), dist.get_rank(), 500_000
    other: Any = dist.new_group()
    other.pair.selection, other.pair.node._single_copy = group.pair.selection, group.pair.node._single_copy
    out, block = np.zeros((n, count)), np.full(count, me + 1.0)
    for _ in range(3):
        dist.all_gather_single(out, block, group=other)
    dist.barrier()
    call = partial(dist.all_gather_single, out, block, group=other, async_op=True)
    others, comm = range(1, n), MPI.COMM_WORLD
    if me == 0:  # the others have posted the call, and then make no progress
        for peer in others:
            comm.recv(source=peer)
        work = call(timeout=timedelta(seconds=0.3))
        with pytest.raises(dist.DistError):
            work.wait()
        out[:] = -5
        for peer in others:
            comm.send(None, peer)
    else:
        work = call(timeout=timedelta(seconds=60))
        comm.send(None, 0)
        comm.recv(source=0)
        work._request.Test()
    dist.barrier()
    if me == 0:
        assert (out == -5).all()
    else:
        with pytest.raises(dist.DistError):
            work.wait()
    dist.barrier()


def test_ranks_that_wait_at_once_and_later(group: Any) -> None:
    """Some members are asynchronous, or make the call for the first time: all members make it in the same way."""
    n, me, count = dist.get_world_size(), dist.get_rank(), 20_000
    out = np.zeros(n * count)
    for turn in range(12):
        block = np.full(count if (turn + me) % 4 else (count // 2, 2), 10.0 * turn + me)
        work = dist.all_gather_single(out, block, group=group, async_op=(turn + me) % 3 == 0)
        if work is not None:
            work.wait()
        assert (out.reshape(n, count) == 10 * turn + np.arange(n)[:, None]).all(), turn
        named = dist.broadcast(out, turn % n, group=group, async_op=(turn + me) % 3 == 1)
        if named is not None:
            named.wait()


def test_a_call_that_differs(group: Any) -> None:
    """Prepared calls of which one member makes another: all members raise before data moves."""
    n, me, count = dist.get_world_size(), dist.get_rank(), 20_000
    out, block = np.zeros(n * count), np.full(count, float(me))
    for _ in range(3):
        dist.all_gather_single(out, block, group=group)
    out[:] = -1
    with pytest.raises(dist.CollectiveMismatchError):
        if me == 0:
            dist.all_gather_single(out[: n * 8], block[:8], group=group)
        else:
            dist.all_gather_single(out, block, group=group)
    assert (out == -1).all()


def test_from_which_size_on() -> None:
    """The usual group: small blocks move as they did, large ones copy once, between ranks of one node."""
    world: Any = registry.state().world
    chosen = world.pair.selection
    if not registry.state().pool.single_copy:
        assert not chosen.single_copy
        return
    assert not chosen.copies_once(Kind.BROADCAST, 1024 * 1024)
    assert chosen.copies_once(Kind.BROADCAST, 1024 * 1024 + 1)
    assert chosen.copies_once(Kind.GATHER, 64 * 1024)
    assert not chosen.copies_once(Kind.ALL_REDUCE, 1 << 30)
    if chosen.mode == "auto":
        assert chosen.node(Kind.BROADCAST, 1 << 30)
