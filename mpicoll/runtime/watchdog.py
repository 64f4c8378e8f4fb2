"""The watchdog: a thread that reports, and ends the process, if a blocking MPI call cannot end.

The thread sleeps, and never calls MPI. The waiting loop handles everything that can be polled. A blocking MPI call is entered
only after all members have agreed to it. But a peer may be stopped, or die, between the agreement and the call. If the limit
has passed, or if a member on this node is dead or has given the group up, the watchdog reports and ends the process.

The same thread writes to the node board where this rank is, also while the program computes, or sleeps outside the
library.
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


class OwnThread(threading.Thread):
    """A thread of the library: a search for deadlocks does not ask what it does.

    Only the class tells it from the program's threads, which may have any name.
    """


def own_idents() -> set[int | None]:
    """Return the identifiers of the library's threads that are alive."""
    return {thread.ident for thread in threading.enumerate() if isinstance(thread, OwnThread)}


class Native(Protocol):
    """A blocking MPI call that a thread is in.

    Attributes:
        since: when the thread entered it (time.monotonic).
        limit: seconds.
    """

    since: float
    limit: float

    def describe(self) -> str:
        """Return the call in words."""

    def hopeless(self, inside: float) -> str:
        """Return why the call can never end, or ""; ``inside``: seconds that it has taken."""


active: dict[int, Native] = {}
"""The blocking MPI call that each thread is in, by thread."""

services: list[Callable[[], None]] = []
"""Functions that the thread calls every quarter of a second; they never call MPI."""

_EVERY = 0.25
LOOK_AFTER = 1.0
"""Seconds in one blocking MPI call (which usually takes less than half a second) after which its members are checked."""
HOPELESS_FOR = 2.0
"""Seconds after which a call that can never end ends the process: it may have been about to return when a member died."""
EXIT_CODE = 70

_thread: threading.Thread | None = None
_stop = threading.Event()
_deadly = True


def start(*, deadly: bool) -> None:
    """Start the thread, once.

    Args:
        deadly: whether the thread may end the process (never with ``on_failure="raise"``).
    """
    global _thread, _deadly
    _deadly = deadly
    if _thread is None or not _thread.is_alive():
        _stop.clear()
        _thread = OwnThread(target=_run, name="mpicoll-watchdog", daemon=True)
        _thread.start()


def watch(death: Callable[[], str]) -> None:
    """Start a thread that prints the text of ``death``, which blocks until a rank of this node dies; "" ends the thread."""

    def run() -> None:
        while text := death():
            os.write(2, f"mpicoll: {text}\n".encode(errors="replace"))

    OwnThread(target=run, name="mpicoll-watch", daemon=True).start()


def stop() -> None:
    """End the thread."""
    _stop.set()


def forget() -> None:
    """Reset the module in a forked child, which has no such thread."""
    global _thread
    _thread = None
    active.clear()
    services.clear()


def verdict(now: float, call: Native, hopeless_since: dict[float, float], *, readable: bool = True) -> str:
    """Return why a blocking MPI call must end the process, or "".

    Args:
        now: time.monotonic.
        call: the call.
        hopeless_since: when each call (by its time of entry) was first found hopeless; this function updates it.
        readable: whether the call can be described; else only its limit counts.
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
    reported: set[float] = set()
    hopeless_since: dict[float, float] = {}
    failures: dict[Callable[[], None], int] = {}
    while not _stop.wait(_EVERY):
        _serve(failures)
        if not active:
            reported.clear()
            hopeless_since.clear()
            continue
        for call in tuple(active.values()):
            why = _why(call, hopeless_since)
            if not why:
                continue
            if call.since not in reported:
                reported.add(call.since)
                _write(f"{_name(call)}: all ranks had agreed to this call, and {why}.")
            if _deadly:
                with contextlib.suppress(Exception):  # None, closed, or full
                    sys.stdout.flush()
                os._exit(EXIT_CODE)


def _serve(failures: dict[Callable[[], None], int]) -> None:
    """Run all services; a failing service stops neither other services nor the watchdog, and is reported at its second failure.

    Args:
        failures: the number of failures of each service in a row.
    """
    for service in tuple(services):
        try:
            service()
            failures.pop(service, None)
        except Exception as error:  # threads of the program change what the service reads
            failures[service] = failures.get(service, 0) + 1
            if failures[service] == 2:
                _write(
                    f"{getattr(service, '__name__', service)} fails in the watchdog: {type(error).__name__}: {error}"
                )


def _why(call: Native, hopeless_since: dict[float, float]) -> str:
    """Return the verdict on a call; only by its limit if the call cannot be described."""
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
