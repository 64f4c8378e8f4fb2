"""Threads that stand in a join or on a lock of Python, and threads that only look so."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from unittest.mock import Mock

import pytest

import mpicoll
from mpicoll.diagnosis.deadlock_search import _look_at_threads
from mpicoll.diagnosis.standing import idles, standing
from mpicoll.runtime import signal_table, signals
from mpicoll.runtime.watchdog import OwnThread, own_idents


class Holder:
    """Objects on which the threads of these tests wait, until ``release``."""

    __slots__ = ("box", "event", "future", "lock", "processes_lock", "queue", "rlock", "simple", "socket", "writer")

    def __init__(self) -> None:
        self.lock, self.rlock, self.event = threading.Lock(), threading.RLock(), threading.Event()
        self.queue: queue.Queue[int] = queue.Queue()
        self.simple: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.future: Future[int] = Future()
        self.processes_lock = multiprocessing.Lock()
        self.socket, self.writer = socket.socketpair()
        self.box = {"lock": self.lock}
        for lock in (self.lock, self.rlock, self.processes_lock):
            lock.acquire()

    def release(self) -> None:
        """Let all threads go on."""
        self.event.set()
        self.queue.put(1)
        self.simple.put(1)
        self.future.set_result(1)
        self.writer.close()
        for lock in (self.lock, self.rlock, self.processes_lock):
            lock.release()


SHARED = threading.RLock()  # these tests use two threads at once


def _with(lock: threading.Lock) -> None:
    with lock:
        pass


def _join(holder: Holder, timeout: float | None = None) -> None:
    thread = threading.Thread(target=holder.event.wait)
    thread.start()
    thread.join(timeout)
    holder.event.wait(20)


def _with_shared(holder: Holder) -> None:
    with SHARED:
        holder.event.wait(0)


def _enclosed(holder: Holder) -> None:
    lock = holder.lock

    def acquire() -> None:
        lock.acquire()
        lock.release()

    acquire()


def _as_argument(holder: Holder) -> None:
    lock = holder.lock
    print(holder, lock.acquire(), file=sys.stderr)
    lock.release()


def _compute(holder: Holder) -> None:
    while not holder.event.is_set():
        pass


STANDS: dict[str, Callable[[Holder], object]] = {
    "a join": _join,
    "an event": lambda holder: holder.event.wait(),
    "a queue": lambda holder: holder.queue.get(),
    "a simple queue": lambda holder: holder.simple.get(),
    "a future": lambda holder: holder.future.result(),
    "a lock of an object": lambda holder: (holder.lock.acquire(), holder.lock.release()),
    "a lock that the thread may acquire again": lambda holder: (holder.rlock.acquire(), holder.rlock.release()),
    "a with statement": lambda holder: _with(holder.lock),
    "a global lock": _with_shared,
    "a lock of an outer function": _enclosed,
    "a lock among arguments": _as_argument,
    "a condition": lambda holder: _with(threading.Condition(holder.lock)),  # type: ignore[arg-type]
}

GOES_ON: dict[str, Callable[[Holder], object]] = {
    "a join with a limit": lambda holder: _join(holder, 20),
    "an event with a limit": lambda holder: holder.event.wait(20),
    "a queue with a limit": lambda holder: holder.queue.get(timeout=20),
    "a simple queue with a limit": lambda holder: holder.simple.get(timeout=20),
    "a future with a limit": lambda holder: holder.future.result(20),
    "a lock with a limit": lambda holder: holder.lock.acquire(timeout=20) and holder.lock.release(),
    "a lock with a limit by position": lambda holder: holder.lock.acquire(True, 20) and holder.lock.release(),
    "a lock of several processes": lambda holder: (holder.processes_lock.acquire(), holder.processes_lock.release()),
    "a socket": lambda holder: holder.socket.recv(1),
    "a sleep": lambda holder: time.sleep(1),
    "a computation": _compute,
}


@contextmanager
def _thread(wait: Callable[[Holder], object]) -> Iterator[threading.Thread]:
    holder = Holder()
    thread = threading.Thread(target=wait, args=(holder,))
    with SHARED:
        thread.start()
        try:
            yield thread
        finally:
            holder.release()
    thread.join(30)
    holder.socket.close()
    assert not thread.is_alive()


def _look(*threads: threading.Thread) -> tuple[tuple[str, int], ...]:
    return standing(sys._current_frames(), [thread.ident for thread in threads])


def _wait_for(thread: threading.Thread) -> tuple[tuple[str, int], ...]:
    """Return what is seen of a thread once it stands."""
    end = time.monotonic() + 20
    while True:
        seen = _look(thread)
        time.sleep(0.05)
        if seen and seen == _look(thread):
            return seen
        assert time.monotonic() < end, seen


@pytest.mark.parametrize("name", STANDS)
def test_a_thread_that_stands(name: str) -> None:
    """The same state is seen as long as the thread stands, with its place in the program."""
    with _thread(STANDS[name]) as thread:
        seen = _wait_for(thread)
        assert "test_standing.py:" in seen[0][0]
        time.sleep(0.05)
        assert _look(thread) == seen


@pytest.mark.parametrize("name", GOES_ON)
def test_a_thread_that_may_go_on(name: str) -> None:
    """No other thread is needed for a thread with a limit, in a sleep, in a computation, or that waits for another process."""
    with _thread(GOES_ON[name]) as thread, _thread(STANDS["an event"]) as other:
        _wait_for(other)
        time.sleep(0.1)
        assert _look(thread) == ()
        assert _look(thread, other) == _look(other, thread) == ()


def test_threads_that_exchange_items() -> None:
    """Threads that run in between are noticed, though they always stand at the same two places."""
    there: queue.Queue[bool] = queue.Queue()
    back: queue.Queue[bool] = queue.Queue()

    def answer() -> None:
        while there.get():
            back.put(True)

    def ask() -> None:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            there.put(True)
            back.get()
        there.put(False)

    threads = [threading.Thread(target=answer), threading.Thread(target=ask)]
    for thread in threads:
        thread.start()
    looks = []
    for _ in range(40):
        time.sleep(0.01)
        looks.append(_look(*threads))
    for thread in threads:
        thread.join()
    assert not any(before and before == after for before, after in pairwise(looks))


def test_an_idle_worker_of_a_pool() -> None:
    """A worker of a pool stands when it has nothing to do; when it works it does what its task does."""
    with ThreadPoolExecutor(1) as pool:
        (worker,) = [pool.submit(threading.current_thread).result()]
        _wait_for(worker)
        assert idles(sys._current_frames()[worker.ident or 0])
        busy = pool.submit(time.sleep, 0.5)
        time.sleep(0.1)
        assert not _look(worker)
        busy.result()


def test_a_worker_of_a_pool_that_begins() -> None:
    """A worker is idle only where it takes its tasks, and not in a function in C by which it begins."""
    with ThreadPoolExecutor(1, initializer=time.sleep, initargs=(0.5,)) as pool:
        done = pool.submit(int)
        (worker,) = pool._threads
        time.sleep(0.1)
        assert not idles(sys._current_frames()[worker.ident or 0])
        assert _look(worker) == ()
        done.result()
        _wait_for(worker)


def test_the_end_of_the_main_thread() -> None:
    """The end stands where it waits for threads, and not in a function in C that it calls before."""
    lock = threading.Lock()
    lock.acquire()
    end = FunctionType(
        threading._shutdown.__code__,  # type: ignore[attr-defined]
        {
            **vars(threading),
            "_main_thread": Mock(_is_stopped=False, _handle=Mock(is_done=lambda: False)),
            "_threading_atexits": [partial(time.sleep, 0.5)],
            "_shutdown_locks": {lock},
            "_thread_shutdown": lock.acquire,
        },
    )
    thread = threading.Thread(target=end)
    thread.start()
    time.sleep(0.1)
    assert _look(thread) == ()
    _wait_for(thread)
    lock.release()
    thread.join()


def test_a_signal_handler_of_the_program() -> None:
    """It may release any thread, also while the library has replaced it; handlers of the library and of Python do not."""
    number = signal.SIGUSR2
    with _thread(STANDS["an event"]) as thread:
        seen = _wait_for(thread)
        before = signal.signal(number, lambda *_: None)
        try:
            assert _look(thread) == ()
            with signals.shield:
                assert signal.getsignal(number) == signals.shield._note
                assert _look(thread) == ()
            signals.notes.start((number,), free=False)
            assert _look(thread) == ()
            signals.notes.stop((number,))
            for other in (signal.SIG_IGN, signal.default_int_handler, signals.guard._handle):
                signal.signal(number, other)
                assert _look(thread) == seen
            signal.signal(number, signal.SIG_DFL)
            signals.notes.start((number,), free=True)
            assert _look(thread) == seen
            signals.notes.stop((number,))
        finally:
            signal.signal(number, before)


def test_a_handler_of_the_end_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that start workers leave one behind: it counts while there are children, and other handlers always."""
    with _thread(STANDS["an event"]) as thread:
        seen = _wait_for(thread)
        before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGUSR2)}
        try:
            for has_child in (False, True):
                monkeypatch.setattr(signal_table, "_has_child", lambda has_child=has_child: has_child)
                signal.signal(signal.SIGCHLD, lambda *_: None)
                assert _look(thread) == (() if has_child else seen)
                with signals.shield:
                    assert _look(thread) == (() if has_child else seen)
                signal.signal(signal.SIGUSR2, lambda *_: None)
                assert _look(thread) == ()
                signal.signal(signal.SIGUSR2, before[signal.SIGUSR2])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def test_children() -> None:
    """A child counts until the program has waited for it, which stays able to."""
    source = """
import os, signal, subprocess
from mpicoll.runtime.signal_table import _has_child
assert not _has_child()
child = subprocess.Popen(["sleep", "60"])
assert _has_child()
child.kill()
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
assert _has_child()
assert child.wait() == -signal.SIGKILL
assert not _has_child()
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_names_do_not_tell_whose_a_thread_is() -> None:
    """A thread of the program may have a name like those of the library."""
    event = threading.Event()
    program, own = threading.Thread(target=event.wait, name="mpicoll loader"), OwnThread(target=event.wait, name="any")
    own.start()
    assert own.ident in own_idents()
    wait = Mock(began=time.time())
    waits = dict.fromkeys(
        {threading.main_thread().ident or 0, *sys._current_frames()} - {ident or 0 for ident in own_idents()}, wait
    )
    assert not _look_at_threads(waits).doubtful
    program.start()
    assert program.ident not in own_idents()
    assert _look_at_threads(waits).doubtful
    event.set()
    program.join()
    own.join()


def test_whose_the_threads_of_the_package_are() -> None:
    """Only launchers, which are no ranks, start other threads than those of the library's class."""
    package = Path(mpicoll.__file__).parent
    found = {
        path.relative_to(package).parts[0] for path in package.rglob("*.py") if "threading.Thread(" in path.read_text()
    }
    assert found == {"launch"}


def test_a_thread_that_has_ended() -> None:
    """Nothing is certain about a thread that has ended, or that the threading module does not know."""
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert _look(thread) == ()
    with _thread(STANDS["an event"]) as other:
        assert standing(sys._current_frames(), [other.ident, 1]) == ()
        assert standing({}, [other.ident]) == ()
