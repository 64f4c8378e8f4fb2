"""Leave the job: report a failure, wait for the other ranks, and choose how this process ends.

Order at the end of a Python program: the excepthook, exit handlers (latest first; one of them is the library's), flushed
streams, the clearing of all modules, and last mpi4py's MPI_Finalize, or MPI_Abort if an abort status was set. A failed rank
ends the job by an abort status, so all other exit handlers have run by then.

Measured with raw mpi4py: a rank that leaves by an exception hangs in MPI_Finalize while other ranks wait for it. A
forked child that ends through sys.exit hangs there for ever.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from mpi4py import run as mpi4py_run

from mpicoll.diagnosis import job_state
from mpicoll.diagnosis.report.report import painted
from mpicoll.errors import DistError, GroupBrokenError, PeerFailedError, in_one_line, reason_of, unseen
from mpicoll.groups import registry
from mpicoll.groups.process_group import name_started, untold
from mpicoll.launch.job_folder import append_record
from mpicoll.lifecycle.endpoint import JobEndpoint, endpoints
from mpicoll.lifecycle.hard_deadline import afterwards
from mpicoll.runtime import waiting, watchdog
from mpicoll.runtime.call_site import NOWHERE
from mpicoll.runtime.mpi_library import retain_for_ever
from mpicoll.runtime.output import flush_streams, say
from mpicoll.runtime.settings import Leftover
from mpicoll.runtime.signals import notes
from mpicoll.transports.shm import mapping

if TYPE_CHECKING:
    from mpicoll.checks.agreement import Closing
    from mpicoll.diagnosis.board import Board

NOBODY_HANDLES = 4.0
"""Seconds after which a failed rank ends the job if no other rank handles the failure."""
SAY_SO_AFTER = 0.1
"""Seconds that a rank waits at its end for the end of the other ranks, before it reports its own end to them."""
COMPARED_WITHIN = 1.0
"""Seconds for which the ranks compare their last calls, after all have reached their end."""

# MPICH 5.0: if the host of a rank is cut off from mpiexec's host, MPI_Abort prints that it aborts. Then it waits for ever
# for an answer of the launcher. The library ends the process after this number of seconds.
_ABORT_LIMIT = 20.0

group_limit = 1800.0
"""The limit of the last default group."""
leftover: Leftover = "error"
"""The setting MPICOLL_LEFTOVER of the last default group."""


@dataclass
class _Ending:
    """How this process ends, as far as is known.

    Attributes:
        code: its exit code.
        what, site: the error or call that ends it, and its file:line.
        by: the call of sys.exit that ends it with code 0, and the place of the call.
        because_of_others: another rank has failed first.
        passed_over: Python ignores the error (raised in a thread, or in an exit handler) and would end with 0.
        unfinished: an operation was posted to MPI that may never complete, so MPI_Finalize could hang.
        interrupted: a forked child ends by Ctrl-C.
    """

    code: int = 0
    what: str = ""
    site: str = ""
    by: str = ""
    because_of_others: bool = False
    passed_over: bool = False
    unfinished: bool = False
    interrupted: bool = False


ending = _Ending()
_left = False


def fails() -> bool:
    """Return whether this rank ends because it, or another rank, has failed."""
    return bool(ending.code or ending.because_of_others)


def mark_unfinished() -> None:
    """Record that an operation was posted to MPI that may never complete."""
    ending.unfinished = True


def prefix() -> str:
    """Return the prefix of each line that this rank prints about its end; "" where the hook of torch.distributed sets its own."""
    if isinstance(sys.stderr, io.StringIO) and sys.excepthook.__module__ == "torch.distributed.distributed_c10d":
        return ""
    known = registry.current()
    if known is not None:
        return f"[rank {known.world.rank()}] "
    return f"[rank {endpoints[-1].board.rank if endpoints else MPI.COMM_WORLD.Get_rank()}] "


@contextlib.contextmanager
def prefixed(error: BaseException | None = None) -> Iterator[None]:
    """Print everything that is written to stderr in one piece, with the prefix; the report of ``error`` in colour."""
    before, text = prefix(), io.StringIO()
    found, sys.stderr = sys.stderr, text
    try:
        yield
    finally:
        sys.stderr = found
        whole = text.getvalue()
        with contextlib.suppress(Exception):  # a stream of the program
            if isinstance(error, DistError) and error.report is not None:
                report = str(error)
                head, _, tail = whole.rpartition(report)
                whole = f"{head}{painted(report, found)}{tail}" if report in whole else whole
        say("".join(f"{before}{line}\n" for line in whole.splitlines()))


def announce_failure(what: str, site: str) -> None:
    """Report to the launcher and the other ranks, at once, that this rank has failed."""
    ending.what, ending.site = what, site
    for endpoint in endpoints:
        if endpoint.job and not endpoint.failure_posted:
            job_state.doomed = f"{what[:200]} at {site}" if site else what[:200]
            endpoint.failure_posted = True
            board = endpoint.board
            # Before other ranks learn of the failure: the job's exit code is that of the rank that failed first.
            append_record("fail", board.rank, ending.code)
            finalizes = not ending.passed_over and not endpoint.spoiled()
            failure = ending.what[:1000], site, ending.code, "", "", finalizes, endpoint.counters(board.rank)[0]
            board.post("failed", failure, range(board.size))
            board.flush(0.5)


def leave(reason: str) -> None:
    """Leave every job that this process is part of; every end of the process calls this function.

    A rank without an error sleeps, and answers questions, until all ranks have reached their end. If they take longer than
    SAY_SO_AFTER, it reports its own end to them. A rank that fails gives ranks that handle the failure ``MPICOLL_EXIT_GRACE``
    seconds, and then ends the job with its own exit code.

    Args:
        reason: what this rank does, as waiting ranks read it: "ended the program".
    """
    global _left
    if _left:
        return
    _left = True
    if waiting.progress_thread is not None:
        waiting.progress_thread.stop()
        waiting.progress_thread = None
    known = registry.current()
    operations: list[Any] = []
    try:
        operations = untold(known.groups.values()) if known is not None and not ending.code else []
    except BaseException as error:
        _note_raised(error, reason)
    never = never_waited(operations)
    if never and known is not None and known.on_failure == "job" and not ending.code:
        ending.code, ending.what, ending.unfinished = 1, never, True
    if known is not None and never:
        text = never + _first_error(operations, known.world.rank())
        say("".join(f"{prefix()}{line}\n" for line in text.splitlines()))
    failed = [error for error in unseen() if not isinstance(error, _FOLLOWING)]
    if failed:
        text = _IN_A_FUTURE.format(n=len(failed), s="" if len(failed) == 1 else "s")
        text += _whole_or_line(failed[0], None if known is None else known.world.rank())
        say("".join(f"{prefix()}{line}\n" for line in text.splitlines()))
    together = True
    try:
        for endpoint in endpoints:
            if endpoint.job:
                _leave_job(endpoint, reason, known.settings.exit_grace if known is not None else 30.0)
            else:
                together = (ending.code != 0 or _leave_as_guest(endpoint, reason)) and together
    except BaseException as error:
        _note_raised(error, reason)
    watchdog.stop()
    mapping.remove()  # a file of shared memory that was given up while it was made
    notes.end()
    spoiled = ending.unfinished or any(endpoint.spoiled() for endpoint in endpoints)
    ends_job = bool(spoiled and ending.code)
    for endpoint in endpoints:
        if endpoint.board.slots is not None:
            endpoint.board.slots.leave(ends_job=ends_job)
    if ends_job:
        flush_streams()
        mpi4py_run.set_abort_status(ending.code)  # mpi4py calls MPI_Abort at the very end, instead of MPI_Finalize
        afterwards(_ABORT_LIMIT)
    elif not spoiled and together:
        for endpoint in endpoints:
            for pair in endpoint.pool.all():
                pair.agreement.free()
        if known is not None:
            for group in tuple(known.groups.values()):
                group.free_plans()


def _note_raised(error: BaseException, reason: str) -> None:
    """Note what a signal handler has raised at this end.

    This rank ends the job: with the code that it has reported, else with that of the handler, else with its own. If all are 0, it
    tells the other ranks that it ends.
    """
    code: Any = error.code if isinstance(error, SystemExit) else 128 + signal.SIGINT
    if not isinstance(error, (SystemExit, KeyboardInterrupt)) or not isinstance(code, (int, type(None))):
        code = 1
        say(f"{prefix()}{reason_of(error)}\n")
    if code and not any(endpoint.failure_posted for endpoint in endpoints):
        ending.code, ending.what = code, reason_of(error)
    if ending.code:
        ending.unfinished = True
        return
    for endpoint in endpoints:
        if endpoint.job:
            _post_exit(endpoint, reason)
            endpoint.board.flush(SAY_SO_AFTER)


def _leave_as_guest(endpoint: JobEndpoint, reason: str) -> bool:
    """Leave a job with ``on_failure="raise"``; return whether all ranks do so within SAY_SO_AFTER.

    Otherwise report this rank's end to ranks that may wait for it, as it has not destroyed its default group.
    """
    board = endpoint.board
    if not any(group.broken is None for group in endpoint.live_groups()):
        return True
    words = np.zeros(1, np.int64)
    all_ended = board.comm.Iallreduce(MPI.IN_PLACE, words, MPI.SUM)
    if poll_until(all_ended.Test, board, SAY_SO_AFTER):
        return True
    retain_for_ever(all_ended, words)
    _post_exit(endpoint, reason)
    board.flush(SAY_SO_AFTER)
    return False


def _post_exit(endpoint: JobEndpoint, reason: str) -> None:
    for rank in range(endpoint.board.size):
        if rank != endpoint.board.rank:
            endpoint.board.post("exited", (*endpoint.counters(rank), reason, ending.by), [rank])


def never_waited(operations: list[Any]) -> str:
    """Return a sentence about operations that were never waited for, or ""."""
    if not operations:
        return ""
    return f"the program ended with operations that were never waited for: {name_started(operations)}"


def _first_error(operations: list[Any], me: int) -> str:
    """Return the first error of these operations, in one line if another rank prints this error; "" if none has failed."""
    error = next((op.error for op in operations if op.error is not None), None)
    if error is None:
        return ""
    return _whole_or_line(error, me)


_FOLLOWING = GroupBrokenError, PeerFailedError
"""Errors that follow from another error."""

_IN_A_FUTURE = (
    "errors of {n} asynchronous call{s} went into Futures of torch. If the program has not read these Futures, the results are "
    "not what it expects. The first error:"
)


def _whole_or_line(error: BaseException, me: int | None) -> str:
    """Return a line break and an error, in one line if another rank than ``me`` prints the whole error."""
    whole = me is None or not isinstance(error, DistError) or error.reporter in (None, me)
    return f"\n{type(error).__name__}: {error if whole else in_one_line(error)}"


def _leave_job(endpoint: JobEndpoint, reason: str, grace: float) -> None:
    board = endpoint.board
    if endpoint.failure_posted:
        ending.because_of_others = False  # a thread of this rank has failed, whatever its main thread raised then
    elif board.failed:
        ending.because_of_others = True  # whatever ends this rank: the job ends with the code of the first failed rank
    if ending.code and not ending.because_of_others:
        announce_failure(ending.what, ending.site)
        _await_handlers(board, grace)
        others = [failure for rank, failure in board.failed.items() if rank != board.rank]
        # Each rank has failed by itself and none ends the job. If one ends the job, MPI_Finalize waits for that rank.
        all_failed = len(others) == board.size - 1 and all(failure.finalizes for failure in others)
        if not all_failed or endpoint.spoiled() or ending.passed_over:
            ending.unfinished = True
        return
    if not ending.code:
        _await_peers(endpoint, reason)
    if board.failed:
        # The failed rank ends the job with its own exit code. If it does not, this rank does.
        origins = {board.origin(rank) for rank in board.failed}
        board.post("ended", None, origins)
        if board.rank in origins:  # the failed rank is dead
            _await_handlers(board, grace)
        else:
            poll_until(lambda: False, board, grace + NOBODY_HANDLES + 2, 0.01)
        ending.code, ending.unfinished = ending.code or 1, True
        append_record("lost", next(iter(board.failed)), 0)
        append_record("blame", board.rank, ending.code)


def _await_handlers(board: Board, grace: float) -> None:
    """Wait for ranks that handle a failure: until all have ended, at most ``grace`` seconds."""
    start = time.monotonic()

    def over() -> bool:
        ended = board.ended | set(board.failed)
        handled = bool(board.handling - ended)
        waited = time.monotonic() - start
        return len(ended - {board.rank}) >= board.size - 1 or (waited >= NOBODY_HANDLES and not handled)

    poll_until(over, board, grace, 0.002)


def poll_until(over: Callable[[], bool], board: Board, limit: float, every: float = 0.001) -> bool:
    """Read and answer messages until ``over()`` is true, at most ``limit`` seconds; return whether it is."""
    end = time.monotonic() + limit
    while True:
        board.poll()
        if over():
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(every)


def _await_peers(endpoint: JobEndpoint, reason: str) -> None:
    """Wait until all ranks have reached their end, and compare last calls and numbers of messages with them."""
    closings = _close(endpoint)
    totals = np.array([endpoint.balance(), len(closings)], np.int64)
    try:
        if not _await_ends(endpoint, reason, totals, closings):
            return
        if totals[1]:  # the last comparisons: all ranks have posted theirs
            poll_until(
                lambda: not [closing for closing in closings if not closing.Test()], endpoint.board, COMPARED_WITHIN
            )
    finally:
        _report_differences(endpoint, closings)
    if totals[1]:  # a rank whose last call differed ends the job once all have reported
        poll_until(endpoint.board.comm.Ibarrier().Test, endpoint.board, 2 * COMPARED_WITHIN)
    if totals[0]:
        _report_lost_messages(endpoint)


def _await_ends(endpoint: JobEndpoint, reason: str, totals: Any, closings: list[Closing]) -> bool:
    """Wait until all ranks have reached their end, and add up ``totals``; return False if a rank has failed."""
    board = endpoint.board
    all_ended = board.comm.Iallreduce(MPI.IN_PLACE, totals, MPI.SUM)
    start = time.monotonic()
    limit = max(group_limit, 60.0)
    exit_posted = False
    while not all_ended.Test():
        waited = time.monotonic() - start
        waiting.progress()
        board.poll()
        for closing in closings:
            closing.Test()  # another rank may be at its next comparison, and wait for this rank's account of its calls
        if waited > SAY_SO_AFTER:
            board.notice_dead()
        if board.failed:
            return False
        if not exit_posted and waited > SAY_SO_AFTER:
            exit_posted = True
            _post_exit(endpoint, reason)
        if waited > limit:
            return False
        time.sleep(waiting.pause(waited, 1_000_000, True) or 0.0)
    return True


UNRECEIVED = "had not been received"


def _report_lost_messages(endpoint: JobEndpoint) -> None:
    """Print which messages were never received, and end with an error, or warn. All ranks have reached their end.

    The ranks count again: when the end began, a thread of a rank may not yet have counted the message that it had just sent.
    """
    board, warns = endpoint.board, leftover == "warn"
    live, sent = endpoint.live_groups(), endpoint.all_sent()
    places = {**endpoint.places, **{group.group_name: group.by_rank(group.known_sites.places) for group in live}}
    displays = {**endpoint.displays, **{group.group_name: group.display for group in live}}
    for rank in {rank for there in sent.values() for rank, _ in there}:
        mine = {  # a member that has received nothing does not remember a destroyed group
            (name, displays.get(name, name)): {
                tag: (n, places.get(name, {}).get((to, tag), "")) for (to, tag), n in there.items() if to == rank
            }
            for name, there in sent.items()
        }
        mine = {group: there for group, there in mine.items() if there}
        if rank == board.rank:
            board.sent[rank] = mine
        board.post("sent", mine, [rank])
    board.flush(1.0)
    all_ended, least = board.comm.Ibarrier(), time.monotonic() + 0.1
    poll_until(lambda: all_ended.Test() and time.monotonic() >= least, board, 5.0)
    board.poll()
    lost = _lost_messages(endpoint)
    totals = np.array([len(lost), endpoint.balance()], np.int64)
    summed = board.comm.Iallreduce(MPI.IN_PLACE, totals, MPI.SUM)
    if not poll_until(summed.Test, board, 5.0):
        retain_for_ever(summed, totals)
        lost = lost or [f"the program ended, and other ranks did not tell within 5 s which messages {UNRECEIVED}"]
    elif totals[0] == 0 and totals[1] <= 0:  # below 0: a thread has not yet counted a message that was received
        return
    elif totals[0] == 0 and board.rank == 0:
        lost = [f"the program ended, and {totals[1]} message{'s' if totals[1] > 1 else ''} {UNRECEIVED}"]
    if not warns:
        ending.code, ending.unfinished = 1, True
    for text in lost:
        say(f"{prefix()}mpicoll: {'warning: ' if warns else ''}{text}\n")


def _lost_messages(endpoint: JobEndpoint) -> list[str]:
    """Return a line on each place from which messages to this rank were never received; all ranks have sent their numbers."""
    board, received, found = endpoint.board, endpoint.all_received(), []
    for sender, by_group in sorted(board.sent.items()):
        for (name, display), there in by_group.items():
            for tag, (count, place) in there.items():
                left = count - received.get(name, {}).get((sender, tag), 0)
                if left > 0:
                    found.append(
                        f"the program ended, and {left} message{'s' if left > 1 else ''} from rank {sender} to rank "
                        f"{board.rank} with tag {tag} on group {display} {UNRECEIVED}{f' ({place})' if place else ''}"
                    )
    return found


def _close(endpoint: JobEndpoint) -> list[Closing]:
    """Post the last comparison on every group at level ``roll``; return all that are pending, also of destroyed groups."""
    found = [pair.closing for pair in endpoint.pool.all()]
    for group in endpoint.live_groups():
        if group.level == "roll" and group.broken is None:
            agreement, op = group.pair.agreement, "end of the program"
            found.append(agreement.close(op, NOWHERE, group.calls + 1, group.display, group.ranks))
    return [closing for closing in found if closing is not None]


def _report_differences(endpoint: JobEndpoint, closings: list[Closing]) -> None:
    """Print how the last calls of the ranks differed, and end with an error if they did."""
    for closing in closings:
        if closing.same is not False:
            continue
        ending.code, ending.unfinished = ending.code or 1, True
        error = closing.error
        if error is None:
            text = (
                f"on group {closing.display} the ranks made different calls after the last comparison, and could not "
                "exchange which calls: run with MPICOLL_CHECK=full"
            )
        elif error.reporter in (None, endpoint.board.rank):
            text = str(error)
        else:
            text = f"{in_one_line(error)} (rank {error.reporter} prints the report)"
        with prefixed():
            say(f"CollectiveMismatchError: {text}\n")
