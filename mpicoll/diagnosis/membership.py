"""Members of a group and what this rank has done on it, as reports and searches for deadlocks need it."""

from __future__ import annotations

import threading
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mpicoll.runtime.call_site import CallSite

if TYPE_CHECKING:
    from mpicoll.runtime.settings import Level

T = TypeVar("T")

_MOST_MAKERS = 256


class OpenBlock(Protocol):
    """A block that is open in this process. The other ranks of the block wait for its end, or meet there."""

    def refuse(self, op: str, site: CallSite) -> Exception:
        """Return the error of a collective inside the block."""

    def group(self) -> Membership | None:
        """Return the group of the block, or None if the group has not been made."""


class Membership:
    """The members of a group, and what this rank has done on it.

    Attributes:
        group_name: its name, the same on all members.
        display: its name as users read it.
        ranks: global ranks of the members.
        timeout: limit of a wait in seconds.
        level: the check level.
        order: the numbers of its calls (``checks.order.CallOrder``), which this file only counts.
        last: its last call as op, code and instruction, or an object with these as ``place``; None before the first call.
        receiver: the receives of this rank.
        unwaited: asynchronous calls that the program has not waited for.
        futures: asynchronous calls with a future, while they are pending, or have an error that the program does not know.
        persistent: persistent sends and receives, which count their messages themselves.
        broken: why the group cannot be used any more, or None.
        destroyed: whether ``destroy_process_group`` was called on it.
        destroyed_at: file:line of that call.
    """

    def __init__(
        self,
        name: str,
        display: str,
        ranks: tuple[int, ...],
        rank: int,
        timeout: float,
        level: Level,
        receiver: Any,
        order: Any,
    ) -> None:
        self.group_name = name
        self.display = display
        self.ranks = ranks
        self.timeout = timeout
        self.level = level
        self.order: Any = order
        self.calls = 0
        self.last: tuple[str, CodeType, int] | Any | None = None
        self.receiver = receiver
        self.unwaited: dict[int, Any] = {}
        self.futures: dict[int, Any] = {}
        self.persistent: list[Any] = []
        self.broken: str | None = None
        self.destroyed = False
        self.destroyed_at = ""
        self._makers: dict[int, str] = {}
        self._rank = rank
        self._size = len(ranks)
        self._counting = threading.Lock()
        self._sent: dict[tuple[int, int], int] = {}
        self._received: dict[tuple[int, int], int] = {}

    @property
    def calls(self) -> int:
        """Collective calls that this rank has made on the group."""
        made: int = self.order.calls
        return made

    @calls.setter
    def calls(self, to: int) -> None:
        self.order.calls = to

    def rank(self) -> int:
        """Return this rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of members."""
        return self._size

    def note_maker(self, maker: str) -> None:
        """Note which part of another library makes the next call for the program, for reports."""
        if len(self._makers) >= _MOST_MAKERS:
            del self._makers[next(iter(self._makers))]
        self._makers[self.calls + 1] = maker

    def maker_of(self, number: int) -> str:
        """Return which part of another library has made a call for the program, or ""."""
        return self._makers.get(number, "")

    def last_call(self) -> str:
        """Return the last call on this group and its place in the program, or ""."""
        if self.last is None:
            return ""
        op, code, instruction = self.last if isinstance(self.last, tuple) else self.last.place
        return f"{op} at {CallSite(code, instruction)}"

    def give_up(self, why: str, *, told: bool = False) -> None:
        """Mark the group broken; the first reason stays.

        Args:
            told: the other members are informed, so no member waits for a round that this rank takes back.
        """
        if self.broken is None:
            self.broken = why

    def by_rank(self, counts: dict[tuple[int, int], T]) -> dict[tuple[int, int], T]:
        """Return a table by (global rank, tag) from a table by (rank in the group, tag)."""
        return {(self.ranks[peer], tag): count for (peer, tag), count in counts.items()}

    @property
    def sent(self) -> dict[tuple[int, int], int]:
        """Messages sent so far, by (rank in the group, tag)."""
        return self._with_persistent(self._sent, True)

    @property
    def received(self) -> dict[tuple[int, int], int]:
        """Messages received so far, by (rank in the group, tag)."""
        return self._with_persistent(self._received, False)

    def _with_persistent(self, counted: dict[tuple[int, int], int], sending: bool) -> dict[tuple[int, int], int]:
        with self._counting:
            counts = dict(counted)
            for each in self.persistent:
                messages = each.count + each.begun
                if each.sending != sending or not messages:
                    continue
                count(counts, each.peer, each.tag, messages)
        return counts

    def count_sent(self, peer: int, tag: int) -> None:
        """Count a message that was sent."""
        with self._counting:
            count(self._sent, peer, tag, 1)

    def count_received(self, peer: int, tag: int) -> None:
        """Count a message that was received."""
        with self._counting:
            count(self._received, peer, tag, 1)

    @staticmethod
    def by_peer(counts: dict[tuple[int, int], int]) -> dict[int, int]:
        """Return the number of messages by peer from the number by peer and tag."""
        totals: dict[int, int] = {}
        for (peer, _), count in counts.items():
            totals[peer] = totals.get(peer, 0) + count
        return totals


def count(counts: dict[tuple[int, int], int], peer: int, tag: int, messages: int) -> None:
    """Add to the number of messages of a peer and a tag."""
    counts[peer, tag] = counts.get((peer, tag), 0) + messages
