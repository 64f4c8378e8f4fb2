"""Merge objects of all members of a communicator, by messages with tags of the library, and give the result to all members."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

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
