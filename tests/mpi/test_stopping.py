"""Signals and the time limit: what one rank hears all answer, at the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import mpicoll as dist
from mpicoll.groups import registry
from mpicoll.pytest_plugin import collective_raises
from mpicoll.runtime.signals import notes
from mpicoll.training import stop_requests, time_limit

pytestmark = pytest.mark.mpi

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture(autouse=True)
def _removed() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (TERM, USR1, USR2)]
    yield
    dist.on_signal(None)
    assert not notes.active
    assert [signal.getsignal(number) for number in (TERM, USR1, USR2)] == before


def to_me(number: int) -> None:
    os.kill(os.getpid(), number)


def same_everywhere(value: int, group: Any = None) -> bool:
    """Whether all ranks have the same number; tells them nothing else (no barrier)."""
    both = np.array([value, -value])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return bool(both[0] == -both[1])


def test_one_rank_hears_all_stop_at_the_same_call() -> None:
    """The signal of each rank in turn ends the loop of all at the same step, within 16, and the handler runs there once."""
    size, me = dist.get_world_size(), dist.get_rank()
    for victim in range(size):
        seen: list[tuple[int, int]] = []
        steps = [0]

        def handler(number: int, seen: list[tuple[int, int]] = seen, steps: list[int] = steps) -> None:
            seen.append((number, steps[0]))
            dist.all_reduce(np.ones(3))  # collectives may be made there

        dist.on_signal(handler)
        while not dist.should_stop():
            steps[0] = step = steps[0] + 1
            if step == 37 + victim and me == victim:
                to_me(TERM if victim % 2 else USR1)
            assert step < 1000, victim
        step = steps[0]
        assert 37 + victim <= step <= 37 + victim + 16, (victim, step)
        assert seen == [(TERM if victim % 2 else USR1, step)], (victim, step, seen)
        assert same_everywhere(step), (victim, step)
        for _ in range(20):  # true from then on
            assert dist.should_stop()
        assert len(seen) == 1


def test_alone() -> None:
    """``while not should_stop()`` works without a handler, on the world and on a group, each for itself."""
    size, me = dist.get_world_size(), dist.get_rank()
    reverse = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    for group in (None, reverse):
        steps = 0
        while not dist.should_stop(group):
            steps += 1
            if steps == 20 and me == size - 1:
                to_me(USR1)
        assert same_everywhere(steps, group)
    dist.destroy_process_group(reverse)
    assert signal.getsignal(USR1) == notes.note  # the world's still


def test_barriers_carry_it() -> None:
    """A signal is answered in the next barrier of the group, also with a name and a limit; not in one that is asynchronous."""
    me = dist.get_rank()
    seen: list[int] = []
    dist.on_signal(seen.append, [USR1, USR2])
    calls: list[Callable[[], Any]] = [dist.barrier, lambda: dist.barrier(name="end", timeout=LONG)]
    for number, call in zip((USR1, USR2), calls, strict=True):
        for _ in range(3):
            call()
        assert number not in seen
        if me == 0:
            to_me(number)
        work = dist.barrier(async_op=True)
        assert work is not None
        work.wait()
        assert number not in seen
        call()
        assert seen[-1] == number, seen
    assert seen == [USR1, USR2]
    assert dist.should_stop()


LONG = timedelta(seconds=60)


def test_several_signals_at_once() -> None:
    """Each is answered once on every rank, in the same order, though two ranks hear different ones and one hears both."""
    size, me = dist.get_world_size(), dist.get_rank()
    seen: list[int] = []
    dist.on_signal(seen.append, (TERM, USR1, USR2))
    dist.barrier()
    for number in ((USR1, TERM), (USR2,))[me % 2]:
        to_me(number)
    for _ in range(40):
        dist.should_stop()
    assert sorted(seen) == sorted((TERM, USR1, USR2) if size > 1 else (TERM, USR1)), seen
    assert same_everywhere(int("".join(f"{number:02}" for number in seen)))


def test_slow_steps_agree_more_often() -> None:
    """Where one rank's steps take long the ranks agree at every call, on all alike."""
    me = dist.get_rank()
    dist.on_signal(lambda number: None)
    for _ in range(50):
        dist.should_stop()
    registered = registry.state().world.stopping
    assert isinstance(registered, stop_requests.OnSignal)
    assert same_everywhere(registered.passes)
    while registered.passes:
        dist.should_stop()
    dist.should_stop()
    assert same_everywhere(registered.passes)
    while registered.passes:
        dist.should_stop()
    if me == 0:
        registered._agreed_at -= 3600  # as if the last steps had taken an hour
    dist.should_stop()
    assert registered.passes == 0
    assert same_everywhere(registered.passes)


def test_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time than ``before`` on one rank is the end for all; more is not, nor is no limit at all."""
    size, me = dist.get_world_size(), dist.get_rank()
    monkeypatch.setattr(time_limit, "clock", time_limit.Clock({}, lambda command: ""))
    assert dist.time_left() is None
    for _ in range(5):
        assert not dist.should_stop(before=60)
    left = 30 if me == size - 1 else 3600
    monkeypatch.setattr(time_limit, "clock", time_limit.Clock({"MPICOLL_JOB_END": str(time.time() + left)}))
    assert left - 20 < (dist.time_left() or 0) <= left
    steps = 0
    while not dist.should_stop(before=60):
        steps += 1
        assert steps < 100
    assert same_everywhere(steps)


def test_only_the_first_rank_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch system is asked by one rank of the group, once, and all know."""
    asked: list[Any] = []

    def answer(command: Any) -> str:
        asked.append(command)
        return "7 0:30"

    monkeypatch.setattr(time_limit, "clock", time_limit.Clock({"SLURM_JOB_ID": "7"}, answer))
    for _ in range(20):
        dist.should_stop(before=60)
    assert dist.should_stop(before=60)
    assert len(asked) == (dist.get_rank() == 0)


@pytest.mark.mpi(min_size=2)
def test_left_out() -> None:
    """A rank that does not call it where the others agree is named, and the group can be used."""
    me = dist.get_rank()
    dist.on_signal(lambda number: None)
    x = np.ones(2)
    with collective_raises(dist.CollectiveMismatchError, match="should_stop") as caught:
        if me:
            dist.should_stop()
        else:
            dist.all_reduce(x)
    assert 0 in caught.value.ranks
    dist.barrier()
    with collective_raises(dist.CollectiveMismatchError, match="USR2"):
        dist.on_signal(print, [USR1] if me else [USR2])
    with collective_raises(dist.CollectiveMismatchError, match="before"):
        for _ in range(17):
            dist.should_stop(before=1e-6 if me else None)


@pytest.mark.mpi(min_size=2)
def test_inside_a_block_that_one_rank_runs_first() -> None:
    """It is refused there, between two agreements as well: the others do not call it, and count their calls."""
    dist.on_signal(lambda number: None)
    for _ in range(40):
        dist.should_stop()
    with collective_raises(dist.DistError), dist.zero_first() as turn:
        if turn.is_leader:
            dist.should_stop()
    for _ in range(40):
        assert not dist.should_stop()


def test_wrong_arguments() -> None:
    """They raise on all ranks, leave no handler behind, and the group can be used."""
    me, size = dist.get_rank(), dist.get_world_size()
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (TypeError, lambda: dist.on_signal(7)),  # type: ignore[arg-type]
        (TypeError, lambda: dist.on_signal(print, 15)),  # type: ignore[arg-type]
        (TypeError, lambda: dist.on_signal(print, ["SIGTERM"])),  # type: ignore[list-item]
        (ValueError, lambda: dist.on_signal(print, [signal.SIGKILL])),
        (ValueError, lambda: dist.on_signal(print, [4711])),
        (ValueError, lambda: dist.on_signal(print, [])),
        (TypeError, lambda: dist.should_stop(before="60")),  # type: ignore[arg-type]
        (ValueError, lambda: dist.should_stop(before=-1)),
        (ValueError, lambda: dist.should_stop(before=float("nan"))),
    ]
    for odd in {0, size - 1}:
        for i, (kind, call) in enumerate(wrong):
            right = (lambda: dist.on_signal(print)) if i < 6 else dist.should_stop
            with collective_raises(kind if me == odd else dist.CollectiveMismatchError):
                if me == odd:
                    call()
                else:
                    right()
            assert not notes.active, (i, odd)
            dist.barrier()
    with pytest.raises(ValueError, match="group"):
        dist.should_stop(group="world")


def test_only_the_main_thread_takes_signals() -> None:
    """The first call in another thread raises on all ranks; after on_signal() any thread may ask."""
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            caught.append(RuntimeError(str(dist.should_stop())))
        except RuntimeError as error:
            caught.append(error)

    def in_thread() -> str:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return str(caught.pop())

    assert "main thread" in in_thread()
    dist.on_signal(lambda number: None)
    assert in_thread() == "False"


def test_a_signal_before_another_registration() -> None:
    """What came and was not answered is answered by the handler that takes the place of the one before, or of none."""
    for first in (None, dist.should_stop, lambda: dist.on_signal(print)):
        seen: list[int] = []
        if first is not None:
            first()
            if dist.get_rank() == 0:
                to_me(USR1)
        dist.on_signal(seen.append)
        dist.barrier()
        assert seen == ([] if first is None else [USR1])
        dist.barrier()
        assert len(seen) <= 1
        dist.on_signal(seen.append)  # anew: what has been answered is not answered again
        dist.barrier()
        assert len(seen) <= 1
        dist.on_signal(None)


def test_removal() -> None:
    """The handle, a block, None, another registration and the end of the group give the signals back."""
    mine: list[int] = []
    before = signal.signal(USR2, lambda number, frame: mine.append(number))
    try:
        ours = signal.getsignal(USR2)
        seen: list[int] = []
        handle = dist.on_signal(seen.append, [USR2])
        assert handle is not None
        assert signal.getsignal(USR2) != ours
        dist.on_signal(seen.append, [USR2])  # another one in its place, with the notes gone
        dist.on_signal(None)
        assert signal.getsignal(USR2) is ours
        with dist.on_signal(seen.append, [USR2]):  # type: ignore[union-attr]
            to_me(USR2)
            dist.barrier()
        assert (seen, mine) == ([USR2], [])
        to_me(USR2)
        assert mine == [USR2]
        group = dist.new_group()
        dist.on_signal(seen.append, [USR2], group=group)
        dist.destroy_process_group(group)
        assert signal.getsignal(USR2) is ours
        assert dist.on_signal(None) is None  # there is none
    finally:
        signal.signal(USR2, before)


def test_every_check_level() -> None:
    """The ranks agree at levels ``roll`` and ``off``, too, between calls that are not compared."""
    me, size = dist.get_rank(), dist.get_world_size()
    for level in ("roll", "off"):
        dist.destroy_process_group()
        dist.init_process_group(check=level)  # type: ignore[arg-type]
        steps = 0
        seen: list[int] = []
        dist.on_signal(seen.append)
        x = np.ones(4)
        while not dist.should_stop():
            dist.all_reduce(x, dist.ReduceOp.MAX)
            steps += 1
            if steps == 25 and me == size - 1:
                to_me(USR1)
        assert same_everywhere(steps), (level, steps)
        assert seen == [USR1]
    dist.destroy_process_group()
    dist.init_process_group()


def test_asynchronous_calls_around_it() -> None:
    """Operations under way do not keep the ranks from agreeing on the same step."""
    me, size = dist.get_rank(), dist.get_world_size()
    seen: list[int] = []
    dist.on_signal(seen.append)
    steps = 0
    while not dist.should_stop():
        x = np.ones(1000)
        work = dist.all_reduce(x, async_op=True)
        if steps % 3 == 0:
            dist.barrier()  # with an operation under way it answers nothing
        steps += 1
        if steps == 10 and me == size // 2:
            to_me(TERM)
        done = dist.should_stop()
        assert work is not None
        work.wait()
        if done:
            break
        assert steps < 100
    assert same_everywhere(steps)
    assert seen == [TERM]


def test_a_handler_that_raises() -> None:
    """What it raises comes out of the step, on all ranks, and the group can be used."""

    def stop(number: int) -> None:
        raise SystemError(number)

    for step in (dist.should_stop, dist.barrier):
        dist.on_signal(stop)
        if dist.get_rank() == 0:
            to_me(USR1)
        with collective_raises(SystemError, match=str(int(USR1))):
            for _ in range(17):
                step()
        dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_signals_are_noted_once_the_registration_has_returned_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank notes them before the ranks agree, so none is lost on one that is slow; not where they do not agree."""
    agree = stop_requests.composed.agree
    noted = []

    def watched(*given: Any) -> Any:
        noted.append(notes.has(USR1))
        if dist.get_rank() == 1:
            to_me(USR1)  # another rank may be through already
        return agree(*given)

    before = signal.getsignal(USR1)
    with monkeypatch.context() as patched:
        patched.setattr(stop_requests.composed, "agree", watched)
        dist.on_signal(lambda number: None, [USR1])
    assert noted == [True]
    assert [dist.should_stop() for _ in range(20)][-1]
    dist.on_signal(None)
    with collective_raises(dist.CollectiveMismatchError):
        dist.on_signal(lambda number: None, [USR1 if dist.get_rank() else USR2])
    assert signal.getsignal(USR1) == before
