"""What MPI may go on to use after a call was given up: kept for good, since it may write there at any time.

A signal handler of the program's may raise between any two lines of the library: just after MPI was given a buffer, and
before there is anything that has hold of it.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

__all__ = ["keep", "keep_of"]

_kept: list[Any] = []
_PACKAGE = os.path.dirname(__file__) + os.sep


def keep(*things: Any) -> None:
    """Keep these for good."""
    _kept.extend(things)


def keep_of(error: BaseException) -> None:
    """Keep what the functions of this package held that an exception has gone through so far."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename.startswith(_PACKAGE):
            _kept.append(list(frame.f_locals.values()))
        trace = trace.tb_next
