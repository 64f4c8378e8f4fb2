"""Ordered blocks: blocks that the ranks of a scope run one after the other."""

from __future__ import annotations

import os
import pickle
from types import TracebackType
from typing import Any

from mpicoll.diagnosis.call import Call
from mpicoll.groups import registry
from mpicoll.leader_blocks.blocks import EnteredBlock, find_outer
from mpicoll.leader_blocks.members import Members
from mpicoll.leader_blocks.outcome import broadcast_outcome, failure_of, first_failed, peer_failed, pop_interruption
from mpicoll.leader_blocks.wait_policy import LeaderWatch, SignsOfLife
from mpicoll.runtime import signals
from mpicoll.runtime.call_site import call_site


class OrderedBlock:
    """The context manager of :func:`ordered`."""

    op = "ordered"

    def __init__(self, scope: Any) -> None:
        self.site = call_site()
        self._scope = scope
        self._entered: list[EnteredBlock | None] = []

    def describe(self) -> str:
        """Return the block as messages name it."""
        return f"ordered at {self.site}"

    def _call(self, where: str = "") -> Call:
        return Call(f"{where}ordered", (), self.site, compared=True)

    def __enter__(self) -> None:
        known = registry.current()
        if known is None:
            self._entered.append(None)
            return
        members = Members(known, "world" if self._scope is None else self._scope)
        if len(members.ranks) == 1:
            self._entered.append(None)
            return
        members.check_usable("ordered")
        find_outer(members, "ordered", self)
        place = members.ranks.index(members.me)
        with signals.guard:
            interruption: BaseException | None = None
            for earlier in range(place):
                interruption = self._await(members, earlier, interruption, before=True)
            if interruption is not None:
                self._broadcast(members, place, interruption)
                raise interruption
        opened = EnteredBlock(self, members, members.me, meets=True)
        opened.life = SignsOfLife(members)
        opened.begin()
        self._entered.append(opened)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = self._entered.pop()
        if opened is None:
            return
        opened.end()
        members = opened.members
        if os.getpid() != members.known.pid:
            return  # a forked child is no rank
        assert opened.life is not None
        opened.life.stop()
        if isinstance(error, GeneratorExit):
            error = None
        place = members.ranks.index(members.me)
        with signals.guard:
            try:
                self._broadcast(members, place, error)
            except BaseException:
                if error is None:
                    raise
            if error is not None:
                return
            interruption = pop_interruption()
            for later in range(place + 1, len(members.ranks)):
                interruption = self._await(members, later, interruption, before=False)
            if interruption is not None:
                raise interruption

    def _broadcast(self, members: Members, place: int, error: BaseException | None) -> None:
        """Broadcast how this rank's block has ended."""
        outcome = (True, b"") if error is None else (False, pickle.dumps(failure_of(error)))
        broadcast_outcome(members.group(self.op, self.site), self._call, place, outcome)

    def _await(
        self, members: Members, place: int, interruption: BaseException | None, *, before: bool
    ) -> BaseException | None:
        """Wait for the end of another rank's block; return the first exception that a signal handler raised meanwhile.

        Args:
            place: rank in the group of the rank whose block is waited for.
            interruption: the exception of a signal handler that was noted before.
            before: whether that rank runs its block before this rank.
        """
        rank = members.ranks[place]
        watch = LeaderWatch(members, rank, self.describe(), None)
        well, details = broadcast_outcome(members.group(self.op, self.site, watch), self._call, place, watch=watch)
        interruption = interruption or pop_interruption()
        if not well:
            if interruption is not None:
                raise interruption
            how = pickle.loads(details)
            if before:
                raise first_failed(members, rank, self.describe(), how, in_order=True)
            raise peer_failed(members, rank, self.describe(), how)
        return interruption
