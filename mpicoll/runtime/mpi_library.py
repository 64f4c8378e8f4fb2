"""Hold references to memory that MPI may write after a call was withdrawn; read the name of the MPI library.

A signal handler of the program may raise between any two lines of the library: just after MPI has received a buffer, and before
any object refers to that buffer.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from mpicoll.runtime.call_site import PACKAGE

_retained: list[Any] = []


def retain_for_ever(*things: Any) -> None:
    """Hold references to objects for ever."""
    _retained.extend(things)


def retain_frames(error: BaseException) -> None:
    """Hold references to the locals of all frames of this package that an exception has passed, for ever."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename.startswith(PACKAGE):
            _retained.append(list(frame.f_locals.values()))
        trace = trace.tb_next


def library_name(text: str) -> str:
    """Return the first words of ``MPI.Get_library_version()``: name and version."""
    return " ".join(text.strip("\0 \n").split(",")[0].splitlines()[0].split())
