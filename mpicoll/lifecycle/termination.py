"""Print where the ranks of a node are when SIGTERM ends them, in one termination report.

At its time limit, or if it is cancelled, a job gets SIGTERM on all ranks and is killed some seconds later. By default each
process would end at once. So a thread reads the signal from a pipe to which Python's C handler writes. The thread notices the
signal also while the main thread computes or is inside MPI, as soon as the main thread has released the interpreter lock. Each
rank writes down where it is. The lowest rank that ends prints what all ranks of the node have written, and all end by the
signal, within about a second. MPICH's launcher kills all ranks when the first rank has ended, so each rank waits for the
report.

The report goes to the rank's stderr and to a file, since Open MPI's mpirun (5.0) forwards nothing once SIGTERM has reached it:
to ``termination.txt`` in the folder of `mpicoll run`, which prints the file; else, under Open MPI, to a file in the working
directory.

If a launcher ends the ranks because a rank has failed or died, nothing is printed: the failure was reported.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

from mpicoll.diagnosis import job_state
from mpicoll.diagnosis.node_board import NodeBoard
from mpicoll.diagnosis.report.entries import RankState, name_runs, runs_of, table_of
from mpicoll.diagnosis.report.report import MESSAGE_WIDTH
from mpicoll.diagnosis.report.text_layout import short_paths
from mpicoll.diagnosis.report.texts import node_ends
from mpicoll.groups import registry
from mpicoll.launch.job_folder import read_cause, save_report
from mpicoll.lifecycle import teardown
from mpicoll.lifecycle.endpoint import endpoints
from mpicoll.runtime.call_site import thread_site
from mpicoll.runtime.output import flush_streams
from mpicoll.runtime.signals import Terminated, end_by, guard, notes
from mpicoll.runtime.watchdog import OwnThread

GATHER = 0.5
"""Seconds for which the rank that reports waits for the entries of the other ranks."""
STAY = 0.7
"""Least seconds that a rank lives after the signal: ranks of other nodes may not have reported yet."""
MOST_STAY = 1.2
LATE_AFTER = 3.0
"""Seconds without a step that answers a SIGTERM, after which the report is printed, and the process goes on."""

MAIN_WITHIN = 0.05
"""Seconds that the main thread has to run its handler, before the thread decides."""

_NOTED, _ENDS = b"\xfe", b"\xff"  # bytes that the main thread writes; Python's C handler writes the numbers of signals

_pipe: tuple[int, int] | None = None


def start() -> None:
    """Answer SIGTERM by a report, if this is the main thread and the program does not handle SIGTERM."""
    global _pipe
    if threading.current_thread() is not threading.main_thread() or notes.watched:
        return
    if _pipe is None:
        _pipe = os.pipe()
        for end in _pipe:
            os.set_blocking(end, False)
        os.register_at_fork(after_in_child=_in_child)
        OwnThread(target=_listen, args=(_pipe[0],), name="mpicoll-termination", daemon=True).start()
    found = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    if found != -1:  # of an event loop, which needs it
        signal.set_wakeup_fd(found)
    if not notes.watch(_write_decision) and found == -1:
        signal.set_wakeup_fd(-1)


def stop() -> None:
    """Restore the default effect of SIGTERM."""
    if not notes.watched or threading.current_thread() is not threading.main_thread():
        return
    notes.unwatch()
    found = signal.set_wakeup_fd(-1)
    if _pipe is not None and found not in (-1, _pipe[1]):
        signal.set_wakeup_fd(found)


def _in_child() -> None:
    """Close the parent's pipe in a forked child."""
    global _pipe
    if _pipe is not None:
        for end in _pipe:
            os.close(end)
    _pipe = None


def _write_decision(ends: bool) -> None:
    """Write to the thread, from the handler in the main thread, whether a SIGTERM ends the process."""
    if _pipe is not None:
        with contextlib.suppress(OSError):
            os.write(_pipe[1], _ENDS if ends else _NOTED)


def _listen(reading: int) -> None:
    """Wait for SIGTERM until the process ends; the function of the thread."""
    arrived: float | None = None  # when a SIGTERM came that the main thread has not handled
    late_reported = False
    while True:
        since = notes.unanswered.get(signal.SIGTERM, arrived)
        data = _read(reading, None if since is None else 0.25)
        if not notes.watched:
            arrived = None
            continue
        if signal.SIGTERM in data and not _of_main_thread(data) and notes.has(signal.SIGTERM):
            data += _read(reading, MAIN_WITHIN)
            now = time.monotonic()
            ends = notes.ends_process(signal.SIGTERM, now) or (
                arrived is not None and now - arrived > notes.AGAIN_AFTER
            )
            # Read once more: the main thread may have handled the signal before the line above, and the program may have gone on.
            data += _read(reading, 0.0)
            if not _of_main_thread(data):
                arrived = now if arrived is None else arrived
                data += _ENDS if ends else b""
        if _NOTED[0] in data:
            arrived = None
        if _ENDS[0] in data:
            _end()
        since = notes.unanswered.get(signal.SIGTERM, arrived)
        if since is None:
            late_reported = False
            continue
        waited = time.monotonic() - since
        if waited > LATE_AFTER and not late_reported:
            late_reported = True
            _report(f"SIGTERM came {waited:.0f} s ago, and no step has answered it (should_stop, barrier)")
        known = registry.current()
        if known is not None and waited > known.world.timeout:
            _end()


def _read(reading: int, limit: float | None) -> bytes:
    """Return what was written to the pipe; wait for it for ``limit`` seconds at most (None: for ever)."""
    readable, _, _ = select.select([reading], [], [], limit)
    return os.read(reading, 4096) if readable else b""


def _of_main_thread(data: bytes) -> bool:
    return _NOTED[0] in data or _ENDS[0] in data


def _end() -> None:
    """Report, and end the process by SIGTERM."""
    began = time.monotonic()
    try:
        if not _because_of_others():
            _report("")
            time.sleep(max(0.0, began + STAY - time.monotonic()))
        elif guard.waits:
            guard.noted = Terminated(signal.SIGTERM)  # the main thread reports which rank has failed, and ends
            time.sleep(MOST_STAY)
        _flush()
    finally:
        end_by(signal.SIGTERM)
        time.sleep(1.0)
        os._exit(128 + signal.SIGTERM)


def _flush() -> None:
    """Flush the output of the program for at most 0.2 s: the main thread may hold the lock of a stream."""
    thread = OwnThread(target=flush_streams, name="mpicoll-flush", daemon=True)
    thread.start()
    thread.join(0.2)


def _because_of_others() -> bool:
    """Return whether a launcher ends this rank because a rank has failed, which was reported."""
    known = registry.current()
    slots = known.board.slots if known is not None else None
    return (
        teardown.fails()
        or any(endpoint.board.failed for endpoint in endpoints)
        or (slots is not None and (slots.ends_job() or bool(slots.dead())))
    )


def _report(what: str) -> None:
    """Write down where this rank is; the lowest rank of the node that is about to report prints all entries.

    Args:
        what: the event on a rank that goes on; "": the rank ends.
    """
    known = registry.current()
    if known is None:
        return
    me = known.world.rank() if known.board.slots is None else known.board.rank
    mine = _where(known, me)
    slots = known.board.slots
    if slots is None:
        _print([mine], [me], what)
        return
    slots.write("termination", pickle.dumps((time.monotonic(), mine)))
    if not what:
        slots.end()
    began = time.monotonic()
    index = slots.ranks.index(me)
    while True:
        waited = time.monotonic() - began
        if slots.reported(within=MOST_STAY + GATHER):
            return
        ready = [rank for rank in slots.ranks if (_written(slots, rank) is not None if what else slots.ended(rank))]
        lower = [rank for rank in ready if rank < me]
        complete = len(ready) == len(slots.ranks)
        if (complete and not lower) or waited > (GATHER if not lower else STAY + min(0.02 * index, MOST_STAY - STAY)):
            break
        time.sleep(0.02)
    slots.report()
    rows = [_entry_of(slots, rank) for rank in slots.ranks if not slots.orderly(rank)]
    _print(rows, [rank for rank in slots.ranks if slots.ended(rank)] or [me], what)


def _written(slots: NodeBoard, rank: int) -> RankState | None:
    """Return what a rank of this node has written for this report, or None."""
    data = slots.read(rank, "termination")
    when, entry = pickle.loads(data) if data else (0.0, None)
    fresh: RankState | None = (
        entry if time.monotonic() - when < MOST_STAY + GATHER else None
    )  # all ranks of a node read one clock
    return fresh


def _entry_of(slots: NodeBoard, rank: int) -> RankState:
    """Return where a rank of this node is: as it has just written, or where it was last seen."""
    written = _written(slots, rank)
    if written is not None:
        return written
    place = slots.place(rank)
    site = place.site or "no line of the program"
    seen = (
        f"at {site}" if place.ago < 1.0 else f"last seen {place.ago:.0f} s ago at {site} (stopped, or in native code)"
    )
    return RankState(((rank, rank),), place.op, site=place.last, state="late", problem=seen)


def _where(known: registry.JobWithGroups, rank: int) -> RankState:
    """Return where this rank is: the call that it waits in, or its place in the program and its last call."""
    entry = job_state.calls_now(rank)[0]
    if entry.state == "waits":
        return entry
    site = thread_site(known.thread)
    file, _, function = site.partition(" in ")
    short = short_paths([file])[file] if file else ""
    place = f"at {short} in {function}" if function else "at its end"
    inside = entry.problem if "inside MPI" in entry.problem else ""
    return replace(entry, problem=f"{inside}, {place}" if inside else place)


def _print(rows: list[RankState], ended: list[int], what: str) -> None:
    """Print the report, and save it to a file if the ranks end."""
    members = runs_of(rank for row in rows for run in row.ranks for rank in run)
    cause = read_cause()
    why = "" if cause else ": the time limit, scancel, or kill"
    sentence = what or f"{cause or 'SIGTERM'} ends {name_runs(runs_of(ended))} on {os.uname().nodename}{why}"
    report = node_ends(table_of(rows), members, sentence)
    text = f"mpicoll: {report.text(None, MESSAGE_WIDTH)}\n".encode(errors="replace")
    path = None
    if not what and not save_report(text) and _forwards_nothing():
        path = _save_here(text)
    with contextlib.suppress(OSError):
        os.write(2, text + (f"mpicoll: the report is in {path}, too\n".encode() if path else b""))


def _forwards_nothing() -> bool:
    """Return whether stderr leads to Open MPI's launcher, which may forward nothing any more."""
    try:
        if stat.S_ISREG(os.fstat(2).st_mode):
            return False
        parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:
        return False
    return parent in ("prterun", "prted", "orterun", "orted", "mpirun", "mpiexec")


def _save_here(text: bytes) -> str | None:
    """Save the report to a new file in the working directory; return its path, or None if that is impossible."""
    path = os.path.abspath(f"mpicoll-termination-{os.uname().nodename}-{os.getpid()}.txt")
    try:
        with open(path, "xb") as file:
            file.write(text)
    except OSError:
        return None
    return path
