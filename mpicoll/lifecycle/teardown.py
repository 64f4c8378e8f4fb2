"""How a rank leaves: the hooks that see it coming, and what it owes the others before it goes.

Order at the end of a Python program: the excepthook, then exit handlers (latest first; ours among them), flushed streams,
the end of all modules, and last of all mpi4py's MPI_Finalize, or MPI_Abort where an abort status was set. So the job is
ended by an abort status: every other exit handler has run by then.

Measured with raw mpi4py: a rank that leaves by an exception hangs in MPI_Finalize while the others wait for it, and a
forked child that ends through sys.exit hangs there for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll.diagnosis import job_state
from mpicoll.diagnosis.report.report import painted
from mpicoll.errors import ARGUMENT, DistError, GroupBrokenError, PeerFailedError, in_one_line
from mpicoll.groups import process_group, registry
from mpicoll.launch.job_folder import append_record, record_failure
from mpicoll.lifecycle import exit_code
from mpicoll.lifecycle.hard_deadline import afterwards
from mpicoll.runtime import signals, waiting, watchdog
from mpicoll.runtime.call_site import NOWHERE, Site, traceback_site
from mpicoll.runtime.mpi_library import retain_for_ever
from mpicoll.runtime.output import flush_streams, say
from mpicoll.runtime.signals import notes
from mpicoll.transports.shm import mapping
from mpicoll.transports.topology import node_communicator

if TYPE_CHECKING:
    from mpicoll.checks.agreement import Closing
    from mpicoll.diagnosis.board import Board
    from mpicoll.groups.communicators import Pool


NOBODY_HANDLES = 4.0
"""Seconds after which a failed rank ends the job when no other rank handles the failure."""
SAY_SO_AFTER = 0.1
"""Seconds that a rank waits at its end for the others to end too, before it tells them that it has."""


MOST_REMEMBERED = 1000
"""Destroyed groups of which the number of calls is kept, the last ones: others may still wait in a call of theirs."""

MOST_TAGS = 32
"""Tags of which a rank is told, when this one ends, how many messages there were for it."""


@dataclass(eq=False)
class JobEndpoint:
    """What lives as long as the communicator that a default group was made on, over any number of initialisations.

    Attributes:
        again: where the ranks agree on an idle pair when the default group is made again.
        calls, sent, received, last: of destroyed groups, by name: the calls made, the messages to and from each
            (rank, tag), the last call.
        displays, places: their names as users read them, and where messages to each (rank, tag) were sent.
        job: some default group on it had ``on_failure="job"``.
    """

    board: Board
    pool: Pool
    again: MPI.Intracomm
    topology: Any
    calls: dict[str, int]
    sent: dict[str, dict[tuple[int, int], int]]
    job: bool = False
    said: bool = False
    node: MPI.Intracomm | None = field(default=None, init=False)
    last: dict[str, str] = field(default_factory=dict, init=False)
    received: dict[str, dict[tuple[int, int], int]] = field(default_factory=dict, init=False)
    displays: dict[str, str] = field(default_factory=dict, init=False)
    places: dict[str, dict[tuple[int, int], str]] = field(default_factory=dict, init=False)

    def node_communicator(self, parent: MPI.Intracomm) -> MPI.Intracomm:
        """Return the communicator of this node's ranks, made when it is first asked for, by all of them."""
        if self.node is None:
            self.node = node_communicator(self.topology, parent)
        return self.node

    def remember(self, group: process_group.ProcessGroup) -> None:
        """Keep the counters of a group that is destroyed."""
        for kept in (self.calls, self.last):
            while len(kept) >= MOST_REMEMBERED:
                del kept[next(iter(kept))]
        self.calls[group.group_name] = group.calls
        self.last[group.group_name] = group.last_call()
        if group.sent or group.received:
            self.sent[group.group_name] = group.by_rank(group.sent)
            self.received[group.group_name] = group.by_rank(group.received)
            self.displays[group.group_name] = group.display
            self.places[group.group_name] = group.by_rank(group.told.places)

    def settle(self, name: str, to: set[int], by: set[int]) -> None:
        """Forget the messages on a destroyed group to ranks that have received all, and from those whose all have come.

        The others forget the same, so the sums of all ranks still tell whether something is left.
        """
        for kept, ranks in ((self.sent, to), (self.received, by)):
            if name in kept:
                left = {(rank, tag): count for (rank, tag), count in kept.pop(name).items() if rank not in ranks}
                if left:
                    kept[name] = left
        if name not in self.sent and name not in self.received:
            self.displays.pop(name, None)
            self.places.pop(name, None)

    def counters(self, rank: int) -> tuple[dict[str, int], dict[str, dict[int, int]], dict[str, str]]:
        """Return the calls made on every group, the messages sent to ``rank`` on each by tag, and the last call on each."""
        calls, last = dict(self.calls), dict(self.last)
        sent = {name: _by_tag(there, rank) for name, there in self.sent.items()}
        known = registry.current()
        if known is not None and known.board is self.board:
            for group in tuple(known.groups.values()):
                calls[group.group_name] = group.calls
                last[group.group_name] = group.last_call()
                if rank in group.ranks:
                    sent[group.group_name] = _by_tag(group.sent, group.ranks.index(rank))
        return calls, sent, {name: text for name, text in last.items() if text}


def _by_tag(sent: dict[tuple[int, int], int], peer: int) -> dict[int, int]:
    """Return the messages to one rank by their tag, of the last MOST_TAGS tags, and of all others under -1."""
    counts = [(tag, n) for (to, tag), n in sent.items() if to == peer]
    before = sum(n for _, n in counts[:-MOST_TAGS])
    return dict(counts[-MOST_TAGS:]) | ({-1: before} if before else {})


endpoints: list[JobEndpoint] = []


@dataclass
class _Ending:
    """How this process is ending, as far as is known.

    Attributes:
        passed_over: what ended it is nothing to Python, which would end with 0: it was raised in a thread, or in an exit handler.
    """

    code: int = 0
    what: str = ""
    site: str = ""
    because_of_others: bool = False
    passed_over: bool = False
    stuck: bool = False
    interrupted: bool = False


_ending = _Ending()
_owner = os.getpid()
_installed = False
_at_exit_registered = False
_done = False
_found_hook: Any = None
_found_thread_hook: Any = None
_found_unraisable_hook: Any = None
_passed_over = ""
_keyval: int | None = None


_never_joined: tuple[BaseException, float] | None = None


def never_joined(error: BaseException, grace: float) -> None:
    """Note that this rank could neither take part in ``init_process_group`` nor tell the others.

    Args:
        error: what it raises there. When that ends the program the others may wait for it up to their limits, and this rank
            for them in MPI_Finalize.
        grace: seconds that they have for other things, before this rank ends the job.
    """
    global _never_joined
    _never_joined = error, grace


def fails() -> bool:
    """Whether this rank is on its way out by a failure of its own or of another rank."""
    return bool(_ending.code or _ending.because_of_others)


def stuck() -> None:
    """Note that something was posted to MPI that may never complete, so that MPI_Finalize could hang."""
    _ending.stuck = True


def _note_exit(code: Any, site: str) -> None:
    _ending.code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
    if _ending.code and not _ending.what:
        _ending.what, _ending.site = f"sys.exit({code!r})", site


def install() -> None:
    """Install the hooks of ``on_failure="job"``; those found are called by ours and come back with :func:`uninstall`."""
    _install_hooks()
    signals.guard.install()


def _install_hooks() -> None:
    global _installed, _found_hook, _found_thread_hook, _found_unraisable_hook
    if _installed:
        return
    _installed = True
    _found_hook, sys.excepthook = sys.excepthook, _excepthook
    _found_thread_hook, threading.excepthook = threading.excepthook, _thread_hook
    _found_unraisable_hook, sys.unraisablehook = sys.unraisablehook, _unraisable_hook
    exit_code.watch(_note_exit)


def uninstall() -> None:
    """Take the hooks out where they are still ours (the exit code stays known: programs end after destroying, too)."""
    global _installed
    if not _installed:
        return
    _installed = False
    if sys.excepthook is _excepthook:
        sys.excepthook = _found_hook
    if threading.excepthook is _thread_hook:
        threading.excepthook = _found_thread_hook
    if sys.unraisablehook is _unraisable_hook:
        sys.unraisablehook = _found_unraisable_hook
    signals.guard.uninstall()


def register() -> None:
    """Register the exit handler, and the callback that notices a program's own ``MPI.Finalize()``; once a process."""
    global _at_exit_registered, _keyval
    if not _at_exit_registered:
        _at_exit_registered = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_in_child)
        _keyval = MPI.Comm.Create_keyval(delete_fn=_before_finalize)
        MPI.COMM_SELF.Set_attr(_keyval, True)


def _in_child() -> None:
    watchdog.forget()
    waiting.pending.clear()
    waiting.progress_thread = None
    _ending.code, _ending.what, _ending.site, _ending.interrupted = 0, "", "", False
    exit_code.forget()
    exit_code.watch(_note_exit)
    if not hasattr(sys, "_mpicoll_last_word"):  # a child of a child has it
        sys._mpicoll_last_word = _LastWord()  # type: ignore[attr-defined]


class _LastWord:
    """Ends a forked child when its modules are torn down: after its exit handlers, before MPI_Finalize, where it hangs.

    It hangs on the ``sys`` module, which Python clears last; by then other names are gone, so it holds all that it needs.
    """

    def __init__(self) -> None:
        self.ending = _ending
        self.exit, self.kill, self.getpid = os._exit, os.kill, os.getpid

    def __del__(self) -> None:
        if self.ending.interrupted:
            self.kill(self.getpid(), 2)
        self.exit(self.ending.code)


def _prefix() -> str:
    known = registry.current()
    if known is not None:
        return f"[rank {known.world.rank()}] "
    return f"[rank {endpoints[-1].board.rank}] " if endpoints else f"[rank {MPI.COMM_WORLD.Get_rank()}] "


@contextlib.contextmanager
def _prefixed(prefix: str, error: BaseException | None = None) -> Iterator[None]:
    """Put ``prefix`` before every line that is written to stderr, in one piece; the report of ``error`` in colour there."""
    text = io.StringIO()
    found, sys.stderr = sys.stderr, text
    try:
        yield
    finally:
        sys.stderr = found
        whole = text.getvalue()
        with contextlib.suppress(Exception):  # a stream of the program's
            if isinstance(error, DistError) and error.report is not None:
                said = str(error)
                before, _, after = whole.rpartition(said)
                whole = f"{before}{painted(said, found)}{after}" if said in whole else whole
        say("".join(f"{prefix}{line}\n" for line in whole.splitlines()))


def _excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    if os.getpid() != _owner:
        _found_hook(kind, value, trace)
        return
    known = registry.current()
    board = _end_by(value)
    me = known.world.rank() if known is not None else None
    hides = _hidden(value, me)
    if _ending.because_of_others and not hides:
        say(f"{_prefix()}{kind.__name__}: {in_one_line(value)}\n")
        return
    reporter = _reporter(value, board) if isinstance(value, DistError) and not hides else None
    if known is not None and reporter not in (None, me):
        first = in_one_line(value)
        say(f"{_prefix()}{kind.__name__}: {first} ({traceback_site(trace)}; rank {reporter} tells more)\n")
    else:
        if isinstance(value, DistError) or getattr(value, ARGUMENT, False):
            trace = value.__traceback__ = _without_ours(trace)  # Python's own hook reads it from the exception
        with _prefixed(_prefix(), value):
            _found_hook(kind, value, trace)
    if not _ending.because_of_others:
        _tell_uncaught(value, trace)


def _hidden(error: BaseException, me: int | None) -> bool:
    """Whether an error came while another one was handled that nobody has told, as of a ``finally`` with a barrier in it.

    That is one of the program's own, or the library's with a report that this rank is to print; then the whole chain is shown,
    without the library's own frames.
    """
    found, seen = False, error
    for _ in range(20):
        before = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
        if before is None:
            break
        seen = before
        if isinstance(seen, DistError):
            told = seen.report is not None and seen.reporter in (None, me)
        else:
            told = _of_program(seen.__traceback__)
        found = found or told
        seen.__traceback__ = _without_ours(seen.__traceback__)
    return found


def _of_program(trace: TracebackType | None) -> bool:
    """Whether an exception has passed through the program's own lines."""
    while trace is not None:
        if not Site.inside(trace.tb_frame.f_code):
            return True
        trace = trace.tb_next
    return False


def _end_by(error: BaseException) -> Board | None:
    """Take note of what ends the program, and by whose fault; return the board on which the others are told."""
    _ending.code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    known = registry.current()
    board = known.board if known is not None else endpoints[-1].board if endpoints else None
    if board is not None and not MPI.Is_finalized():
        board.poll()
        if isinstance(error, PeerFailedError):
            _hear_of_origin(error, board)
    _ending.because_of_others = bool(board is not None and board.failed) and isinstance(
        error, (PeerFailedError, GroupBrokenError)
    )
    return board


def _tell_uncaught(error: BaseException, trace: TracebackType | None) -> None:
    _failed(_in_words(error), traceback_site(trace))


def _in_words(error: BaseException) -> str:
    try:
        said = in_one_line(error) if isinstance(error, DistError) and error.report is not None else str(error)
    except Exception:
        said = ""  # of a class whose __str__ raises
    kind = type(error).__name__
    return f"{kind}: {said}" if said else kind


def _tell_as_guest(error: BaseException, trace: TracebackType | None) -> None:
    """Tell those who may wait for this rank, on groups that it has not destroyed, what has ended it; the job is not ours."""
    known = registry.current()
    if known is None or known.board.failed or isinstance(error, (PeerFailedError, GroupBrokenError)):
        return
    known.board.post("failed", (_in_words(error)[:1000], traceback_site(trace), 1), range(known.board.size))
    known.board.flush(0.5)


ORIGIN_ENDS_WITHIN = 0.5
"""Seconds for which a rank, about to end because another one failed in a block, waits for that one to end by it."""


def _hear_of_origin(error: PeerFailedError, board: Board) -> None:
    """Wait a moment for the word of the rank that the error is about, which may be on its way to the end, or go on."""
    end = time.monotonic() + ORIGIN_ENDS_WITHIN
    while error.ranks and not board.failed.keys() & set(error.ranks) and time.monotonic() < end:
        time.sleep(0.002)
        board.poll()


SAME_MOMENT = 0.03
"""Seconds for which a rank that could not wait any longer looks for a lower one that says the same."""


def _reporter(error: DistError, board: Board | None) -> int | None:
    """Return the rank that prints all of what several ranks raise; None: each its own.

    Whose limit passes, or who waits for a rank that has left, tells the members before it raises; of those that do so at
    the same moment the lowest one speaks.
    """
    known = registry.current()
    if error.reporter is not None or error.report is None or board is None or known is None or MPI.Is_finalized():
        return error.reporter
    end = time.monotonic() + SAME_MOMENT
    while time.monotonic() < end:
        board.poll()
        time.sleep(0.001)
    names = [group.group_name for group in tuple(known.groups.values()) if group.display == error.group]
    lower = [rank for name in names for rank in board.leavers.get(name, ()) if rank < board.rank]
    return min(lower, default=None)


def _thread_hook(arguments: threading.ExceptHookArgs) -> None:
    ident = arguments.thread.ident if arguments.thread is not None else None
    if os.getpid() != _owner or ident not in signals.threads or arguments.exc_type is SystemExit:
        _found_thread_hook(arguments)
        return
    # A thread that communicates is one that the other ranks may wait for.
    with _prefixed(_prefix()):
        _found_thread_hook(arguments)
    _ending.code, _ending.passed_over = 1, True
    name = arguments.thread.name if arguments.thread is not None else "?"
    _failed(
        f"{arguments.exc_type.__name__} in thread {name}: {arguments.exc_value}",
        traceback_site(arguments.exc_traceback),
    )


def _unraisable_hook(arguments: Any) -> None:
    """Take an error between ranks that has come out of an exit handler for the end of the program, which Python passes over."""
    global _passed_over
    error: BaseException | None = arguments.exc_value
    handler = "atexit" in (arguments.err_msg or "")
    if os.getpid() != _owner or error is None or not handler:
        _found_unraisable_hook(arguments)
    elif not isinstance(error, DistError) and not getattr(error, ARGUMENT, False):
        # The program's own affair; but others may wait for what the handler would have called.
        place = os.path.basename(traceback_site(arguments.exc_traceback))
        _passed_over = f"{_in_words(error)[:200]}{f' at {place}' if place else ''}, in an exit handler"
        _found_unraisable_hook(arguments)
    else:
        _ending.passed_over = True
        _excepthook(type(error), error, arguments.exc_traceback)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package at its end: the message says all that they could."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    while len(frames) > 1 and Site.inside(frames[-1].tb_frame.f_code):
        frames.pop()
    shorter: TracebackType | None = None
    for frame in reversed(frames):
        shorter = TracebackType(shorter, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shorter


def _failed(what: str, site: str) -> None:
    """Tell the launcher and the other ranks, at once, that this rank has failed."""
    _ending.what, _ending.site = what, site
    for base in endpoints:
        if base.job and not base.said:
            job_state.doomed = f"{what[:200]} at {site}" if site else what[:200]
            base.said = True
            record_failure(base.board.rank, _ending.code)
            finalizes = not _ending.passed_over and not _spoiled(base)
            base.board.post(
                "failed", (_ending.what[:1000], site, _ending.code, "", "", finalizes), range(base.board.size)
            )
            base.board.flush(0.5)


def _before_finalize(comm: Any, keyval: int, value: Any) -> None:
    # MPI calls this first of all in MPI_Finalize. From mpi4py's own the interpreter is gone and it is not reached.
    leave("called MPI.Finalize()")


def _at_exit() -> None:
    try:
        _end()
    finally:
        if sys.unraisablehook is _unraisable_hook:
            sys.unraisablehook = _found_unraisable_hook  # what it needs is about to go


def _end() -> None:
    error = exit_code.uncaught() if not _ending.code else None
    if os.getpid() != _owner:
        exit_code.stop()
        if isinstance(error, KeyboardInterrupt):  # as Python does it: the process ends by the signal
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _ending.interrupted = True
        if error is not None:
            _ending.code = 1
    elif MPI.Is_initialized() and not MPI.Is_finalized():
        if error is not None and _answers():  # the program has put another excepthook in the place of ours
            _end_by(error)
            if not _ending.because_of_others:
                _tell_uncaught(error, sys.last_traceback)
        elif error is not None:
            _tell_as_guest(error, sys.last_traceback)
        if _never_joined is not None and error is _never_joined[0]:
            _end_alone(_never_joined[1])
        leave(f"ended the program ({_passed_over})" if _passed_over else "ended the program")
        if _keyval is not None and not MPI.Is_finalized():
            MPI.COMM_SELF.Delete_attr(_keyval)


def _end_alone(grace: float) -> None:
    """Have the job end some time after a failure that no other rank knows of."""
    say(
        f"{_prefix()}mpicoll: the others could not be told of this error, and may wait for this rank: it ends the job in "
        f"{grace:g} s (MPICOLL_EXIT_GRACE)\n"
    )
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(grace)
    _ending.code, _ending.stuck = 1, True


def _answers() -> bool:
    """Whether this rank answers for its end to others: some default group had ``on_failure="job"``."""
    return any(base.job for base in endpoints)


def leave(reason: str) -> None:
    """Leave every job this process is part of; the one way out, whether it ends well or not.

    Args:
        reason: what this rank does, as others read it who wait for it: "ended the program".

    A rank that ends well waits, asleep and answering questions, until all have come to their end, and says that it has
    ended when the others take longer. One that fails gives ranks that handle the failure ``MPICOLL_EXIT_GRACE`` seconds,
    and ends the job with its own exit code.
    """
    global _done
    if _done:
        return
    _done = True
    if waiting.progress_thread is not None:
        waiting.progress_thread.stop()
        waiting.progress_thread = None
    known = registry.current()
    never = _never_waited(known) if known is not None and not _ending.code else ""
    if never and known is not None and known.on_failure == "job" and not _ending.code:
        _ending.code, _ending.what, _ending.stuck = 1, never, True
    if never:
        say(f"{_prefix()}{never}\n")
    parted = True
    try:
        for base in endpoints:
            if base.job:
                _leave_base(base, reason, known.settings.exit_grace if known is not None else 30.0)
            else:
                parted = (_ending.code != 0 or _part(base, reason)) and parted
    except KeyboardInterrupt:
        _ending.code, _ending.stuck = 128 + signal.SIGINT, True
    watchdog.stop()
    mapping.remove()  # what was given up while it was made
    notes.end()
    spoiled = _ending.stuck or any(pair.spoiled for base in endpoints for pair in base.pool.all())
    ends_job = bool(spoiled and _ending.code)
    for base in endpoints:
        if base.board.slots is not None:
            base.board.slots.leave(ends_job=ends_job)
    if ends_job:
        _abort(_ending.code)
    elif not spoiled and parted:
        for base in endpoints:
            for pair in base.pool.all():
                pair.agreement.free()
        if known is not None:
            for group in tuple(known.groups.values()):
                group.free_plans()


def _part(base: JobEndpoint, reason: str) -> bool:
    """Leave a program whose end is not the library's affair; whether all ranks do so at about the same time.

    Those that may be waiting for this rank, as it has not destroyed its default group, are told. It waits for nobody.
    """
    board = base.board
    if not any(group.broken is None for group in _live(base)):
        return True
    words = np.zeros(1, np.int64)
    everybody = board.comm.Iallreduce(MPI.IN_PLACE, words, MPI.SUM)
    end = time.monotonic() + SAY_SO_AFTER
    while not everybody.Test():
        board.poll()
        if time.monotonic() > end:
            retain_for_ever(everybody, words)
            for rank in range(board.size):
                if rank != board.rank:
                    board.post("exited", (*base.counters(rank), reason), [rank])
            board.flush(SAY_SO_AFTER)
            return False
        time.sleep(0.001)
    return True


def _never_waited(known: registry.JobWithGroups) -> str:
    calls = [op.call for group in tuple(known.groups.values()) for op in tuple(group.unwaited.values())]
    if not calls:
        return ""
    return "the program ended with operations that nobody waited for: " + "; ".join(
        f"{call.op} issued at {call.site}" for call in calls
    )


def _leave_base(base: JobEndpoint, reason: str, grace: float) -> None:
    board = base.board
    if base.said:
        _ending.because_of_others = (
            False  # this rank has failed by itself, in a thread, whatever its main thread heard then
        )
    elif board.failed:
        _ending.because_of_others = True  # whatever this rank ends with: the job ends with the code of who failed first
    if _ending.code and not _ending.because_of_others:
        _failed(_ending.what, _ending.site)
        _await_peers(board, grace)
        others = [failure for rank, failure in board.failed.items() if rank != board.rank]
        # Each rank failed by itself, and none ends the job: where one does, MPI_Finalize would wait for it.
        alone = len(others) == board.size - 1 and all(failure.finalizes for failure in others)
        if not alone or _spoiled(base) or _ending.passed_over:
            _ending.stuck = True
        return
    if not _ending.code:
        _linger(base, reason)
    if board.failed:
        # The origin ends the job with its own exit code; should it not, we do.
        origins = {board.origin(rank) for rank in board.failed}
        board.post("ended", None, origins)
        if board.rank in origins:  # one that is dead left it to us
            _await_peers(board, grace)
            _ending.code, _ending.stuck = _ending.code or 1, True
            append_record("blame", board.rank, _ending.code)
            return
        end = time.monotonic() + grace + NOBODY_HANDLES + 2
        while time.monotonic() < end:
            board.poll()
            time.sleep(0.01)
        _ending.code, _ending.stuck = _ending.code or 1, True
        append_record("blame", board.rank, _ending.code)


def _spoiled(base: JobEndpoint) -> bool:
    return any(pair.spoiled for pair in base.pool.all())


def _await_peers(board: Board, grace: float) -> None:
    start = time.monotonic()
    while True:
        board.poll()
        over = board.ended | set(board.failed)
        handling = board.handling - over
        waited = time.monotonic() - start
        if len(over - {board.rank}) >= board.size - 1 or waited >= grace or (waited >= NOBODY_HANDLES and not handling):
            return
        time.sleep(0.002)


def _linger(base: JobEndpoint, reason: str) -> None:
    closings = _close(base)
    totals = np.array([balance(base), len(closings)], np.int64)
    try:
        if not _await_all(base, reason, totals, closings):
            return
        if totals[1]:
            _compare_last(closings)
    finally:
        _say_apart(base, closings)
    if totals[1]:
        _await_words(base)
    if totals[0]:
        _name_lost(base)


def _await_all(base: JobEndpoint, reason: str, totals: Any, closings: list[Closing]) -> bool:
    """Wait until all ranks have come to their end, and add up ``totals``; False when that cannot be, as one has failed."""
    board = base.board
    everybody = board.comm.Iallreduce(MPI.IN_PLACE, totals, MPI.SUM)
    start = time.monotonic()
    limit = max(base_limit, 60.0)
    told = False
    while not everybody.Test():
        waited = time.monotonic() - start
        waiting.progress()
        board.poll()
        for closing in closings:
            closing.Test()  # another rank may be at its next comparison, and wait for this one to tell what it called
        if waited > SAY_SO_AFTER:
            board.notice_dead()
        if board.failed:
            return False
        if not told and waited > SAY_SO_AFTER:
            told = True
            for rank in range(board.size):
                board.post("exited", (*base.counters(rank), reason), [rank])
        if waited > limit:
            return False
        time.sleep(waiting.pause(waited, 1_000_000, True) or 0.0)
    return True


def balance(base: JobEndpoint) -> int:
    """Return the messages that this rank has sent on all groups, less those that it has received."""
    sent = sum(sum(there.values()) for there in _sent(base).values())
    return sent - sum(sum(here.values()) for here in _received(base).values())


def _sent(base: JobEndpoint) -> dict[str, dict[tuple[int, int], int]]:
    """Return the messages to each (rank, tag) on each group, also on those that are destroyed."""
    return {**base.sent, **{group.group_name: group.by_rank(group.sent) for group in _live(base)}}


def _received(base: JobEndpoint) -> dict[str, dict[tuple[int, int], int]]:
    return {**base.received, **{group.group_name: group.by_rank(group.received) for group in _live(base)}}


def _live(base: JobEndpoint) -> list[process_group.ProcessGroup]:
    known = registry.current()
    return list(known.groups.values()) if known is not None and known.board is base.board else []


def _name_lost(base: JobEndpoint) -> None:
    """Say which messages were never received, and end with an error: all ranks have come to their end."""
    board = base.board
    _ending.code, _ending.stuck = 1, True
    places = {**base.places, **{group.group_name: group.by_rank(group.told.places) for group in _live(base)}}
    for rank in {rank for there in _sent(base).values() for rank, _ in there}:
        mine = {
            name: {tag: (n, places.get(name, {}).get((to, tag), "")) for (to, tag), n in there.items() if to == rank}
            for name, there in _sent(base).items()
        }
        mine = {name: there for name, there in mine.items() if there}
        if rank == board.rank:
            board.sent[rank] = mine
        board.post("sent", mine, [rank])
    board.flush(1.0)
    told = board.comm.Ibarrier()
    end = time.monotonic() + 5.0
    while (not told.Test() or time.monotonic() < end - 4.9) and time.monotonic() < end:
        board.poll()
        time.sleep(0.001)
    board.poll()
    received = _received(base)
    displays = {**base.displays, **{group.group_name: group.display for group in _live(base)}}
    for sender, by_group in sorted(board.sent.items()):
        for name, there in by_group.items():
            for tag, (count, place) in there.items():
                left = count - received.get(name, {}).get((sender, tag), 0)
                if left > 0:
                    what = f"{left} message{'s' if left > 1 else ''}"
                    say(
                        f"{_prefix()}mpicoll: the program ended, and {what} from rank {sender} to rank {board.rank} with tag "
                        f"{tag} on group {displays.get(name, name)} had not been received{f' ({place})' if place else ''}\n"
                    )


def _close(base: JobEndpoint) -> list[Closing]:
    """Post the last comparison on every group that rolls; return those under way, also of groups that were destroyed."""
    known = registry.current()
    found = [pair.closing for pair in base.pool.all()]
    for group in tuple(known.groups.values()) if known is not None and known.board is base.board else ():
        if group.level == "roll" and group.broken is None:
            agreement, op = group.pair.agreement, "end of the program"
            found.append(agreement.close(op, NOWHERE, group.calls + 1, group.display, group.ranks))
    return [closing for closing in found if closing is not None]


COMPARED_WITHIN = 1.0
"""Seconds for which ranks that have all come to their end compare their last calls."""


def _compare_last(closings: list[Closing]) -> None:
    """End the last comparisons; all ranks have posted theirs."""
    end = time.monotonic() + COMPARED_WITHIN
    while [closing for closing in closings if not closing.Test()] and time.monotonic() < end:
        time.sleep(0.001)


def _await_words(base: JobEndpoint) -> None:
    """Wait until all ranks have said what they have to say of their last calls: one that differed ends the job."""
    everybody = base.board.comm.Ibarrier()
    end = time.monotonic() + 2 * COMPARED_WITHIN
    while not everybody.Test() and time.monotonic() < end:
        time.sleep(0.001)


def _say_apart(base: JobEndpoint, closings: list[Closing]) -> None:
    """Say where the ranks' last calls differed, and end with an error then."""
    for closing in closings:
        if closing.same is not False:
            continue
        _ending.code, _ending.stuck = _ending.code or 1, True
        error = closing.error
        if error is None:
            text = (
                f"on group {closing.display} the ranks made different calls after the last comparison, and could not tell "
                "each other which: run with MPICOLL_CHECK=full"
            )
        elif error.reporter in (None, base.board.rank):
            text = str(error)
        else:
            text = f"{in_one_line(error)} (rank {error.reporter} tells more)"
        with _prefixed(_prefix()):
            say(f"CollectiveMismatchError: {text}\n")


base_limit = 1800.0

# MPICH 5.0: a rank whose host is cut off from the one of mpiexec says in MPI_Abort that it aborts, and then waits for good for
# an answer of the launcher. After so many seconds it is ended.
_ABORT_LIMIT = 20.0


def _abort(code: int) -> None:
    """Have mpi4py call MPI_Abort with ``code`` at the very end, instead of MPI_Finalize."""
    from mpi4py import run as mpi4py_run

    flush_streams()
    mpi4py_run.set_abort_status(code or 1)
    afterwards(_ABORT_LIMIT)
