"""State of the job on this rank, and what this rank reports of itself: waits of its threads, last call, place in the program."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mpicoll.diagnosis.deadlock import Wait
from mpicoll.diagnosis.membership import Membership
from mpicoll.diagnosis.place import Place
from mpicoll.diagnosis.report.entries import RankState, entry_of
from mpicoll.runtime import watchdog
from mpicoll.runtime.call_site import thread_site

if TYPE_CHECKING:
    from mpicoll.diagnosis.board import Board
    from mpicoll.runtime.settings import Settings
    from mpicoll.transports.topology import Topology

NOT_INITIALIZED = "Default process group has not been initialized, please make sure to call init_process_group."


class Counters(Protocol):
    """Counters of destroyed groups by name, in the order in which the groups were destroyed."""

    calls: dict[str, int]
    sent: dict[str, dict[tuple[int, int], int]]
    received: dict[str, dict[tuple[int, int], int]]

    def remember(self, group: Any) -> None:
        """Record the counters of a group that is destroyed."""

    def settle(self, name: str, to: set[int], by: set[int]) -> None:
        """Forget messages on a destroyed group that have all arrived."""


@dataclass(kw_only=True)
class JobState:
    """The state of the job for diagnosis, from the start to the end of a default group.

    Attributes:
        world: the default group.
        groups: all groups of this process, by name.
        board: where ranks write what other ranks must know if something is wrong.
        on_failure: "job" if a rank that fails ends the job, else "raise".
        pid: this process; a forked child has another one.
        thread_multiple: whether MPI allows calls from several threads at once.
        thread: the thread that called ``init_process_group``.
        endpoint: the counters of groups that were destroyed.
        waits: the call that each thread waits in, by thread.
        meetings: meetings of the ranks of a new group in which this rank has arrived, each as a group with one call.
    """

    world: Membership
    groups: Mapping[str, Membership] = field(default_factory=dict)
    board: Board
    settings: Settings
    topology: Topology
    on_failure: str
    pid: int
    thread_multiple: bool
    thread: int
    endpoint: Counters | None = None
    waits: dict[int, Waiting] = field(default_factory=dict)
    meetings: dict[str, int] = field(default_factory=dict)


class Waiting(Protocol):
    """The wait of a thread of this process (:class:`mpicoll.diagnosis.wait_policy.CallWait`)."""

    group: Membership
    call: Any
    peer: int | None
    began: float
    looks: int

    def describe(self) -> str:
        """Return the call, its group and its place in the program."""

    def meets(self) -> tuple[str, tuple[int, ...], int]:
        """Return the name of the group whose ranks must all make this call, these ranks, and the number of the call."""

    def as_wait(self) -> Wait:
        """Return this wait as a search for deadlocks sees it."""


_job: JobState | None = None

destroyed_at = ""
"""Where the program destroyed its last default group; "" before."""

doomed = ""
"""The error that has ended this rank's program or one of its threads. Other threads and exit handlers may still wait."""


def set_job(new: JobState | None) -> None:
    """Set or remove the state of the job; for ``groups.registry`` only."""
    global _job
    _job = new


def job() -> JobState:
    """Return the state of the job; raise torch's ValueError if there is no default group."""
    if _job is None:
        raise ValueError(NOT_INITIALIZED + (f" The last one was destroyed at {destroyed_at}." if destroyed_at else ""))
    return _job


def current() -> JobState | None:
    """Return the state of the job, or None if there is no default group."""
    return _job


def _waits() -> tuple[Waiting, ...]:
    """Return the waits of all threads of this process."""
    return tuple(_job.waits.values()) if _job is not None else ()


BETWEEN = "between two calls, or at the end"
GIVEN_UP_AFTER = 10.0
"""Seconds in a call of MPI after which a group that a member has given up counts as broken for that call."""


def note_waits() -> None:
    """Write the collectives that the threads of this rank wait in to the node board."""
    known = current()
    if known is not None and known.board.slots is not None:
        waits = [wait for wait in _waits() if wait.peer is None]
        rows = []
        for wait in waits[:3]:
            name, _, seq = wait.meets()
            rows.append((name, seq, wait.began, str(wait.call.site)[-200:]))
        known.board.slots.write("waits", pickle.dumps(rows) if rows else b"")


MOST_DESTROYED = 16
"""Most destroyed groups, the last ones, that a rank writes to the node board."""
MOST_RECEIVERS = 64
"""Most ranks and tags to which the messages on these groups went: those of further groups are not written."""


def note_destroyed(known: JobState, site: str) -> None:
    """Write the groups that this rank has destroyed to the node board, for ranks that wait in a later call of such a group."""
    if known.board.slots is not None and known.endpoint is not None:
        calls = dict([*known.endpoint.calls.items()][-MOST_DESTROYED:])
        sent: dict[str, dict[int, int]] = {}
        room = MOST_RECEIVERS
        for name in reversed(calls):
            there = known.endpoint.sent.get(name, {})
            room -= len(there)
            if room >= 0:
                sent[name] = {}
                for (rank, _), count in there.items():
                    sent[name][rank] = sent[name].get(rank, 0) + count
        known.board.slots.write("destroyed", pickle.dumps((site[-300:], calls, sent)))


class Destroyed(NamedTuple):
    """The groups that a rank of this node has destroyed.

    Attributes:
        site: where it last destroyed one.
        calls: the number of calls on each.
        sent: the number of messages to each rank, by group; groups of which the numbers are not known are missing.
    """

    site: str = ""
    calls: Mapping[str, int] = {}
    sent: Mapping[str, Mapping[int, int]] = {}


def destroyed_by(board: Board, rank: int) -> Destroyed:
    """Return the groups that a rank of this node has destroyed."""
    written = b"" if board.slots is None else board.slots.read(rank, "destroyed")
    return Destroyed(*pickle.loads(written)) if written else Destroyed()


def place_of(board: Board, rank: int) -> Place:
    """Return the place of a rank from the node board; a place without a site if the rank is on another node."""
    return board.slots.place(rank) if board.slots is not None and rank in board.slots.ranks else Place()


SEEN_NOW = 1.0
"""Seconds since a rank wrote its place, within which the rank runs: a thread of the rank writes the place."""


def seen_ago(ago: float, where: str) -> str:
    """Return where a rank is, or was some seconds ago, as the end of a sentence."""
    if ago < SEEN_NOW:
        return f"it is at {where}"
    return f"it was last seen {ago:.0f} s ago at {where} (stopped, or in native code)"


def _last_call(known: JobState, group: Membership | None = None) -> tuple[str, str, str]:
    """Return the last call on a group, or else on the group with most calls: op, site, group; or empty strings."""
    if group is None or group.last is None:
        group = max(tuple(known.groups.values()), key=lambda group: group.calls, default=None)
    op, _, site = (group.last_call() if group is not None else "").partition(" at ")
    return op, site, group.display if group is not None and op else ""


def write_place() -> None:
    """Write the program's current place to the node board (a watchdog service: it never calls MPI)."""
    known = current()
    if known is None or known.board.slots is None:
        return
    site = thread_site(known.thread)
    known.board.slots.write_place(site, *_last_call(known)[:2])


def await_death(board: Board, note: Callable[[int], None]) -> str:
    """Block until the next rank of this node dies, and return the sentence to print; "" if no rank is left.

    For a thread of its own (see :meth:`mpicoll.diagnosis.node_board.NodeBoard.await_death`).

    Args:
        note: called with the rank, unless that rank or this one has destroyed its default group.
    """
    slots = board.slots
    try:
        rank = slots.await_death() if slots is not None else -1
        if rank < 0 or slots is None or rank in reported_dead or board.failed:
            return ""  # after a known failure the launcher ends the other ranks
        reported_dead.add(rank)
        known = current()
        if known is not None and known.world.group_name not in destroyed_by(board, rank).calls:
            note(rank)
        place = slots.place(rank)
    except (OSError, ValueError):
        return ""  # the communicator was freed
    waits = [wait.describe() for wait in _waits()]
    waits += [call.describe() for call in tuple(watchdog.active.values())]
    return (
        f"rank {rank}'s process ended without a report: killed by a signal, or os._exit or os.exec"
        + (f" (last seen at {place})" if place.site else "")
        + (f"; rank {board.rank} waits in {waits[0]}" if waits else "")
    )


reported_dead: set[int] = set()
"""Dead ranks that this rank has printed."""


def hopeless(group: Membership, inside: float) -> str:
    """Return why a blocking MPI call of a group can never end, or "", from shared memory only.

    Args:
        inside: seconds that the call has taken. A member that has completed the call may give the group up in a later call
            while other members are still in this call. So a group that was given up counts only after GIVEN_UP_AFTER.
    """
    known = current()
    slots = known.board.slots if known is not None else None
    if slots is None:
        return ""
    for rank in slots.dead():
        if rank in group.ranks:
            return f"rank {rank} will never finish this call: its process is gone"
    for rank in slots.ranks:
        if inside > GIVEN_UP_AFTER and rank in group.ranks:
            given_up = slots.read(rank, "withdrawn").decode(errors="replace").split("\n")
            if group.group_name in given_up:
                return f"rank {rank} will never finish this call: it gave the group up"
    return ""


FRESH = 0.5
"""Seconds for which a wait progresses all pending requests at least every millisecond."""


def waits_lately() -> bool:
    """Return whether a thread has begun to wait a short while ago, and so progresses all pending requests."""
    since = time.time() - FRESH
    return any(wait.began > since for wait in _waits())


def waits_now(destroyed: Mapping[str, int], group_name: str) -> tuple[int, RankState]:
    """Return this rank's answer to a question of another rank (see ``diagnosis.board.Where``).

    Args:
        destroyed: the numbers of calls made on groups that were destroyed, by name. Other members may still wait in the last
            call of such a group.
    """
    known = current()
    found = known.groups.get(group_name) if known is not None else None
    rank = known.world.rank() if known is not None else -1
    for wait in _waits()[:1]:
        entry = entry_of(wait.call, rank, wait.group.display, state="late")
        break
    else:
        op, site, display = _last_call(known, found) if known is not None else ("", "", "")
        entry = RankState(((rank, rank),), op, site=site, group=display, state="late", problem=BETWEEN)
    if found is not None:
        return found.calls, entry
    calls = destroyed.get(group_name, 0)
    return max(calls, known.meetings.get(group_name, 0)) if known is not None else calls, entry


def calls_now(rank: int) -> list[RankState]:
    """Return what each thread of this process waits in, or else its last call; for a report of all ranks.

    Any thread may call this function, wherever other threads hang: it only reads, takes no lock, and never calls MPI.

    Args:
        rank: this process, as the report numbers it.
    """
    known = current()
    ranks = ((rank, rank),)
    if known is None:
        return [RankState(ranks, state="late", problem="has no default group")]
    now = time.time()
    entries = [
        entry_of(wait.call, rank, wait.group.display, state="waits", waited=now - wait.began) for wait in _waits()
    ]
    entries += [
        RankState(
            ranks, state="late", problem=f"{time.monotonic() - call.since:.1f} s inside MPI for {call.describe()}"
        )
        for call in tuple(watchdog.active.values())
    ]
    if entries:
        return entries
    op, site, display = _last_call(known)
    waited_for = sum(len(group.unwaited) for group in tuple(known.groups.values()))
    more = f" ({waited_for} pending that the program has not waited for)" if waited_for else ""
    return [RankState(ranks, op, site=site, group=display, state="late", problem=f"in no call of mpicoll{more}")]


def last_seen(rank: int) -> str:
    """Return where a rank of this node was when it last wrote its place, as the end of a sentence, or ""."""
    known = current()
    place = place_of(known.board, rank) if known is not None else Place()
    return seen_ago(place.ago, str(place)) if place.site else ""
