"""Find the line of the program that calls the library."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType

_INSTALLED = tuple({os.path.join(path, "") for path in sysconfig.get_paths().values()})
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_no_places: tuple[str, ...] = (PACKAGE,)


@dataclass(slots=True, frozen=True)
class CallSite:
    """A place in the program, as a code object and an instruction: the line is found only when the site is printed."""

    code: CodeType
    instruction: int

    @staticmethod
    def inside(code: CodeType) -> bool:
        """Return whether code belongs to this package."""
        return code.co_filename.startswith(PACKAGE)

    def __str__(self) -> str:
        line = self.code.co_firstlineno
        for start, stop, number in self.code.co_lines():
            if number is not None and start <= self.instruction < stop:
                line = number
                break
        return f"{self.code.co_filename}:{line}"


class _Nowhere(CallSite):
    """No line of the program, for its end without a call."""

    def __str__(self) -> str:
        return ""


NOWHERE = _Nowhere(_Nowhere.__str__.__code__, 0)


def pass_through(*paths: str) -> None:
    """Let :func:`call_site` skip code at these paths, too, which is between the program and this package."""
    global _no_places
    _no_places = tuple(dict.fromkeys((*_no_places, *paths)))


def call_site() -> CallSite:
    """Return the innermost place on the stack that is outside this package (226 ns a level on the machine measured)."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_no_places) and frame.f_back is not None:
        frame = frame.f_back
    return CallSite(frame.f_code, frame.f_lasti)


def program_level() -> int:
    """Return the ``stacklevel`` with which the caller warns at the line of the program."""
    frame, level = sys._getframe(1), 1
    while frame.f_code.co_filename.startswith(_no_places) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def caller(depth: int = 1) -> FrameType:
    """Return the frame of the caller of the function that calls `caller`; that function's own frame if C called it.

    Args:
        depth: number of frames between the function that calls `caller` and the wanted frame.
    """
    try:
        return _frame(depth + 1)
    except ValueError:
        return _frame(depth)


_frame = sys._getframe


def program_site(frame: FrameType | None) -> str:
    """Return the innermost place of a stack that is neither in this package nor in an installed one, or ""."""
    innermost = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            text = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}()"
            if not name.startswith(_INSTALLED) and not name.startswith("<"):
                return text
            innermost = innermost or text
        frame = frame.f_back
    return innermost


def traceback_site(trace: TracebackType | None) -> str:
    """Return file:line of the innermost place of a traceback that is neither in this package nor in an installed one, or ""."""
    innermost = own = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not CallSite.inside(code):
            innermost = f"{code.co_filename}:{trace.tb_lineno}"
            if not code.co_filename.startswith((*_INSTALLED, "<")):
                own = innermost
        trace = trace.tb_next
    return own or innermost
