"""Random programs in which one rank makes one call more, one less, or another one, and catches every error."""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import mpicoll as dist
from mpicoll.operations.work import is_over
from mpicoll.runtime import waiting

pytestmark = pytest.mark.mpi(min_size=2)

LIMIT = timedelta(seconds=1)
"""For the calls at the end that another rank does not make."""
KINDS = ("sum", "max", "gather")


class Program:
    """The calls of one rank on a group. Each call moves its number since the last error that this rank was told of."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.number = 0
        self.pending: list[tuple[Any, Any, int]] = []
        self.errors: list[BaseException] = []
        self.dropped: list[Any] = []

    def make(self, kind: str, asynchronous: bool) -> None:
        """Make a call; an error ends the numbering."""
        self.number += 1
        size, me, number = self.group.size(), self.group.rank(), self.number
        mine, result = np.zeros(size), np.zeros(size)
        mine[me] = number
        try:
            if kind == "gather":
                work = dist.all_gather_single(result, mine[me : me + 1], self.group, asynchronous)
            else:
                result, op = mine, dist.ReduceOp.SUM if kind == "sum" else dist.ReduceOp.MAX
                work = dist.all_reduce(mine, op, self.group, asynchronous)
        except dist.DistError as error:
            self.told(error)
            return
        if work is None:
            check(result, number)
        else:
            self.pending.append((work, result, number))

    def wait(self) -> None:
        """Wait for the call that is pending longest."""
        work, result, number = self.pending.pop(0)
        try:
            work.wait()
        except dist.DistError as error:
            self.told(error)
        else:
            check(result, number)

    def look(self) -> None:
        """Look at the call that is pending longest, without learning its error."""
        try:
            if not is_over(self.pending[0][0]):
                self.pending[0][0].get_future()
        except dist.DistError as error:  # the call can never complete
            self.told(error)

    def drop(self) -> None:
        """Drop the call that is pending longest."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            work, _, _ = self.pending.pop(0)
            self.dropped.append(work._request)
            del work

    def told(self, error: dist.DistError) -> None:
        if not any(error is known for known in self.errors):
            self.errors.append(error)
            self.number = 0


def check(result: Any, number: int) -> None:
    assert (result == number).all(), f"call {number} has a result of calls {result}"


def steps_of(draw: random.Random) -> list[tuple[str, str]]:
    """Return the steps of a program: blocking and asynchronous calls, and waits."""
    pending, steps = 0, []
    kinds = KINDS[: draw.choice([1, 1, 3])]
    for _ in range(draw.randint(2, 7)):
        how = draw.choice(["blocking", "asynchronous", "asynchronous"])
        steps.append((draw.choice(kinds), how))
        pending += how == "asynchronous"
        if pending and draw.random() < 0.3:
            steps.append(("", "look"))
        if draw.random() < 0.2:
            steps.append(("", "progress"))
        while pending and draw.random() < 0.3:
            steps.append(("", draw.choice(["wait", "wait", "drop"])))
            pending -= 1
    return steps


@pytest.mark.parametrize("seed", [pytest.param(each, marks=[pytest.mark.slow] * (each > 5)) for each in range(24)])
def test_no_result_is_of_calls_with_another_number(seed: int) -> None:
    """A call that returns has moved the data of the calls with its number since the last error that this rank was told of."""
    draw = random.Random(seed)
    steps = steps_of(draw)
    calls = [at for at, (kind, _) in enumerate(steps) if kind]
    odd, at, change = (
        draw.randrange(dist.get_world_size()),
        draw.choice(calls),
        draw.choice(["added", "dropped", "swapped"]),
    )
    if dist.get_rank() == odd:
        if change == "added":
            steps.insert(at, (draw.choice(KINDS), draw.choice(["blocking", "asynchronous"])))
        elif change == "dropped":
            del steps[at]
        else:
            steps[at] = draw.choice(KINDS), draw.choice(["blocking", "asynchronous"])
    group = dist.new_group(timeout=LIMIT)
    program = Program(group)
    for kind, how in steps:
        if kind:
            program.make(kind, how == "asynchronous")
        elif how == "progress":
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                waiting.progress()  # as a wait for something else
        elif program.pending:
            getattr(program, how)()
    while program.pending:
        program.wait()
    for request in program.dropped:
        with contextlib.suppress(dist.DistError):
            request.complete()
    group.unwaited.clear()  # dropped calls are an error at the end
    usable = [error for error in program.errors if isinstance(error, dist.CollectiveMismatchError)]
    for error in usable:
        says = str(error)
        assert ("can still be used" in says) != ("The group is broken now" in says), says


def test_the_example_of_one_call_more() -> None:
    """One rank makes one all_reduce more and catches its error; the others have three equal ones pending, and all raise."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=LIMIT)
    if me == 0:
        with pytest.raises(dist.CollectiveMismatchError, match=r"The group is broken now: ranks? 1.* pending"):
            dist.all_reduce(np.ones(7), group=group)
    arrays = [np.full(3, 10.0 * (number + 1)) for number in range(3)]
    if me == 0:
        for x in arrays:
            reason = r"calls of it were pending .*\(call 1, on this rank all_reduce at .*: its CollectiveMismatchError"
            with pytest.raises(dist.GroupBrokenError, match=reason):
                dist.all_reduce(x, group=group)
        return
    works = [dist.all_reduce(x, group=group, async_op=True) for x in arrays]
    for number, work in enumerate(works):
        assert work is not None
        with pytest.raises(dist.GroupBrokenError if number else dist.CollectiveMismatchError):
            work.wait()
    assert size > 1


@pytest.mark.parametrize("look", ["is_over", "get_future", "dropped"])
def test_the_next_call_tells_of_a_mismatch_that_the_program_does_not_know(look: str) -> None:
    """A call that a rank makes before it knows that its last one failed would pair off with the next call of another rank."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=LIMIT)
    first, second = np.full(3, 10.0), np.full(3, 80.0)
    if me == 0:
        with pytest.raises(dist.CollectiveMismatchError, match="can still be used"):
            dist.all_reduce(np.ones(7), group=group)
        dist.barrier()
        dist.all_reduce(first, group=group)
        assert (first == 10 * size).all(), first
        return
    work: Any = dist.all_reduce(first, group=group, async_op=True)
    if look == "is_over":
        is_over(work)  # what is_completed of a torch Work does
    elif look == "get_future":
        work.get_future()
    else:
        with pytest.warns(ResourceWarning):
            del work
        group.unwaited.clear()  # else an error at the end
    dist.barrier()
    with pytest.raises(dist.CollectiveMismatchError, match="can still be used") as caught:
        dist.all_reduce(second, group=group, async_op=look == "get_future")
    assert (second == 80).all(), second
    if look != "dropped":
        with pytest.raises(dist.CollectiveMismatchError) as again:
            work.wait()
        assert again.value is caught.value
    dist.all_reduce(first, group=group)
    assert (first == 10 * size).all(), first


def test_a_call_while_the_members_exchange_their_calls() -> None:
    """A rank that makes a call while the exchange waits for another member gets the error of the exchange."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=10 * LIMIT)
    first, second = np.full(3, 10.0), np.full(3, 80.0)
    if me == 0:
        with pytest.raises(dist.CollectiveMismatchError, match="can still be used"):
            dist.all_reduce(np.ones(7), group=group)
    elif me == 1 and size > 2:
        work: Any = dist.all_reduce(first, group=group, async_op=True)
        end = time.monotonic() + 30
        while group.unknown_mismatch is None and not is_over(work):
            assert time.monotonic() < end
        try:
            work.get_future().result(timeout=0.05)
        except TimeoutError:  # the exchange waits for the ranks that sleep
            with pytest.raises(dist.CollectiveMismatchError, match="can still be used") as caught:
                dist.all_reduce(second, group=group, async_op=True)
            assert work.exception() is caught.value
        except dist.CollectiveMismatchError:
            pass  # between nodes a rank may learn of the difference after the ranks that sleep have woken up
    else:
        work = dist.all_reduce(first, group=group, async_op=True)
        time.sleep(1)
        with pytest.raises(dist.CollectiveMismatchError, match="can still be used"):
            work.wait()
    dist.all_reduce(first, group=group)
    assert (first == 10 * size).all(), first


def test_an_outcome_that_the_program_has_looked_at_is_raised_once() -> None:
    """After ``exception()`` or a future's ``exception()`` the next call is made."""
    me, size = dist.get_rank(), dist.get_world_size()
    for number, look in enumerate(
        (
            lambda work: work.exception(),
            lambda work: work.get_future().exception(),
        )
    ):
        group = dist.new_group(timeout=10 * LIMIT)
        x = np.full(3, 10.0)
        if me == 0:
            with pytest.raises(dist.CollectiveMismatchError):
                dist.all_reduce(np.ones(7), group=group)
        else:
            work: Any = dist.all_reduce(x, group=group, async_op=True)
            while not is_over(work):
                time.sleep(0.001)
            assert look(work), number
        dist.all_reduce(x, group=group)
        assert (x == 10 * size).all(), (number, x)


def test_polling_raises_the_mismatch() -> None:
    """A program that goes on when ``is_completed`` returns True has the result, or was told the error."""
    me = dist.get_rank()
    group = dist.new_group(timeout=10 * LIMIT)
    work: Any = dist.all_reduce(np.ones(3 + (me == 1)), group=group, async_op=True)
    with pytest.raises(dist.CollectiveMismatchError, match="can still be used"):
        while not work.is_completed():
            time.sleep(0.001)
    assert work.is_completed()


def test_is_success_tells_no_error() -> None:
    """False is returned for a pending call, too: the error is raised later."""
    me = dist.get_rank()
    group = dist.new_group(timeout=10 * LIMIT)
    work: Any = dist.all_reduce(np.ones(3 + (me == 1)), group=group, async_op=True)
    while not is_over(work):
        assert not work.is_success()
        time.sleep(0.001)
    assert not work.is_success()
    with pytest.raises(dist.CollectiveMismatchError, match="can still be used"):
        work.is_completed()
    assert not work.is_success()
    x = np.full(3, 10.0)
    dist.all_reduce(x, group=group)
    assert (x == 10 * dist.get_world_size()).all()
    assert isinstance(work.exception(), dist.CollectiveMismatchError)
    assert not work.is_success()
    dist.all_reduce(np.ones(3), group=group)


def test_the_end_of_a_group_raises_an_error_that_the_program_does_not_know() -> None:
    """``destroy_process_group`` raises the error of a call that nobody has waited for, once."""
    me = dist.get_rank()
    group = dist.new_group(timeout=10 * LIMIT)
    work: Any = dist.all_reduce(np.ones(3 + (me == 1)), group=group, async_op=True)
    future = work.get_future()
    while not future.done():
        time.sleep(0.001)
    with pytest.raises(dist.CollectiveMismatchError, match="can still be used"):
        dist.destroy_process_group(group)
    dist.all_reduce(np.ones(3), group=group)
    dist.destroy_process_group(group)
