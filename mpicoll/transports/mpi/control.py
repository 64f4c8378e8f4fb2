"""The control channel over MPI: each round is a small MAX all-reduce on the control communicator of the group.

The words of all members are reduced to their maxima. A word that must be equal is sent with its negative: the two maxima are
opposite if and only if all members sent the same. The spread of the posting times comes out in the same way.
"""

from __future__ import annotations

import struct
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.runtime.waiting import STALL
from mpicoll.transports.control import COMPARED, SAID, Agreed, Words, decode
from mpicoll.transports.mpi.collectives import persistent_collectives

AHEAD = 8
"""Rounds of a group that a member may have posted and not yet released."""

_ROUND = struct.Struct(f"={SAID + 2}q")
_STALL_US = int(STALL * 1e6)


class MpiRound:
    """One slot of the channel: memory, and a persistent request if MPI has persistent collectives (MPI-4.1 section 6.13)."""

    __slots__ = ("_channel", "_maxima", "busy", "recv", "request", "send", "words")

    def __init__(self, channel: MpiControl) -> None:
        self._channel = channel
        self.send = np.zeros(SAID + 2, np.int64)
        self.recv = np.zeros(SAID + 2, np.int64)
        self.words = self.send.data
        self.busy = False
        self._maxima: list[int] = []
        self.request: Any = None
        if channel.persistent:
            self.request = channel.comm.Allreduce_init(self.send, self.recv, MPI.MAX)

    def write(self, words: Words) -> None:
        """Write the words and the posting time."""
        now = int((time.monotonic() - self._channel.epoch) * 1e6)
        _ROUND.pack_into(self.words, 0, *words, now, -now)
        self._maxima = []
        self.busy = True

    def Start(self) -> None:
        """Post the round."""
        if self._channel.persistent:
            self.request.Start()
        else:
            self.request = self._channel.comm.Iallreduce(self.send, self.recv, MPI.MAX)

    def Test(self) -> bool:
        """Return whether all members have posted the round."""
        done: bool = self.request.Test()
        return done

    def maxima(self) -> list[int]:
        """Return the largest of each word, of the posting times and of their negatives."""
        if not self._maxima:
            self._maxima = self.recv.tolist()
        return self._maxima

    @property
    def stalled(self) -> bool:
        """Whether the posting times spread by more than ``STALL``."""
        *_, last, first = self.maxima()
        return last + first > _STALL_US

    @property
    def nonblocking(self) -> bool:
        """Whether a member is asynchronous."""
        return bool(self.maxima()[COMPARED])

    def unanimous(self, words: Words) -> bool:
        """Return whether the maxima are these words."""
        return tuple(self.maxima()[:COMPARED]) == words[:COMPARED]

    def agreed(self) -> Agreed:
        """Return the decoded words of the complete round."""
        *words, last, first = self.maxima()
        return decode(words, (last + first) / 1e6, (last - int(self.send[SAID])) / 1e6)

    def release(self) -> None:
        """Free the slot."""
        self.busy = False

    def free(self) -> None:
        """Free the persistent request; a round that is not complete stays as it is."""
        if self.request is not None and self._channel.persistent and not self.busy:
            self.request.Free()


class Meeting:
    """A barrier that tells by how much the times differ at which the members posted it (a Pollable).

    Args:
        comm: communicator; all its members post the meeting, in the order of its other collectives.
        epoch: as of :class:`MpiControl`.
    """

    __slots__ = ("_request", "_times")

    def __init__(self, comm: MPI.Intracomm, epoch: float) -> None:
        now = int((time.monotonic() - epoch) * 1e6)
        self._times = np.array([now, -now], np.int64)
        self._request = comm.Iallreduce(MPI.IN_PLACE, self._times, MPI.MAX)

    def Test(self) -> bool:
        """Return whether all members have posted the meeting."""
        done: bool = self._request.Test()
        return done

    def spread(self) -> float:
        """Return the seconds between the first and the last post of a complete meeting."""
        last, first = self._times.tolist()
        return float(last + first) / 1e6


class MpiControl:
    """Rounds over MPI.

    Attributes:
        comm: the control communicator of the group.
        epoch: time.monotonic() at a moment that is the same on all members, to within the skew of a barrier.
    """

    carries_data = False

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.epoch = 0.0
        self.persistent = False
        self._slots: list[MpiRound] = []
        self._made = 0

    def room(self, number: int) -> bool:
        """Return whether the next round may be posted."""
        place = self._made % AHEAD
        return place >= len(self._slots) or not self._slots[place].busy

    def fill(self, number: int, words: Words) -> MpiRound:
        """Return the next round with its words written. All members make their rounds in the same order."""
        place = self._made % AHEAD
        if place >= len(self._slots):
            self.persistent = persistent_collectives()
            self._slots.append(MpiRound(self))
        self._made += 1
        slot = self._slots[place]
        slot.write(words)
        return slot

    def withdraw(self, number: int) -> None:
        """Do nothing: a round of MPI cannot be taken back. A member that posts it late finds that it ``stalled``."""

    def free(self) -> None:
        """Free the persistent requests (before MPI is finalised)."""
        for slot in self._slots:
            slot.free()
        self._slots, self._made = [], 0
