"""Notice the SystemExit that leaves the program's outermost frame.

From Python 3.12 on sys.monitoring reports the exception. The monitor costs 0.1 us for each frame that an exception leaves, in the
whole program. On Python 3.10 and 3.11 the frame shows only whether an exception has left it: its last instruction is no return.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType

_on_exit: Callable[[SystemExit], None] | None = None
_outermost: FrameType | None = None


def forget() -> None:
    """Forget the outermost frame in a forked child."""
    global _outermost
    _outermost = None


def _find_outermost() -> None:
    global _outermost
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    _outermost = frame


if sys.version_info >= (3, 12):
    _TOOLS = (4, 3)  # the numbers that the interpreter gives to no kind of tool

    def watch(on_exit: Callable[[SystemExit], None]) -> None:
        """Call ``on_exit`` with the SystemExit that leaves the outermost frame of the main thread."""
        global _on_exit
        _on_exit = on_exit
        _find_outermost()
        monitoring = sys.monitoring
        tool = next((n for n in _TOOLS if monitoring.get_tool(n) == __name__), None)
        if tool is None:
            tool = next((n for n in _TOOLS if monitoring.get_tool(n) is None), None)
            if tool is None:
                return
            monitoring.use_tool_id(tool, __name__)
        monitoring.register_callback(tool, monitoring.events.PY_UNWIND, _left)
        monitoring.set_events(tool, monitoring.events.PY_UNWIND)

    def _left(code: CodeType, offset: int, error: BaseException) -> None:
        if _outermost is None or code is not _outermost.f_code or not isinstance(error, SystemExit):
            return
        if _on_exit is not None and threading.current_thread() is threading.main_thread():
            _on_exit(error)

    def has_left_by_exception() -> bool:
        """Return False: sys.monitoring reports the exception."""
        return False

else:
    _RETURN = dis.opmap["RETURN_VALUE"]

    def watch(on_exit: Callable[[SystemExit], None]) -> None:
        """Remember the outermost frame of the main thread; this Python has no sys.monitoring."""
        _find_outermost()

    def has_left_by_exception() -> bool:
        """Return whether an exception has left the outermost frame of the main thread."""
        if _outermost is None or hasattr(sys, "ps1"):  # a prompt has a frame for each line
            return False
        frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            if frame is _outermost:
                return False
            frame = frame.f_back
        return _outermost.f_lasti >= 0 and _outermost.f_code.co_code[_outermost.f_lasti] != _RETURN
