"""What the ranks of a node say when SIGTERM ends them: where each of them is, in one report.

A job that has come to its limit, or is cancelled, gets SIGTERM on all ranks and is killed some seconds later. By default the
process would be gone at once. So the signal is told to a thread, by a pipe that Python's handler in C writes to: it hears of
it also while the main thread computes or is inside MPI, as soon as that has let go of the interpreter lock. Each rank writes
down where it is, the lowest one that is ended prints what all of the node have written, and all end by the signal, within a
second. MPICH's launcher kills the others when the first rank is gone: so each waits for the report.

Where a launcher ends the ranks because one of them has failed or died, nothing is printed: that has been told.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import stat
import sys
import threading
import time
from dataclasses import replace

from mpicoll.diagnosis import job_state
from mpicoll.diagnosis.node_board import NodeBoard
from mpicoll.diagnosis.report.entries import Entry, name_runs, runs_of, table_of
from mpicoll.diagnosis.report.report import MESSAGE_WIDTH, last_words
from mpicoll.diagnosis.report.text_layout import short_paths
from mpicoll.groups import registry
from mpicoll.lifecycle import teardown
from mpicoll.lifecycle.endpoint import endpoints
from mpicoll.runtime.call_site import program_site
from mpicoll.runtime.output import flush_streams
from mpicoll.runtime.signals import Terminated, end_by, guard, notes

GATHER = 0.5
"""Seconds for which the rank that reports waits for the words of the others."""
STAY = 0.7
"""Seconds that a rank stays after the signal at least: ranks of other nodes may not be through with their report."""
MOST_STAY = 1.2
LATE_AFTER = 3.0
"""Seconds without a step that answers a SIGTERM, after which the report is printed, and the process goes on."""

MAIN_WITHIN = 0.05
"""Seconds that the main thread has to come to its handler, before the thread decides alone."""

_NOTED, _ENDS = b"\xfe", b"\xff"  # what the main thread says; what C writes are the numbers of signals

_pipe: tuple[int, int] | None = None


def start() -> None:
    """Have SIGTERM answered by a report, in the main thread of a process whose SIGTERM nobody handles."""
    global _pipe
    if threading.current_thread() is not threading.main_thread() or notes.watched:
        return
    if _pipe is None:
        _pipe = os.pipe()
        for end in _pipe:
            os.set_blocking(end, False)
        os.register_at_fork(after_in_child=_in_child)
        threading.Thread(target=_listen, args=(_pipe[0],), name="mpicoll-lastwords", daemon=True).start()
    found = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    if found != -1:  # an event loop's, which needs it
        signal.set_wakeup_fd(found)
    if not notes.watch(_tell) and found == -1:
        signal.set_wakeup_fd(-1)


def stop() -> None:
    """Give SIGTERM its default back."""
    if not notes.watched or threading.current_thread() is not threading.main_thread():
        return
    notes.unwatch()
    found = signal.set_wakeup_fd(-1)
    if _pipe is not None and found not in (-1, _pipe[1]):
        signal.set_wakeup_fd(found)


def _in_child() -> None:
    """Let go of the parent's pipe in a forked child."""
    global _pipe
    if _pipe is not None:
        for end in _pipe:
            os.close(end)
    _pipe = None


def _tell(ends: bool) -> None:
    """Tell the thread what the main thread makes of a SIGTERM, out of the handler."""
    if _pipe is not None:
        with contextlib.suppress(OSError):
            os.write(_pipe[1], _ENDS if ends else _NOTED)


def _listen(reading: int) -> None:
    """Wait for SIGTERM, for ever (the thread)."""
    heard: float | None = None  # one that the main thread has not come to
    late_told = False
    while True:
        since = notes.unanswered.get(signal.SIGTERM, heard)
        words = _read(reading, None if since is None else 0.25)
        if not notes.watched:
            heard = None
            continue
        if signal.SIGTERM in words and not _of_main(words) and notes.has(signal.SIGTERM):
            words += _read(reading, MAIN_WITHIN)
            now = time.monotonic()
            ends = notes.ends_process(signal.SIGTERM, now) or (heard is not None and now - heard > notes.AGAIN_AFTER)
            # Once more: if the main thread came to it before that was looked up, the program may have gone on since.
            words += _read(reading, 0.0)
            if not _of_main(words):
                heard = now if heard is None else heard
                words += _ENDS if ends else b""
        if _NOTED[0] in words:
            heard = None
        if _ENDS[0] in words:
            _end()
        since = notes.unanswered.get(signal.SIGTERM, heard)
        if since is None:
            late_told = False
            continue
        waited = time.monotonic() - since
        if waited > LATE_AFTER and not late_told:
            late_told = True
            _report(f"SIGTERM came {waited:.0f} s ago, and no step has answered it (should_stop, barrier)")
        known = registry.current()
        if known is not None and waited > known.world.timeout:
            _end()


def _read(reading: int, limit: float | None) -> bytes:
    """Return what has been written to the pipe, waiting for it for some seconds at most (None: for ever)."""
    readable, _, _ = select.select([reading], [], [], limit)
    return os.read(reading, 4096) if readable else b""


def _of_main(words: bytes) -> bool:
    return _NOTED[0] in words or _ENDS[0] in words


def _end() -> None:
    """Report, and end the process by SIGTERM."""
    began = time.monotonic()
    try:
        if not _because_of_others():
            _report("")
            time.sleep(max(0.0, began + STAY - time.monotonic()))
        elif guard.waits:
            guard.noted = Terminated(signal.SIGTERM)  # the main thread says who has failed, and ends
            time.sleep(MOST_STAY)
        _flush()
    finally:
        end_by(signal.SIGTERM)
        time.sleep(1.0)
        os._exit(128 + signal.SIGTERM)


def _flush() -> None:
    """Flush what the program has printed, unless that takes long: the main thread may hold the lock of its file."""
    thread = threading.Thread(target=flush_streams, name="mpicoll-flush", daemon=True)
    thread.start()
    thread.join(0.2)


def _because_of_others() -> bool:
    """Whether a launcher ends this rank because another one, or this one, has failed: that is known already."""
    known = registry.current()
    boards = [endpoint.board for endpoint in endpoints]
    slots = known.board.slots if known is not None else None
    return (
        teardown.fails()
        or any(board.failed for board in boards)
        or (slots is not None and (slots.ends_job() or bool(slots.dead())))
    )


def _report(what: str) -> None:
    """Write down where this rank is; the lowest one of the node that is about to report prints it for all.

    Args:
        what: has happened, on a rank that goes on; "": it ends.
    """
    known = registry.current()
    if known is None:
        return
    me = known.world.rank() if known.board.slots is None else known.board.rank
    mine = where(known, me)
    slots = known.board.slots
    if slots is None:
        _print([mine], [me], what)
        return
    slots.write("last", pickle.dumps((time.monotonic(), mine)))
    if not what:
        slots.end()
    began = time.monotonic()
    index = slots.ranks.index(me)
    while True:
        waited = time.monotonic() - began
        if slots.reported(within=MOST_STAY + GATHER):
            return
        told = [rank for rank in slots.ranks if (_said(slots, rank) is not None if what else slots.ended(rank))]
        lower = [rank for rank in told if rank < me]
        everybody = len(told) == len(slots.ranks)
        if (everybody and not lower) or waited > (GATHER if not lower else STAY + min(0.02 * index, MOST_STAY - STAY)):
            break
        time.sleep(0.02)
    slots.report()
    rows = [_of(slots, rank) for rank in slots.ranks if not slots.orderly(rank)]
    _print(rows, [rank for rank in slots.ranks if slots.ended(rank)] or [me], what)


def _said(slots: NodeBoard, rank: int) -> Entry | None:
    """Return what a rank of this node has written for this report, if it has."""
    said = slots.read(rank, "last")
    when, entry = pickle.loads(said) if said else (0.0, None)
    fresh: Entry | None = entry if time.monotonic() - when < MOST_STAY + GATHER else None  # one clock for a node
    return fresh


def _of(slots: NodeBoard, rank: int) -> Entry:
    """Return where a rank of this node is: as it has just said, or where it was last seen."""
    said = _said(slots, rank)
    if said is not None:
        return said
    place = slots.place(rank)
    where = place.site or "no line of the program"
    seen = (
        f"at {where}" if place.ago < 1.0 else f"last seen {place.ago:.0f} s ago at {where} (stopped, or in native code)"
    )
    return Entry(((rank, rank),), place.op, site=place.last, state="late", problem=seen)


def where(known: registry.JobWithGroups, rank: int) -> Entry:
    """Return where this rank is: the call that it waits in, or its place in the program, and its last call."""
    entry = job_state.calls_now(rank)[0]
    if entry.state == "waits":
        return entry
    site = program_site(sys._current_frames().get(known.thread))
    file, _, function = site.partition(" in ")
    short = short_paths([file])[file] if file else ""
    place = f"at {short} in {function}" if function else "at its end"
    inside = entry.problem if "inside MPI" in entry.problem else ""
    return replace(entry, problem=f"{inside}, {place}" if inside else place)


def _print(rows: list[Entry], ended: list[int], what: str) -> None:
    members = runs_of(rank for row in rows for run in row.ranks for rank in run)
    what = (
        what or f"SIGTERM ends {name_runs(runs_of(ended))} on {os.uname().nodename}: the time limit, scancel, or kill"
    )
    told = last_words(table_of(rows), members, what)
    text = f"mpicoll: {told.text(None, MESSAGE_WIDTH)}\n".encode(errors="replace")
    out = _launchers_stderr()
    try:
        os.write(2 if out is None else out, text)
    except OSError:
        pass
    finally:
        if out is not None:
            os.close(out)


def _launchers_stderr() -> int | None:
    """Return the stderr of the launcher where it runs on this node and is Open MPI's, opened; else None: this rank's own.

    Open MPI's mpirun (5.0) forwards nothing any more once SIGTERM has reached it.
    """
    parent = os.getppid()
    try:
        if stat.S_ISREG(os.fstat(2).st_mode):  # not the launcher's
            return None
        with open(f"/proc/{parent}/comm") as file:
            if file.read().strip() not in ("prterun", "orterun", "mpirun", "mpiexec"):
                return None
        taken = _take_descriptor(parent, 2)
        return os.open(f"/proc/{parent}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY) if taken < 0 else taken
    except OSError:
        return None


_PIDFD_GETFD = 438  # on every architecture


def _take_descriptor(process: int, descriptor: int) -> int:
    """Return another process's descriptor as one of this process, -1 where the kernel forbids it.

    Unlike the same file opened again it shares the place in the file, so that neither writes over the other.
    """
    if not sys.platform.startswith("linux"):
        return -1
    import ctypes

    other = os.pidfd_open(process)
    try:
        taken: int = ctypes.PyDLL(None).syscall(_PIDFD_GETFD, other, descriptor, 0)
        return taken
    finally:
        os.close(other)
