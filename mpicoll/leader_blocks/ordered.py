"""Ordered blocks: blocks that the ranks of a scope run one after the other."""

from __future__ import annotations

import pickle
from typing import Any

from mpicoll.groups import registry
from mpicoll.leader_blocks.blocks import Block
from mpicoll.leader_blocks.entered_block import EnteredBlock, find_outer
from mpicoll.leader_blocks.members import Members
from mpicoll.leader_blocks.outcome import SharedOutcome, broadcast_outcome, first_failed, peer_failed, pop_interruption
from mpicoll.runtime import signals


class OrderedBlock(Block):
    """The context manager of :func:`ordered`."""

    def __init__(self, scope: Any) -> None:
        super().__init__("ordered", "world" if scope is None else scope)

    def __enter__(self) -> None:
        known = registry.current()
        members = None if known is None else Members(known, self._scope)
        if members is None or len(members.ranks) == 1:
            self._entered.append(None)
            return
        members.check_usable(self.op)
        what = self.describe()
        find_outer(members, what, nests=False)
        with signals.guard:
            place = members.ranks.index(members.me)
            interruption: BaseException | None = None
            for earlier in range(place):
                interruption = self._await(members, earlier, interruption, before=True)
            if interruption is not None:
                broadcast_outcome(members.group(self.op, self.site), self._call, place, interruption)
                raise interruption
        self._entered.append(EnteredBlock(what, members, members.me, meets=True))

    def _end(self, entered: EnteredBlock, error: BaseException | None) -> None:
        members = entered.members
        assert entered.life is not None
        entered.life.stop()
        place = members.ranks.index(members.me)
        with signals.guard:
            try:
                outcome = SharedOutcome() if error is None else error
                broadcast_outcome(members.group(self.op, self.site), self._call, place, outcome)
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
        well, details, noted = self._await_outcome(members, place, self.describe())
        interruption = interruption or noted
        if not well:
            if interruption is not None:
                raise interruption
            how = pickle.loads(details)
            if before:
                raise first_failed(members, rank, self.describe(), how, in_order=True)
            raise peer_failed(members, rank, self.describe(), how)
        return interruption
