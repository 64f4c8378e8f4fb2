"""Recognise threads that stand: they wait in a join or on a lock of Python without a limit.

Only another thread of the process can release them. Threads that sleep, compute, or wait for anything else or with a limit may go
on by themselves. If the program handles signals, a handler may release any thread; one of SIGCHLD only if there are children.
That a thread of a C library releases a lock is not expected.
"""

from __future__ import annotations

import dis
import queue
import sys
import threading
import time
from collections.abc import Collection
from functools import lru_cache
from inspect import getattr_static
from types import CodeType, FrameType, MemberDescriptorType
from typing import Any

from mpicoll.runtime import signals
from mpicoll.runtime.call_site import program_site

_WAITS = {
    *(
        (kind, method)
        for kind in (type(threading.Lock()), type(threading.RLock()))
        for method in ("acquire", "__enter__")
    ),
    (queue.SimpleQueue, "get"),
}
"""Methods in C that wait without a limit if they are called without arguments."""

_WORKERS = (
    ("concurrent.futures.thread", "_worker", "work_queue", ("work_queue", "get")),
    ("multiprocessing.pool", "worker", "inqueue", ("get",)),
)
"""The functions of the threads of pools: module, function, the variable of the queue of work, and what they call to take work."""

JOIN = getattr(threading.Thread, "_wait_for_tstate_lock", threading.Thread.join).__code__
"""The code that calls C for a join: a function of its own up to Python 3.12."""

END = threading._shutdown.__code__  # type: ignore[attr-defined]
"""The end of the main thread, which waits for threads that are no daemons, after it has called functions of the program."""

_CALLS = {"CALL", "PRECALL", "CALL_METHOD"}  # PRECALL: of Python 3.11, which makes some calls there
_CALLS_BY_NAME = {"CALL_KW", "CALL_FUNCTION_KW", "CALL_FUNCTION"}  # of Python 3.13, and of 3.10
_ENTERS = {"SETUP_WITH", "BEFORE_WITH"}  # up to Python 3.13; later versions call __enter__
_BETWEEN = {"PRECALL", "PUSH_NULL", "COPY", "SWAP", "LOAD_SPECIAL", "EXTENDED_ARG", "CACHE"}
_ARGUMENTS = {"LOAD_CONST", "KW_NAMES"}


def idles(frame: FrameType) -> bool:
    """Return whether a thread, by its innermost frame, is an idle worker of a pool: only another thread can give it work."""
    for module, function, variable, path in _WORKERS:
        pool = sys.modules.get(module)
        if pool is not None and frame.f_code is getattr(pool, function).__code__:
            return (
                frame.f_lasti in _takes(frame.f_code, path) and type(frame.f_locals.get(variable)) is queue.SimpleQueue
            )
    return False


def standing(frames: dict[int, FrameType], idents: Collection[int | None]) -> tuple[tuple[str, int], ...]:
    """Return the place and the processor time in ns of each thread, of the main thread first; () if a thread does not stand.

    The processor time shows that a thread has run, also if it stands at the same place again.

    Args:
        frames: the frame of each thread of this process that runs Python.
        idents: the threads in question.
    """
    return () if signals.handlers() else places(frames, idents)


def places(frames: dict[int, FrameType], idents: Collection[int | None]) -> tuple[tuple[str, int], ...]:
    """Return what :func:`standing` does, whether or not the program handles signals."""
    found = []
    numbers = {thread.ident: thread.native_id for thread in threading.enumerate()}
    main = threading.main_thread().ident
    for ident in sorted(idents, key=lambda ident: (ident != main, ident or 0)):
        frame, number = frames.get(ident or 0), numbers.get(ident)
        if frame is None or number is None or not stands(frame):
            return ()
        try:
            ran = time.clock_gettime_ns(~number << 3 | 6)  # Linux: the clock of the processor time of a thread
        except OSError:
            return ()
        found.append((program_site(frame), ran))
    return tuple(found)


def stands(frame: FrameType) -> bool:
    """Return whether the call in which a thread is, by its innermost frame, is a join or a lock without a limit."""
    code = frame.f_code
    if code is JOIN:
        limits = frame.f_locals
        return limits.get("block", True) is True and limits.get("timeout") in (None, -1)
    if idles(frame):
        return True
    at = frame.f_lasti
    operation, count = dis.opname[code.co_code[at]], code.co_code[at + 1]
    if operation not in _ENTERS and (operation not in _CALLS or count):
        return False  # most code that computes: without the time to disassemble it
    *path, method = _called(code, at) or [""]
    if code is END and not path and method == "_thread_shutdown":
        return True  # the threads' end in C, since Python 3.13
    if not path or all(method != name for _, name in _WAITS):
        return False
    try:
        return (type(_value(frame, path)), method) in _WAITS
    except (AttributeError, KeyError):
        return False


@lru_cache(maxsize=128)
def _called(code: CodeType, instruction: int) -> tuple[str, ...]:
    """Return the names of the method that an instruction calls without arguments, from the variable on; () for other calls.

    The method of a ``with`` is ``__enter__``.
    """
    names: list[str] = []
    for each in reversed([each for each in dis.get_instructions(code) if each.offset <= instruction]):
        if each.offset == instruction:
            if each.opname in _ENTERS:
                names.append("__enter__")
        elif each.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            names.append(each.argval)
        elif each.opname == "LOAD_SPECIAL" and each.argrepr == "__enter__":
            names.append("__enter__")
        elif each.opname.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")):
            variable = each.argval if isinstance(each.argval, str) else each.argval[-1]  # one that loads two variables
            return (variable, *reversed(names))
        elif each.opname not in _BETWEEN:
            break
    return ()


@lru_cache(maxsize=8)
def _takes(code: CodeType, method: tuple[str, ...]) -> frozenset[int]:
    """Return the instructions by which a worker of a pool calls the method that gives it work."""
    found, path = [], [""]
    for each in dis.get_instructions(code):
        if path == [*method] and each.opname in _CALLS | _CALLS_BY_NAME:
            found.append(each.offset)
        if each.opname.startswith("LOAD_FAST"):
            path = [each.argval]
        elif each.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            path = [*path, each.argval]
        elif each.opname not in _BETWEEN | _ARGUMENTS:
            path = [""]
    return frozenset(found)


def _value(frame: FrameType, path: list[str]) -> Any:
    """Return the value of a variable, or of attributes of it, without running code of the program.

    Up to Python 3.12 a frame keeps the values that ``f_locals`` returns until it ends. So global variables are read without it.
    """
    code, (variable, *attributes) = frame.f_code, path
    local = variable in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    value = frame.f_locals[variable] if local else frame.f_globals[variable]
    for name in attributes:
        found = getattr_static(value, name)
        value = found.__get__(value) if isinstance(found, MemberDescriptorType) else found
    return value
