"""Find out whether a signal handler of the program makes a call while its rank is inside another call of the library.

Python runs signal handlers between two instructions of the main thread. The other ranks do not expect the call of such a handler.
"""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from mpicoll.runtime.call_site import CallSite

inside: set[int] = set()
"""The main thread, if it waits in a call, or runs handlers of signals that came earlier: then a handler makes its next call."""

calls: set[CodeType] = set()
"""Code of functions that are a part of a call, and in which Ctrl-C is noted."""

waits: set[CodeType] = set()
"""Code of functions that are a part of a call, and answer Ctrl-C themselves."""

_WEAKREF = weakref.__file__


def found() -> bool:
    """Return whether the stack of the main thread shows that a signal handler has called the caller from inside a call."""
    if get_ident() != threading.main_thread().ident:
        return False
    frame: FrameType | None = sys._getframe(1)
    is_inside = False
    while frame is not None and CallSite.inside(frame.f_code):  # the frames of the call that the caller makes
        is_inside = is_inside or _is_part_of_call(frame)
        frame = frame.f_back
    if frame is not None and (frame.f_code.co_name == "__del__" or frame.f_code.co_filename == _WEAKREF):
        return False  # a finalizer, which may run at any moment, too
    while frame is not None:
        if _is_part_of_call(frame):
            return True
        frame = frame.f_back
    if not is_inside:
        inside.clear()  # a handler that raised has left a wait before its end was noted
    return False


def raised(error: BaseException) -> bool:
    """Return whether a signal handler of the program has raised an error, by the frames of its traceback."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    function = getattr(handler, "func", handler)  # of functools.partial
    function = function if hasattr(function, "__code__") else type(function).__call__
    return getattr(function, "__code__", None)


def _is_part_of_call(frame: FrameType) -> bool:
    return frame.f_code in waits or frame.f_code in calls
