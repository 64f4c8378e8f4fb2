"""Search for deadlocks while a rank waits: collect the states of all ranks twice, and report a certificate."""

from __future__ import annotations

import math
import pickle
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

from mpicoll.diagnosis import job_state
from mpicoll.diagnosis.board import Board
from mpicoll.diagnosis.deadlock import State, blocked_set, report
from mpicoll.diagnosis.job_state import JobState
from mpicoll.diagnosis.membership import Membership
from mpicoll.diagnosis.report.report import Report
from mpicoll.diagnosis.report.texts import OTHERS_ALIVE, OTHERS_STAND
from mpicoll.errors import DeadlockError
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import stacks
from mpicoll.runtime.watchdog import own_idents

DESTROYED = 32
"""The most destroyed groups that a rank lists; nothing is certain about a group that the rank does not list."""

HELD_AFTER = 1.0
"""Seconds for which each wait has lasted before it is looked into what other threads may do; that takes milliseconds."""


def describe_state() -> State:
    """Return the state of this rank for a search for deadlocks."""
    known = job_state.current()
    rank = known.world.rank() if known is not None else -1
    waits, meetings = (dict(known.waits), dict(known.meetings)) if known is not None else ({}, {})
    threads = _look_at_threads(waits)
    ours = list(known.groups.values()) if known is not None else []
    for group in ours:
        catch_up(group)
    return State(
        rank,
        search.epoch,
        tuple(wait.as_wait() for wait in waits.values()),
        free=threads.free or any(getattr(wait, "ends_itself", False) for wait in waits.values()),
        calls={
            **meetings,
            **_of_destroyed("calls"),
            **{group.group_name: group.calls for group in ours},
        },
        sent={**_of_destroyed("sent"), **_messages(ours, "sent")},
        received={**_of_destroyed("received"), **_messages(ours, "received")},
        receives=tuple(
            (group.group_name, group.ranks[source] if source >= 0 else -1, tag)
            for group in ours
            for source, tag in group.receiver.outstanding()
        ),
        groups={group.group_name: group.display for group in ours},
        doubtful=threads.doubtful,
        non_daemon=threads.non_daemon,
        stands=threads.stands,
        looks=tuple(wait.looks for wait in waits.values()),
    )


class _Threads(NamedTuple):
    """What :class:`State` says of the threads of this process."""

    free: bool
    doubtful: bool
    non_daemon: bool
    stands: tuple[tuple[str, int], ...]


def _look_at_threads(waits: Mapping[int, job_state.Waiting]) -> _Threads:
    """Return the state of the threads; ``waits`` has those that wait in the library."""
    with stacks() as frames:  # of all threads that run Python, also threads that the threading module has not started
        return _threads(frames, waits)


def _threads(frames: dict[int, FrameType], waits: Mapping[int, job_state.Waiting]) -> _Threads:
    from mpicoll.diagnosis import held, standing  # which most ranks never load

    started, me = threading.enumerate(), threading.get_ident()
    alive = {*frames, me} - own_idents()
    users = (signals.threads & alive) | {threading.main_thread().ident} | waiting.calling
    others = alive - users
    if users <= waits.keys():
        idle = {ident for ident, frame in frames.items() if standing.idles(frame)}
        active = others - idle
        return _Threads(
            free=bool(active) and _last(waits) and held.may_begin(frames, active),
            doubtful=bool(others),
            non_daemon=any(each.ident in active and not each.daemon for each in started),
            stands=(),
        )
    # A thread that uses the library is outside of it. It may go on unless all threads stand that do not wait in the library, or
    # it is held and no thread that does not stand may make a call.
    outside = (alive | users) - waits.keys()
    stands: tuple[tuple[str, int], ...] = ()
    if not _runs_callbacks():
        stands = standing.standing(frames, outside)
        if not stands and _last(waits):
            stands = held.standing_beside({**frames, me: sys._getframe(2)}, outside, users, waits)
    return _Threads(free=not stands, doubtful=bool(others or stands), non_daemon=False, stands=stands)


def _last(waits: Mapping[int, job_state.Waiting]) -> bool:
    return all(time.time() - wait.began > HELD_AFTER for wait in waits.values())


def _runs_callbacks() -> bool:
    """Return whether a callback runs, or a pending request has a future: both may release a thread that stands."""
    return bool(waiting.calling) or any(getattr(each, "future", None) is not None for each in tuple(waiting.pending))


def _of_destroyed(what: str) -> dict[Any, int]:
    """Return a counter of the groups that were destroyed last: other ranks may still be in the last calls of these groups."""
    known = job_state.current()
    if known is None or known.endpoint is None:
        return {}
    counts = getattr(known.endpoint, what)
    recent = tuple(islice(reversed(counts), DESTROYED))
    if what == "calls":
        return {name: counts[name] for name in recent}
    return {(name, peer, tag): count for name in recent for (peer, tag), count in counts[name].items()}


def catch_up(group: Membership) -> None:
    """Count the messages of receives that are complete and that the program has not waited for."""
    for operation in (*group.unwaited.values(), *group.futures.values()):
        operation.Test()


def _messages(ours: list[Membership], what: str) -> dict[tuple[str, int, int], int]:
    return {
        (group.group_name, group.ranks[peer], tag): count
        for group in ours
        for (peer, tag), count in getattr(group, what).items()
    }


class DeadlockSearch:
    """The search of one process for deadlocks, while it waits.

    One waiting rank searches, as a rule the lowest: a rank does not search if a lower rank has searched since it began to
    wait. The states of the ranks of this node are read from the node board, where waiting ranks write them. Ranks of other
    nodes are asked. All states are read twice, and each state is confirmed after the first reading: then all states held at
    one moment. The ranks that the certificate names receive the certificate.

    A search that finds nothing is repeated at growing intervals. Meanwhile the lowest waiting rank of each node reads the time
    of the last change on its node, which takes some microseconds. If the time is new, that rank searches among the ranks of the
    node. So a deadlock that the last rank completes is found at once. These searches take a twentieth of the time at most.
    """

    FIRST_AFTER = 0.1
    STAGGER = 0.02
    LEAVE_IT = 1.0
    AGAIN_WITHIN = 5.0
    DOUBTFUL_FOR = 2.0
    STANDS_IN_PYTHON_FOR = 4.0
    NON_DAEMON_FOR = 10.0
    AWAKE_WITHIN = 0.5
    WRITE_EVERY = 0.005
    DEAD_EVERY = 0.02
    NEWS_EVERY = 0.02
    NEAR_SHARE = 1 / 20
    STANDS_FOR = 0.25

    def __init__(self) -> None:
        self.epoch = 0
        self.written: State | None = None
        self._lock = threading.Lock()
        self._mine = -1
        self._since = 0.0
        self._next = 0.0
        self._pause = 0.0
        self._asked: list[int] | None = None
        self._until = 0.0
        self._before: tuple[float, dict[int, State]] | None = None
        self._next_write = 0.0
        self._next_dead = 0.0
        self._stated: tuple[tuple[int, ...], int] = (), 0
        self._read_at = 0.0
        self._near = False  # the current search is among the ranks of this node only
        self._near_at = math.inf
        self._rest_until = 0.0
        self._news = (0, 0)
        self._next_news = 0.0

    def verdict(self, board: Board) -> DeadlockError | None:
        """Return the error of a certificate that another rank found, if this rank still waits in the same calls."""
        if board.verdict is None:
            return None
        (epoch, certificate), board.verdict = board.verdict, None
        return self._error(certificate, board.rank) if epoch == self.epoch else None

    @staticmethod
    def _error(certificate: Report, me: int) -> DeadlockError:
        error = certificate.as_error(DeadlockError, me)
        error.reporter = certificate.members[0][0]
        return error

    def look_for_dead(self, board: Board, waited: float) -> None:
        """Look every 20 ms whether a process of this node is dead."""
        now = time.monotonic()
        if waited > self.DEAD_EVERY and now >= self._next_dead:
            self._next_dead = now + self.DEAD_EVERY
            if board.notice_dead():
                signals.guard.ignore_news()

    def look(self, waited: float) -> BaseException | None:
        """Continue the search, every few milliseconds; return the error if a certificate names this rank."""
        known = job_state.current()
        if known is None or known.world.size() == 1 or waited < self.FIRST_AFTER:
            return None
        if not self._lock.acquire(blocking=False):
            return None  # another thread searches
        try:
            return self._look(known, waited, time.monotonic())
        finally:
            self._lock.release()

    def _look(self, known: JobState, waited: float, now: float) -> BaseException | None:
        board = known.board
        slots = board.slots
        new = self._mine != self.epoch
        if new:
            self._mine, self._since, self._pause = self.epoch, now, self.FIRST_AFTER
            place = board.rank if slots is None else slots.waiting_below() + known.topology.node
            self._next = now + min(place, 50) * self.STAGGER
            self._near_at = math.inf
            self._asked, self._before = None, None
        self._write_state(board, now)
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
        """Plan a search among the ranks of this node if one of their states has changed and no lower rank waits."""
        slots = board.slots
        if slots is None or now < self._next_news:
            return
        self._next_news = now + self.NEWS_EVERY
        news = slots.changed(), len(board.exited)
        if news != self._news:
            self._news = news
            if not slots.waiting_below(int((now - self.STANDS_FOR) * 1e9)):
                self._near_at = max(now, self._rest_until)

    def _start(self, known: JobState, now: float, *, near: bool) -> BaseException | None:
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

    def _write_state(self, board: Board, now: float) -> None:
        """Write this rank's state to the node board if it has changed, or confirm it."""
        if board.slots is None or now < self._next_write:
            return
        self._next_write = now + self.WRITE_EVERY
        state = describe_state()
        if state != self.written:
            board.slots.write_state(pickle.dumps(state))
            self.written, self._stated = state, (state.looks, time.monotonic_ns())
        elif state.looked_since(self._stated[0]):
            # Each wait has been tested since then and was not over, so the rank was in all these waits at that time.
            board.slots.confirm(self._stated[1])
            self._stated = state.looks, time.monotonic_ns()

    def erase(self) -> None:
        """Remove this rank's state from the node board, as the rank does not wait any more."""
        known = job_state.current()
        if known is not None and known.board.slots is not None:
            known.board.slots.write("state", b"")
        self.written = None

    def _left_to_another(self, board: Board, now: float) -> bool:
        """Return whether a lower rank has searched in the last second, and since this rank began to wait."""
        recent = max(self._since, now - self.LEAVE_IT)
        if any(rank < board.rank and when > recent for rank, when in tuple(board.searched_by.items())):
            return True
        if board.slots is None:
            return False
        return any(rank < board.rank and board.slots.searched(rank) > recent * 1e9 for rank in board.slots.ranks)

    def _read(self, known: JobState, now: float) -> BaseException | None:
        board = known.board
        assert self._asked is not None
        if any(rank not in board.states and rank not in board.exited for rank in self._asked) and now < self._until:
            return None
        self._asked = None
        states = {**board.states, board.rank: describe_state()}
        slots = board.slots
        if slots is not None:
            for rank in slots.ranks:
                if rank != board.rank and (data := slots.read(rank, "state")):
                    states[rank] = pickle.loads(data)
        for exit_ in tuple(board.exited.values()):
            sent = {(name, board.rank, tag): n for name, by_tag in exit_.sent.items() for tag, n in by_tag.items()}
            states[exit_.rank] = State(exit_.rank, gone=True, calls=exit_.calls, sent=sent)
        blocked = blocked_set(states)
        before, self._before = self._before, (now, states)
        read_before, self._read_at = self._read_at, now
        if not blocked:
            self._before = None
            if not self._near:
                self._pause = min(2 * self._pause, self.AGAIN_WITHIN)
                self._next = now + self._pause
            return None
        if before is None or any(not _goes_on(board, before[1].get(rank), states[rank]) for rank in blocked):
            self._again(now)
            return None
        doubtful = any(states[rank].doubtful for rank in blocked)
        # When each state on the node board was confirmed last: at that time its rank was awake.
        confirmed = [
            slots.confirmed(rank) / 1e9
            for rank in blocked
            if slots is not None and rank in slots.ranks and rank != board.rank
        ]
        if doubtful and min([read_before, *confirmed]) < now - self.AWAKE_WITHIN:
            # A rank is, or this rank was, stopped: the time in which its other threads do nothing starts again.
            self._again(now)
            return None
        stands = [(rank, *states[rank].stands[0]) for rank in sorted(blocked) if states[rank].stands]
        doubtful_for = self.STANDS_IN_PYTHON_FOR if stands else self.DOUBTFUL_FOR
        if any(states[rank].non_daemon for rank in blocked):
            doubtful_for = self.NON_DAEMON_FOR
        if (doubtful and now - before[0] < doubtful_for) or any(when <= before[0] for when in confirmed):
            self._before = before
            self._again(now)
            return None
        certificate = report(states, blocked, time.time())
        if doubtful:
            seconds = f"{now - before[0]:.1f}"
            closing = OTHERS_ALIVE(seconds=seconds)
            if stands:
                rank, site, _ = stands[0]
                closing = OTHERS_STAND(rank=rank, site=site.rpartition("/")[2], seconds=seconds)
            certificate = replace(certificate, closing=closing)
        board.post("deadlock", ({rank: states[rank].epoch for rank in blocked}, certificate), blocked)
        if board.rank not in blocked:
            if not self._near:
                self._next = now + self.AGAIN_WITHIN
            return None
        return self._error(certificate, board.rank)


def _goes_on(board: Board, before: State | None, now: State) -> bool:
    """Return whether a rank's state is unchanged; a rank of another node must have tested its waits in between."""
    if before is None or before != now:
        return False
    return now.gone or _is_local(board, now.rank) or now.looked_since(before.looks)


def _is_local(board: Board, rank: int) -> bool:
    return board.slots is not None and rank in board.slots.ranks


search = DeadlockSearch()
