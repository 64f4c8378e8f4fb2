"""Messages between ranks about what is wrong: failures, exits, withdrawals, and where ranks wait.

The messages are small, and use a communicator of the library. No message is sent unless something is wrong. A rank reads messages
in waits of more than a few milliseconds, and while it waits for its peers at its end. A rank that computes does not answer: such
a rank is not blocked.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.diagnosis.deadlock import State
from mpicoll.diagnosis.node_board import NodeBoard
from mpicoll.diagnosis.place import Place
from mpicoll.diagnosis.report.entries import RankState, Runs
from mpicoll.diagnosis.report.report import Report
from mpicoll.runtime.mpi_library import retain_frames

_TAG = 1
MOST_ASKED = 256
"""The most ranks that a waiting rank asks for their states; in a larger group the rank asks the nearest ranks."""
ANSWER_WITHIN = 0.3


_SILENT = "its process"
"""How the cause begins of a rank that could not report it."""


@dataclass(frozen=True)
class Failure:
    """A rank that ended with an uncaught exception or a nonzero exit code, or that is dead.

    Attributes:
        what, site: the cause, and its file:line.
        op, last: the last call of the rank and its call site, if the rank could not report the cause.
        finalizes: the rank calls MPI_Finalize if each rank has failed by itself; False: the rank ends the job, or is dead.
        calls: number of calls made on each group; empty if the rank is dead.
    """

    rank: int
    what: str
    site: str
    code: int
    op: str = ""
    last: str = ""
    finalizes: bool = False
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def is_silent(self) -> bool:
        """Whether the rank could not report the cause: the site is where it was last seen."""
        return bool(self.op) or self.what.startswith(_SILENT)

    def __str__(self) -> str:
        after = f", after its last known call {self.op} at {self.last}" if self.op else ""
        seen = "last seen at" if self.is_silent else "at"
        return f"rank {self.rank} failed: {self.what}" + (f" ({seen} {self.site}{after})" if self.site else "")


EARLIER_TAGS = -1
"""What stands for the tags of many earlier messages, which an ended rank does not list."""


@dataclass(frozen=True)
class Exit:
    """A rank that makes no more calls.

    Attributes:
        calls: number of calls made on each group.
        sent: messages sent to this rank on each group, by tag; under ``EARLIER_TAGS`` the messages of all earlier tags.
        last: its last call on each group, with its place in the program.
        reason: what the rank did, as the end of a sentence.
        by: the call of sys.exit that ended the program, and its place; "" if there is none, or none is known.
    """

    rank: int
    calls: dict[str, int]
    sent: dict[str, dict[int, int]]
    last: dict[str, str]
    reason: str
    by: str = ""

    def describe(self, group: str | None) -> str:
        """Return what the rank did, and after which calls on ``group``; None: without the calls."""
        by = f", by {self.by}" if self.by else ""
        if group is None:
            return self.reason + by
        calls = self.calls.get(group, 0)
        text = f"{self.reason} after {calls} call{'s' if calls != 1 else ''} on this group{by}"
        return f"{text}, the last {self.last[group]}" if group in self.last else text


@dataclass(frozen=True)
class Where:
    """The answer of a waiting rank: its number of calls on the group in question, and the call that it waits in."""

    rank: int
    calls: int
    waits: RankState


_Sends = list[tuple[MPI.Request, Any]]


def _incomplete(sends: _Sends) -> _Sends:
    """Return the sends that are not complete."""
    return [item for item in sends if not item[0].Test()]


@dataclass
class Board:
    """The state of other ranks as this process knows it, by global rank.

    Attributes:
        comm: a communicator for these messages only.
        where: answers a question: a group's name -> number of calls made on the group, and the call that this rank waits in.
        failed, exited: ranks that have failed, and ranks that have ended.
        ended: ranks that have ended after a failure.
        handling: ranks that handle a failure.
        withdrawn: the first rank that gave a group up, and its reason, by the group's name.
        interrupted: when (time.monotonic) this rank learnt that a rank gave a group up because of an exception of its program,
            with which the rank may end, by the group's name.
        leavers: all ranks that have given a group up, by the group's name.
        joins, left: values that ranks bring to a meeting, and ranks that have left the meeting, by the meeting's key.
        announced: failed ranks whose failure this rank has raised.
        state: returns the state of this rank for a search for deadlocks.
        slots: the node board, if there is shared memory.
        sent: what ranks report at the end if messages are lost: group (name, display) -> tag -> (messages to this rank, place).
        printed: ranks that have printed a report in place of the rank that was to print it.
        dead: ranks whose process has ended without a message; nothing is sent to them.
        verdict: (epoch, report) of a certificate that another rank found and that names this rank.
        certain: the ranks of the certificate for which a group was given up, by the group's name.
        alive: when (time.monotonic) a rank in a long block last gave a sign of life.
    """

    comm: MPI.Intracomm
    where: Callable[[str], tuple[int, RankState]]
    failed: dict[int, Failure] = field(default_factory=dict)
    exited: dict[int, Exit] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    handling: set[int] = field(default_factory=set)
    printed: set[int] = field(default_factory=set)
    withdrawn: dict[str, tuple[int, str]] = field(default_factory=dict)
    interrupted: dict[str, float] = field(default_factory=dict)
    leavers: dict[str, set[int]] = field(default_factory=dict)
    certain: dict[str, Runs] = field(default_factory=dict)
    joins: dict[Any, dict[int, Any]] = field(default_factory=dict)
    left: dict[Any, set[int]] = field(default_factory=dict)
    announced: set[int] = field(default_factory=set)
    state: Callable[[], State] | None = None
    slots: NodeBoard | None = None
    dead: set[int] = field(default_factory=set)
    sent: dict[int, dict[tuple[str, str], dict[int, tuple[int, str]]]] = field(default_factory=dict)
    verdict: tuple[int, Report] | None = None
    alive: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._sending: _Sends = []
        self._receiving: list[tuple[MPI.Request, Any]] = []
        self._answers: dict[str, dict[int, Where]] = {}
        self.states: dict[int, State] = {}
        self.search = 0
        self.balance = 0  # messages posted here, less messages read here
        self.searched_by: dict[int, float] = {}

    def post(self, kind: str, payload: Any, ranks: Iterable[int]) -> None:
        """Send ``(kind, payload)`` to all ranks of ``ranks`` but this rank; never wait."""
        message = np.frombuffer(pickle.dumps((kind, self.rank, payload)), np.uint8)
        try:
            with self._lock:
                self._sending = _incomplete(self._sending)
                for rank in ranks:
                    if rank == self.rank or rank in self.dead:
                        continue
                    self._sending.append((self.comm.Isend([message, MPI.BYTE], rank, _TAG), message))
                    self.balance += 1
        except BaseException as error:
            retain_frames(error)  # out of a signal handler
            raise

    def notice_dead(self) -> bool:
        """Look for dead ranks of this node, and report them to the other nodes; return whether any rank is dead."""
        if self.slots is None:
            return bool(self.dead)
        new = [rank for rank in self.slots.dead() if rank not in self.dead and rank not in self.exited]
        for rank in new:
            self.dead.add(rank)
            self._bury(rank, self.slots.place(rank), ended=self.slots.ended(rank))
        local = set(self.slots.ranks)
        if new and self.rank == min(local - self.dead):
            for rank in new:
                place = self.slots.place(rank)
                self.post("died", (rank, place), [r for r in range(self.size) if r not in local])
        return bool(self.dead)

    def _bury(self, rank: int, place: Place, *, ended: bool = False) -> None:
        self.dead.add(rank)
        what = f"{_SILENT} ended without a report: killed by a signal, or os._exit or os.exec"
        if ended:
            what = f"{_SILENT} was ended by SIGTERM"
        self.failed.setdefault(rank, Failure(rank, what, place.site, 1, place.op, place.last))

    def origin(self, rank: int) -> int:
        """Return the rank that ends the job because ``rank`` failed: ``rank``, or the lowest living rank if ``rank`` is dead."""
        return rank if rank not in self.dead else min(set(range(self.size)) - self.dead)

    def flush(self, limit: float) -> None:
        """Wait until all posted messages are sent, at most ``limit`` seconds."""
        end = time.monotonic() + limit
        with self._lock:
            while True:
                if not self._sending or time.monotonic() >= end:
                    break
                self._sending = _incomplete(self._sending)
                time.sleep(0.0005)

    def poll(self) -> None:
        """Read all messages that have arrived, and answer questions."""
        try:
            self._poll()
        except BaseException as error:
            retain_frames(error)  # out of a signal handler
            raise

    def _poll(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread is reading
        answers: list[tuple[int, tuple[str, Any] | None]] = []
        try:
            while True:
                status = MPI.Status()
                found = self.comm.Improbe(MPI.ANY_SOURCE, _TAG, status)
                if found is None:
                    break
                buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                # The receive is not waited for: a large message arrives once its sender is in MPI again.
                self._receiving.append((found.Irecv([buffer, MPI.BYTE]), buffer))
            for item in tuple(self._receiving):
                request, buffer = item
                if not request.Test():
                    continue
                self._receiving.remove(item)
                self.balance -= 1
                kind, rank, payload = pickle.loads(buffer.tobytes())
                answers.append((rank, self._read(kind, rank, payload)))
        finally:
            self._lock.release()
        for rank, answer in answers:
            if answer is not None:
                self.post(*answer, [rank])

    def _read(self, kind: str, rank: int, payload: Any) -> tuple[str, Any] | None:
        if kind == "failed":
            self.failed.setdefault(rank, Failure(rank, *payload))
        elif kind == "exited":
            self.exited[rank] = Exit(rank, *payload)
        elif kind == "sent":
            self.sent[rank] = payload
        elif kind == "died":
            self._bury(*payload)
        elif kind == "alive":
            self.alive[rank] = time.monotonic()
        elif kind == "ended":
            self.ended.add(rank)
        elif kind == "handling":
            self.handling.add(rank)
        elif kind == "printed":
            self.printed.add(rank)
        elif kind == "withdrawn":
            group, why, certain, of_program = payload
            if of_program and group not in self.withdrawn:
                self.interrupted[group] = time.monotonic()
            self.withdrawn.setdefault(group, (rank, why))
            self.certain[group] = certain
            self.leavers.setdefault(group, set()).add(rank)
        elif kind == "ask":
            return ("where", (payload, *self.where(payload)))
        elif kind == "where":
            group, calls, waits = payload
            self._answers.setdefault(group, {})[rank] = Where(rank, calls, waits)
        elif kind == "search":
            self.searched_by[rank] = time.monotonic()
            return ("state", (payload, self.state())) if self.state is not None else None
        elif kind == "state":
            number, state = payload
            if number == self.search:
                self.states[rank] = state
        elif kind == "deadlock":
            epochs, report = payload
            self.verdict = (epochs[self.rank], report)
        elif kind == "join":
            key, value = payload
            self.joins.setdefault(key, {})[rank] = value
            self.left.setdefault(key, set()).discard(rank)
        elif kind == "unjoin":
            self.left.setdefault(payload, set()).add(rank)
        return None

    def ask(self, group: str, ranks: Iterable[int]) -> dict[int, Where | None]:
        """Ask ``ranks``, or the nearest of many ranks, for their states.

        Returns:
            For each rank that was asked its answer within 0.3 s, else None. Ranks that wait in the library answer.
        """
        others = [rank for rank in ranks if rank != self.rank]
        others.sort(key=lambda rank: abs(rank - self.rank))
        others = others[:MOST_ASKED]
        with self._asking:
            self._answers[group] = {}
            self.post("ask", group, others)
            end = time.monotonic() + ANSWER_WITHIN
            while True:
                if time.monotonic() >= end or len(self._answers[group]) >= len(others):
                    break
                self.poll()
                time.sleep(0.001)
            answers = self._answers.pop(group)
        return {rank: answers.get(rank) for rank in others}
