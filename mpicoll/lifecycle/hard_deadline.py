"""End the process if a call into C that holds the interpreter lock takes too long.

During such a call no Python thread and no Python handler runs. A process has one faulthandler.dump_traceback_later, which the
program or its test runner uses. So a timer of this module (timer_create(2)) sends an unused real-time signal. On this signal
faulthandler prints the stacks of all threads, from C, before the signal has its default effect.
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from mpicoll.runtime.signal_table import unhandled

_LONGEST = 1e9


class _Event(ctypes.Structure):
    """``struct sigevent``, to its third field; SIGEV_SIGNAL is 0."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 64),
    )


class _Times(ctypes.Structure):
    """``struct itimerspec``: the interval and the first time, in seconds and nanoseconds."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "first", "first_ns"))


def _library() -> Any:
    """Return the library that has timers, or None: the C library of Linux, or librt before glibc 2.34."""
    if sys.platform != "linux":
        return None
    for name in (None, "librt.so.1"):
        try:
            library = ctypes.PyDLL(name)
            library.timer_create  # noqa: B018
        except (OSError, AttributeError):
            continue
        return library
    return None


def _free_signal() -> int | None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1):
        if unhandled(number) and number not in blocked:
            return number
    return None


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """End the process, and print the stacks of all threads to stderr, unless the block ends in time."""
    seconds = min(seconds, _LONGEST)
    with ExitStack() as undo:
        start = _timer(seconds, undo)
        if start is None or start():
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)
            undo.callback(faulthandler.cancel_dump_traceback_later)
        yield


def afterwards(seconds: float) -> None:
    """End the process without a message ``seconds`` after the end of the interpreter, if the process still runs.

    Libraries run code at exit(3), for example MPI_Abort by mpi4py. The time of Python's own exit handlers does not count. Only
    the first call has an effect.
    """
    if hasattr(sys, "_mpicoll_afterwards"):
        return
    with ExitStack() as undo:
        start = _timer(seconds, undo)
        undo.pop_all()
    if start is not None:
        sys._mpicoll_afterwards = _Afterwards(start)  # type: ignore[attr-defined]


class _Afterwards:
    """Starts the timer when Python clears ``sys``, the last module; so the object refers to all that it needs."""

    def __init__(self, start: Callable[[], int]) -> None:
        self.start = start

    def __del__(self) -> None:
        self.start()


def _timer(seconds: float, undo: ExitStack) -> Callable[[], int] | None:
    """Make a timer, and return the function that starts it (0: success), or None if this machine has no timers."""
    library, number = _library(), _free_signal()
    if library is None or number is None:
        return None
    timer = ctypes.c_void_p()
    event = _Event(signal=number)
    if library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        return None
    faulthandler.register(number, file=2, chain=True)
    undo.callback(faulthandler.unregister, number)
    undo.callback(library.timer_delete, timer)
    times = _Times(first=int(seconds), first_ns=max(1, int(seconds % 1 * 1e9)))
    return partial(library.timer_settime, timer, 0, ctypes.byref(times), None)
