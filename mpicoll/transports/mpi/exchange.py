"""What all members of a communicator find out together: merged objects, and whether the lengths of their blocks fit."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpicoll.runtime.waiting import Pollable
from mpicoll.transports.mpi.collectives import library_tag

_T = TypeVar("_T")


def merge_all(
    comm: MPI.Intracomm,
    mine: _T,
    merge: Callable[[_T, _T], _T],
    pack: Callable[[_T], bytes],
    unpack: Callable[[bytes], _T],
) -> Generator[Pollable, None, _T]:
    """Merge the objects of all members up a binomial tree, and return the result on all members.

    A generator that yields the requests to complete. A member may make the next call while another one still reads: messages of
    a pair of ranks arrive in the order in which they were sent.

    Args:
        comm: communicator; all its members call this function.
        mine: object of this member.
        merge: returns one object for two, in the order of the tree.
        pack, unpack: convert an object to bytes, and bytes to an object.
    """
    me, size = comm.Get_rank(), comm.Get_size()
    up, down = library_tag(1), library_tag(2)
    merged = mine
    bit = 1
    while bit < size and not me & bit:
        if me + bit < size:
            child = _Incoming(comm, me + bit, up)
            yield child
            merged = merge(merged, unpack(child.message))
        bit *= 2
    if bit < size:
        yield comm.Isend(np.frombuffer(pack(merged), np.uint8), me - bit, up)
        parent = _Incoming(comm, me - bit, down)
        yield parent
        packed = parent.message
        merged = unpack(packed)
    else:
        packed = pack(merged)
    message = np.frombuffer(packed, np.uint8)
    sends = []
    while bit > 1:
        bit //= 2
        if me + bit < size:
            sends.append(comm.Isend(message, me + bit, down))
    yield from sends
    return merged


class _Incoming:
    """A message of unknown length from one member, as a request."""

    __slots__ = ("_buffer", "_comm", "_request", "_source", "_tag")

    def __init__(self, comm: MPI.Intracomm, source: int, tag: int) -> None:
        self._comm = comm
        self._source = source
        self._tag = tag
        self._request: MPI.Request | None = None
        self._buffer = np.empty(0, np.uint8)

    @property
    def message(self) -> bytes:
        return self._buffer.tobytes()

    def Test(self) -> bool:
        if self._request is None:
            status = MPI.Status()
            found = self._comm.Improbe(self._source, self._tag, status)
            if found is None:
                return False
            self._buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._request = found.Irecv(self._buffer)
        return self._request.Test()


def compare_lengths(
    comm: MPI.Intracomm, sends: Any, expects: Any, largest: int | None
) -> Generator[Pollable, None, int | tuple[Any, Any]]:
    """Compare the lengths that each member sends with those that the others expect.

    All members call this function, and are known to. The members add up the lengths that they send, and subtract the lengths that
    they expect, each times a number of its pair of members: the sum is 0 if all lengths fit. The lengths themselves are exchanged
    only if the sum is another one.

    Args:
        sends, expects: lengths of the blocks to and from each member, int64.
        largest: bytes of the largest block of this member; None, on all members: they need not find the largest of all.

    Returns:
        The bytes of the largest block of all members, or 0. If lengths differ, on all members a pair: those that each member
        sends to this one, and those that each member expects from this one.
    """
    size = comm.Get_size()
    of_sends, of_expects = _numbers_of_pairs(comm.Get_rank(), size)
    # Arrays of one element, as scalars of NumPy warn of an overflow.
    total = np.array([np.vdot(of_sends, sends.view(np.uint64))])
    total -= np.array([np.vdot(of_expects, expects.view(np.uint64))])
    most = np.array([largest or 0], np.int64)
    requests = [comm.Iallreduce(MPI.IN_PLACE, total, MPI.SUM)]
    if largest is not None:
        requests.append(comm.Iallreduce(MPI.IN_PLACE, most, MPI.MAX))
    yield from requests
    if not total[0]:
        return int(most[0])
    sent, expected = np.empty(size, np.int64), np.empty(size, np.int64)
    yield comm.Ialltoall(sends, sent)
    yield comm.Ialltoall(expects, expected)
    return sent, expected


@lru_cache(maxsize=16)
def _numbers_of_pairs(rank: int, size: int) -> tuple[Any, Any]:
    """Return the numbers of the pairs in which a rank sends, and of those in which a rank receives.

    The numbers are odd, so one length that differs always changes the sum modulo 2**64. Several that differ change the sum in all
    likelihood, as the numbers look random (SplitMix64: Steele, Lea, Flood 2014).
    """
    peers = np.arange(size, dtype=np.uint64)
    return _mixed(peers + np.uint64(rank * size)), _mixed(peers * np.uint64(size) + np.uint64(rank))


def _mixed(numbers: Any) -> Any:
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
