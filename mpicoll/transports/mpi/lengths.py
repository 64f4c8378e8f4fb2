"""Compare the lengths of the blocks that the members of a group send each other, over MPI."""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.runtime.waiting import Pollable


def compare_lengths(
    comm: MPI.Intracomm, sends: Any, expects: Any, largest: int
) -> Generator[Pollable, None, int | tuple[Any, Any]]:
    """Compare the lengths that each member sends with those that the others expect.

    All members call this function, and are known to. The members add up the lengths that they send, and subtract the lengths that
    they expect, each times a number of its pair of members: the sum is 0 if all lengths fit. The lengths themselves are exchanged
    only if the sum is another one.

    Args:
        sends, expects: lengths of the blocks to and from each member, int64.
        largest: bytes of the largest block of this member.

    Returns:
        The bytes of the largest block of all members; or, on all members, a pair: the lengths that each member sends to this one,
        and those that each member expects from this one.
    """
    size = comm.Get_size()
    of_sends, of_expects = _numbers_of_pairs(comm.Get_rank(), size)
    # Arrays of one element, as scalars of NumPy warn of an overflow.
    total = np.array([np.vdot(of_sends, sends.view(np.uint64))])
    total -= np.array([np.vdot(of_expects, expects.view(np.uint64))])
    most = np.array([largest], np.int64)
    yield from [comm.Iallreduce(MPI.IN_PLACE, total, MPI.SUM), comm.Iallreduce(MPI.IN_PLACE, most, MPI.MAX)]
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
