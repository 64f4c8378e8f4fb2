"""The progress thread: progresses pending requests while the program computes (``MPICOLL_PROGRESS=thread``).

Without the thread requests progress only in waits of the library, so most of the data of an asynchronous call moves in its
``wait``.

The thread progresses requests as a wait does, and nothing else. It reads no messages of the board and watches no limit. It counts
neither as a thread of the program nor as waiting, so it does not change whether a rank counts as blocked. The error of
a request is stored for its own ``wait``. If another thread has just begun to wait, the progress thread pauses, since a wait
progresses all requests.

The thread is started with the first request, sleeps while no request is pending, and is ended before MPI is finalised.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from mpicoll.runtime import waiting
from mpicoll.runtime.output import say
from mpicoll.runtime.watchdog import OwnThread

NAME = "mpicoll-progress"

MOVING_NAP = 5e-5
FIRST_NAP = 5e-5
MOST_NAP = 1e-2
STAND_BACK = 1e-3
NAP_SHARE = 1 / 50
MOST_AT_ONCE = 128
ENDS_WITHIN = 2.0
"""Seconds for which other threads wait for the thread: a callback of the program may run in it, and not return."""


def nap(waited: float, moves: bool) -> float:
    """Return the seconds to sleep until the next poll.

    Args:
        waited: seconds since a request was last completed or started.
        moves: whether a transfer is pending, which takes one step or a few steps a poll.
    """
    if moves:
        return MOVING_NAP
    return max(FIRST_NAP, min(MOST_NAP, waited * NAP_SHARE))


class Operation(Protocol):
    """A request that was started and is not over."""

    @property
    def done(self) -> bool:
        """Whether the request is over."""

    @property
    def error(self) -> BaseException | None:
        """The error of the request."""

    @property
    def group(self) -> Any:
        """The group of the request."""

    def Test(self) -> bool:
        """Progress the request; return whether it is over."""


_Ref = weakref.ref[Operation]
_Queue = queue.SimpleQueue[tuple[_Ref, int | None] | None]


class ProgressThread:
    """The progress thread of one process, and the requests that it progresses (a waiting.BackgroundProgress).

    Args:
        stands_back: returns whether another thread progresses all requests now.
        current_device: returns the current device of the calling thread; None if the library has seen no array on a device.
        use_device: sets the current device of the calling thread.
        every: whether every request is added to the thread.
    """

    def __init__(
        self,
        stands_back: Callable[[], bool],
        current_device: Callable[[], int | None] = lambda: None,
        use_device: Callable[[int], None] = lambda device: None,
        every: bool = True,
    ) -> None:
        self.every = every
        self._stands_back = stands_back
        self._current_device, self._use_device = current_device, use_device
        self._started: _Queue = queue.SimpleQueue()  # a signal handler may put into it, too
        self._polling = threading.RLock()  # locked while the thread progresses requests
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._first = 0

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this thread, as in a callback of the program."""
        return self._thread is threading.current_thread()

    def begun(self, operation: Operation) -> None:
        """Add a request that was started; never wait."""
        # A weak reference: the request is freed, with its arrays, when its wait is over. MPI may get memory of the current GPU.
        device: int | None = None
        with suppress(Exception):  # the device has failed: the error is raised when its elements are needed
            device = self._current_device()
        self._started.put((weakref.ref(operation), device))
        if self._thread is None and self._starting.acquire(blocking=False):
            try:
                if self._thread is None:
                    self._over = threading.Event()
                    thread = OwnThread(target=self._run, args=(self._started, self._over), name=NAME, daemon=True)
                    self._thread = thread
                    thread.start()
            except RuntimeError as error:  # too many threads, or the interpreter is at its end
                self._thread = waiting.progress_thread = None
                say(f"mpicoll: MPICOLL_PROGRESS=thread has no effect: {error}\n")
            finally:
                self._starting.release()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Prevent progress by the thread inside the block; wait at most 2 s for a callback of the program in it."""
        locked = self._polling.acquire(timeout=ENDS_WITHIN)
        try:
            yield
        finally:
            if locked:
                self._polling.release()

    def stop(self) -> None:
        """End the thread, until a request is started again; waits complete what is pending."""
        thread = self._thread
        if thread is not None:
            self._over.set()
            self._started.put(None)
            self._started = queue.SimpleQueue()
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(ENDS_WITHIN)
            self._thread = None

    def _run(self, started: _Queue, over: threading.Event) -> None:
        pending: list[_Ref] = []
        device: int | None = None
        since = time.monotonic()
        while not over.is_set():
            while not pending or not started.empty():
                new = started.get()
                if new is None:
                    return
                since = time.monotonic()
                pending.append(new[0])
                device = self._use(device, new[1])
            if self._stands_back():
                time.sleep(STAND_BACK)
                continue
            with self._polling:
                left = self._look(pending)
            now = time.monotonic()
            if len(left) < len(pending):
                pending, since = left, now
            if left:
                time.sleep(nap(now - since, now < waiting.transfers_until()))

    def _use(self, device: int | None, wanted: int | None) -> int | None:
        """Set the current device of this thread if it differs from ``device``; return it."""
        if wanted is not None and wanted != device:
            with suppress(Exception):  # the device has failed: the error is raised when its elements are needed
                self._use_device(wanted)
        return device if wanted is None else wanted

    def _look(self, operations: list[_Ref]) -> list[_Ref]:
        """Progress requests, of very many the first ones and a window of the rest; return requests that are not over."""
        looked = operations
        if len(operations) > MOST_AT_ONCE:
            half = MOST_AT_ONCE // 2
            self._first = half if not half <= self._first < len(operations) else self._first
            looked = operations[:half] + operations[self._first : self._first + half]
            self._first += half
        for each in looked:
            _advance(each())
        return [each for each in operations if _goes_on(each())]


def _goes_on(operation: Operation | None) -> bool:
    return operation is not None and not operation.done and operation.group.broken is None


def _advance(operation: Operation | None) -> None:
    """Progress a request; the request holds its error."""
    if operation is None or operation.group.broken is not None:
        return
    try:
        operation.Test()
    except BaseException as error:
        if operation.error is None:  # of a callback of the program on its future
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
    if operation.done:
        waiting.drop(operation)


_locked = threading.local()


def _before_fork() -> None:
    """Wait for the end of a poll before a fork, so that no request is half progressed in the child."""
    thread = waiting.progress_thread
    _locked.by = (
        thread._polling if isinstance(thread, ProgressThread) and thread._polling.acquire(timeout=ENDS_WITHIN) else None
    )


def _after_fork() -> None:
    if _locked.by is not None:
        _locked.by.release()
        _locked.by = None


def _in_child() -> None:
    waiting.progress_thread = _locked.by = None


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
