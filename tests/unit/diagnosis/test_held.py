"""Threads that are held by a thread that waits in the library, and threads that stand for an unknown reason."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool

import numpy as np
import pytest

import mpicoll as dist
from mpicoll.diagnosis import held
from mpicoll.diagnosis.held import held_by, standing_beside
from mpicoll.diagnosis.standing import idles


class Waiter:
    """A function that waits, in place of a call of the library, until ``release``."""

    def __init__(self) -> None:
        self.released, self.began = threading.Event(), threading.Event()
        self.ident = 0

    def wait(self, *_: object) -> None:
        self.ident = threading.get_ident()
        self.began.set()
        self.released.wait()


def _join(waiter: Waiter) -> None:
    thread = threading.Thread(target=waiter.wait)
    thread.start()
    thread.join()


def _join_with_limit(waiter: Waiter) -> None:
    thread = threading.Thread(target=waiter.wait)
    thread.start()
    thread.join(20)


def _future(waiter: Waiter) -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(waiter.wait).result()


def _future_of_another_call(waiter: Waiter) -> None:
    done = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(lambda: (waiter.wait(), done.set()))
        pool.submit(done.wait).result()


def _with_pool(waiter: Waiter) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(waiter.wait)


def _apply(waiter: Waiter) -> None:
    with ThreadPool(2) as pool:
        pool.apply(waiter.wait)


def _map(waiter: Waiter) -> None:
    with ThreadPool(2) as pool:
        pool.map(lambda part: part or waiter.wait(), [1, 0, 2])


def _apply_another_call(waiter: Waiter) -> None:
    done = threading.Event()
    with ThreadPool(2) as pool:
        pool.apply_async(lambda: (waiter.wait(), done.set()))
        pool.apply(done.wait)


def _event(waiter: Waiter) -> None:
    done = threading.Event()
    threading.Thread(target=lambda: (waiter.wait(), done.set())).start()
    done.wait()


HELD: dict[str, Callable[[Waiter], None]] = {
    "a join": _join,
    "a future": _future,
    "the end of a pool": _with_pool,
    "a result": _apply,
    "results": _map,
}

NOT_HELD: dict[str, Callable[[Waiter], None]] = {
    "a join with a limit": _join_with_limit,
    "a future of another call": _future_of_another_call,
    "a result of another call": _apply_another_call,
    "an event": _event,
}


@contextmanager
def _thread(target: Callable[[Waiter], None]) -> Iterator[tuple[int, Waiter]]:
    """Yield a thread that runs ``target``, and what it waits for."""
    waiter = Waiter()
    thread = threading.Thread(target=target, args=(waiter,))
    thread.start()
    try:
        waiter.began.wait(20)
        yield thread.ident or 0, waiter
    finally:
        waiter.released.set()
        thread.join(30)


def _comes(condition: Callable[[], object]) -> bool:
    end = time.monotonic() + 20
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("name", HELD)
def test_a_thread_that_is_held(name: str) -> None:
    """Directly, and through a thread that joins it."""

    def join(waiter: Waiter) -> None:
        thread = threading.Thread(target=HELD[name], args=(waiter,))
        thread.start()
        thread.join()

    for target in (HELD[name], join):
        with _thread(target) as (ident, waiter):
            assert _comes(lambda ident=ident, waiter=waiter: ident in held_by(sys._current_frames(), {waiter.ident}))
            assert held_by(sys._current_frames(), set()) == set()


@pytest.mark.parametrize("name", NOT_HELD)
def test_a_thread_that_is_not_held(name: str) -> None:
    """A limit ends the wait, and it is not known who sets an event."""
    with _thread(NOT_HELD[name]) as (ident, waiter):
        time.sleep(0.2)
        assert ident not in held_by(sys._current_frames(), {waiter.ident})


def _beat() -> None:
    while not STOP.wait(0.05):
        pass


def _send_late() -> None:
    if not STOP.wait(20):
        dist.send(np.ones(1), 0)


STOP = threading.Event()


def test_threads_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that have made no call and lead to none do not count; threads and handlers that may make a call do."""
    monkeypatch.setattr(held, "ASK_EVERY", 0.0)
    before = signal.getsignal(signal.SIGUSR2)

    def look(*beside: threading.Thread, users: tuple[int, ...] = ()) -> bool:
        idents = [ident, *(thread.ident for thread in beside)]
        return bool(standing_beside(sys._current_frames(), idents, {ident, *users}, {waiter.ident}))

    with _thread(_join) as (ident, waiter):
        beats, sends = threads = [threading.Thread(target=target) for target in (_beat, _send_late)]
        for thread in threads:
            thread.start()
        try:
            assert _comes(look)
            assert look(beats)
            assert not look(sends)
            assert not look(beats, sends)
            assert not look(beats, users=(beats.ident or 0,))
            signal.signal(signal.SIGUSR2, lambda *_: STOP.is_set())
            assert look(beats)
            signal.signal(signal.SIGUSR2, lambda *_: _send_late())
            assert not look()
        finally:
            signal.signal(signal.SIGUSR2, before)
            STOP.set()
            for thread in threads:
                thread.join()


def test_the_signal_of_a_timer() -> None:
    """A handler that a timer will call may raise, and end the wait."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    with _thread(_join) as (ident, waiter):
        try:
            assert _comes(lambda: standing_beside(sys._current_frames(), [ident], {ident}, {waiter.ident}))
            signal.alarm(1000)
            assert not standing_beside(sys._current_frames(), [ident], {ident}, {waiter.ident})
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


def test_an_idle_worker_of_a_pool_of_threads() -> None:
    """A worker that has nothing to do waits for work, and not in a function in C that is its work."""
    with ThreadPool(1, initializer=time.sleep, initargs=(0.3,)) as pool:
        (worker,) = pool._pool  # type: ignore[attr-defined]
        assert not idles(sys._current_frames()[worker.ident])
        assert _comes(lambda: idles(sys._current_frames()[worker.ident]))
        busy = pool.apply_async(time.sleep, (0.3,))
        assert _comes(lambda: not idles(sys._current_frames()[worker.ident]))
        busy.get()
        assert _comes(lambda: idles(sys._current_frames()[worker.ident]))
