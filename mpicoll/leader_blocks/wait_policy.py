"""Waiting for a rank that runs its block: limits, notices on stderr and signs of life."""

from __future__ import annotations

import math
import threading
import time

from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.job_state import last_seen
from mpicoll.diagnosis.wait_policy import CallWait
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.leader_blocks.members import Members
from mpicoll.runtime.output import say
from mpicoll.runtime.watchdog import OwnThread


class LeaderWatch:
    """Watch over one rank that runs its block. There is no time limit while that rank lives; notices on stderr name the rank.

    A rank of this node lives as long as its process has its record lock. A rank of another node sends signs of life, and counts
    as lost after ``silence`` seconds without a sign.
    """

    def __init__(self, members: Members, leader: int, what: str, limit: float | None) -> None:
        known = members.known
        self.leader = leader
        self.what = what
        self.limit = math.inf if limit is None else limit
        self.silence = math.inf
        board = known.board
        if not (board.slots is not None and leader in board.slots.ranks):
            self.silence = (members.known_group or known.world).timeout
        here = known.topology.local_ranks
        self._notifies = min((r for r in members.ranks if r != leader and r in here), default=-1) == known.world.rank()
        self._began = time.monotonic()
        self._next_notice = known.settings.stall_warn
        self._host = members.host(leader)

    def look(self) -> bool:
        """Print a notice if one is due; return whether the leader has given no sign of life for ``silence`` seconds."""
        now = time.monotonic()
        waited = now - self._began
        if waited >= self._next_notice:
            while self._next_notice <= waited:
                self._next_notice *= 2
            if self._notifies:
                place = last_seen(self.leader)
                text = f"mpicoll: waiting {_duration(waited)} for rank {self.leader} ({self._host}) in {self.what}"
                say(f"{text}; {place}\n" if place else f"{text}\n")
        heard = registry.state().board.alive.get(self.leader, 0.0)
        return now - max(self._began, heard) > self.silence


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class LeaderWait(CallWait):
    """Wait policy of a rank that waits for the leader's outcome."""

    __slots__ = ("watch",)

    def __init__(self, watch: LeaderWatch, group: ProcessGroup, call: CallDescription, limit: float) -> None:
        super().__init__(group, call, limit)
        self.watch = watch

    def check(self, waited: float) -> BaseException | None:
        """Return an error if this wait can never end, or if the leader is lost."""
        failure = super().check(waited)
        if failure is None and self.watch.look():
            self.limit = self.watch.silence
            failure = self.timed_out(waited)
        return failure

    def stalled(self, waited: float) -> None:
        """Print nothing: the watch prints the notices."""


class SignsOfLife:
    """A thread of a rank in its block that sends signs of life to the waiting ranks of other nodes."""

    def __init__(self, members: Members) -> None:
        known = members.known
        slots = known.board.slots
        away = [r for r in members.ranks if r != members.me and not (slots is not None and r in slots.ranks)]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if away and known.thread_multiple:
            every = (members.known_group or known.world).timeout / 4
            board = known.board

            def send() -> None:
                while not self._stop.wait(every):
                    board.post("alive", None, away)

            self._thread = OwnThread(target=send, name="mpicoll-alive", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
