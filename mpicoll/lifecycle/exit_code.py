"""What a Python program is going to end with, which Python tells nobody: SystemExit and its code, or an exception.

Three ways, since none sees everything. ``sys.exit``, ``exit`` and ``quit`` are replaced by functions that raise an exception
of our own. From Python 3.12 on the interpreter itself says with what the program's outermost frame ends, so that
``raise SystemExit(5)`` is seen, too, and a ``sys.exit`` that was imported before; it costs 0.1 us for each frame that an
exception leaves. What Python has printed as uncaught is kept in ``sys.last_value``, whoever printed it.

Not seen are, on Python 3.10 and 3.11, ``raise SystemExit(5)`` and a ``sys.exit`` imported before. The exception is gone
when the exit handlers run, and its class, which is in C, cannot tell.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

from mpicoll.runtime.call_site import program_site, traceback_site

Note = Callable[[Any, str], None]

_note: Note | None = None
_outermost: CodeType | None = None
_before: BaseException | None = None


class _Exit(SystemExit):
    """SystemExit that notes its code when it is what ends the program.

    Python drops the exception right before the exit handlers run, when no frame is left on the stack; one that was caught
    is dropped from within a frame.

    Attributes:
        site: file:line of the program that called sys.exit.
    """

    def __init__(self, code: Any = None, site: str = "") -> None:
        super().__init__(code)
        self.site = site

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            if _note is not None:
                _note(self.code, self.site)


def _exit(status: Any = None, /) -> None:
    """Exit the interpreter by raising SystemExit(status)."""
    if threading.current_thread() is threading.main_thread():
        # Not kept by a name: this frame is in its traceback, and it has to go when nobody else holds it.
        raise _Exit(status, program_site(sys._getframe()).rpartition(" in ")[0])
    raise SystemExit(status)


class _Quit:
    """The ``exit`` and ``quit`` that Python has for its prompt, which programs call, too."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __repr__(self) -> str:
        return repr(self._found)

    def __call__(self, code: Any = None) -> None:
        try:
            self._found(code)
        except SystemExit as exit_:
            code = exit_.code
        _exit(code)


def watch(note: Note) -> None:
    """Have ``note(code, file:line)`` called when SystemExit ends the program, with the code as it was raised."""
    global _note
    _note = note
    if sys.exit is not _exit:
        sys.exit = _exit  # type: ignore[assignment]
    for name in ("exit", "quit"):
        found = getattr(builtins, name, None)  # python -S has none
        if type(found).__module__ == "_sitebuiltins":
            setattr(builtins, name, _Quit(found))
    if sys.version_info >= (3, 12):
        _watch_outermost()


def stop() -> None:
    """Note nothing from now on: what is dropped later, with the modules, does not end the program."""
    global _note
    _note = None


def forget() -> None:
    """Start anew in a forked child: what its parent saw is no end of its own."""
    global _before, _outermost
    _before = getattr(sys, "last_value", None)
    _outermost = None


def uncaught() -> BaseException | None:
    """Return the exception that has ended the program, if there is one and Python has printed it; for exit handlers."""
    error = getattr(sys, "last_value", None)
    trace = getattr(sys, "last_traceback", None)
    if error is None or error is _before or hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    # Prompts and test runners keep exceptions there, too: those have not come out of the outermost frame.
    return error if trace is not None and trace.tb_frame.f_back is None else None


if sys.version_info >= (3, 12):
    _TOOLS = (4, 3)  # the numbers that the interpreter gives to no kind of tool

    def _watch_outermost() -> None:
        """Have the interpreter say with what the outermost frame of the main thread ends."""
        global _outermost
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_back is not None:
            frame = frame.f_back
        _outermost = frame.f_code if frame is not None else None
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
        if code is not _outermost or not isinstance(error, SystemExit):
            return
        if _note is not None and threading.current_thread() is threading.main_thread():
            _note(error.code, error.site if isinstance(error, _Exit) else traceback_site(error.__traceback__))
