"""What a wait on a group is for: who can never come, who is late, and is it certain that nobody can go on."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from mpicoll import groups, waiting, watchdog
from mpicoll.checks.board import Board
from mpicoll.checks.call import Call, name_ranks
from mpicoll.checks.deadlock import State, Wait, report, stuck
from mpicoll.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    GroupBrokenError,
    PeerExitedError,
    PeerFailedError,
)
from mpicoll.groups import ProcessGroup

__all__ = ["CallWait", "Search", "describe_state", "local_wait", "waits_now"]

_waits: dict[int, CallWait] = {}


class CallWait:
    """What one wait on a group is for: its limit, who can never come, and what to say when it is over."""

    __slots__ = ("call", "group", "limit", "peer", "stall_warn", "tag")

    def __init__(self, group: ProcessGroup, call: Call, limit: float, peer: int | None = None, tag: int = 0) -> None:
        self.group = group
        self.call = call
        self.limit = limit
        self.peer = peer  # global rank this point-to-point call waits for; None: all members; -1: any source
        self.tag = tag
        self.stall_warn = groups.state().settings.stall_warn

    def describe(self) -> str:
        """Return the call, its group and its place in the program."""
        number = f", call {self.call.seq}" if self.call.seq else ""
        return f"{self.call.describe()} on group {self.group.display}{number} at {self.call.site}"

    def check(self, waited: float) -> BaseException | None:
        """Return an error when this wait can never end."""
        known = groups.current()
        if known is None:
            return None
        board = known.board
        certain = search.verdict(board)
        if certain is not None:
            return certain
        for failure in tuple(board.failed.values()):
            if failure.rank in self.group.ranks or failure.rank not in board.announced:
                board.announced.add(failure.rank)
                board.post("handling", None, [failure.rank])
                return PeerFailedError(f"{failure}, while rank {board.rank} waited in {self.describe()}")
        withdrawn = board.withdrawn.get(self.group.group_name)
        if withdrawn is not None:
            rank, why = withdrawn
            return GroupBrokenError(f"{self.describe()}: rank {rank} gave the group up: {why}")
        gone = [exit_.rank for exit_ in tuple(board.exited.values()) if self._needs(exit_)]
        if gone:
            calls = board.exited[gone[0]].calls.get(self.group.group_name, 0)
            after = "" if self.peer is not None else f" after {calls} call{'s' if calls != 1 else ''} on this group"
            return PeerExitedError(
                f"{self.describe()}: {name_ranks(gone)} ended the program{after}, so this call can never complete"
            )
        return search.look(waited)

    def as_wait(self) -> Wait:
        """Return this wait as a search for deadlocks sees it."""
        sending = self.peer is not None and self.call.op in ("send", "isend")
        return Wait(
            self.group.group_name, self.group.ranks, self.describe(), self.peer, self.call.seq, sending, self.tag
        )

    def _needs(self, exit_: Any) -> bool:
        name = self.group.group_name
        if self.peer is None:
            return exit_.rank in self.group.ranks and exit_.calls.get(name, 0) < self.call.seq
        if self.peer < 0:
            others = [rank for rank in self.group.ranks if rank != exit_.rank and rank != groups.state().world.rank()]
            if exit_.rank not in self.group.ranks or not all(rank in groups.state().board.exited for rank in others):
                return False
            received = self.group.by_peer(self.group.received).get(self.group.ranks.index(exit_.rank), 0)
            return bool(exit_.sent.get(name, 0) <= received)
        if self.peer != exit_.rank:
            return False
        if self.call.op in ("send", "isend"):
            return True  # it has left without receiving
        received = self.group.by_peer(self.group.received).get(self.group.ranks.index(self.peer), 0)
        return bool(exit_.sent.get(name, 0) <= received)

    def stalled(self, waited: float) -> None:
        """Say who is missing: once a job, by the lowest rank that waits."""
        answers, text = self._missing()
        if all(rank > groups.state().world.rank() for rank in answers):
            sys.stderr.write(
                f"mpicoll: rank {groups.state().world.rank()} has waited {waited:.0f} s in {self.describe()}: {text}\n"
            )
            sys.stderr.flush()

    def timed_out(self, waited: float) -> BaseException:
        """Return the error for a wait that passed its limit, naming who is late and where."""
        _, text = self._missing()
        return CollectiveTimeoutError(
            f"Timed out waiting {self.limit:g} s in {self.describe()}: {text}. The group is broken now"
        )

    def give_up(self, reason: BaseException) -> None:
        """Withdraw: mark the group broken and tell its members."""
        text = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
        known = groups.current()
        if isinstance(reason, PeerFailedError) and known is not None:
            for group in tuple(known.groups.values()):
                if any(rank in group.ranks for rank in known.board.failed):
                    group.give_up(text)
        else:
            self.group.give_up(f"rank {self.group.ranks[self.group.rank()]} gave up: {text}")
        if isinstance(reason, (PeerFailedError, GroupBrokenError)) or known is None:
            return
        known.board.post("withdrawn", (self.group.group_name, text), self.group.ranks)
        known.board.withdrawn.setdefault(self.group.group_name, (known.board.rank, text))

    def _missing(self) -> tuple[list[int], str]:
        board = groups.state().board
        asked = self.group.ranks if self.peer is None else [self.peer] if self.peer >= 0 else self.group.ranks
        answers = board.ask(self.group.group_name, asked)
        arrived, elsewhere, silent = [], [], []
        for rank in asked:
            if rank == board.rank:
                continue
            where = answers.get(rank)
            if where is None:
                silent.append(rank)
            elif self.peer is None and where.calls >= self.call.seq:
                arrived.append(rank)
            else:
                elsewhere.append(where)
        parts = [f"rank {w.rank} has not come to it, it {w.waits}" for w in elsewhere]
        if silent:
            parts.append(
                f"{name_ranks(silent)} did not come to it and {'does' if len(silent) == 1 else 'do'} not answer "
                "(computing, stopped or dead)"
            )
        if not parts:
            parts.append("all ranks have come to it, and it does not end")
        return arrived, "; ".join(parts)


def waits_now(group_name: str) -> tuple[int, str]:
    """Return this rank's part of the answer to a question (see ``checks.board.Where``)."""
    known = groups.current()
    found = known.groups.get(group_name) if known is not None else None
    waits = [wait.describe() for wait in tuple(_waits.values())]
    text = f"waits in {waits[0]}" if waits else "is between two calls, or at its end"
    return found.calls if found is not None else 0, text


def describe_state() -> State:
    """Return what this rank says of itself to a search for deadlocks."""
    known = groups.current()
    rank = known.world.rank() if known is not None else -1
    waits = dict(_waits)
    alive = {thread.ident for thread in threading.enumerate()}
    users = (waiting.threads & alive) | {threading.main_thread().ident}
    ours = list(known.groups.values()) if known is not None else []
    return State(
        rank,
        search.epoch,
        tuple(wait.as_wait() for wait in waits.values()),
        free=any(ident not in waits for ident in users),
        calls={group.group_name: group.calls for group in ours},
        sent=_messages(ours, "sent"),
        received=_messages(ours, "received"),
        receives=tuple(
            (group.group_name, group.ranks[source] if source >= 0 else -1, tag)
            for group in ours
            for source, tag in group.pair.receiver.outstanding()
        ),
        doubtful=len(alive - users) > watchdog.THREADS,
    )


def _messages(ours: list[ProcessGroup], what: str) -> dict[tuple[str, int, int], int]:
    return {
        (group.group_name, group.ranks[peer], tag): count
        for group in ours
        for (peer, tag), count in getattr(group, what).items()
    }


class Search:
    """The search of one process for deadlocks, while it waits.

    One rank of those that wait searches, the lowest as a rule: the others leave it to a lower one that has asked them
    lately. It asks all ranks, twice, and tells those that the certificate names.
    """

    FIRST_AFTER = 0.1
    STAGGER = 0.02
    LEAVE_IT = 1.0
    AGAIN_WITHIN = 5.0
    DOUBTFUL_FOR = 2.0

    def __init__(self) -> None:
        self.epoch = 0
        self._mine = -1
        self._next = 0.0
        self._pause = 0.0
        self._asked = False
        self._until = 0.0
        self._before: tuple[float, dict[int, State]] | None = None

    def verdict(self, board: Board) -> DeadlockError | None:
        """Return the error of a certificate that another rank found, if this rank still waits as it did then."""
        if board.verdict is None:
            return None
        (epoch, text), board.verdict = board.verdict, None
        return self._error(text) if epoch == self.epoch else None

    @staticmethod
    def _error(text: str) -> DeadlockError:
        error = DeadlockError(text)
        error.reporter = int(re.findall(r"\d+", text)[0])
        return error

    def look(self, waited: float) -> BaseException | None:
        """Go on with the search; return the error when this rank is in a certificate. Called every few milliseconds."""
        known = groups.current()
        if known is None or known.world.size() == 1:
            return None
        board, now = known.board, time.monotonic()
        if waited < self.FIRST_AFTER + min(board.rank, 50) * self.STAGGER:
            return None
        if self._mine != self.epoch:
            self._mine, self._next, self._pause = self.epoch, now, self.FIRST_AFTER
            self._asked, self._before = False, None
        if self._asked:
            return self._read(known, now)
        if now < self._next or any(
            rank < board.rank and now - when < self.LEAVE_IT for rank, when in tuple(board.searched_by.items())
        ):
            return None
        board.search += 1
        board.states = {}
        board.post("search", board.search, [r for r in range(board.size) if r not in board.exited])
        self._asked, self._until = True, now + 0.3
        return None

    def _read(self, known: groups.State, now: float) -> BaseException | None:
        board = known.board
        if len(board.states) < board.size - 1 - len(board.exited) and now < self._until:
            return None
        self._asked = False
        states = {**board.states, board.rank: describe_state()}
        for exit_ in tuple(board.exited.values()):
            states[exit_.rank] = State(exit_.rank, gone=True, calls=exit_.calls)
        held = stuck(states)
        before, self._before = self._before, (now, states)
        if not held:
            self._pause = min(2 * self._pause, self.AGAIN_WITHIN)
            self._next = now + self._pause
            self._before = None
            return None
        doubtful = any(states[rank].doubtful for rank in held)
        if before is None or any(rank not in before[1] or before[1][rank].epoch != states[rank].epoch for rank in held):
            self._next = now + 0.02
            return None
        if doubtful and now - before[0] < self.DOUBTFUL_FOR:
            self._before, self._next = before, now + 0.1
            return None
        text = report(states, held)
        if doubtful:
            text += f"\nOther threads are alive; nothing has changed for {now - before[0]:.1f} s."
        board.post("deadlock", ({rank: states[rank].epoch for rank in held}, text), held)
        if board.rank not in held:
            self._next = now + self.AGAIN_WITHIN
            return None
        return self._error(text)


search = Search()


def local_wait(test: Callable[[], bool], patience: CallWait) -> None:
    """Wait, and be found waiting by those who ask."""
    ident = threading.get_ident()
    outer = _waits.get(ident)
    _waits[ident] = patience
    search.epoch += 1
    try:
        waiting.wait(test, patience)
    finally:
        search.epoch += 1
        if outer is None:
            del _waits[ident]
        else:
            _waits[ident] = outer
