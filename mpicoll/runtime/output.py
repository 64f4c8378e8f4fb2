"""Write lines of the library to stderr, in one piece each."""

from __future__ import annotations

import contextlib
import os
import sys


def say(text: str) -> None:
    """Write lines to stderr; where the program has closed that, or it takes nothing, to the one that the process began with.

    It never raises: a message must not change how a job ends.
    """
    for out in (sys.stderr, sys.__stderr__):
        try:
            out.write(text)  # type: ignore[union-attr]
            out.flush()  # type: ignore[union-attr]
        except Exception:  # it is None, closed, full, of another encoding, or the program's own
            continue
        return
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def flush_streams() -> None:
    """Flush what the program has printed; never raises, as :func:`say`."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # None, closed, or full
            stream.flush()
