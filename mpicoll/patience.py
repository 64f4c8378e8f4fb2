"""What a wait on a group is for: who can never come, who is late, and is it certain that nobody can go on."""

from __future__ import annotations

import math
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from types import CodeType
from typing import Any

from mpicoll import groups, waiting, watchdog
from mpicoll.checks.board import Board, Exit, Failure
from mpicoll.checks.call import Call, fingerprint, program_site
from mpicoll.checks.deadlock import State, Wait, report, stuck
from mpicoll.checks.entries import Entry, Runs, Table, entry_of, holds, join, runs_of, table_of
from mpicoll.checks.layout import short_paths
from mpicoll.checks.report import BROKEN, MESSAGE_WIDTH, Report, peer_exited, peer_failed, show, time_limit
from mpicoll.checks.slots import Place
from mpicoll.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    GroupBrokenError,
    PeerExitedError,
    PeerFailedError,
    in_one_line,
)
from mpicoll.groups import ProcessGroup
from mpicoll.work import calling

__all__ = [
    "CallWait",
    "Search",
    "await_death",
    "calls_now",
    "describe_state",
    "failed_entry",
    "hopeless",
    "joined",
    "last_seen",
    "local_wait",
    "note_waits",
    "search",
    "tell_place",
    "waits_lately",
    "waits_now",
]

_waits: dict[int, CallWait] = {}

joined: dict[str, int] = {}
"""Meetings of the listed ranks of a new group that this rank has come to: as if each was a group with one call."""

DESTROYED = 32
"""Destroyed groups that a rank still speaks of; with one that it does not name nothing is certain."""
MOST_PLACES = 6  # rows of a report for each way to be missing: so they all fit into its table
BETWEEN = "between two calls, or at the end"
EXPLAINED_WITHIN = 3.0
VERDICT_WITHIN = 2.0
GIVEN_UP_AFTER = 10.0


DOOMED_AFTER = 0.1
"""Seconds after which the waits of a rank that has failed end."""


class CallWait:
    """What one wait on a group is for: its limit, who can never come, and what to say when it is over."""

    __slots__ = (
        "_wait",
        "began",
        "call",
        "group",
        "limit",
        "looks",
        "noted",
        "origin",
        "peer",
        "stall_warn",
        "tag",
        "verdict_until",
    )

    AFTERWARDS = BROKEN
    """What holds when it has ended without success."""

    def __init__(self, group: ProcessGroup, call: Call, limit: float, peer: int | None = None, tag: int = 0) -> None:
        self.group = group
        self.call = call
        self.limit = limit
        self.peer = peer  # global rank this point-to-point call waits for; None: all members; -1: any source
        self.tag = tag
        self.stall_warn = groups.state().settings.stall_warn
        self.began = time.time()
        self.looks = 0  # times that it was found not to be over
        self.noted = False  # the ranks of this node can read that this one waits
        self.verdict_until = 0.0
        self.origin: int | None = None  # the failed rank because of which it ends
        self._wait: Wait | None = None

    def describe(self) -> str:
        """Return the call, its group and its place in the program."""
        number = f", call {self.call.seq}" if self.call.seq else ""
        return f"{self.call.describe()} on group {self.group.display}{number} at {self.call.site}"

    def check(self, waited: float) -> BaseException | None:
        """Return an error when this wait can never end."""
        self.looks += 1
        known = groups.current()
        if known is None:
            return None
        board = known.board
        self.note()
        search.look_for_dead(board, waited)
        if self.call.explaining and waited < EXPLAINED_WITHIN:
            return None  # members that have told everything raise, and end, before others have read it
        return search.verdict(board) or self.ended(board, waited) or search.look(waited)

    def ended(self, board: Board, waited: float) -> BaseException | None:
        """Return an error when somebody who is needed has failed, has ended, or gave the group up; or this rank has failed."""
        if groups.doomed and waited > DOOMED_AFTER:
            return GroupBrokenError(
                f"{self.describe()}: this rank has failed ({groups.doomed}), so nobody makes this call with it"
            )
        gone = [exit_.rank for exit_ in tuple(board.exited.values()) if self._needs(exit_)]
        for failure in tuple(board.failed.values()):
            if failure.rank in self.group.ranks or failure.rank not in board.announced:
                if gone and failure.what.startswith(PeerExitedError.__name__):
                    continue  # it failed since somebody is gone, as this wait does
                self.origin = failure.rank
                return self.because_failed(failure, waited)
        if gone:
            return self.because_exited([board.exited[rank] for rank in gone], waited)
        withdrawn = board.withdrawn.get(self.group.group_name)
        if withdrawn is not None and not self._verdict_comes(board):
            rank, why = withdrawn
            broken = GroupBrokenError(f"{self.describe()}: rank {rank} gave the group up: {why}")
            broken.reporter = rank
            return broken
        return None

    def _verdict_comes(self, board: Board) -> bool:
        """Whether the group was given up for a certificate that names this rank, too: it comes from another one."""
        if not holds(board.certain.get(self.group.group_name, ()), board.rank):
            return False
        now = time.monotonic()
        self.verdict_until = self.verdict_until or now + VERDICT_WITHIN
        return now < self.verdict_until

    def because_failed(self, failure: Failure, waited: float) -> PeerFailedError:
        """Return the error of a wait that cannot end because a rank has failed."""
        told = self._report(peer_failed, [failed_entry(failure)], waited)
        error = PeerFailedError(told.text(groups.state().world.rank(), MESSAGE_WIDTH))
        told.put_on(error)
        return error

    def because_exited(self, exits: list[Exit], waited: float) -> PeerExitedError:
        """Return the error of a wait that cannot end because ranks have ended."""
        told = self._report(peer_exited, [self._end(exit_) for exit_ in exits], waited)
        error = PeerExitedError(told.text(groups.state().world.rank(), MESSAGE_WIDTH))
        told.put_on(error)
        return error

    def _end(self, exit_: Exit) -> Entry:
        """Return what a rank did that has left, with its last call on the group."""
        name = self.meets()[0]
        what = exit_.describe(name if self.peer is None and name == self.group.group_name else None)
        op, _, site = exit_.last.get(self.group.group_name, "").rpartition(" at ")
        ranks = ((exit_.rank, exit_.rank),)
        return Entry(ranks, op, site=site, state="exited", problem=what.partition(", the last ")[0])

    def _report(
        self, kind: Callable[[Entry, str, Runs, Table, str], Report], said: list[Entry], waited: float
    ) -> Report:
        """Return the report of a call that cannot complete, because of what ``said`` tells."""
        mine = entry_of(self.call, groups.state().world.rank())
        gone = join(run for entry in said for run in entry.ranks)
        waits = [Entry(mine.ranks, state="waits", waited=(waited, waited)), *self._beside(mine, gone)]
        members = runs_of(self.meets()[1])
        return kind(mine, self.group.display, members, table_of([*said, *waits]), self.AFTERWARDS)

    def meets(self) -> tuple[str, tuple[int, ...], int]:
        """Return the group whose ranks all have to come to this call, these ranks, and its number there."""
        return self.group.group_name, self.group.ranks, self.call.seq

    def came(self) -> set[int]:
        """Return ranks that are known to have come to it, whatever they do now."""
        return set()

    def note(self) -> None:
        """Write down for the ranks of this node which collectives this one waits in, once; it costs some microseconds."""
        if not self.noted:
            self.noted = True
            note_waits()

    def _beside(self, mine: Entry, gone: Runs) -> list[Entry]:
        """Return those ranks of this node, but ``gone``, that wait in this collective, or left it for the same reason."""
        slots, (name, ranks, seq) = groups.state().board.slots, self.meets()
        if slots is None or self.peer is not None:
            return []
        found = []
        now = time.time()
        for rank in set(slots.ranks).intersection(ranks) - {slots.me}:
            data = b"" if holds(gone, rank) else slots.read(rank, "waits")
            for group, number, began, site in pickle.loads(data) if data else ():
                if (group, number) == (name, seq):
                    call = (
                        Entry((), state="waits")
                        if mine.site.endswith(site)
                        else replace(mine, site=site, state="waits")
                    )
                    found.append(replace(call, ranks=((rank, rank),), waited=(now - began, now - began)))
        return found

    def as_wait(self) -> Wait:
        """Return this wait as a search for deadlocks sees it."""
        if self._wait is None:
            me = self.group.ranks[self.group.rank()]
            sending = self.peer is not None and self.call.op in ("send", "isend")
            entry = entry_of(self.call, me, self.group.display, state="waits", peer=self.peer)
            self._wait = Wait(
                self.group.group_name,
                self.group.ranks,
                entry,
                self.peer,
                self.call.seq,
                sending,
                self.tag,
                self.began,
                fingerprint(self.call.op, self.call.key) if self.peer is None and self.group.level != "full" else 0,
                needs=_needs(self.call, me, self.group.level) if self.peer is None else None,
            )
        return self._wait

    def _needs(self, exit_: Any) -> bool:
        name = self.group.group_name
        if self.peer is not None:
            _catch_up(self.group)
        if self.peer is None:
            return exit_.rank in self.group.ranks and exit_.calls.get(name, 0) < self.call.seq
        if self.peer < 0:
            others = [rank for rank in self.group.ranks if rank != exit_.rank and rank != groups.state().world.rank()]
            if exit_.rank not in self.group.ranks or not all(rank in groups.state().board.exited for rank in others):
                return False
            received = self.group.by_peer(self.group.received).get(self.group.ranks.index(exit_.rank), 0)
            return bool(exit_.sent_on(name) <= received)
        if self.peer != exit_.rank:
            return False
        if self.call.op in ("send", "isend"):
            return True  # it has left without receiving
        received = self.group.by_peer(self.group.received).get(self.group.ranks.index(self.peer), 0)
        return bool(exit_.sent_on(name) <= received)

    def stalled(self, waited: float) -> None:
        """Say who is missing: once a job, by the lowest rank that waits."""
        arrived, told = self._told(waited)
        if all(rank > groups.state().world.rank() for rank in arrived):
            show(told, width=MESSAGE_WIDTH, before="mpicoll: ")

    def timed_out(self, waited: float) -> BaseException:
        """Return the error for a wait that passed its limit, naming who is late and where."""
        _, told = self._told(waited, over=True)
        error = CollectiveTimeoutError(told.text(groups.state().world.rank(), MESSAGE_WIDTH))
        told.put_on(error)
        return error

    def give_up(self, reason: BaseException) -> None:
        """Withdraw: mark the group broken and tell its members."""
        text = in_one_line(reason) or type(reason).__name__
        known = groups.current()
        heard = False
        if isinstance(reason, PeerFailedError) and known is not None:
            if self.origin is not None:  # only now: where the call has come to its end after all, nothing is raised
                known.board.announced.add(self.origin)
                known.board.post("handling", None, [known.board.origin(self.origin)])
            for group in tuple(known.groups.values()):
                if any(rank in group.ranks for rank in known.board.failed):
                    group.give_up(text)
                    heard = heard or group is self.group
        # The failed rank may be no member: the others here do not learn from it that this rank has left their call.
        self.group.give_up(f"rank {self.group.ranks[self.group.rank()]} gave up: {text}")
        if heard or isinstance(reason, GroupBrokenError) or known is None:
            return
        known.board.withdrawn.setdefault(self.group.group_name, (known.board.rank, text))
        if known.board.slots is not None:
            mine = [name for name, (rank, _) in known.board.withdrawn.items() if rank == known.board.rank]
            known.board.slots.write("withdrawn", "\n".join(mine[-40:]).encode())
        certain = reason.report.members if isinstance(reason, DeadlockError) and reason.report is not None else ()
        known.board.post("withdrawn", (self.group.group_name, text, certain), self.group.ranks)

    def _told(self, waited: float, over: bool = False) -> tuple[list[int], Report]:
        """Ask the others where they are; return who has come to the call, too, and the report."""
        board, (name, members, seq) = groups.state().board, self.meets()
        wanted = members if self.peer is None or self.peer < 0 else (self.peer,)
        answers, came = board.ask(name, wanted), self.came()
        arrived = [board.rank]
        late, silent, left = [], [], []
        for rank, where in answers.items():
            ranks = ((rank, rank),)
            if rank in came or (where is not None and self.peer is None and where.calls >= seq):
                arrived.append(rank)
            elif rank in board.exited:
                left.append(self._end(board.exited[rank]))
            elif where is not None:
                late.append(replace(where.waits, ranks=ranks))
            elif (place := _place(board, rank)).site:
                seen = _seen(place.ago, place.site)
                silent.append(Entry(ranks, place.op, site=place.last, state="silent", problem=seen))
            else:
                silent.append(Entry(ranks, state="silent"))
        entries = [
            *_largest(late, Entry((), state="late")),
            *_largest(silent, Entry((), state="silent")),
            *_largest(left, Entry((), state="exited")),
            Entry(runs_of(arrived), state="waits", waited=(waited, waited)),
        ]
        mine = entry_of(self.call, board.rank)
        told = time_limit(
            mine,
            self.group.display,
            runs_of(members),
            table_of(entries),
            self.limit if over and self.limit < math.inf else round(waited, 1),
            over,
            unasked=len({*wanted} - {board.rank}) - len(answers),
            behind=None if self.call.come is None else not self.call.come(),
            closing=self.AFTERWARDS,
        )
        return arrived[1:], told


def _largest(entries: list[Entry], rest: Entry) -> list[Entry]:
    """Return what most of the ranks say, in at most ``MOST_PLACES`` entries, and who says something else as ``rest``."""
    rows: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        rows.setdefault(entry.said(), []).append(entry)
    alike = sorted(rows.values(), key=len, reverse=True)
    others = [run for row in alike[MOST_PLACES:] for entry in row for run in entry.ranks]
    kept = [entry for row in alike[:MOST_PLACES] for entry in row]
    return [*kept, replace(rest, ranks=join(others))] if others else kept


def _needs(call: Call, me: int, level: str) -> tuple[int, ...] | None:
    """Return whom a call that makes no round needs; None: all members. A root that sends to all waits for nobody."""
    if level == "full" or not call.passes:
        return None
    named = dict(part for part in call.key if isinstance(part, tuple) and len(part) == 2)
    root = named.get("root")
    if root is None:
        return None
    if call.op in ("reduce", "gather"):
        return None if me == root else ()
    return () if me == root else (root,)


def failed_entry(failure: Failure) -> Entry:
    """Return how a rank failed, as a report has it."""
    ranks = ((failure.rank, failure.rank),)
    if not failure.op:
        return Entry(ranks, state="failed", problem=failure.what, site=failure.site)
    where = f" (at {short_paths([failure.site])[failure.site]})" if failure.site else ""
    return Entry(ranks, failure.op, site=failure.last, state="failed", problem=failure.what + where)


def note_waits() -> None:
    """Write down for the ranks of this node in which collectives the threads of this one wait."""
    known = groups.current()
    if known is not None and known.board.slots is not None:
        waits = [wait for wait in tuple(_waits.values()) if wait.peer is None]
        said = []
        for wait in waits[:3]:
            name, _, seq = wait.meets()
            said.append((name, seq, wait.began, str(wait.call.site)[-200:]))
        known.board.slots.write("waits", pickle.dumps(said) if said else b"")


def _place(board: Board, rank: int) -> Place:
    """Return where a rank is that does not answer; without a site if it is not of this node."""
    return board.slots.place(rank) if board.slots is not None and rank in board.slots.ranks else Place()


def _seen(ago: float, where: str) -> str:
    """Return where a rank is, or was some seconds ago, as the end of a sentence."""
    if ago < 1.0:
        return f"it is at {where}"
    return f"it was last seen {ago:.0f} s ago at {where} (stopped, or in native code)"


def _last_call(known: groups.State, group: ProcessGroup | None = None) -> tuple[str, str, str]:
    """Return the last call on a group, or where there is none that on the group with most: op, site, group; or empty."""
    if group is None or group.last is None:
        group = max(tuple(known.groups.values()), key=lambda group: group.calls, default=None)
    op, _, site = (group.last_call() if group is not None else "").partition(" at ")
    return op, site, group.display if group is not None and op else ""


def tell_place() -> None:
    """Write down for the ranks of this node where the program is just now (a watchdog service: it never calls MPI)."""
    known = groups.current()
    if known is None or known.board.slots is None:
        return
    site = program_site(sys._current_frames().get(known.thread))
    known.board.slots.tell_place(site, *_last_call(known)[:2])


def await_death(board: Board) -> str:
    """Block until the next rank of this node is gone without a word, and return what to say; "" when nobody is left.

    For a thread of its own (see :meth:`mpicoll.checks.slots.Slots.await_death`).
    """
    slots = board.slots
    try:
        rank = slots.await_death() if slots is not None else -1
        if rank < 0 or slots is None or rank in told_dead or board.failed:
            return ""  # after a failure that is known already, it is the launcher that ends the others
        told_dead.add(rank)
        place = slots.place(rank)
    except (OSError, ValueError):
        return ""  # the communicator was freed
    waits = [wait.describe() for wait in tuple(_waits.values())]
    waits += [call.describe() for call in tuple(watchdog.active.values())]
    return (
        f"rank {rank}'s process is gone without a word: killed by a signal, or os._exit"
        + (f" (at {place})" if place.site else "")
        + (f"; rank {board.rank} waits in {waits[0]}" if waits else "")
    )


told_dead: set[int] = set()


def hopeless(group: ProcessGroup, inside: float) -> str:
    """Return why a native call of a group can never end, or "", from what stands in shared memory alone.

    Args:
        inside: seconds that it has taken. A member may give a group up in a later call, while others are still within the
            transfer that they are through with: that is not looked at before it has taken far too long.
    """
    known = groups.current()
    slots = known.board.slots if known is not None else None
    if slots is None:
        return ""
    for rank in slots.dead():
        if rank in group.ranks:
            return f"rank {rank} will never finish it: its process is gone"
    for rank in slots.ranks:
        if inside > GIVEN_UP_AFTER and rank in group.ranks:
            given_up = slots.read(rank, "withdrawn").decode(errors="replace").split("\n")
            if group.group_name in given_up:
                return f"rank {rank} will never finish it: it gave the group up"
    return ""


FRESH = 0.5
"""Seconds for which a wait looks at all that is pending at least every millisecond."""


def waits_lately() -> bool:
    """Whether some thread has begun a short while ago to wait, and so moves everything on that is pending."""
    since = time.time() - FRESH
    return any(wait.began > since for wait in tuple(_waits.values()))


def waits_now(group_name: str) -> tuple[int, Entry]:
    """Return this rank's part of the answer to a question (see ``checks.board.Where``)."""
    known = groups.current()
    found = known.groups.get(group_name) if known is not None else None
    rank = known.world.rank() if known is not None else -1
    for wait in tuple(_waits.values())[:1]:
        entry = entry_of(wait.call, rank, wait.group.display, state="late")
        break
    else:
        op, site, display = _last_call(known, found) if known is not None else ("", "", "")
        entry = Entry(((rank, rank),), op, site=site, group=display, state="late", problem=BETWEEN)
    return found.calls if found is not None else joined.get(group_name, 0), entry


def calls_now(rank: int) -> list[Entry]:
    """Return what each thread of this process waits in, or else its last call; for a report of where all ranks are.

    Reads only, takes no lock and never calls MPI: any thread may ask, whatever the others hang in.

    Args:
        rank: this process, as the report numbers it.
    """
    known = groups.current()
    ranks = ((rank, rank),)
    if known is None:
        return [Entry(ranks, state="late", problem="has no default group")]
    now = time.time()
    entries = [
        entry_of(wait.call, rank, wait.group.display, state="waits", waited=now - wait.began)
        for wait in tuple(_waits.values())
    ]
    entries += [
        Entry(ranks, state="late", problem=f"{time.monotonic() - call.since:.1f} s inside MPI for {call.describe()}")
        for call in tuple(watchdog.active.values())
    ]
    if entries:
        return entries
    op, site, display = _last_call(known)
    waited_for = sum(len(group.unwaited) for group in tuple(known.groups.values()))
    more = f" ({waited_for} under way that it has not waited for)" if waited_for else ""
    return [Entry(ranks, op, site=site, group=display, state="late", problem=f"in no call of mpicoll{more}")]


def last_seen(rank: int) -> str:
    """Return where a rank of this node was when it last wrote it down, as the end of a sentence, or ""."""
    known = groups.current()
    place = _place(known.board, rank) if known is not None else Place()
    return _seen(place.ago, str(place)) if place.site else ""


def describe_state() -> State:
    """Return what this rank says of itself to a search for deadlocks."""
    known = groups.current()
    rank = known.world.rank() if known is not None else -1
    waits = dict(_waits)
    # Of all threads that run Python, also those that the threading module has not started.
    # What they run and no frames: this one among them would keep all that is in use here until Python looks for cycles.
    runs, started = {ident: frame.f_code for ident, frame in sys._current_frames().items()}, threading.enumerate()
    alive = set(runs) - {thread.ident for thread in started if thread.name.startswith("mpicoll-")}
    users = (waiting.threads & alive) | {threading.main_thread().ident} | calling
    others = alive - users
    ours = list(known.groups.values()) if known is not None else []
    for group in ours:
        _catch_up(group)
    return State(
        rank,
        search.epoch,
        tuple(wait.as_wait() for wait in waits.values()),
        free=any(ident not in waits for ident in users),
        calls={**joined, **_of_destroyed("calls"), **{group.group_name: group.calls for group in ours}},
        sent={**_of_destroyed("sent"), **_messages(ours, "sent")},
        received={**_of_destroyed("received"), **_messages(ours, "received")},
        receives=tuple(
            (group.group_name, group.ranks[source] if source >= 0 else -1, tag)
            for group in ours
            for source, tag in group.pair.receiver.outstanding()
        ),
        doubtful=bool(others),
        patient=any(each.ident in others and not (each.daemon or _idles(runs[each.ident])) for each in started),
        looks=tuple(wait.looks for wait in waits.values()),
    )


def _idles(code: CodeType) -> bool:
    """Whether a thread is a worker of a pool that has nothing to do: only another thread can give it something."""
    pool = sys.modules.get("concurrent.futures.thread")
    return pool is not None and code is pool._worker.__code__


def _of_destroyed(what: str) -> dict[Any, int]:
    """Return the same of the groups that were destroyed last: others may still be in their last calls."""
    known = groups.current()
    if known is None or known.base is None:
        return {}
    counts = getattr(known.base, what)
    recent = tuple(islice(reversed(counts), DESTROYED))
    if what == "calls":
        return {name: counts[name] for name in recent}
    return {(name, peer, tag): count for name in recent for (peer, tag), count in counts[name].items()}


def _catch_up(group: ProcessGroup) -> None:
    """Count the messages that have come for receives that nobody waits for yet: they are no longer on their way."""
    for operation in tuple(group.unwaited.values()):
        operation.advance()


def _messages(ours: list[ProcessGroup], what: str) -> dict[tuple[str, int, int], int]:
    return {
        (group.group_name, group.ranks[peer], tag): count
        for group in ours
        for (peer, tag), count in getattr(group, what).items()
    }


class Search:
    """The search of one process for deadlocks, while it waits.

    One rank of those that wait searches, the lowest as a rule: the others leave it to a lower one that has searched since
    they began to wait. The state of each rank of this node is read from shared memory, where ranks that wait keep it up to
    date; those of other nodes are asked. All that twice, and each state is said to hold again after the first reading, so
    that all held at one moment. The ranks that the certificate names are told.

    A search that finds nothing is made again later and later. Meanwhile the lowest rank of each node that waits looks at the
    time of its neighbours' last change, which costs some microseconds, and searches among them when there is a new one: what
    a rank that blocks after all others completes is found at once. Searches for news take a twentieth of the time at most.
    """

    FIRST_AFTER = 0.1
    STAGGER = 0.02
    LEAVE_IT = 1.0
    AGAIN_WITHIN = 5.0
    DOUBTFUL_FOR = 2.0
    PATIENT_FOR = 10.0
    AWAKE_WITHIN = 0.5
    PUBLISH_EVERY = 0.005
    DEAD_EVERY = 0.02
    NEWS_EVERY = 0.02
    NEAR_SHARE = 1 / 20
    STANDS_FOR = 0.25

    def __init__(self) -> None:
        self.epoch = 0
        self.published: State | None = None
        self._lock = threading.Lock()
        self._mine = -1
        self._since = 0.0
        self._next = 0.0
        self._pause = 0.0
        self._asked: list[int] | None = None
        self._until = 0.0
        self._before: tuple[float, dict[int, State]] | None = None
        self._next_publish = 0.0
        self._next_dead = 0.0
        self._stated: tuple[tuple[int, ...], int] = (), 0
        self._read_at = 0.0
        self._near = False  # the search that is under way is among the ranks of this node alone
        self._near_at = math.inf
        self._rest_until = 0.0
        self._news = (0, 0)
        self._next_news = 0.0

    def verdict(self, board: Board) -> DeadlockError | None:
        """Return the error of a certificate that another rank found, if this rank still waits as it did then."""
        if board.verdict is None:
            return None
        (epoch, told), board.verdict = board.verdict, None
        return self._error(told, board.rank) if epoch == self.epoch else None

    @staticmethod
    def _error(told: Report, me: int) -> DeadlockError:
        error = DeadlockError(told.text(me, MESSAGE_WIDTH))
        told.put_on(error)
        error.reporter = told.members[0][0]
        return error

    def look_for_dead(self, board: Board, waited: float) -> None:
        """Look, every now and then, whether a process of this node is gone."""
        now = time.monotonic()
        if waited > self.DEAD_EVERY and now >= self._next_dead:
            self._next_dead = now + self.DEAD_EVERY
            if board.notice_dead():
                waiting.guard.ignore_news()

    def look(self, waited: float) -> BaseException | None:
        """Go on with the search; return the error when this rank is in a certificate. Called every few milliseconds."""
        known = groups.current()
        if known is None or known.world.size() == 1 or waited < self.FIRST_AFTER:
            return None
        if not self._lock.acquire(blocking=False):
            return None  # another thread is at it
        try:
            return self._look(known, waited, time.monotonic())
        finally:
            self._lock.release()

    def _look(self, known: groups.State, waited: float, now: float) -> BaseException | None:
        board = known.board
        slots = board.slots
        new = self._mine != self.epoch
        if new:
            self._mine, self._since, self._pause = self.epoch, now, self.FIRST_AFTER
            turn = board.rank if slots is None else slots.waiting_below() + known.topology.node
            self._next = now + min(turn, 50) * self.STAGGER
            self._near_at = math.inf
            self._asked, self._before = None, None
        self._publish(board, now)
        if new and slots is not None:
            self._news = slots.changed(), len(board.exited)
        if self._asked is not None:
            return self._read(known, now)
        if now >= self._near_at:
            return self._start(known, now, near=True)
        if now >= self._next and not self._left_to_another(board, now):
            return self._start(known, now, near=False)
        self._watch(board, now)
        return None

    def _watch(self, board: Board, now: float) -> None:
        """Arrange for a search among the ranks of this node when there is news of them, where no lower one of them does."""
        slots = board.slots
        if slots is None or now < self._next_news:
            return
        self._next_news = now + self.NEWS_EVERY
        news = slots.changed(), len(board.exited)
        if news != self._news:
            self._news = news
            if not slots.waiting_below(int((now - self.STANDS_FOR) * 1e9)):
                self._near_at = max(now, self._rest_until)

    def _start(self, known: groups.State, now: float, *, near: bool) -> BaseException | None:
        board = known.board
        remote = [r for r in range(board.size) if not _is_local(board, r) and r not in board.exited]
        board.search += 1
        board.states = {}
        if board.slots is not None and not (near and remote):
            board.slots.searching()
        if near:
            remote = []
        board.post("search", board.search, remote)
        self._asked, self._until = remote, now + 0.3
        self._near, self._near_at = near, math.inf
        error = self._read(known, now)
        if near:
            over = time.monotonic()
            self._rest_until = over + (over - now) / self.NEAR_SHARE
        return error

    def _again(self, now: float) -> None:
        if self._near:
            self._near_at = now + self.STAGGER
        else:
            self._next = now + self.STAGGER

    def _publish(self, board: Board, now: float) -> None:
        """Keep this rank's state in shared memory up to date."""
        if board.slots is None or now < self._next_publish:
            return
        self._next_publish = now + self.PUBLISH_EVERY
        state = describe_state()
        if state != self.published:
            board.slots.write_state(pickle.dumps(state))
            self.published, self._stated = state, (state.looks, time.monotonic_ns())
        elif state.looked_since(self._stated[0]):
            # No wait was over when it was looked at since then, so all held then.
            board.slots.confirm(self._stated[1])
            self._stated = state.looks, time.monotonic_ns()

    def unpublish(self) -> None:
        """Take this rank's state back: it does not wait any more."""
        known = groups.current()
        if known is not None and known.board.slots is not None:
            known.board.slots.write("state", b"")
        self.published = None

    def _left_to_another(self, board: Board, now: float) -> bool:
        """Whether a lower rank has searched lately, and since this one began to wait."""
        recent = max(self._since, now - self.LEAVE_IT)
        if any(rank < board.rank and when > recent for rank, when in tuple(board.searched_by.items())):
            return True
        if board.slots is None:
            return False
        return any(rank < board.rank and board.slots.searched(rank) > recent * 1e9 for rank in board.slots.ranks)

    def _read(self, known: groups.State, now: float) -> BaseException | None:
        board = known.board
        assert self._asked is not None
        if any(rank not in board.states and rank not in board.exited for rank in self._asked) and now < self._until:
            return None
        self._asked = None
        states = {**board.states, board.rank: describe_state()}
        for rank in board.slots.ranks if board.slots is not None else ():
            data = board.slots.read(rank, "state") if board.slots is not None and rank != board.rank else b""
            if data:
                states[rank] = pickle.loads(data)
        for exit_ in tuple(board.exited.values()):
            sent = {(name, board.rank, tag): n for name, by_tag in exit_.sent.items() for tag, n in by_tag.items()}
            states[exit_.rank] = State(exit_.rank, gone=True, calls=exit_.calls, sent=sent)
        held = stuck(states)
        before, self._before = self._before, (now, states)
        read_before, self._read_at = self._read_at, now
        if not held:
            self._before = None
            if not self._near:
                self._pause = min(2 * self._pause, self.AGAIN_WITHIN)
                self._next = now + self._pause
            return None
        if before is None or any(not _goes_on(board, before[1].get(rank), states[rank]) for rank in held):
            self._again(now)
            return None
        doubtful = any(states[rank].doubtful for rank in held)
        if doubtful and min(read_before, self._awake(board, held)) < now - self.AWAKE_WITHIN:
            # One is, or this rank was, stopped, with its other threads: the time in which they do nothing begins anew.
            self._again(now)
            return None
        doubtful_for = self.PATIENT_FOR if any(states[rank].patient for rank in held) else self.DOUBTFUL_FOR
        if (doubtful and now - before[0] < doubtful_for) or not self._held_since(board, held, before[0]):
            self._before = before
            self._again(now)
            return None
        told = report(states, held, time.time())
        if doubtful:
            told = replace(told, closing=f"Other threads are alive; nothing has changed for {now - before[0]:.1f} s.")
        board.post("deadlock", ({rank: states[rank].epoch for rank in held}, told), held)
        if board.rank not in held:
            if not self._near:
                self._next = now + self.AGAIN_WITHIN
            return None
        return self._error(told, board.rank)

    @staticmethod
    def _held_since(board: Board, held: set[int], first: float) -> bool:
        """Whether each state that was read from shared memory has been confirmed after the first reading."""
        if board.slots is None:
            return True
        mine = [rank for rank in held if rank != board.rank and _is_local(board, rank)]
        return all(board.slots.confirmed(rank) > first * 1e9 for rank in mine)

    @staticmethod
    def _awake(board: Board, held: set[int]) -> float:
        """Return when the last of these ranks of this node was awake (ranks of others have just answered)."""
        if board.slots is None:
            return math.inf
        times = [board.slots.confirmed(rank) for rank in held if rank != board.rank and _is_local(board, rank)]
        return min(times, default=math.inf) / 1e9


def _goes_on(board: Board, before: State | None, now: State) -> bool:
    """Whether a rank still says the same, and one of another node has looked at its waits since it said so first."""
    if before is None or before != now:
        return False
    return now.gone or _is_local(board, now.rank) or now.looked_since(before.looks)


def _is_local(board: Board, rank: int) -> bool:
    return board.slots is not None and rank in board.slots.ranks


search = Search()


def local_wait(test: Callable[[], bool], patience: CallWait) -> None:
    """Wait, and be found waiting by those who ask."""
    ident = threading.get_ident()
    outer = _waits.get(ident)
    _waits[ident] = patience
    search.epoch += 1
    over = False
    try:
        waiting.wait(test, patience)
        over = True
    finally:
        search.epoch += 1
        if outer is None:
            del _waits[ident]
        else:
            _waits[ident] = outer
        if search.published is not None:
            search.unpublish()
        if over and patience.noted:  # else it stays for those who leave the call after this rank
            note_waits()
