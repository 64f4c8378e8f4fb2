"""Counts that MPI-3 cannot say: its counts and displacements are C ints, whatever the memory.

Open MPI 5.0 refuses 2**31 + 1000 elements with MPI_ERR_ARG; MPI-4 has other functions for them, which MPICH 5.0 offers and
mpi4py uses. Here no library is asked for more than ``COUNT_LIMIT``, so that all of them do the same:

- Collectives are cut into pieces (``base.pieces``) as soon as what one rank passes in a call may be beyond the limit, which all
  members know alike (:func:`beyond`).
- A block of a piece that starts too far behind the others is copied to a nearer place first, or from there afterwards
  (:func:`near`). That is this rank's own business: the others see the same call.
- Messages keep their place in the order and stay whole, as one element of a derived type (:func:`post`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.transports.base import Array, Kind, Movement, Request, block_bytes, starts

COUNT_LIMIT = 2**31 - 1
"""The largest count or displacement of a native call (tests lower it)."""

_WHOLE = frozenset({Kind.BROADCAST, Kind.ALL_REDUCE, Kind.REDUCE})


def beyond(move: Movement, size: int, largest: int) -> bool:
    """Whether what a rank passes in one native call may be more bytes than the limit; the same answer on all members.

    Bytes, not elements: the libraries multiply inside.

    Args:
        largest: bytes of the largest block that any member moves.
    """
    if largest * size <= COUNT_LIMIT:
        return False
    if move.more:
        return any(beyond(part, size, block_bytes(part, size)) for part in move.parts)
    return move.kind is not Kind.BARRIER and largest * (1 if move.kind in _WHOLE else size) > COUNT_LIMIT


def near(move: Movement) -> tuple[Movement, Callable[[], None]] | None:
    """Return a movement whose blocks are within reach, and what puts its result in place; None where they are already."""
    send, recv = move.send, move.recv
    buffer = recv if recv is not None else send
    # The engine moves a long complex as two elements.
    limit = COUNT_LIMIT // 2 if buffer is not None and buffer.dtype.char == "G" else COUNT_LIMIT
    send_far = send is not None and _far(send, move.sendcounts, move.senddispls, limit)
    recv_far = recv is not None and _far(recv, move.recvcounts, move.recvdispls, limit)
    if not (send_far or recv_far):
        return None
    if send_far:
        assert send is not None
        packed = np.concatenate([send[part] for part in _parts(move.sendcounts, move.senddispls)])
        move = replace(move, send=packed, senddispls=None)
    if not recv_far:
        return move, lambda: None
    assert recv is not None
    parts = _parts(move.recvcounts, move.recvdispls)
    landed = np.empty(sum(part.stop - part.start for part in parts), recv.dtype)

    def finish() -> None:
        at = 0
        for part in parts:
            count = part.stop - part.start
            recv[part] = landed[at : at + count]
            at += count

    return replace(move, recv=landed, recvdispls=None), finish


def _far(buffer: Array, counts: Sequence[int] | None, displs: Sequence[int] | None, limit: int) -> bool:
    return counts is not None and displs is not None and buffer.size > limit and max(displs, default=0) > limit


def _parts(counts: Sequence[int] | None, displs: Sequence[int] | None) -> list[slice]:
    assert counts is not None
    begins = starts(counts) if displs is None else displs
    return [slice(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]


class Landing:
    """A request after which something has to be put in place (a Request)."""

    __slots__ = ("_finish", "_request")

    def __init__(self, request: Request, finish: Callable[[], None]) -> None:
        self._request = request
        self._finish: Callable[[], None] | None = finish

    def Test(self) -> bool:
        """Return whether it is complete, and its result in place."""
        if self._finish is not None:
            if not self._request.Test():
                return False
            self._finish()
            self._finish = None
        return True


def post(method: Callable[[Any, int, int], MPI.Request], array: Array, peer: int, tag: int) -> MPI.Request:
    """Post a send or receive of contiguous elements, however many.

    Args:
        method: such as ``comm.Isend``.
    """
    if array.size <= COUNT_LIMIT:
        # Its type is said: of memory that is not aligned mpi4py would not know it.
        return method([array, MPI.Datatype.fromcode(array.dtype.char)], peer, tag)
    kind = _contiguous(array)
    try:
        return method([array, 1, kind], peer, tag)
    finally:
        kind.Free()  # MPI keeps it until the message is through (MPI-4.1 section 5.1.9)


def _contiguous(array: Array) -> MPI.Datatype:
    """Return a committed type of all elements: blocks of a power of two, and the rest behind them."""
    element = MPI.Datatype.fromcode(array.dtype.char)
    block = 1 << (COUNT_LIMIT.bit_length() + 1) // 2
    blocks, rest = divmod(array.size, block)
    made: list[MPI.Datatype] = []
    try:
        made.append(element.Create_contiguous(block))
        made.append(made[0].Create_contiguous(blocks))
        begin = blocks * block * array.dtype.itemsize
        return MPI.Datatype.Create_struct([1, rest], [0, begin], [made[1], element]).Commit()
    finally:
        for each in made:
            each.Free()
