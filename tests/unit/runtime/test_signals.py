"""What the library does with signals: handlers of the program's, in Python and in C, come through it unharmed."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

from mpicoll.runtime import signal_table
from mpicoll.runtime.signal_table import c_handler, unhandled
from mpicoll.runtime.signals import DeferredInterrupt, SignalShield

USED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _handlers_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in USED}
    yield
    for number, handler in before.items():
        faulthandler.unregister(number)
        signal.signal(number, handler)


@pytest.fixture
def guard() -> Iterator[DeferredInterrupt]:
    """A guard that has been installed, but for SIGINT, which is pytest's."""
    guard = DeferredInterrupt()
    guard.installed = True
    yield guard
    guard.disarm()


def test_signals_that_nobody_handles_are_noted_while_armed(guard: DeferredInterrupt) -> None:
    """Armed, SIGTERM and SIGUSR1 are noted; after it they have their default back, in Python and in C."""
    before = c_handler(signal.SIGTERM)
    assert unhandled(signal.SIGTERM)
    guard.arm()
    guard.arm()
    signal.raise_signal(signal.SIGTERM)
    noted = guard.pop()
    assert getattr(noted, "number", None) == signal.SIGTERM
    guard.disarm()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert c_handler(signal.SIGTERM) == before
    guard.arm()
    guard.ignore_news()
    guard.disarm()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    signal.raise_signal(signal.SIGUSR1)


def test_a_handler_in_c_is_left_alone(guard: DeferredInterrupt) -> None:
    """Where C handles a signal that Python calls default, arming, disarming and ignoring change nothing."""
    with tempfile.TemporaryFile() as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        assert not unhandled(signal.SIGUSR1)
        before = c_handler(signal.SIGUSR1)
        for change in (guard.arm, guard.ignore_news, guard.disarm):
            change()
            assert c_handler(signal.SIGUSR1) == before, change
        signal.raise_signal(signal.SIGUSR1)
        assert os.fstat(file.fileno()).st_size


def test_the_handler_of_mpi_comes_back(guard: DeferredInterrupt, monkeypatch: pytest.MonkeyPatch) -> None:
    """What MPI does on a signal is noted instead while armed, and done again afterwards."""
    with tempfile.TemporaryFile() as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        before = c_handler(signal.SIGUSR1)
        monkeypatch.setattr(signal_table, "library_of", lambda address: "libmpi.so.12")
        guard.arm()
        signal.raise_signal(signal.SIGUSR1)
        assert getattr(guard.pop(), "number", None) == signal.SIGUSR1
        assert not os.fstat(file.fileno()).st_size
        guard.disarm()
        assert c_handler(signal.SIGUSR1) == before
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR1)
        assert os.fstat(file.fileno()).st_size


def test_a_handler_in_c_that_comes_while_armed_stays(guard: DeferredInterrupt) -> None:
    """What C installs between arming and disarming, as out of a callback, is not taken away."""
    guard.arm()
    with tempfile.TemporaryFile() as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        before = c_handler(signal.SIGUSR1)
        guard.disarm()
        assert c_handler(signal.SIGUSR1) == before
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_the_shield_keeps_what_c_does_before_a_handler() -> None:
    """Under the shield and after it the C handler acts at once, and the Python handler that it calls when it may."""
    seen: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    with tempfile.TemporaryFile() as file:
        faulthandler.register(signal.SIGUSR2, file=file, chain=True)
        shield = SignalShield()
        with shield:
            signal.raise_signal(signal.SIGUSR2)
            first = os.fstat(file.fileno()).st_size
            assert first
            assert not seen
        assert seen == [signal.SIGUSR2]
        signal.raise_signal(signal.SIGUSR2)
        assert seen == [signal.SIGUSR2] * 2
        assert os.fstat(file.fileno()).st_size > first


def test_system_calls_go_on_where_the_program_asked_for_it() -> None:
    """signal.siginterrupt(number, False) holds after a call of the library: a read is not interrupted."""
    ran: list[float] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: ran.append(time.monotonic()))
    signal.siginterrupt(signal.SIGUSR2, False)
    with SignalShield():
        pass
    reading, writing = os.pipe()
    start = time.monotonic()
    threads = [
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR2)),
        threading.Timer(0.25, os.write, (writing, b"x")),
    ]
    for thread in threads:
        thread.start()
    os.read(reading, 1)
    for thread in threads:
        thread.join()
    os.close(reading)
    os.close(writing)
    assert ran
    assert ran[0] - start > 0.2


class Stop(Exception):
    """What a handler of the program raises."""


@pytest.mark.parametrize("strike", [1, 2, 3, 4])
def test_a_handler_that_raises_while_handlers_change(strike: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it strikes, going under the shield or coming out, all handlers are the program's again."""

    def stop(number: int, frame: object) -> None:
        raise Stop

    changed = 0
    real = signal_table.exchange

    def exchange(number: int, handler: object) -> None:
        nonlocal changed
        real(number, handler)
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            return
        changed += 1
        if changed == strike:  # taken are USR1, USR2, and given back in the same order
            signal.raise_signal(signal.SIGUSR1 if strike > 2 else signal.SIGUSR2)

    monkeypatch.setattr(signal_table, "exchange", exchange)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, stop)
    shield = SignalShield()
    inside = 0

    def call() -> None:
        nonlocal inside
        with shield:
            inside += 1

    with pytest.raises(Stop):
        call()
    assert inside == (strike > 1)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        assert signal.getsignal(number) is stop
    assert not shield.up
    with shield:
        assert signal.getsignal(signal.SIGUSR1) is not stop
        assert signal.getsignal(signal.SIGUSR2) is not stop
    assert signal.getsignal(signal.SIGUSR1) is stop


def test_every_handler_runs() -> None:
    """When signals have come, each one's handler runs, also behind one that raises."""
    seen: list[int] = []

    def stop(number: int, frame: object) -> None:
        seen.append(number)
        raise Stop

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, stop)

    def call() -> None:
        with SignalShield():
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(Stop):
        call()
    assert seen == [signal.SIGUSR2, signal.SIGUSR1]


def test_what_it_costs() -> None:
    """The shield takes microseconds, with a handler of the program's as well: it is put up in every call."""
    signal.signal(signal.SIGUSR2, lambda number, frame: None)
    shield, times = SignalShield(), []
    for _ in range(200):
        start = time.perf_counter()
        with shield:
            pass
        times.append(time.perf_counter() - start)
    assert sorted(times)[100] < 100e-6


def test_an_exception_that_strikes_as_a_call_ends_leaves_nobody_inside(guard: DeferredInterrupt) -> None:
    """Python runs handlers before the first line of ``__exit__``: what the guard holds then is dropped by the next to look."""

    def struck() -> None:
        guard.__enter__()

    struck()
    assert guard.depth == 1
    with guard:
        assert guard.depth == 1
        with guard:
            assert guard.depth == 2
        assert guard.depth == 1
    assert guard.depth == 0
    struck()
    with pytest.raises(KeyboardInterrupt):
        guard._handle(signal.SIGINT, sys._getframe())
