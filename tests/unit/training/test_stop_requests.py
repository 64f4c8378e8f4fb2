"""When the ranks agree on signals, and what is done when one comes: without MPI."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from mpicoll.runtime import signals
from mpicoll.runtime.signal_table import c_handler, unhandled
from mpicoll.runtime.signals import SignalNotes
from mpicoll.training.stop_requests import MOST_CALLS, calls_until_next

USED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def notes() -> Iterator[SignalNotes]:
    before = {number: signal.getsignal(number) for number in USED}
    yield SignalNotes()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_calls_until_next() -> None:
    """About a second, from one call to sixteen, and never more than twice as many as before."""
    assert calls_until_next(60.0, 16) == 1
    assert calls_until_next(0.3, 16) == 3
    assert calls_until_next(1e-6, 1) == 2
    assert calls_until_next(0.0, 16) == MOST_CALLS
    for before in range(1, MOST_CALLS + 1):
        for seconds in (0.0, 1e-9, 0.01, 0.0625, 0.5, 0.99, 1.01, 1e6):
            calls = calls_until_next(seconds, before)
            assert 1 <= calls <= min(MOST_CALLS, 2 * before)
            assert calls == 1 or calls * seconds <= 1.0


def test_noted_until_released(notes: SignalNotes) -> None:
    """Held, a signal leaves a note and nothing else; released by all who hold it, it is the program's again."""
    seen: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    mine = signal.getsignal(signal.SIGUSR2)
    before = c_handler(signal.SIGUSR1)
    held = [notes.start(USED, free=False), notes.start((signal.SIGUSR2,), free=False)]
    for number in USED:
        signal.raise_signal(number)
    assert set(notes.came) == set(USED)
    assert not seen
    notes.stop(held[0])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert c_handler(signal.SIGUSR1) == before
    signal.raise_signal(signal.SIGUSR2)
    assert not seen
    notes.stop(held[1])
    assert not notes.active
    assert not notes.came
    assert signal.getsignal(signal.SIGUSR2) is mine
    signal.raise_signal(signal.SIGUSR2)
    assert seen == [signal.SIGUSR2]


def test_only_what_nobody_handles(notes: SignalNotes) -> None:
    """Where the program did not ask for it, its own handlers stay."""
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    mine = signal.getsignal(signal.SIGUSR1)
    held = notes.start((signal.SIGTERM, signal.SIGUSR1), free=True)
    assert held == (signal.SIGTERM,)
    assert signal.getsignal(signal.SIGUSR1) is mine
    notes.stop(held)
    assert unhandled(signal.SIGTERM)


def test_a_handler_that_came_later_stays(notes: SignalNotes) -> None:
    """What the program installs while a signal is held is not taken away."""
    held = notes.start((signal.SIGUSR2,), free=False)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    notes.stop(held)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


def test_a_later_sigterm_ends(notes: SignalNotes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the same cause does not; SIGUSR1 never does; one that nobody holds any more does what it does by default."""
    ended: list[int] = []
    monkeypatch.setattr(signals, "end_by", ended.append)
    held = notes.start((signal.SIGTERM, signal.SIGUSR1), free=False)
    for number in held:
        notes.note(number, None)
        notes.note(number, None)
    assert not ended
    for number in held:
        notes.came[number] -= notes.AGAIN_AFTER + 1
        notes.note(number, None)
    assert ended == [signal.SIGTERM]
    released = threading.Thread(target=notes.stop, args=(held,))
    released.start()
    released.join()
    assert signal.getsignal(signal.SIGUSR1) == notes.note  # only the main thread could change that
    notes.note(signal.SIGUSR1, None)
    assert ended == [signal.SIGTERM, signal.SIGUSR1]


def test_what_a_step_has_answered(notes: SignalNotes) -> None:
    """A signal that comes here after all ranks have answered it is not waited for; registered anew it is."""
    held = notes.start((signal.SIGTERM, signal.SIGUSR1), free=False)
    notes.note(signal.SIGUSR1, None)
    assert set(notes.unanswered) == {signal.SIGUSR1}
    notes.agreed(signal.SIGUSR1)
    notes.agreed(signal.SIGTERM)
    for number in held:
        notes.note(number, None)
    assert not notes.unanswered
    notes.stop(held)
    held = notes.start((signal.SIGTERM,), free=False)
    notes.note(signal.SIGTERM, None)
    assert set(notes.unanswered) == {signal.SIGTERM}
    notes.stop(held)


def test_a_forked_child_ends_by_its_signals(monkeypatch: pytest.MonkeyPatch, notes: SignalNotes) -> None:
    """Held signals are given back in a child, as workers are ended by SIGTERM."""
    monkeypatch.setattr(signals, "notes", notes)
    held = notes.start((signal.SIGTERM,), free=False)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == notes.note
    notes.stop(held)
