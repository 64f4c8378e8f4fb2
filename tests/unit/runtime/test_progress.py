"""The progress thread, on operations that are made up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from polling import until

from mpicoll.runtime import waiting
from mpicoll.runtime.progress import FIRST_NAP, MOST_AT_ONCE, MOST_NAP, NAME, ProgressThread, nap


class Made:
    """An operation that is done when it has been looked at so many times."""

    def __init__(self, looks: int, raises: BaseException | None = None) -> None:
        self.looks = looks
        self.done = False
        self.error: BaseException | None = None
        self.group = SimpleNamespace(broken=None)
        self.threads: set[str] = set()
        self._raises = raises

    def Test(self) -> bool:
        """Be looked at once more."""
        self.threads.add(threading.current_thread().name)
        self.looks -= 1
        self.done = self.looks <= 0
        if self.done and self._raises is not None:
            raise self._raises
        return self.done


@pytest.fixture
def mover() -> Iterator[ProgressThread]:
    """A thread of no library."""
    made = ProgressThread(lambda: False)
    yield made
    made.stop()


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_naps() -> None:
    """They grow with the time for which nothing has ended, and are short while something moves."""
    assert nap(0.0, False) == FIRST_NAP
    assert nap(0.01, False) < nap(0.05, False) < nap(10.0, False) == MOST_NAP
    assert nap(10.0, True) <= FIRST_NAP


def test_it_begins_with_the_first_operation_and_ends_when_told(mover: ProgressThread) -> None:
    """Before there is no thread; afterwards there is none either, and it can begin again."""
    assert not running()
    for _ in range(2):
        operations: Any = [Made(3), Made(1), Made(7)]
        for each in operations:
            mover.begun(each)
        assert until(lambda made=operations: all(each.done for each in made))  # type: ignore[misc]
        assert all(each.threads == {NAME} for each in operations)
        assert len(running()) == 1
        mover.stop()
        assert not running()


def test_it_takes_them_out_of_what_is_pending(mover: ProgressThread) -> None:
    """What it has moved to its end no wait looks at any more."""
    operation: Any = Made(5)
    waiting.pending.append(operation)
    mover.begun(operation)
    assert until(lambda: operation not in waiting.pending)
    assert operation.done


def test_all_of_very_many_are_looked_at(mover: ProgressThread) -> None:
    """Also those behind some that do not end."""
    stuck: list[Any] = [Made(1 << 60) for _ in range(2 * MOST_AT_ONCE)]
    operations: list[Any] = [Made(2) for _ in range(2 * MOST_AT_ONCE)]
    for each in (*stuck, *operations):
        mover.begun(each)
    assert until(lambda: all(each.done for each in operations))
    assert not any(each.done for each in stuck)


def test_it_leaves_broken_groups_alone(mover: ProgressThread) -> None:
    """An operation of a group that was given up is its wait's."""
    broken: Any = Made(3)
    broken.group.broken = "it was given up"
    good: Any = Made(3)
    mover.begun(broken)
    mover.begun(good)
    assert until(lambda: good.done)
    assert not broken.threads


def test_it_stands_back() -> None:
    """While another thread moves everything on it looks at nothing."""
    waits = [True]
    mover = ProgressThread(lambda: waits[0])
    operation: Any = Made(1)
    mover.begun(operation)
    time.sleep(0.05)
    assert not operation.threads
    waits[0] = False
    assert until(lambda: operation.done)
    mover.stop()


def test_it_rests(mover: ProgressThread) -> None:
    """Nothing is looked at within the block."""
    operation: Any = Made(1 << 60)
    mover.begun(operation)
    assert until(lambda: bool(operation.threads))
    with mover.resting():
        looks = operation.looks
        time.sleep(0.05)
        assert operation.looks == looks
    assert until(lambda: operation.looks < looks)


def test_what_a_callback_raises_is_told(mover: ProgressThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to threading.excepthook, and the thread goes on; what an operation ends with is not told, but kept."""
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: told.append(arguments.exc_value))
    ends_badly, callback = MemoryError("the operation"), SystemExit("the callback")
    first: Any = Made(1, ends_badly)
    first.error = ends_badly
    second: Any = Made(1, callback)
    last: Any = Made(3)
    for each in (first, second, last):
        mover.begun(each)
    assert until(lambda: last.done)
    assert told == [callback]


def test_stopped_from_within(mover: ProgressThread) -> None:
    """A callback may end it."""

    class Stops(Made):
        def Test(self) -> bool:
            mover.stop()
            return super().Test()

    operation: Any = Stops(1)
    mover.begun(operation)
    assert until(lambda: operation.done and not running())


def test_no_more_threads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no thread can be started the program goes on without, and one line says so."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    mover = ProgressThread(lambda: False)
    monkeypatch.setattr(waiting, "progress_thread", mover)
    monkeypatch.setattr(threading.Thread, "start", start)
    operation: Any = Made(1)
    mover.begun(operation)
    assert waiting.progress_thread is None
    assert capsys.readouterr().err == "mpicoll: MPICOLL_PROGRESS=thread has no effect: can't start new thread\n"
