"""What MPI may go on to use after a call was given up: kept for good, since it may write there at any time.

A signal handler of the program's may raise between any two lines of the library: just after MPI was given a buffer, and
before there is anything that has hold of it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from mpicoll.runtime.call_site import PACKAGE

_kept: list[Any] = []


def retain_for_ever(*things: Any) -> None:
    """Keep these for good."""
    _kept.extend(things)


def retain_frames(error: BaseException) -> None:
    """Keep what the functions of this package held that an exception has gone through so far."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename.startswith(PACKAGE):
            _kept.append(list(frame.f_locals.values()))
        trace = trace.tb_next


def library_name(text: str) -> str:
    """Return the first words of ``MPI.Get_library_version()``: name and version."""
    return " ".join(text.strip("\0 \n").split(",")[0].splitlines()[0].split())
