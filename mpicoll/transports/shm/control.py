"""Rounds of a group whose members are on one node, through memory that they share.

The protocol and the layout of a record are described in ``native/ring.h``. A call with little data sends the data beside
its record (*eager*): when the round is over, so is the call.
"""

from __future__ import annotations

import mmap
import operator
from collections.abc import Generator
from typing import Any

from mpi4py import MPI

from mpicoll.runtime import native
from mpicoll.transports.base import Request
from mpicoll.transports.shm.mapping import map_together

AHEAD = 8
"""Rounds of a group that a member may have posted and not yet read (``native/ring.h``; a test compares the numbers)."""

MASK = 2 * AHEAD - 1
"""A round's number and this is its place in the ring."""

EAGER_BYTES = 2048
"""Bytes that a member may write beside its record (``native/ring.h``)."""

MOST_MEMBERS = 64
"""With more members on a node a tree is faster than a ring: each member reads the records of all."""

PART = -(-2 * AHEAD * (128 + EAGER_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
"""Bytes of each member: of ``native/ring.h``, rounded up to pages."""

_POKE_EVERY = 8


class Rounds:
    """The ring of one group, and the communicator that is progressed while this member waits for a round."""

    __slots__ = ("_comm", "me", "ring", "size")

    def __init__(self, memory: mmap.mmap, comm: MPI.Intracomm, part: int) -> None:
        self.me, self.size, self._comm = comm.Get_rank(), comm.Get_size(), comm
        self.ring: Any = native.found.Ring(memory, self.me, self.size, part)

    def poke(self) -> None:
        """Let MPI progress, which does so in its own calls only."""
        self._comm.Iprobe(MPI.ANY_SOURCE, 0)


class RingRound:
    """One place of the ring, through which every 16th round is posted. The object is the request of its round, too."""

    __slots__ = ("_polls", "_rounds", "busy", "number", "place", "request", "words")

    def __init__(self, rounds: Rounds, place: int) -> None:
        self._rounds = rounds
        self._polls = 0
        self.place = place
        self.busy = False
        self.number = 0
        self.words: tuple[int, ...] = ()
        self.request = self

    def fill(self, number: int, words: tuple[int, ...]) -> None:
        """Write the record of a round; ``words`` are compared."""
        self.number, self.words = number, words
        self._rounds.ring.write(number, words)

    @property
    def starting(self) -> tuple[Any, ...]:
        """The function that posts the round, and its arguments, for ``map``."""
        return operator.methodcaller("post", self.number), (self._rounds.ring,)

    def Start(self) -> None:
        """Post the round."""
        self._rounds.ring.post(self.number)

    def Test(self) -> bool:
        """Return whether all others have posted the round."""
        if self._rounds.ring.is_over(self.number):
            return True
        self._polls += 1
        if not self._polls % _POKE_EVERY:
            self._rounds.poke()
        return False

    def poll(self, nanoseconds: int) -> bool:
        """Return whether all others have posted the round; poll for so long."""
        found: bool = self._rounds.ring.poll(self.number, nanoseconds)
        return found

    def same(self) -> bool:
        """Return whether all others have posted the same words."""
        found: bool = self._rounds.ring.is_unanimous(self.number)
        return found

    def spread(self) -> int:
        """Return the nanoseconds between the first and the last post."""
        found: int = self._rounds.ring.spread(self.number)
        return found

    def maxima(self) -> tuple[list[int], float, float]:
        """Return the largest of each word; the seconds between the first and the last post; those after this member's."""
        words, spread, waited = self._rounds.ring.maxima(self.number)
        return words, spread / 1e9, waited / 1e9

    def free(self) -> None:
        """Free nothing: the ring belongs to the group."""


def make_rounds(comm: MPI.Intracomm, why_not: str) -> Generator[Request, None, Rounds | str]:
    """Make the ring of a group whose members are on one node. All members call this function, and are known to.

    A generator that yields the requests to complete.

    Args:
        comm: of the group.
        why_not: why this member has no memory to give, "" if it has.

    Returns:
        The ring; or why there is none: on all members alike, in words on those that know.
    """
    made = yield from map_together(comm, 0, PART, why_not)
    return made if isinstance(made, str) else Rounds(made[0], comm, made[1])
