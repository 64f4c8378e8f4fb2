"""Move more elements than MPI-3 can count: its counts and displacements are C ints.

Open MPI 5.0 refuses 2**31 + 1000 elements with MPI_ERR_ARG. MPI-4 has functions with larger counts, which MPICH 5.0 has and
mpi4py uses. This library passes no count above ``COUNT_LIMIT`` to any MPI, so that all behave alike:

- Collectives are cut into pieces (``base.pieces``) if the bytes of one rank in a call may exceed the limit. All members decide
  alike (:func:`exceeds_count`).
- A block of a piece with a displacement above the limit is copied to packed memory before, or from packed memory afterwards
  (:func:`near`). Other members make the same call as without the copy.
- A message stays one message, with one element of a derived type (:func:`post`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mpi4py import MPI

from mpicoll.memory.scratch import concatenated, scratch
from mpicoll.runtime.waiting import Pollable
from mpicoll.transports.base import WHOLE, Array, Kind, Movement, block_bytes, starts

COUNT_LIMIT = 2**31 - 1
"""The largest count or displacement of a call of MPI (tests lower it)."""


def exceeds_count(move: Movement, size: int, largest: int) -> bool:
    """Return whether a rank may pass more bytes than the limit in one call of MPI; the same answer on all members.

    Bytes count, not elements, as the libraries multiply counts and sizes.

    Args:
        largest: bytes of the largest block of any member.
    """
    if largest * size <= COUNT_LIMIT:
        return False
    if move.more:
        return any(exceeds_count(part, size, block_bytes(part, size)) for part in move.parts)
    return move.kind is not Kind.BARRIER and largest * (1 if move.kind in WHOLE else size) > COUNT_LIMIT


def near(move: Movement, least: int | None = None) -> tuple[Movement, Callable[[], None]] | None:
    """Return a movement without large displacements, and the function that copies its result; None if there are none.

    Args:
        least: displacements of more elements are large; default ``COUNT_LIMIT``.
    """
    send, recv = move.send, move.recv
    buffer = recv if recv is not None else send
    # The transport moves a clongdouble as two elements.
    limit = COUNT_LIMIT // 2 if buffer is not None and buffer.dtype.char == "G" else COUNT_LIMIT
    limit = limit if least is None else least
    send_far = send is not None and _far(send, move.sendcounts, move.senddispls, limit)
    recv_far = recv is not None and _far(recv, move.recvcounts, move.recvdispls, limit)
    if not (send_far or recv_far):
        return None
    if send_far:
        assert send is not None
        packed = concatenated([send[part] for part in _parts(move.sendcounts, move.senddispls)])
        move = replace(move, send=packed, senddispls=None)
    if not recv_far:
        return move, lambda: None
    assert recv is not None
    parts = _parts(move.recvcounts, move.recvdispls)
    received = scratch(sum(part.stop - part.start for part in parts), recv.dtype)

    def finish() -> None:
        at = 0
        for part in parts:
            count = part.stop - part.start
            recv[part] = received[at : at + count]
            at += count

    return replace(move, recv=received, recvdispls=None), finish


def _far(buffer: Array, counts: Sequence[int] | None, displs: Sequence[int] | None, limit: int) -> bool:
    return counts is not None and displs is not None and buffer.size > limit and max(displs, default=0) > limit


def _parts(counts: Sequence[int] | None, displs: Sequence[int] | None) -> list[slice]:
    assert counts is not None
    begins = starts(counts) if displs is None else displs
    return [slice(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]


class CopyAfter:
    """A request followed by a copy of the result."""

    __slots__ = ("_finish", "_request")

    def __init__(self, request: Pollable, finish: Callable[[], None]) -> None:
        self._request = request
        self._finish: Callable[[], None] | None = finish

    def Test(self) -> bool:
        """Return whether the request is complete and the result copied."""
        if self._finish is not None:
            if not self._request.Test():
                return False
            self._finish()
            self._finish = None
        return True


def post(method: Callable[[Any, int, int], MPI.Request], array: Array, peer: int, tag: int) -> MPI.Request:
    """Post a send or receive of any number of contiguous elements.

    Args:
        method: such as ``comm.Isend``.
    """
    if array.size <= COUNT_LIMIT:
        # With the type, as mpi4py finds none for memory that is not aligned.
        return method([array, MPI.Datatype.fromcode(array.dtype.char)], peer, tag)
    kind = _contiguous(array)
    try:
        return method([array, 1, kind], peer, tag)
    finally:
        kind.Free()  # MPI frees the type after the message is complete (MPI-4.1 section 5.1.9)


def _contiguous(array: Array) -> MPI.Datatype:
    """Return a committed type of all elements: blocks of a power of two, then the remaining elements."""
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
