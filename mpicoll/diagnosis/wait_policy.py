"""Wait policy of calls on a group: when a wait must end early, and the error that it raises.

The errors are: a peer failed, a peer exited, a deadlock, the time limit.
"""

from __future__ import annotations

import math
import pickle
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mpicoll.diagnosis import job_state
from mpicoll.diagnosis.board import EARLIER_TAGS, Board, Exit, Failure
from mpicoll.diagnosis.call import CallDescription, fingerprint
from mpicoll.diagnosis.deadlock import Wait
from mpicoll.diagnosis.deadlock_search import catch_up, search
from mpicoll.diagnosis.job_state import SEEN_NOW, destroyed_by, note_waits, place_of, seen_ago
from mpicoll.diagnosis.membership import Membership
from mpicoll.diagnosis.report.entries import RankState, Runs, Table, entry_of, holds, join, runs_of, table_of
from mpicoll.diagnosis.report.report import MESSAGE_WIDTH, Report, show
from mpicoll.diagnosis.report.text_layout import short_paths
from mpicoll.diagnosis.report.texts import BROKEN, NOT_LOST, peer_exited, peer_failed, time_limit, with_unreceived
from mpicoll.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    DistError,
    GroupBrokenError,
    PeerExitedError,
    PeerFailedError,
    reason_of,
)
from mpicoll.runtime import handler_calls, waiting

MOST_PLACES = 6  # rows of a report for each state of missing ranks: so all rows fit into the table
EXPLAINED_WITHIN = 3.0
VERDICT_WITHIN = 2.0
_PLACE = re.compile(r"(?<= at )[^\s:]+:\d+")

COMPLETES_WITHIN = 0.5
"""Seconds in which a call may still complete on this rank after a rank that has also made the call has failed."""

FAILS_WITHIN = 0.3
"""Seconds for which a rank waits for the failure of a rank whose program has interrupted a call: the failure says more."""

DESTROYED_EVERY = 0.25
"""Seconds between two looks for members that have destroyed the group."""

REFUSED_WARN = 5.0
"""Seconds, or ``MPICOLL_STALL_WARN`` if less, until a wait is reported at whose end this rank raises an error of its own."""

DOOMED_AFTER = 0.1
"""Seconds after which the waits of a rank that has failed end."""


class CallWait:
    """Wait policy of one call on a group."""

    AFTERWARDS = BROKEN
    """The sentence of the error on the state of the group after the wait has failed."""

    def __init__(
        self, group: Membership, call: CallDescription, limit: float, peer: int | None = None, tag: int = 0
    ) -> None:
        self.group = group
        self.call = call
        self.limit = limit
        self.peer = peer  # global rank that this point-to-point call waits for; None: all members; -1: any source
        self.tag = tag
        warn = job_state.job().settings.stall_warn
        self.stall_warn = warn if call.error is None else min(warn, REFUSED_WARN)
        self.began = time.time()
        self.looks = 0  # number of tests after which the wait was not over
        self.noted = False  # the wait is on the node board
        self.verdict_until = 0.0
        self.completes_until = 0.0
        self.ends_itself = False  # the program has given this wait a time after which the call stays pending
        self.origin: int | None = None  # the failed rank that ends the wait
        self.next_destroyed = DESTROYED_EVERY
        self.have_destroyed: Collection[int] = ()
        self._wait: Wait | None = None

    @property
    def stays_until(self) -> float:
        """time.monotonic() before which this rank does not withdraw."""
        return self.call.stays_until

    def describe(self) -> str:
        """Return the call, its group and its place in the program."""
        number = f", call {self.call.seq}" if self.call.seq else ""
        return f"{self.call.describe()} on group {self.group.display}{number} at {self.call.site}"

    def check(self, waited: float) -> BaseException | None:
        """Return an error if this wait can never end."""
        self.looks += 1
        known = job_state.current()
        if known is None:
            return None
        board = known.board
        self.note()
        search.look_for_dead(board, waited)
        if self.call.explaining and waited < EXPLAINED_WITHIN:
            return None  # members that have posted their calls raise, and may end before other members have read them
        return search.verdict(board) or self.ended(board, waited) or search.look(waited)

    def ended(self, board: Board, waited: float, polled: bool = False) -> BaseException | None:
        """Return an error if a needed rank or this rank has failed, a needed rank has ended, or a rank gave the group up.

        Args:
            polled: the program polls the call. Then a receive needs a message with its tag. For a receive that waits, the search
                for deadlocks looks at the tags, and lists the messages with other tags.
        """
        if job_state.doomed and waited > DOOMED_AFTER:
            return GroupBrokenError(
                f"{self.describe()}: this rank has failed ({job_state.doomed}), so no rank makes this call with it"
            )
        gone = [exit_ for exit_ in tuple(board.exited.values()) if self._needs(exit_, polled)]
        gone = gone or self._destroyed(board, waited)
        for failure in tuple(board.failed.values()):
            if failure.rank in self.group.ranks or failure.rank not in board.announced:
                if gone and failure.what.startswith(PeerExitedError.__name__):
                    continue  # that rank failed because a rank is gone, like this wait
                if self._completes(failure, waited):
                    continue
                self.origin = failure.rank
                return self.because_failed(failure, waited)
        withdrawn = board.withdrawn.get(self.group.group_name)
        if gone:
            left = self.because_exited(gone, waited)
            if withdrawn is not None and withdrawn[0] != board.rank:
                left.reporter = withdrawn[0]  # the first rank that gave the group up prints the report
            return left
        if withdrawn is not None and not self._verdict_comes(board) and not self._failure_comes(board):
            rank, why = withdrawn
            broken = GroupBrokenError(f"{self.describe()}: rank {rank} gave the group up: {why}")
            broken.reporter = rank
            return broken
        return None

    def _destroyed(self, board: Board, waited: float) -> list[Exit]:
        """Return members on this node that have destroyed the group before this call: they never make it.

        A message that they have sent or received before may still be on its way at the first look.
        """
        if waited < self.next_destroyed or board.slots is None:
            return []
        self.next_destroyed = waited + DESTROYED_EVERY
        name, found, before = self.group.group_name, {}, self.have_destroyed
        for rank in set(board.slots.ranks).intersection(self.group.ranks) - {board.rank}:
            site, calls, sent = destroyed_by(board, rank)
            if name in calls and (self.peer is None or name in sent):
                to_me = {EARLIER_TAGS: sent.get(name, {}).get(board.rank, 0)}
                found[rank] = Exit(rank, dict(calls), {name: to_me}, {}, f"destroyed the group at {site}")
        self.have_destroyed = found.keys()
        if self.peer is not None:
            found = {rank: exit_ for rank, exit_ in found.items() if rank in before}
        return [exit_ for exit_ in found.values() if self._needs(exit_, False, found)]

    def _verdict_comes(self, board: Board) -> bool:
        """Return whether the group was given up for a certificate that names this rank, too: the certificate will arrive."""
        if not holds(board.certain.get(self.group.group_name, ()), board.rank):
            return False
        now = time.monotonic()
        self.verdict_until = self.verdict_until or now + VERDICT_WITHIN
        return now < self.verdict_until

    def _failure_comes(self, board: Board) -> bool:
        """Return whether the rank that gave the group up probably ends by the exception that interrupted its call."""
        since = board.interrupted.get(self.group.group_name)
        return since is not None and time.monotonic() < since + FAILS_WITHIN

    def _completes(self, failure: Failure, waited: float) -> bool:
        """Return whether this call may still complete: the failed rank has made the call, and failed a moment ago."""
        name, _, seq = self.meets()
        withdrawn = job_state.job().board.withdrawn.get(self.group.group_name)
        if self.peer is not None or failure.calls.get(name, 0) < seq or (withdrawn and withdrawn[0] == failure.rank):
            return False
        self.completes_until = self.completes_until or waited + COMPLETES_WITHIN
        return waited < self.completes_until

    def because_failed(self, failure: Failure, waited: float) -> PeerFailedError:
        """Return the error of a wait that cannot end because a rank has failed."""
        report = self._report(peer_failed, [failed_entry(failure)], waited)
        return report.as_error(PeerFailedError, job_state.job().world.rank())

    def because_exited(self, exits: list[Exit], waited: float) -> PeerExitedError:
        """Return the error of a wait that cannot end because ranks have ended."""
        report = self._report(peer_exited, [self._end(exit_) for exit_ in exits], waited)
        return self._with_unreceived(report).as_error(PeerExitedError, job_state.job().world.rank())

    def _with_unreceived(self, report: Report) -> Report:
        """Return a report with the messages of which this receive may mean one: other tags, or its tag on other groups."""
        if self.peer is None or self.call.op in ("send", "isend"):
            return report
        found = []
        for group in tuple(job_state.job().groups.values()):
            if self.peer >= 0 and self.peer not in group.ranks:
                continue
            other = group.group_name != self.group.group_name
            same = f" ({group.group_name})" if group.display == self.group.display else ""  # of the same ranks
            for source, tag in group.receiver.unreceived(group.ranks.index(self.peer) if self.peer >= 0 else -1):
                if not other or tag == self.tag:
                    found.append((group.ranks[source], tag, f"{group.display}{same}" if other else ""))
        return with_unreceived(report, found, tagged="object" not in self.call.name)

    def _end(self, exit_: Exit) -> RankState:
        """Return what a rank that has ended did, with its last call on the group."""
        name = self.meets()[0]
        what = exit_.describe(name if self.peer is None and name == self.group.group_name else None)
        op, _, site = exit_.last.get(self.group.group_name, "").rpartition(" at ")
        ranks = ((exit_.rank, exit_.rank),)
        return RankState(ranks, op, site=site, state="exited", problem=what.partition(", the last ")[0])

    def _report(
        self, kind: Callable[[RankState, str, Runs, Table, str], Report], causes: list[RankState], waited: float
    ) -> Report:
        """Return the report of a call that cannot complete because of ``causes``."""
        mine = entry_of(self.call, job_state.job().world.rank())
        gone = join(run for entry in causes for run in entry.ranks)
        own = RankState(mine.ranks, state="waits", waited=(waited, waited), problem=mine.problem)
        waits = [own, *self._beside(replace(mine, problem=""), gone)]
        members = runs_of(self.meets()[1])
        return kind(mine, self.group.display, members, table_of([*causes, *waits]), self.AFTERWARDS)

    def meets(self) -> tuple[str, tuple[int, ...], int]:
        """Return the name of the group whose ranks must all make this call, these ranks, and the number of the call."""
        return self.group.group_name, self.group.ranks, self.call.seq

    def came(self) -> set[int]:
        """Return ranks that are known to have made this call, whatever they do now."""
        # A rank has been told to stay only after all ranks had agreed to the call.
        return set(self.group.ranks) if self.call.stays_until else set()

    def note(self) -> None:
        """Write the collectives that this rank waits in to the node board, once; it takes some microseconds."""
        if not self.noted:
            self.noted = True
            note_waits()

    def _beside(self, mine: RankState, gone: Runs) -> list[RankState]:
        """Return the ranks of this node, without ``gone``, that wait in this collective, or left this one for the same reason."""
        found = []
        now = time.time()
        for rank, (began, site) in self._noted(gone).items():
            same = RankState((), state="waits")
            call = same if mine.site.endswith(site) else replace(mine, site=site, called_from="", state="waits")
            found.append(replace(call, ranks=((rank, rank),), callers=(), waited=(now - began, now - began)))
        return found

    def _noted(self, gone: Runs = ()) -> dict[int, tuple[float, str]]:
        """Return the other ranks of this node whose record says that they wait in this collective: since when, and where."""
        slots, (name, ranks, seq) = job_state.job().board.slots, self.meets()
        if slots is None or self.peer is not None:
            return {}
        found = {}
        for rank in set(slots.ranks).intersection(ranks) - {slots.me}:
            data = b"" if holds(gone, rank) else slots.read(rank, "waits")
            for group, number, began, site in pickle.loads(data) if data else ():
                if (group, number) == (name, seq):
                    found[rank] = began, site
        return found

    def as_wait(self) -> Wait:
        """Return this wait in the form that a search for deadlocks reads."""
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
                _matched(self.call, entry) if self.peer is None and self.group.level != "full" else 0,
                needs=_needs(self.call, me, self.group.level) if self.peer is None else None,
            )
        return self._wait

    def _needs(self, exit_: Exit, polled: bool, left: Mapping[int, Exit] = MappingProxyType({})) -> bool:
        """Return whether this call needs a rank that makes no more calls; ``left`` has members that have left the group alone."""
        name = self.group.group_name
        if self.peer is None:
            return exit_.rank in self.group.ranks and exit_.calls.get(name, 0) < self.call.seq
        if self.peer >= 0 and self.call.op in ("send", "isend"):
            return self.peer == exit_.rank  # the peer has left without receiving
        sources = set(self.group.ranks) - {job_state.job().world.rank()} if self.peer < 0 else {self.peer}
        exited = {**left, **job_state.job().board.exited}
        if exit_.rank not in sources or not sources <= exited.keys():
            return False
        catch_up(self.group)
        tag = self.tag if polled else None
        return not any(self._has_unreceived(exited[rank], tag) for rank in sources)

    def _has_unreceived(self, exit_: Exit, tag: int | None) -> bool:
        """Return whether a rank that has ended has sent a message, with this tag or any, that this rank has not received."""
        sent = exit_.sent.get(self.group.group_name, {})
        peer, received = self.group.ranks.index(exit_.rank), self.group.received
        if tag is None or EARLIER_TAGS in sent:
            return sum(sent.values()) > self.group.by_peer(received).get(peer, 0)
        return sent.get(tag, 0) > received.get((peer, tag), 0)

    def stalled(self, waited: float) -> None:
        """Print which ranks are missing: once a job, on the lowest rank that waits."""
        arrived, report = self._ask(waited)
        if all(rank > job_state.job().world.rank() for rank in arrived):
            show(report, width=MESSAGE_WIDTH, before="mpicoll: ")

    def timed_out(self, waited: float) -> BaseException:
        """Return the error of a wait that passed its limit, with the ranks that are late and their places."""
        _, report = self._ask(waited, over=True)
        return report.as_error(CollectiveTimeoutError, job_state.job().world.rank())

    def withdraw(self, reason: BaseException) -> None:
        """Mark the group broken and inform its members."""
        on_exit(reason)
        text, of_program = reason_of(reason), not isinstance(reason, DistError)
        known = job_state.current()
        informed = False
        if isinstance(reason, PeerFailedError) and known is not None:
            if self.origin is not None:  # only now: if the call still completes, nothing is raised
                known.board.announced.add(self.origin)
                known.board.post("handling", None, [known.board.origin(self.origin)])
            for group in tuple(known.groups.values()):
                if any(rank in group.ranks for rank in known.board.failed):
                    group.give_up(text, told=True)
                    informed = informed or group is self.group
        # The failed rank may be no member: then its failure does not inform the members that this rank has left their call.
        self.group.give_up(f"rank {self.group.ranks[self.group.rank()]} gave up: {text}", told=True)
        told = isinstance(reason, PeerExitedError) and reason.reporter is not None
        if informed or told or isinstance(reason, GroupBrokenError) or known is None:
            return
        known.board.withdrawn.setdefault(self.group.group_name, (known.board.rank, text))
        if known.board.slots is not None:
            mine = [name for name, (rank, _) in known.board.withdrawn.items() if rank == known.board.rank]
            known.board.slots.write("withdrawn", "\n".join(mine[-40:]).encode())
        certain = reason.report.members if isinstance(reason, DeadlockError) and reason.report is not None else ()
        known.board.post("withdrawn", (self.group.group_name, text, certain, of_program), self.group.ranks)

    def _ask(self, waited: float, over: bool = False) -> tuple[list[int], Report]:
        """Ask other ranks for their states; return the other ranks that have made the call, and the report."""
        board, (name, members, seq) = job_state.job().board, self.meets()
        wanted = members if self.peer is None or self.peer < 0 else (self.peer,)
        answers, came = board.ask(name, wanted), self.came()
        noted = self._noted() if None in answers.values() else {}
        mine, arrived = entry_of(self.call, board.rank), [board.rank]
        unheard: list[int] = []
        late, silent, left, computing = [], [], [], []
        for rank, where in answers.items():
            ranks = ((rank, rank),)
            if rank in came or (where is not None and self.peer is None and where.calls >= seq):
                if where is not None or rank in board.exited:
                    arrived.append(rank)
                elif (place := place_of(board, rank)).site and place.ago < SEEN_NOW:
                    computing.append(RankState(ranks, state="unheard", problem=seen_ago(place.ago, place.site)))
                else:
                    unheard.append(rank)
            elif rank in board.exited:
                left.append(self._end(board.exited[rank]))
            elif where is not None:
                late.append(replace(where.waits, ranks=ranks))
            elif rank in noted:  # the rank is stopped, or got no processor for as long as an answer was awaited
                unheard.append(rank)
            elif (place := place_of(board, rank)).site:
                seen = seen_ago(place.ago, place.site)
                silent.append(RankState(ranks, place.op, site=place.last, state="silent", problem=seen))
            else:
                silent.append(RankState(ranks, state="silent"))
        entries = [
            *_largest(late, RankState((), state="late")),
            *_largest(silent, RankState((), state="silent")),
            *_largest(left, RankState((), state="exited")),
            *_largest(computing, RankState((), state="unheard")),
            *([RankState(runs_of(unheard), state="unheard")] if unheard else []),
            RankState(mine.ranks, state="waits", waited=(waited, waited), problem=mine.problem),
            *([RankState(runs_of(arrived[1:]), state="waits", waited=(waited, waited))] if arrived[1:] else []),
        ]
        report = time_limit(
            mine,
            self.group.display,
            runs_of(members),
            table_of(entries),
            self.limit if over and self.limit < math.inf else round(waited, 1),
            over,
            unasked=len({*wanted} - {board.rank}) - len(answers),
            behind=None if self.call.device_ready is None else not self.call.device_ready(),
            closing=self.AFTERWARDS,
        )
        unheard += [run[0] for row in computing for run in row.ranks]
        return [*arrived[1:], *unheard], self._with_unreceived(report)


def _ignore(error: BaseException) -> None:
    """Do nothing with an exception that ends a call."""


on_exit: Callable[[BaseException], None] = _ignore
"""Notes an exception of the program that ends a call, as it may end the program, too."""


def _largest(entries: list[RankState], rest: RankState) -> list[RankState]:
    """Return the answers of most ranks, at most ``MOST_PLACES`` different ones, and the ranks with other answers as ``rest``."""
    rows: dict[tuple[Any, ...], list[RankState]] = {}
    for entry in entries:
        rows.setdefault(entry.content(), []).append(entry)
    alike = sorted(rows.values(), key=len, reverse=True)
    others = [run for row in alike[MOST_PLACES:] for entry in row for run in entry.ranks]
    listed = [entry for row in alike[:MOST_PLACES] for entry in row]
    return [*listed, replace(rest, ranks=join(others))] if others else listed


def _matched(call: CallDescription, entry: RankState) -> int:
    """Return the fingerprint of what calls of MPI must agree in to complete: they complete with another reduction or name."""
    return fingerprint(call.op, tuple(part for part in entry.key if part[0] not in ("op", "name")))


def _needs(call: CallDescription, me: int, level: str) -> tuple[int, ...] | None:
    """Return the ranks that a call without a round needs; None: all members. A root that sends to all members needs none."""
    if level == "full" or not call.passes:
        return None
    named = dict(part for part in call.key if isinstance(part, tuple) and len(part) == 2)
    root = named.get("root")
    if root is None:
        return None
    if call.op in ("reduce", "gather", "gather_single"):
        return None if me == root else ()
    return () if me == root else (root,)


def failed_entry(failure: Failure) -> RankState:
    """Return the entry of a failed rank for a report."""
    ranks = ((failure.rank, failure.rank),)
    if not failure.is_silent:
        what, misfit, _ = failure.what.partition(NOT_LOST)
        if misfit:  # room for both sides of the message
            places = short_paths(_PLACE.findall(what))
            what = _PLACE.sub(lambda found: places[found[0]], what)
        return RankState(ranks, state="failed", problem=what, site=failure.site)
    where = f" (last seen at {short_paths([failure.site])[failure.site]})" if failure.site else ""
    return RankState(ranks, failure.op, site=failure.last, state="failed", problem=failure.what + where)


def local_wait(test: Callable[[], bool], policy: CallWait) -> None:
    """Wait until ``test`` returns True; record the wait for ranks that ask."""
    ident = threading.get_ident()
    waits = job_state.job().waits
    outer = waits.get(ident)
    waits[ident] = policy
    outermost = not handler_calls.inside and ident == threading.main_thread().ident
    if outermost:
        handler_calls.inside.add(ident)
    search.epoch += 1
    over = False
    try:
        waiting.wait(test, policy)
        over = True
    finally:
        if outermost:
            handler_calls.inside.clear()
        search.epoch += 1
        if outer is None:
            del waits[ident]
        else:
            waits[ident] = outer
        if search.written is not None:
            search.erase()
        if over and policy.noted:  # else the record stays for ranks that leave the call after this rank
            note_waits()


handler_calls.waits.add(local_wait.__code__)
