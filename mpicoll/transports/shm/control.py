"""The control channel of a group whose members are on one node: a ring of records in memory that they share.

The protocol and the layout of a record are described in ``native/ring.h``. A call with little data sends the data beside
its record (*eager*): when the round is over, so is the call.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Generator
from typing import Any

from mpi4py import MPI

from mpicoll.runtime import native
from mpicoll.runtime.waiting import STALL, Pollable
from mpicoll.transports.base import EAGER_BYTES
from mpicoll.transports.control import COMPARED, Agreed, Words, decode
from mpicoll.transports.shm.mapping import map_together

AHEAD = 8
"""Rounds of a group that a member may have posted and not yet read (``native/ring.h``; a test compares the numbers)."""

MASK = 2 * AHEAD - 1
"""A round's number and this is its place in the ring."""

MOST_MEMBERS = 64
"""Most members of a ring: with more a tree is faster, as each member reads the records of all."""

PART = -(-2 * AHEAD * (128 + EAGER_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
"""Bytes of each member: of ``native/ring.h``, rounded up to pages."""

_POKE_EVERY, _POKE_NS = 8, 20_000
_STALL_NS = int(STALL * 1e9)


class RingRound:
    """One place of the ring: rounds of every 16th number are posted through it."""

    __slots__ = ("_channel", "_polls", "busy", "number")

    def __init__(self, channel: RingControl) -> None:
        self._channel = channel
        self._polls = 0
        self.busy = False
        self.number = 0

    def Start(self) -> None:
        """Post the round."""
        self._channel.ring.post(self.number)

    def Test(self) -> bool:
        """Return whether all other members have posted the round."""
        if self._channel.ring.is_over(self.number):
            return True
        self.poke()
        return False

    def poke(self) -> None:
        """Let MPI progress at some of the polls."""
        self._polls += 1
        if not self._polls % _POKE_EVERY:
            self._channel.poke()

    def poll(self, nanoseconds: int) -> bool:
        """Poll for some time, and let MPI progress in between; return whether all other members have posted the round."""
        while not self._channel.ring.poll(self.number, min(nanoseconds, _POKE_NS)):
            nanoseconds -= _POKE_NS
            if nanoseconds <= 0:
                return False
            self._channel.poke()
        return True

    @property
    def stalled(self) -> bool:
        """Whether the posting times spread by more than ``STALL``."""
        spread: int = self._channel.ring.spread(self.number)
        return spread > _STALL_NS

    @property
    def nonblocking(self) -> bool:
        """Whether a member is asynchronous."""
        return bool(self._channel.ring.maxima(self.number)[0][COMPARED])

    def unanimous(self, words: Words) -> bool:
        """Return whether all members posted the words that this member posted."""
        found: bool = self._channel.ring.is_unanimous(self.number)
        return found

    def agreed(self) -> Agreed:
        """Return the decoded words of the complete round."""
        words, spread, waited = self._channel.ring.maxima(self.number)
        return decode(words, spread / 1e9, waited / 1e9)

    def release(self) -> None:
        """Free the place."""
        self.busy = False


class RingControl:
    """Rounds through a ring of the extension.

    Attributes:
        ring: the memory, ``_native.Ring``.
        places: of the rounds, by number.
    """

    carries_data = True

    def __init__(self, memory: mmap.mmap, comm: MPI.Intracomm, part: int) -> None:
        self._comm, self._pid = comm, os.getpid()
        self.ring: Any = native.found.Ring(memory, comm.Get_rank(), comm.Get_size(), part)
        self.places = [RingRound(self) for _ in range(MASK + 1)]

    def room(self, number: int) -> bool:
        """Return whether the round of that number may be posted."""
        return not self.places[(number - AHEAD) & MASK].busy

    def fill(self, number: int, words: Words) -> RingRound:
        """Return the round of that number with its words written."""
        place = self.posted(number)
        place.busy = True
        self.ring.write(number, words)
        return place

    def take(self, number: int) -> RingRound:
        """Return the round of that number, which the extension has posted, as a round in use."""
        place = self.posted(number)
        place.busy = True
        return place

    def posted(self, number: int) -> RingRound:
        """Return the round of that number, which the extension has written."""
        place = self.places[number & MASK]
        place.number = number
        return place

    def withdraw(self, number: int) -> None:
        """Take back the rounds up to this one that are not over; no round is posted afterwards. A forked child leaves them."""
        if os.getpid() == self._pid:
            self.ring.withdraw(number)

    def poke(self) -> None:
        """Let MPI progress, which does so in its own calls only."""
        self._comm.Iprobe(MPI.ANY_SOURCE, 0)

    def free(self) -> None:
        """Free nothing: the ring is memory of the group."""


def make_ring(comm: MPI.Intracomm, why_not: str) -> Generator[Pollable, None, RingControl | str]:
    """Make the ring of a group whose members are on one node. All members call this function, and are known to.

    A generator that yields the requests to complete.

    Args:
        comm: communicator of the group.
        why_not: why this member has no memory for the ring; "" if it has.

    Returns:
        The ring; or on all members a string that says why there is none ("" on members that do not know).
    """
    made = yield from map_together(comm, 0, PART, why_not)
    return made if isinstance(made, str) else RingControl(made[0], comm, made[1])
