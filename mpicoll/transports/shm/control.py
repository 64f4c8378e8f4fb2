"""Rounds of members on one node, through memory that they share: a microsecond each, and little data rides along.

Each member has a ring of records, one for each of the last rounds. To post a round is to write one's record and then its
number; the round is over for who has seen its number in the records of all. What is compared stands in the record in one
piece, so a member that finds the same bytes everywhere knows that all make the same call. A call of little data writes what
the others are to read beside its record: when the round is over, so is the call.

Why a record is not written anew while somebody reads it. A member posts round k only when it has read all of round k -
``AHEAD``, so all have posted that one; and each had read all of round k - 2 ``AHEAD`` before it did. The ring has twice
``AHEAD`` places, so the record that round k takes is one that all have read. Why plain stores and loads are enough is said in
:mod:`mpicoll.transports.shm.segment`; what is written here is too little for stores that pass others by.
"""

from __future__ import annotations

import math
import mmap
import operator
import struct
import time
from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicoll.transports.base import Request
from mpicoll.transports.shm.mapping import map_together

AHEAD = 8
"""Rounds of a group that a member may have posted and not yet seen the end of."""

_RING = 2 * AHEAD
MASK = _RING - 1
_WORDS = 16
"""Words of a record, of eight bytes: its number, what is compared, the time; two cache lines, as for the counters."""
_BODY = slice(1, 11)
_TIME = 11
_WORDS_COMPARED = struct.Struct("=10q")
RIDING_BYTES = 2048
"""Bytes that a member may write beside its record."""

MOST_MEMBERS = 64
"""With more members on a node a tree is faster than that each reads the records of all."""

PART = -(-_RING * (8 * _WORDS + RIDING_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
"""Bytes of each member."""

_POKE_EVERY = 8


class Rounds:
    """The shared records of one group, as one member sees them.

    Attributes:
        me, size: of this member.
        counters: all of it as words; where a place is said, it is an index into it.
        at: for each place of the ring: this member's words that are compared, the places of its number and of its time, the
            places of the others' numbers, and the others' words that are compared.
    """

    __slots__ = ("_bytes", "_comm", "_table", "_whole", "at", "counters", "me", "size")

    def __init__(self, memory: mmap.mmap, comm: MPI.Intracomm, part: int) -> None:
        self.me, self.size, self._comm = comm.Get_rank(), comm.Get_size(), comm
        words: Any = memoryview(memory).cast("q")
        self.counters = words
        whole = np.frombuffer(memory, np.uint8)
        self._whole = whole.reshape(self.size, part)
        self._bytes = list(self._whole)
        records = np.frombuffer(memory, np.int64).reshape(self.size, part // 8)[:, : _RING * _WORDS]
        self._table = records.reshape(self.size, _RING, _WORDS)
        starts = [[rank * (part // 8) + _WORDS * i for rank in range(self.size)] for i in range(_RING)]
        self.at = tuple(self._place(words, of) for of in starts)

    def _place(self, words: Any, starts: list[int]) -> tuple[Any, int, int, tuple[int, ...], tuple[Any, ...]]:
        mine, others = starts[self.me], tuple(start for rank, start in enumerate(starts) if rank != self.me)
        bodies = tuple(words[start + _BODY.start : start + _BODY.stop] for start in others)
        return words[mine + _BODY.start : mine + _BODY.stop], mine, mine + _TIME, others, bodies

    def layout(self) -> dict[str, Any]:
        """Return where the records stand, in bytes, as the extension wants to know it."""
        return {"rounds": self.counters, "part": self._whole.shape[1], "ring": _RING, "me": self.me, "size": self.size}

    def layout_beside(self) -> dict[str, Any]:
        """Return where that stands what is written beside the records."""
        first, part = _RING * _WORDS * 8, self._whole.shape[1]
        return {"data": self.counters, "first": first, "apart": part, "room": RIDING_BYTES, "places": _RING, "line": 0}

    def beside(self, place: int, rank: int, dtype: np.dtype[Any], shape: tuple[int, ...], at: int = 0) -> Any:
        """Return what a member writes beside its record at a place of the ring, as an array, from byte ``at`` on."""
        start = _RING * _WORDS * 8 + place * RIDING_BYTES + at
        nbytes = dtype.itemsize * math.prod(shape)
        return self._bytes[rank][start : start + nbytes].view(dtype).reshape(shape)

    def across(self, place: int, dtype: np.dtype[Any], count: int, at: int = 0) -> Any:
        """Return ``count`` elements of what each member writes beside its record, as one array with a row for each."""
        start = _RING * _WORDS * 8 + place * RIDING_BYTES + at
        return self._whole[:, start : start + count * dtype.itemsize].view(dtype)

    def maxima(self, place: int) -> tuple[list[int], int, int]:
        """Return the largest of each word that is compared, and the last and the first time (ns)."""
        records: npt.NDArray[np.int64] = self._table[:, place]
        times = records[:, _TIME]
        return records[:, _BODY].max(0).tolist(), int(times.max()), int(times.min())

    def poke(self) -> None:
        """Have MPI move on what else it has to do: it does so in its own calls alone."""
        self._comm.Iprobe(MPI.ANY_SOURCE, 0)


class NodeSlot:
    """One place of the ring, as what a round is posted through; it is its own request."""

    __slots__ = (
        "_others",
        "_polls",
        "_rounds",
        "_theirs",
        "busy",
        "mine",
        "number",
        "place",
        "request",
        "time",
        "where",
    )

    def __init__(self, rounds: Rounds, place: int) -> None:
        self._rounds = rounds
        self._polls = 0
        self.place = place
        self.mine, self.where, self.time, self._others, self._theirs = rounds.at[place]
        self.busy = False
        self.number = 0
        self.request = self

    def fill(self, number: int, words: tuple[int, ...]) -> None:
        """Write what a round says; ``words`` are what is compared."""
        self.number = number
        _WORDS_COMPARED.pack_into(self.mine, 0, *words)
        self._rounds.counters[self.time] = time.monotonic_ns()

    @property
    def starting(self) -> tuple[Any, ...]:
        """What posts it, for ``map``: a function and its arguments."""
        return operator.setitem, (self._rounds.counters,), (self.where,), (self.number,)

    def Start(self) -> None:
        """Post it."""
        self._rounds.counters[self.where] = self.number

    def Test(self) -> bool:
        """Return whether all others have posted it, too."""
        counters, number = self._rounds.counters, self.number
        for other in self._others:
            if counters[other] < number:
                self._polls += 1
                if not self._polls % _POKE_EVERY:
                    self._rounds.poke()
                return False
        return True

    def same(self) -> bool:
        """Whether all others have written the same."""
        mine = self.mine
        return all(theirs == mine for theirs in self._theirs)

    def spread(self) -> int:
        """Return the nanoseconds between the first and the last post."""
        counters = self._rounds.counters
        times: list[int] = [counters[other + _TIME] for other in self._others]
        times.append(counters[self.time])
        return max(times) - min(times)

    def maxima(self) -> tuple[list[int], float, float]:
        """Return the largest of each word; the seconds between the first and the last post; those after this member's."""
        words, last, first = self._rounds.maxima(self.place)
        return words, (last - first) / 1e9, (last - self._rounds.counters[self.time]) / 1e9

    def free(self) -> None:
        """Nothing is to be given back."""


def make_rounds(comm: MPI.Intracomm, why_not: str) -> Generator[Request, None, Rounds | str]:
    """Make the rounds of a group whose members are on one node; all of them call it, and are known to.

    A generator: it yields what has to complete before it goes on.

    Args:
        comm: of the group.
        why_not: why this member has no memory to give, "" if it has.

    Returns:
        The rounds, or why there are none: on all members alike, in words on those that know.
    """
    made = yield from map_together(comm, 0, PART, why_not)
    return made if isinstance(made, str) else Rounds(made[0], comm, made[1])
