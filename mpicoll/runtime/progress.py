"""The progress thread: operations under way go on while the program computes (``MPICOLL_PROGRESS=thread``).

Without it they go on where the library is waiting anyway, so most of the data of an asynchronous call moves in its ``wait``.

The thread does what a wait does with what is pending, and nothing else: it does not read what other ranks tell, looks at no
limit, and counts neither as a thread of the program nor as waiting, so a rank that computes is no more blocked than without it.
What an operation ends with is kept for its own ``wait``. While another thread begins to wait it stands back, since that one moves
everything on.

It is started with the first operation, sleeps in a queue while nothing is under way, and is ended before MPI is.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from mpicoll.runtime import waiting
from mpicoll.runtime.output import say

NAME = "mpicoll-progress"
"""Threads whose names begin with "mpicoll-" are none of the program's (``diagnosis.deadlock_search.describe_state``)."""

MOVING_NAP = 5e-5
FIRST_NAP = 5e-5
MOST_NAP = 1e-2
STAND_BACK = 1e-3
NAP_SHARE = 1 / 50
MOST_AT_ONCE = 128
ENDS_WITHIN = 2.0
"""Seconds after which the thread is left alone: a callback of the program's runs in it, and does not return."""


def nap(waited: float, moves: bool) -> float:
    """Return the seconds to sleep until the next look.

    Args:
        waited: seconds since something has last come to its end, or has been begun.
        moves: data is on its way, which goes on in steps, one or a few a look.
    """
    if moves:
        return MOVING_NAP
    return max(FIRST_NAP, min(MOST_NAP, waited * NAP_SHARE))


class Group(Protocol):
    """The group of an operation."""

    broken: str | None


class Operation(Protocol):
    """An operation that was issued and is not over."""

    @property
    def done(self) -> bool:
        """Whether it is over."""

    @property
    def error(self) -> BaseException | None:
        """What it has failed with."""

    @property
    def group(self) -> Group:
        """The group that it is on."""

    def advance(self) -> bool:
        """Move it on."""


def _no_device() -> int | None:
    return None


def _use_none(device: int) -> None:
    """Do nothing: there is no device."""


_Ref = weakref.ref[Operation]
_Queue = queue.SimpleQueue[tuple[_Ref, int | None] | None]


class ProgressThread:
    """The thread of one process, and what it has to move on (a waiting.BackgroundProgress).

    Args:
        stands_back: whether some other thread moves everything on just now.
        current_device: returns the current device of the thread that calls it; None if the library has seen no array on one.
        use_device: makes a device the current one of the thread that calls it.
    """

    def __init__(
        self,
        stands_back: Callable[[], bool],
        current_device: Callable[[], int | None] = _no_device,
        use_device: Callable[[int], None] = _use_none,
    ) -> None:
        self._stands_back = stands_back
        self._current_device, self._use_device = current_device, use_device
        self._came: _Queue = queue.SimpleQueue()  # a signal handler may put into it, too
        self._turn = threading.RLock()  # held while operations are looked at
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._first = 0

    def begun(self, operation: Operation) -> None:
        """Take over an operation that has been issued; never waits."""
        # It goes, with its arrays, as soon as its wait is over. MPI may be handed memory of the program's current GPU.
        device: int | None = None
        with suppress(Exception):  # it has failed: told where its elements are needed
            device = self._current_device()
        self._came.put((weakref.ref(operation), device))
        if self._thread is None and self._starting.acquire(blocking=False):
            try:
                if self._thread is None:
                    self._over = threading.Event()
                    thread = threading.Thread(target=self._run, args=(self._came, self._over), name=NAME, daemon=True)
                    self._thread = thread
                    thread.start()
            except RuntimeError as error:  # there are too many, or the interpreter is at its end
                self._thread = waiting.progress_thread = None
                say(f"mpicoll: MPICOLL_PROGRESS=thread has no effect: {error}\n")
            finally:
                self._starting.release()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Have it look at nothing meanwhile; where a callback of the program's keeps it busy that is not waited for long."""
        held = self._turn.acquire(timeout=ENDS_WITHIN)
        try:
            yield
        finally:
            if held:
                self._turn.release()

    def stop(self) -> None:
        """End it, until an operation is begun again; what it has not moved to its end is left to waits."""
        thread = self._thread
        if thread is not None:
            self._over.set()
            self._came.put(None)
            self._came = queue.SimpleQueue()
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(ENDS_WITHIN)
            self._thread = None

    def _run(self, came: _Queue, over: threading.Event) -> None:
        under_way: list[_Ref] = []
        device: int | None = None
        since = time.monotonic()
        while not over.is_set():
            while not under_way or not came.empty():
                new = came.get()
                if new is None:
                    return
                since = time.monotonic()
                under_way.append(new[0])
                device = self._use(device, new[1])
            if self._stands_back():
                time.sleep(STAND_BACK)
                continue
            with self._turn:
                left = self._look(under_way)
            now = time.monotonic()
            if len(left) < len(under_way):
                under_way, since = left, now
            if left:
                time.sleep(nap(now - since, now < waiting.transfers_until()))

    def _use(self, device: int | None, wanted: int | None) -> int | None:
        """Make a device the current one of this thread, if it is another one than before; return it."""
        if wanted is not None and wanted != device:
            with suppress(Exception):  # it has failed: told where its elements are needed
                self._use_device(wanted)
        return device if wanted is None else wanted

    def _look(self, operations: list[_Ref]) -> list[_Ref]:
        """Move operations on, where there are very many the first ones and some others in turn; return those that are left."""
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
    """Move an operation on; what it ends with is its own."""
    if operation is None or operation.group.broken is not None:
        return
    try:
        operation.advance()
    except BaseException as error:
        if operation.error is None:  # out of a callback of the program's that hangs on its future
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
    if operation.done:
        waiting.drop(operation)


_held = threading.local()


def _before_fork() -> None:
    """Fork between two looks, so that nothing is left half done in the child."""
    thread = waiting.progress_thread
    _held.by = (
        thread._turn if isinstance(thread, ProgressThread) and thread._turn.acquire(timeout=ENDS_WITHIN) else None
    )


def _after_fork() -> None:
    if _held.by is not None:
        _held.by.release()
        _held.by = None


def _in_child() -> None:
    waiting.progress_thread = _held.by = None


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
