"""Write lines of the library to stderr, in one piece each."""

from __future__ import annotations

import contextlib
import os
import sys


def say(text: str) -> None:
    """Write lines to stderr, or to the process's first stderr if the program has closed it or it cannot be written.

    Never raises: a message must not change how a job ends.
    """
    for out in (sys.stderr, sys.__stderr__):
        try:
            out.write(text)  # type: ignore[union-attr]
            out.flush()  # type: ignore[union-attr]
        except Exception:  # the stream is None, closed, full, of another encoding, or an object of the program
            continue
        return
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def flush_streams() -> None:
    """Flush the program's stdout and stderr. Never raises."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the stream is None, closed, or full
            stream.flush()
