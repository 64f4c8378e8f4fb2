"""Find the exception that ends a Python program (SystemExit with its code, or another), which Python shows to no exit handler.

The module uses three ways, since no way notices every end. ``sys.exit``, ``exit`` and ``quit`` are replaced by functions that
raise an exception of this module. From Python 3.12 on the interpreter reports the exception that ends the program's outermost
frame (``exit_monitor``): also ``raise SystemExit(5)``, and a ``sys.exit`` that was imported earlier. An uncaught exception that
was printed is in ``sys.last_value``, whichever hook printed it.

On Python 3.10 and 3.11 a SystemExit that a signal handler raises inside a call gets an attribute of this module, which notes
the code. These versions miss ``raise SystemExit(5)``, and a ``sys.exit`` imported earlier, outside of calls: the exception is
gone when the exit handlers run, and its class, which is in C, has no hook.
"""

from __future__ import annotations

import builtins
import dis
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from mpicoll.errors import cause_among
from mpicoll.lifecycle import exit_monitor
from mpicoll.runtime.call_site import CallSite, program_site, traceback_site

Note = Callable[[Any, str, str], None]

_RAISE, _RERAISE, _RETURN = (dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE", "RETURN_VALUE"))

_note: Note | None = None
_last: weakref.ref[_Exit | _Mark] | None = None
_before: BaseException | None = None


class _Exit(SystemExit):
    """SystemExit that notes its code if it ends the program.

    Python drops the exception right before the exit handlers run, when no frame is left on the stack. A caught exception is
    dropped from within a frame. An exception to which a frame of its own traceback refers lives on
    (``except SystemExit as error: found = error; raise``, and calls of the library that a signal handler has left).

    Attributes:
        site: file:line of the program that called sys.exit.
        cause: the error of this library that the program handled then (``errors.cause_among``), or "".
    """

    def __init__(self, code: Any = None, site: str = "", cause: str = "") -> None:
        global _last
        super().__init__(code)
        self.site, self.cause = site, cause
        _last = weakref.ref(self)

    def error(self) -> SystemExit:
        """Return the exception that has ended the program, or has not."""
        return self

    def __del__(self) -> None:
        _drop(self)


class _Mark:
    """An attribute of a SystemExit of another class, which is dropped with the exception and notes as :class:`_Exit` does.

    The class refers to no exception, so that the exception is dropped as without the mark.
    """

    def __init__(self, error: SystemExit) -> None:
        self.code, self.site, self.cause = error.code, traceback_site(error.__traceback__), cause_among(error)

    def error(self) -> SystemExit | None:
        """Return the exception with this mark; None if the garbage collector is about to drop the exception."""
        holders = [each for fields in gc.get_referrers(self) for each in (fields, *gc.get_referrers(fields))]
        return next((each for each in holders if isinstance(each, SystemExit)), None)

    def __del__(self) -> None:
        _drop(self)


def _drop(last: _Exit | _Mark) -> None:
    """Note the exception that is being dropped, if it has ended the program."""
    try:
        sys._getframe(2)
    except ValueError:
        is_end = True
    else:
        error = last.error()
        is_end = error is not None and _has_ended_program(error)  # the garbage collector has found the exception
    if is_end and _note is not None:
        _note(last.code, last.site, last.cause)


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"
_Exit.__module__ = "builtins"  # so Python prints its own name


def _exit(status: Any = None, /) -> None:
    """Exit the interpreter by raising SystemExit(status)."""
    if threading.current_thread() is threading.main_thread():
        # No name here refers to the exception: its traceback holds this frame, so the name would hold the exception.
        raise _Exit(status, program_site(sys._getframe()).rpartition(" in ")[0], cause_among(sys.exc_info()[1]))
    raise SystemExit(status)


def mark(error: BaseException) -> None:
    """Mark an exception of a signal handler that leaves a call: if it is a SystemExit and ends the program, its code is noted."""
    global _last
    if isinstance(error, SystemExit) and not isinstance(error, _Exit) and sys.version_info < (3, 12):
        found = error.__dict__["_mpicoll_mark"] = _Mark(error)
        _last = weakref.ref(found)


class _Quit:
    """The ``exit`` and ``quit`` of Python's prompt, which programs call, too."""

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
    """Call ``note(code, file:line, cause)`` if SystemExit ends the program, with the code as it was raised."""
    global _note
    _note = note
    if sys.exit is not _exit:
        sys.exit = _exit  # type: ignore[assignment]
    for name in ("exit", "quit"):
        found = getattr(builtins, name, None)  # python -S has none
        if type(found).__module__ == "_sitebuiltins":
            setattr(builtins, name, _Quit(found))
    exit_monitor.watch(_note_outermost)


def _note_outermost(error: SystemExit) -> None:
    if _note is not None:
        _note(
            error.code,
            error.site if isinstance(error, _Exit) else traceback_site(error.__traceback__),
            cause_among(error),
        )


def note_last() -> None:
    """Note the last SystemExit if it lives on and has ended the program; for exit handlers."""
    last = _last() if _last is not None else None
    error = last.error() if last is not None else None
    if last is not None and error is not None and _note is not None and _has_ended_program(error):
        _note(last.code, last.site, last.cause)


def _has_ended_program(error: SystemExit) -> bool:
    """Return whether the exception has left the outermost frame, as the frames of its traceback show.

    The first of them is the outermost frame that the exception is known to have reached. That frame has raised the exception
    again; or, below the module of the program, has ended where the exception came, as with a task of asyncio, which holds the
    exception. And no frame that called that frame has returned.
    """
    trace, running = error.__traceback__, sys._current_frames().get(threading.main_thread().ident or 0)
    if sys.version_info >= (3, 12) or trace is None:  # sys.monitoring has reported the exception
        return False
    stack: set[int] = set()
    while running is not None:
        stack.add(id(running))
        running = running.f_back
    frame: FrameType | None = trace.tb_frame
    assert frame is not None
    code, last = frame.f_code, frame.f_lasti
    operation = code.co_code[last]
    again = operation == _RAISE and (
        code.co_code[last + 1] == 0 or CallSite.inside(code)
    )  # `raise`; `raise error` of a call
    raised = operation == _RERAISE or again
    if not raised and last != trace.tb_lasti:
        return False
    module = False
    while frame is not None:
        if id(frame) in stack or frame.f_code.co_code[frame.f_lasti] == _RETURN:
            return False
        module = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
        frame = frame.f_back
    return raised or module


def stop() -> None:
    """Stop calling ``note``: exceptions that are dropped later, with the modules, do not end the program."""
    global _note
    _note = None


def forget() -> None:
    """Forget the parent's exceptions in a forked child."""
    global _before, _last
    _last = None
    _before = getattr(sys, "last_value", None)
    exit_monitor.forget()


def uncaught() -> BaseException | None:
    """Return the exception that has ended the program and that Python has printed, or None; for exit handlers."""
    error = getattr(sys, "last_value", None)
    trace = getattr(sys, "last_traceback", None)
    if error is None or error is _before or hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    # Prompts and test runners put exceptions there, too; such an exception has not left the outermost frame.
    return error if trace is not None and trace.tb_frame.f_back is None else None
