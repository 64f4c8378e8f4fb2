"""The last resort for a rank that sits in a blocking MPI call which cannot end: report, and end the process.

A sleeping thread that never calls MPI. The waiting loop handles everything that is waited for by polling; a blocking
native call is entered only after all members have agreed to it, but an agreement is a promise, not a fact: a peer may be
stopped or die between the two. Past the limit, or when a member on this node is known to be dead or to have given the
group up, the process reports and ends.

The same thread answers, through the shared memory of the node, when others ask where this rank is: also while the program
computes, or sleeps in a call that is not ours.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from mpicoll.runtime.output import say


class Native(Protocol):
    """A blocking MPI call that a thread is in.

    Attributes:
        since: when it was entered (time.monotonic).
        limit: seconds.
    """

    since: float
    limit: float

    def describe(self) -> str:
        """Return what the call is."""

    def hopeless(self, inside: float) -> str:
        """Return why it can never end, or "", given the seconds that it has taken."""


active: dict[int, Native] = {}
"""Thread → the blocking MPI call that it is in."""

services: list[Callable[[], None]] = []
"""Called by the thread every quarter of a second; they never call MPI."""

_EVERY = 0.25
LOOK_AFTER = 1.0
"""Seconds in one native call (which is cut to take half a second) after which its members are looked at."""
HOPELESS_FOR = 2.0
"""Seconds after which a call that can never end is ended: it may have been about to return when a member died."""
EXIT_CODE = 70

_thread: threading.Thread | None = None
_stop = threading.Event()
_deadly = True


def start(*, deadly: bool) -> None:
    """Start the thread, once. ``deadly``: it may end the process (never as a guest in somebody else's program)."""
    global _thread, _deadly
    _deadly = deadly
    if _thread is None or not _thread.is_alive():
        _stop.clear()
        _thread = threading.Thread(target=_run, name="mpicoll-watchdog", daemon=True)
        _thread.start()


def watch(death: Callable[[], str]) -> None:
    """Start a thread that prints what ``death`` returns: it blocks until a process of this node is gone; "": no more."""

    def run() -> None:
        while text := death():
            os.write(2, f"mpicoll: {text}\n".encode(errors="replace"))

    threading.Thread(target=run, name="mpicoll-watch", daemon=True).start()


def stop() -> None:
    """Let the thread end."""
    _stop.set()


def forget() -> None:
    """Drop the thread's traces in a forked child, where it does not exist."""
    global _thread
    _thread = None
    active.clear()
    services.clear()


def verdict(now: float, call: Native, hopeless_since: dict[float, float], *, readable: bool = True) -> str:
    """Return why a native call has to be ended, or "".

    Args:
        now: time.monotonic.
        call: the call.
        hopeless_since: the memory of this function: when the call that was entered at some time was found hopeless.
        readable: what it depends on can be read; else its limit alone counts.
    """
    since = call.since
    inside = now - since
    if inside > call.limit:
        return f"it has been inside MPI for {inside:.1f} s, past its limit: another rank was stopped or died after it agreed"
    why = call.hopeless(inside) if inside > LOOK_AFTER and readable else ""
    if not why:
        hopeless_since.pop(since, None)
        return ""
    return why if now - hopeless_since.setdefault(since, now) >= HOPELESS_FOR else ""


def _run() -> None:
    told: set[float] = set()
    hopeless_since: dict[float, float] = {}
    failures: dict[Callable[[], None], int] = {}
    while not _stop.wait(_EVERY):
        _serve(failures)
        if not active:
            told.clear()
            hopeless_since.clear()
            continue
        for call in tuple(active.values()):
            why = _why(call, hopeless_since)
            if not why:
                continue
            if call.since not in told:
                told.add(call.since)
                _write(f"{_name(call)}: all ranks had agreed to this call, and {why}.")
            if _deadly:
                with contextlib.suppress(Exception):  # None, closed, or full
                    sys.stdout.flush()
                os._exit(EXIT_CODE)


def _serve(failures: dict[Callable[[], None], int]) -> None:
    """Run every service; one that fails ends neither the others nor the last resort, and is told of when it fails again.

    Args:
        failures: of each service, in a row.
    """
    for service in tuple(services):
        try:
            service()
            failures.pop(service, None)
        except Exception as error:  # the program's threads change what it reads
            failures[service] = failures.get(service, 0) + 1
            if failures[service] == 2:
                _write(
                    f"{getattr(service, '__name__', service)} fails in the watchdog: {type(error).__name__}: {error}"
                )


def _why(call: Native, hopeless_since: dict[float, float]) -> str:
    """Return the verdict on a call; by its limit alone where what it depends on cannot be read."""
    now = time.monotonic()
    try:
        return verdict(now, call, hopeless_since)
    except Exception:
        return verdict(now, call, hopeless_since, readable=False)


def _name(call: Native) -> str:
    try:
        return call.describe()
    except Exception:
        return "a blocking MPI call"


def _write(text: str) -> None:
    say(f"mpicoll: {text}\n")
