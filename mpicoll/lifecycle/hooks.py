"""Hooks that notice how this process ends: excepthooks, exit handlers, MPI_Finalize, forked children."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicoll import errors
from mpicoll.diagnosis import wait_policy
from mpicoll.errors import (
    ARGUMENT,
    DistError,
    DistNetworkError,
    GroupBrokenError,
    PeerExitedError,
    PeerFailedError,
    before_c,
    in_one_line,
    message_of,
    reason_of,
)
from mpicoll.groups import registry
from mpicoll.groups.process_group import name_started
from mpicoll.launch.job_folder import append_record
from mpicoll.lifecycle import exit_code
from mpicoll.lifecycle.endpoint import endpoint_of, endpoints
from mpicoll.lifecycle.teardown import announce_failure, ending, leave, poll_until, prefix, prefixed
from mpicoll.runtime import signals, waiting, watchdog
from mpicoll.runtime.call_site import CallSite, traceback_site
from mpicoll.runtime.output import say

if TYPE_CHECKING:
    from mpicoll.diagnosis.board import Board

ORIGIN_ENDS_WITHIN = 0.5
"""Seconds for which a rank that ends because another rank failed in a block waits for the failure message of that rank."""

SAME_MOMENT = 0.03
"""Seconds for which a rank whose wait has ended looks for a lower rank that prints the same report."""

PRINTED_WITHIN = 2.0
"""Seconds in which the rank that prints a report ends with its error, before another rank prints the report."""

MOST_CHAINED = 20
"""Exceptions of a chain (``__cause__``, ``__context__``) that are looked at."""

_owner = os.getpid()
_installed = False
_registered = False
_keyval: int | None = None

_ignored_error = ""
"""Text of the program's exception in an exit handler, which Python ignores."""

_never_joined: tuple[BaseException, float] | None = None


def never_joined(error: BaseException, grace: float) -> None:
    """Record that this rank could neither take part in ``init_process_group`` nor send its error to the other ranks.

    If ``error`` ends the program, the other ranks may wait for this rank up to their limits, and this rank for them in
    MPI_Finalize.

    Args:
        error: the exception that this rank raises.
        grace: seconds that the other ranks have, before this rank ends the job.
    """
    global _never_joined
    _never_joined = error, grace


def _note_exit(code: Any, site: str, cause: str) -> None:
    ending.code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
    if ending.code and not ending.what:
        ending.what, ending.site = f"sys.exit({code!r}){cause}", site
    elif site and not ending.code:
        ending.by = f"sys.exit({'' if code is None else code}) at {os.path.basename(site)}"


def install() -> None:
    """Install the hooks of ``on_failure="job"``. The hooks call the hooks found, which :func:`uninstall` restores."""
    global _installed
    if not _installed:
        _installed = True
        for hook in _HOOKS:
            hook.install()
        exit_code.watch(_note_exit)
        wait_policy.on_exit = exit_code.mark
    signals.guard.install()


def uninstall() -> None:
    """Restore the hooks found, if the library's are still installed. The exit code stays known: the program may end later."""
    global _installed
    if not _installed:
        return
    _installed = False
    for hook in _HOOKS:
        hook.restore()
    signals.guard.uninstall()


def register() -> None:
    """Register the exit handler, and a callback that notices a program's own ``MPI.Finalize()``; once a process."""
    global _registered, _keyval
    if not _registered:
        _registered = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_in_child)
        # MPI calls the callback first in a program's MPI_Finalize, but not in mpi4py's, after the end of the interpreter.
        _keyval = MPI.Comm.Create_keyval(delete_fn=lambda *_: _finalize())
        MPI.COMM_SELF.Set_attr(_keyval, True)


def _finalize() -> None:
    """Leave the job at the program's own MPI_Finalize. If that is an error, the program goes on, and then ends with its code."""
    if _keyval is not None:
        leave("called MPI.Finalize()")
        if ending.code:
            sys._mpicoll_interpreter_exit = InterpreterExit()  # type: ignore[attr-defined]


def _in_child() -> None:
    watchdog.forget()
    waiting.pending.clear()
    waiting.progress_thread = None
    ending.code, ending.what, ending.site, ending.by, ending.interrupted = 0, "", "", "", False
    exit_code.forget()
    exit_code.watch(_note_exit)
    if not hasattr(sys, "_mpicoll_interpreter_exit"):  # a child of a child has it
        sys._mpicoll_interpreter_exit = InterpreterExit()  # type: ignore[attr-defined]
    sys._mpicoll_interpreter_exit.code = 0  # type: ignore[attr-defined]


class InterpreterExit:
    """Ends a process when its modules are cleared: a forked child, before MPI_Finalize, which would hang; a failed rank.

    An attribute of the ``sys`` module, which Python clears last. Other names are cleared before, so the object holds all that
    it needs.
    """

    def __init__(self) -> None:
        self.ending, self.code = ending, ending.code
        self.exit, self.kill, self.getpid = os._exit, os.kill, os.getpid

    def __del__(self) -> None:
        if self.ending.interrupted:
            self.kill(self.getpid(), 2)
        self.exit(self.ending.code or self.code)


def _excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    if os.getpid() != _owner or _found_hook.calls:
        _found_hook(kind, value, trace)
        return
    value = before_c(value)
    kind = type(value)
    known = registry.current()
    board = _note_end(value)
    me = known.world.rank() if known is not None else None
    hides = _hides_another(value, me)
    if ending.because_of_others and not hides:
        say(f"{prefix()}{kind.__name__}: {in_one_line(value)}\n")
        return
    reporter = _reporter(value, board) if isinstance(value, DistError) and not hides else None
    site = traceback_site(trace)
    other = reporter if known is not None and reporter != me else None
    trace = _shortened(value, trace)
    if other is not None:
        say(f"{prefix()}{kind.__name__}: {in_one_line(value)} ({site}; rank {other} prints the report)\n")
    else:
        with prefixed(value):
            _found_hook(kind, value, trace)
        if ending.because_of_others and board is not None and not MPI.Is_finalized():
            board.post("printed", None, range(board.size))  # for ranks that wait for this report
            board.flush(0.5)
    if not isinstance(value, (DistError, KeyboardInterrupt)):
        # After an error such as MemoryError this may fail, and the other ranks must hear of the error.
        with contextlib.suppress(Exception):
            _say_pending()
    if not ending.because_of_others:
        if isinstance(value, PeerExitedError) and value.ranks:
            append_record("early", value.ranks[0], 0)
        announce_failure(reason_of(value, whole=True), site)
    if other is not None and board is not None and not MPI.Is_finalized() and "\n" in str(value):
        with contextlib.suppress(KeyboardInterrupt):
            if not _is_printed(value, other, board):
                with prefixed(value):
                    print(
                        f"mpicoll: rank {other}, which was to print the report, may not have done so:", file=sys.stderr
                    )
                    _found_hook(kind, value, trace)
                board.post("printed", None, range(board.size))
                board.flush(0.5)


def _say_pending() -> None:
    """Print the operations that the program has not waited for: its own error may come from data that they had not moved yet."""
    known = registry.current()
    groups = tuple(known.groups.values()) if known is not None else ()
    pending = [call for group in groups for call in group.untold() if call.error is None]
    if pending:
        say(f"{prefix()}mpicoll: at this error the program had not waited for: {name_started(pending)}\n")


def _hides_another(error: BaseException, me: int | None) -> bool:
    """Return whether an error was raised while an unreported error was handled, as in a ``finally`` with a barrier.

    The hidden error is the program's own, or the library's with a report that this rank is to print. Then the whole chain is
    printed, without the library's own frames.
    """
    found, seen = False, error
    for _ in range(MOST_CHAINED):
        before = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
        if before is None:
            break
        seen = before
        if isinstance(seen, DistError):
            found = found or (seen.report is not None and seen.reporter in (None, me))
        else:
            found = found or _of_program(seen.__traceback__)
        seen.__traceback__ = _without_ours(seen.__traceback__)
    return found


def _of_program(trace: TracebackType | None) -> bool:
    """Return whether an exception has passed through lines of the program."""
    while trace is not None:
        if not CallSite.inside(trace.tb_frame.f_code):
            return True
        trace = trace.tb_next
    return False


def _note_end(error: BaseException) -> Board | None:
    """Record the error that ends the program, and whether another rank is at fault; return the board of the job."""
    ending.code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    known = registry.current()
    board = known.board if known is not None else endpoints[-1].board if endpoints else None
    if board is not None and not MPI.Is_finalized():
        board.poll()
        if isinstance(error, PeerFailedError) or _is_lost(error):
            _await_origin(error, board)
    ending.because_of_others = bool(board is not None and board.failed) and _may_come_of_others(error)
    return board


def _announce_as_guest(error: BaseException, trace: TracebackType | None) -> None:
    """Send the error that ends this rank to ranks that may wait for it on groups that it has not destroyed."""
    known = registry.current()
    if known is None or known.board.failed or isinstance(error, (PeerFailedError, GroupBrokenError)):
        return
    calls = endpoint_of(known.board).counters(known.board.rank)[0]
    failure = reason_of(error, whole=True)[:1000], traceback_site(trace), 1, "", "", False, calls
    known.board.post("failed", failure, range(known.board.size))
    known.board.flush(0.5)


def _may_come_of_others(error: BaseException) -> bool:
    """Return whether another rank's failure causes the error of this rank, if one has failed."""
    return isinstance(error, (PeerFailedError, GroupBrokenError)) or _is_lost(error)


def _is_lost(error: BaseException) -> bool:
    """Return whether a connection to the server of a store, which another rank may have, has ended."""
    return isinstance(error, DistNetworkError) and error.is_lost


def _await_origin(error: BaseException, board: Board) -> None:
    """Wait at most ORIGIN_ENDS_WITHIN for the failure message of a rank that the error names; the rank may also go on.

    A lost connection to the server of a store names no rank: the rank that has the server may be any.
    """
    if not isinstance(error, PeerFailedError):
        poll_until(lambda: board.notice_dead() or bool(board.failed), board, ORIGIN_ENDS_WITHIN, 0.002)
    elif error.ranks:
        poll_until(lambda: bool(board.failed.keys() & set(error.ranks)), board, ORIGIN_ENDS_WITHIN, 0.002)


def _reporter(error: DistError, board: Board | None) -> int | None:
    """Return the rank that prints the report of an error that several ranks raise; None: each rank prints its own.

    A rank whose limit passes, or whose peer has left, informs the members before it raises. If several ranks do so at the
    same moment, the lowest of these ranks prints.
    """
    known = registry.current()
    if error.reporter is not None or error.report is None or board is None or known is None or MPI.Is_finalized():
        return error.reporter
    poll_until(lambda: False, board, SAME_MOMENT)
    names = [group.group_name for group in tuple(known.groups.values()) if group.display == error.group]
    lower = [rank for name in names for rank in board.leavers.get(name, ()) if rank < board.rank]
    return min(lower, default=None)


def _is_printed(error: BaseException, reporter: int, board: Board) -> bool:
    """Return whether another rank prints the report of an error: its reporter, or the lowest other rank that ends with the error.

    The reporter may handle its error, so that the job ends without its report.
    """
    poll_until(
        lambda: reporter in board.failed.keys() | board.ended | board.exited.keys() | board.printed,
        board,
        PRINTED_WITHIN,
    )
    if reporter in board.printed:
        return True
    end = board.failed.get(reporter)
    if end is not None and (isinstance(error, PeerFailedError) or end.what.partition(":")[0] in errors.__all__):
        return True
    poll_until(lambda: False, board, 10 * SAME_MOMENT)
    words = reason_of(error, whole=True)[:1000]
    lower = {rank for rank, failure in board.failed.items() if rank < board.rank and failure.what == words}
    return bool(lower) and poll_until(lambda: bool(lower & board.printed), board, 2 * PRINTED_WITHIN)


def _thread_hook(arguments: threading.ExceptHookArgs) -> None:
    ident = arguments.thread.ident if arguments.thread is not None else None
    passes = os.getpid() != _owner or _found_thread_hook.calls
    if passes or ident not in signals.threads or arguments.exc_type is SystemExit:
        _found_thread_hook(arguments)
        return
    kind, value, trace, thread = arguments
    site = traceback_site(trace)
    if value is not None:
        arguments = threading.ExceptHookArgs((kind, value, _shortened(value, trace), thread))
    # Other ranks may wait for a thread that communicates.
    with prefixed():
        _found_thread_hook(arguments)
    ending.code, ending.passed_over = 1, True
    name = thread.name if thread is not None else "?"
    announce_failure(f"{kind.__name__} in thread {name}: {'' if value is None else message_of(value)}", site)


def _unraisable_hook(arguments: Any) -> None:
    """Treat an error between ranks in an exit handler as the end of the program, although Python ignores it."""
    global _ignored_error
    error: BaseException | None = arguments.exc_value
    handler = "atexit" in (arguments.err_msg or "")
    if os.getpid() != _owner or error is None or not handler or _found_unraisable_hook.calls:
        _found_unraisable_hook(arguments)
    elif not isinstance(error, DistError) and not getattr(error, ARGUMENT, False):
        # An error of the program, which Python ignores. But other ranks may wait for a call that the handler would have made.
        place = os.path.basename(traceback_site(arguments.exc_traceback))
        _ignored_error = f"{reason_of(error, whole=True)[:200]}{f' at {place}' if place else ''}, in an exit handler"
        _found_unraisable_hook(arguments)
    else:
        ending.passed_over = True
        _excepthook(type(error), error, arguments.exc_traceback)


class FoundHook:
    """The hook of Python that the library's hook has replaced, at each installation that was not undone.

    Another package may wrap the library's hook, as torch's ``init_process_group`` does at each call. Then the library's hook
    stays when it is to be removed, and a second installation finds a hook that calls the library's hook.

    Args:
        module, name: where Python has the hook: ``sys`` and ``excepthook``.
        ours: the library's hook.
    """

    def __init__(self, module: Any, name: str, ours: Callable[..., None]) -> None:
        self._module, self._name, self._ours = module, name, ours
        self._found: list[Callable[..., Any]] = []
        self._local = threading.local()

    def install(self) -> None:
        """Replace the hook of Python."""
        self._found.append(getattr(self._module, self._name))
        setattr(self._module, self._name, self._ours)

    def restore(self) -> None:
        """Restore the hook found, if the library's is still installed."""
        if getattr(self._module, self._name) is self._ours:
            setattr(self._module, self._name, self._found.pop())

    @property
    def calls(self) -> bool:
        """Whether this thread is in the found hook, so that the library's hook is called from a hook that it has called."""
        return getattr(self._local, "level", None) is not None

    def __call__(self, *given: Any) -> None:
        """Call the hook found last; from inside of that hook, the hook found before."""
        before = getattr(self._local, "level", None)
        self._local.level = level = (len(self._found) if before is None else before) - 1
        try:
            self._found[max(level, 0)](*given)
        finally:
            self._local.level = before


_found_hook = FoundHook(sys, "excepthook", _excepthook)
_found_thread_hook = FoundHook(threading, "excepthook", _thread_hook)
_found_unraisable_hook = FoundHook(sys, "unraisablehook", _unraisable_hook)
_HOOKS = _found_hook, _found_thread_hook, _found_unraisable_hook


def _shortened(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback to show of an exception, which Python's own hooks read from the exception."""
    if isinstance(error, DistError) or getattr(error, ARGUMENT, False):
        trace = error.__traceback__ = _without_ours(trace)
    return trace


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package: the message has all facts that the frames show.

    A traceback that has no other frames keeps its first.
    """
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    shorter: TracebackType | None = None
    for frame in reversed([each for each in frames if not CallSite.inside(each.tb_frame.f_code)] or frames[:1]):
        shorter = TracebackType(shorter, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shorter


def _at_exit() -> None:
    try:
        _end()
    finally:
        _found_unraisable_hook.restore()  # Python clears the modules that the library's hook needs


def _end() -> None:
    global _keyval
    if not ending.code:
        exit_code.note_last()
    error = exit_code.uncaught() if not ending.code else None
    if os.getpid() != _owner:
        exit_code.stop()
        if isinstance(error, KeyboardInterrupt):  # as in Python, the process ends by the signal
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            ending.interrupted = True
        if error is not None:
            ending.code = 1
    elif MPI.Is_initialized() and not MPI.Is_finalized():
        if error is not None and any(endpoint.job for endpoint in endpoints):  # the program has replaced our excepthook
            _note_end(error)
            if not ending.because_of_others:
                announce_failure(reason_of(error, whole=True), traceback_site(sys.last_traceback))
        elif error is not None:
            _announce_as_guest(error, sys.last_traceback)
        if _never_joined is not None and error is _never_joined[0]:
            _end_alone(_never_joined[1])
        leave(f"ended the program ({_ignored_error})" if _ignored_error else "ended the program")
        keyval, _keyval = _keyval, None
        if keyval is not None and not MPI.Is_finalized():
            MPI.COMM_SELF.Delete_attr(keyval)
            if not ending.code:
                append_record("end", MPI.COMM_WORLD.rank, os.getpid())


def _end_alone(grace: float) -> None:
    """End the job ``grace`` seconds after a failure that no other rank knows."""
    say(
        f"{prefix()}mpicoll: this error could not be sent to the other ranks, which may wait for this rank. This rank ends "
        f"the job in {grace:g} s (MPICOLL_EXIT_GRACE)\n"
    )
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(grace)
    ending.code, ending.unfinished = 1, True
