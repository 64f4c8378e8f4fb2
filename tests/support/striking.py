"""Raise in the middle of a call, between two lines of the library, as a signal handler of the program may."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Struck", "strike"]


class Struck(Exception):
    """An exception that a signal handler of the program raises."""


def strike(function: Any, line: int, call: Callable[[], object]) -> bool:
    """Make a call, and raise when the call reaches a line of a function; return whether it reached the line."""

    def local(frame: Any, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lineno == line:
            sys.settrace(None)
            raise Struck
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: local if frame.f_code is function.__code__ else None)
    try:
        call()
    except Struck:
        return True
    finally:
        sys.settrace(before)
    return False
