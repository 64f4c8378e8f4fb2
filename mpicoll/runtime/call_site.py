"""Find the line of the program that calls the library, and the places of its other threads."""

from __future__ import annotations

import gc
import os
import site
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType

from mpicoll.runtime.native import found as extension

_INSTALLED = tuple({os.path.join(path, "") for path in (*sysconfig.get_paths().values(), site.getusersitepackages())})
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Folders of installed packages that are no paths of this Python: those of a cluster's modules, for example."""
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


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


FrameFinder = Callable[[int], FrameType]

_no_places: tuple[str, ...] = (PACKAGE,)
_passed: dict[str, bool] = {}
"""Whether code is between the program and this package, by the name of its file."""

_frame: FrameFinder = sys._getframe
_followers: list[Callable[[FrameFinder], None]] = []


def pass_through(*paths: str) -> None:
    """Let call sites skip code at these paths, too, which is between the program and this package.

    From now on each call looks for its frame by the names of files, which takes some 100 ns a frame.
    """
    global _no_places, _frame
    _no_places = tuple(dict.fromkeys((*_no_places, *paths)))
    _passed.clear()
    _frame = program_frame
    for follower in _followers:
        follower(program_frame)


def follow(follower: Callable[[FrameFinder], None]) -> None:
    """Call ``follower`` now, and again after :func:`pass_through`, with the function that finds the frame of the program's call.

    Until :func:`pass_through` is called that function is ``sys._getframe``, and its argument the number of frames between.
    """
    _followers.append(follower)
    follower(_frame)


def passes_through() -> bool:
    """Return whether frames are found by the names of files, so that this package may call its own public functions."""
    return _frame is program_frame


def _is_passed(name: str) -> bool:
    found = _passed.get(name)
    if found is None:
        found = _passed[name] = name.startswith(_no_places)
    return found


def _find_frame_outside(files: dict[str, bool]) -> FrameType | None:
    """Return the innermost frame whose code is not in one of the files to pass.

    Args:
        files: whether to pass a file, by its name.

    Returns:
        None if there is no such frame, or if ``files`` does not name its file.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and files.get(frame.f_code.co_filename):
        frame = frame.f_back
    return frame if frame is not None and frame.f_code.co_filename in files else None


find_frame_outside = _find_frame_outside if extension is None else extension.find_frame_outside


def program_frame(depth: int = 0) -> FrameType:
    """Return the innermost frame that is outside this package and the paths of :func:`pass_through`.

    A thread that C has started has no such frame: then it is that of the main thread, which waits for the thread, as in the
    backward pass of a model on a GPU.
    """
    frame: FrameType | None = find_frame_outside(_passed)
    if frame is not None:
        return frame
    # A file that is seen for the first time, or the end of the stack.
    first, main = sys._getframe(1), threading.main_thread().ident or 0
    frame = _outside_of(first)
    if frame is None:
        with stacks() as frames:
            frame = _outside_of(frames.get(main))
    if frame is not None:
        return frame
    while first.f_back is not None:
        first = first.f_back
    return first


def _outside_of(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _is_passed(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def call_site() -> CallSite:
    """Return the innermost place on the stack that is outside this package (226 ns a level on the machine measured)."""
    frame = program_frame()
    return CallSite(frame.f_code, frame.f_lasti)


def program_level() -> int:
    """Return the ``stacklevel`` with which the caller warns at the line of the program."""
    frame, level = sys._getframe(1), 1
    while _is_passed(frame.f_code.co_filename) and frame.f_back is not None:
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


class _Block:
    """A block of ``stacks``."""

    __slots__ = ("__weakref__",)


_open: weakref.WeakSet[_Block] = weakref.WeakSet()
"""Blocks that are open. A block that a signal handler has left before its end was noted is dropped with its generator."""
_collects: bool | None = None
"""Whether garbage was collected before the first open block; None: no block has stopped the collection."""
_changes = threading.RLock()
"""Held by the thread that opens or ends a block. A signal handler may open one meanwhile."""


@contextmanager
def stacks() -> Iterator[dict[int, FrameType]]:
    """Give the innermost frame of each other thread, by its ``threading.get_ident()``, to a block that looks at their stacks.

    CPython 3.11 makes an object of a frame when ``f_back`` is read. If that collects garbage, a finalizer may let the thread
    run whose frame is read; if the frame ends meanwhile, the process crashes or ``f_back`` never returns. So no collection
    starts inside the block.
    """
    block = _Block()
    try:
        if sys.version_info[:2] == (3, 11):
            _stop_collecting(block)
        frames = sys._current_frames()
        del frames[threading.get_ident()]
        yield frames
    finally:
        if block in _open:
            _collect_again(block)


def _stop_collecting(block: _Block) -> None:
    global _collects
    with _changes:
        if _collects is None:
            _collects = gc.isenabled()
        _open.add(block)
        gc.disable()


def _collect_again(block: _Block) -> None:
    global _collects
    with _changes:
        _open.discard(block)
        if not _open:
            if _collects:
                gc.enable()
            _collects = None


def _in_child() -> None:
    global _changes
    _changes = threading.RLock()
    for block in tuple(_open):  # blocks of other threads, which the child does not have
        _collect_again(block)


os.register_at_fork(after_in_child=_in_child)


def _is_installed(name: str) -> bool:
    """Return whether a file of code belongs to Python or to an installed package, or is no file."""
    return name.startswith((*_INSTALLED, "<")) or any(folder in name for folder in _PACKAGES)


_MOST_CALLERS = 4


def is_installed(call: CallSite) -> bool:
    """Return whether a call stands in Python's library or in an installed package, not in the program."""
    return _is_installed(call.code.co_filename)


def callers_of(call: CallSite) -> list[str]:
    """Return the places of the program that have led to a call, the nearest first, each function once.

    Returns:
        At most four of file:line; ["thread NAME"] if the call stands in an installed package and no line of the program has made
        the call, as in a thread of an executor; [] if no thread is in the call.
    """
    ident, found = threading.get_ident(), _callers_on(sys._getframe(1), call)
    if found is None:
        with stacks() as frames:
            others = {thread: _callers_on(frame, call) for thread, frame in frames.items()}
        ident, found = next((pair for pair in others.items() if pair[1] is not None), (0, None))
    if found == [] and is_installed(call):
        return [f"thread {_name_of(ident)}"]
    return found or []


def _callers_on(frame: FrameType | None, call: CallSite) -> list[str] | None:
    """Return the same of one stack: None if the call is not on the stack, [] if no line of the program is."""
    while frame is not None and not (frame.f_code is call.code and frame.f_lasti == call.instruction):
        frame = frame.f_back
    if frame is None:
        return None
    found: list[str] = []
    seen = {call.code}
    while frame is not None and len(found) < _MOST_CALLERS:
        code = frame.f_code
        if code not in seen and not _is_passed(code.co_filename) and not _is_installed(code.co_filename):
            found.append(f"{code.co_filename}:{frame.f_lineno}")
        seen.add(code)
        frame = frame.f_back
    return found


def _name_of(ident: int) -> str:
    return next((thread.name for thread in threading.enumerate() if thread.ident == ident), str(ident))


def thread_site(ident: int) -> str:
    """Return the innermost place of the stack of a thread that is neither in this package nor in an installed one, or ""."""
    if ident == threading.get_ident():
        return program_site(sys._getframe())
    with stacks() as frames:
        return program_site(frames.get(ident))


def program_site(frame: FrameType | None) -> str:
    """Return the innermost place of a stack that is neither in this package nor in an installed one, or ""."""
    innermost = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            text = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}()"
            if not _is_installed(name):
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
            if not _is_installed(code.co_filename):
                own = innermost
        trace = trace.tb_next
    return own or innermost
