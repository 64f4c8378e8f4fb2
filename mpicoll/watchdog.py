"""The last resort for a rank that sits in a blocking MPI call which cannot end: report, and end the process.

A sleeping thread that never calls MPI. The waiting loop handles everything that is waited for by polling; a blocking
native call is entered only after all members have agreed to it, but an agreement is a promise, not a fact: a peer may be
stopped or die between the two.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["active", "start", "stop"]

active: dict[int, tuple[float, float, Callable[[], str]]] = {}
"""Thread → (when it entered its native call, the limit in seconds, what the call is)."""

_EVERY = 0.25
EXIT_CODE = 70
THREADS = 1
"""Threads of this module's own that are alive while it runs."""

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


def stop() -> None:
    """Let the thread end."""
    _stop.set()


def forget() -> None:
    """Drop the thread's traces in a forked child, where it does not exist."""
    global _thread
    _thread = None
    active.clear()


def overdue(now: float, calls: dict[int, tuple[float, float, Any]]) -> list[tuple[float, Any]]:
    """Return (seconds, description) of every native call that is past its limit."""
    return [(now - since, what) for since, limit, what in calls.values() if now - since > limit]


def _run() -> None:
    told: set[int] = set()
    while not _stop.wait(_EVERY):
        if not active:
            told.clear()
            continue
        late = overdue(time.monotonic(), dict(active))
        if not late:
            continue
        seconds, what = late[0]
        if id(what) not in told:
            told.add(id(what))
            sys.stderr.write(
                f"mpicoll: {what()}: all ranks had agreed to this call, and it has been inside MPI for {seconds:.1f} s, "
                "past its limit: another rank was stopped or died after it agreed.\n"
            )
            sys.stderr.flush()
        if _deadly:
            sys.stdout.flush()
            os._exit(EXIT_CODE)
