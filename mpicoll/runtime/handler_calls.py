"""Find out whether a signal handler of the program makes a call while its rank is inside another call of the library.

Python runs signal handlers between two instructions of the main thread. The other ranks do not expect the call of such a handler.
"""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from inspect import CO_VARARGS
from threading import get_ident
from types import CodeType, FrameType

from mpicoll.errors import chain_of
from mpicoll.runtime.call_site import CallSite

inside: set[int] = set()
"""The main thread, if it waits in a call, or runs handlers of signals that came earlier: then a handler makes its next call."""

calls: set[CodeType] = set()
"""Code of functions that are a part of a call, and in which Ctrl-C is noted."""

waits: set[CodeType] = set()
"""Code of functions that are a part of a call, and answer Ctrl-C themselves."""

_WEAKREF = weakref.__file__
_NUMBERS = signal.valid_signals()


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


def raised(error: BaseException) -> BaseException | None:
    """Return the error that a signal handler of the program has raised: an error, or one that it was raised from or behind.

    The frame of a handler has a frame among its arguments. A handler may have been replaced since it was called.
    """
    for each in chain_of(error):
        trace = each.__traceback__
        while trace is not None:
            if _handles_signal(trace.tb_frame):
                return each
            trace = trace.tb_next
    return None


def _handles_signal(frame: FrameType) -> bool:
    code = frame.f_code
    if CallSite.inside(code):
        return False
    given = frame.f_locals
    values = [given.get(name) for name in code.co_varnames[: code.co_argcount + bool(code.co_flags & CO_VARARGS)]]
    flat = [each for value in values for each in (value if type(value) is tuple else (value,))]
    kinds = [type(each) for each in flat]  # isinstance() looks at the object, which may raise
    return FrameType in kinds and any(kind is int and each in _NUMBERS for kind, each in zip(kinds, flat, strict=True))


def _is_part_of_call(frame: FrameType) -> bool:
    return frame.f_code in waits or frame.f_code in calls
