"""Object collectives, and threads that communicate at once."""

from __future__ import annotations

from typing import Any

import collective_cases as cases
import numpy as np
import pytest
from mpi4py import MPI
from ranks import Unpicklable, run_threads

import mpicoll as dist
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi


def test_objects_of_every_size_are_gathered() -> None:
    """all_gather_object delivers objects of different kinds and sizes to all ranks, in the order of ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    kinds = [lambda r: None, lambda r: {"rank": r, "data": list(range(r))}, lambda r: "x" * (10_000 * r)]
    kinds += [lambda r: np.arange(r * 1000) if r % 2 else b"", lambda r: (r, [r, {r}])]
    for make in kinds:
        gathered: list[Any] = ["old"] * size
        assert dist.all_gather_object(gathered, make(rank)) is None
        for r, value in enumerate(gathered):
            assert np.array_equal(value, make(r)) if isinstance(value, np.ndarray) else value == make(r), (r, value)


def test_objects_are_broadcast_from_every_root() -> None:
    """broadcast_object_list replaces the elements of the same list, by global and by group rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for root in range(size):
        for keyword in ("src", "group_src"):
            for payload in ([], [root, "text", None], ["x" * 200_000]):
                objects = list(payload) if rank == root else ["old"] * len(payload)
                before = objects
                assert dist.broadcast_object_list(objects, **{keyword: root}) is None
                assert objects is before
                assert objects == payload, f"root {root}, {keyword}"
    objects = [rank]
    dist.broadcast_object_list(objects)
    assert objects == [0]


def test_objects_on_a_subgroup() -> None:
    """On a group the list has one place for each member, in its order, and src is a global rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    ranks = list(range(size))[::-1]
    group = dist.new_group(ranks, sort_ranks=False)
    gathered = [None] * size
    dist.all_gather_object(gathered, rank, group)
    assert gathered == ranks
    objects = [rank]
    dist.broadcast_object_list(objects, src=size - 1, group=group)
    assert objects == [size - 1]
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_objects_that_do_not_fit_together() -> None:
    """What cannot be pickled on one rank, or lists of different lengths, raise on all; then objects move again."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for odd in range(size):
        with collective_raises(RuntimeError, match=r"cannot\s+be\s+pickled") as caught:
            dist.all_gather_object([None] * size, Unpicklable() if rank == odd else 1)
        assert isinstance(caught.value, dist.CollectiveMismatchError) == (rank != odd)
        with collective_raises(RuntimeError, match=r"cannot\s+be\s+pickled"):
            dist.broadcast_object_list([Unpicklable()], odd)
        with collective_raises(dist.CollectiveMismatchError, match="broadcast_object_list"):
            dist.broadcast_object_list([1] * (3 if rank == odd else 2), 0)
        gathered = [None] * size
        dist.all_gather_object(gathered, rank)
        assert gathered == list(range(size))


def in_threads(functions: list[Any]) -> None:
    """Run functions in threads at once; raise what the first of them raised."""
    errors: list[BaseException] = []

    def run(function: Any) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    run_threads(run, functions)
    if errors:
        raise errors[0]


def need_threads() -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI gives no MPI_THREAD_MULTIPLE")


def test_threads_each_on_a_group_of_its_own() -> None:
    """Several threads make collectives at once, each on its own group, in no order between them."""
    need_threads()
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group() for _ in range(4)]

    def work(which: int) -> None:
        for turn in range(15):
            for count in (3, 4000):
                x = np.full(count, float(rank + which))
                handle = dist.all_reduce(x, group=groups[which], async_op=(turn + which) % 3 == 0)
                if handle is not None:
                    handle.wait()
                assert (x == sum(r + which for r in range(size))).all(), f"thread {which}, turn {turn}, {count}"
            dist.barrier(groups[which])

    in_threads([lambda which=which: work(which) for which in range(4)])
    for group in groups:
        dist.destroy_process_group(group)


def test_threads_make_every_collective() -> None:
    """Two threads make every collective at once, on a group each."""
    need_threads()
    groups = [dist.new_group(), dist.new_group()]
    in_threads([lambda group=group: cases.every_collective(group, (3, 4000)) for group in groups])
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_threads_send_and_receive_at_once() -> None:
    """Threads exchange messages on one group, told apart by their tags."""
    need_threads()
    size, rank = dist.get_world_size(), dist.get_rank()
    before, after = (rank - 1) % size, (rank + 1) % size

    def work(tag: int) -> None:
        for turn in range(10):
            x = np.zeros(2)
            sent = dist.isend(np.array([rank, turn], float), after, tag=tag)
            assert dist.recv(x, before, tag=tag) == before
            sent.wait()
            assert (x == [before, turn]).all(), f"tag {tag}: {x}"

    in_threads([lambda tag=tag: work(tag) for tag in range(3)])


def test_a_work_may_be_waited_for_in_another_thread() -> None:
    """A Work issued by one thread may be waited for by another."""
    need_threads()
    x = np.ones(4000)
    work = dist.all_reduce(x, async_op=True)
    in_threads([lambda: work.wait(), lambda: work.get_future().result(20)])
    assert (x == dist.get_world_size()).all()
