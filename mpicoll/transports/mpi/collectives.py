"""The MPI transport: each movement is one collective of MPI on the data communicator of the group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.runtime.mpi_library import library_name, retain_for_ever
from mpicoll.runtime.waiting import Pollable
from mpicoll.transports import large_counts
from mpicoll.transports.base import Kind, Movement, block_bytes, starts


@lru_cache(maxsize=1)
def persistent_collectives() -> bool:
    """Return whether this MPI has the persistent collectives of MPI-4 (the same on all ranks of a job).

    The function makes one to find out, as Open MPI 5.0 has persistent collectives and reports version 3.1.
    """
    try:
        MPI.COMM_SELF.Barrier_init().Free()
    except (NotImplementedError, MPI.Exception):
        return False
    return True


@lru_cache(maxsize=1)
def _is_mpich() -> bool:
    return library_name(MPI.Get_library_version()).startswith("MPICH")


_POSTED_FROM = 32 * 1024 * 1024
"""Bytes in all from which on Iallgatherv and a wait take less time than Allgatherv, with other libraries than MPICH."""


def _is_posted(name: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether a call is posted and waited for, as that is faster than the blocking call; the same on all members.

    Allgatherv of MPICH moves messages of 32 KiB from 512 KiB in all on: Iallgatherv takes 0.26 to 0.84 of the time.
    With Open MPI Iallgatherv takes 0.4 to 1.0 from 32 MiB on, and up to 4 times as long below (benchmarks/mpi_calls.py).
    """
    if name != "Allgatherv":
        return False
    _, (counts, _), datatype = arguments[1]
    return bool(sum(counts) * datatype.Get_size() >= (512 * 1024 if _is_mpich() else _POSTED_FROM))


@lru_cache
def library_tag(number: int) -> int:
    """Return one of the 32 largest tags, which only the library uses; 1 and 2 belong to the exchange after a mismatch."""
    return (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) - number  # MPI guarantees 32767


class AllRequests:
    """Several requests of MPI as one request, with the memory that must live as long."""

    __slots__ = ("_held", "_requests")

    def __init__(self, requests: list[MPI.Request], held: Any = None) -> None:
        self._requests = requests
        self._held = held

    def Test(self) -> bool:
        """Return whether all requests are complete."""
        if len(self._requests) == 1:
            return self._requests[0].Test()
        return bool(MPI.Request.Testall(self._requests))


Post = tuple[Callable[..., MPI.Request], Any, int, int]
"""A message of bytes to post: method of the communicator, bytes, peer, and tag."""


def post_all(posts: Iterable[Post]) -> list[MPI.Request]:
    """Post messages. If one cannot be posted, the earlier requests are retained, as MPI may still write into their memory."""
    requests: list[MPI.Request] = []
    try:
        for post, piece, peer, tag in posts:
            requests.append(post([piece, MPI.BYTE], peer, tag))
    except BaseException:
        retain_for_ever(requests)
        raise
    return requests


# Names of blocking calls. A nonblocking call has "I" and the same name in lower case.
_EVEN = {
    Kind.BROADCAST: "Bcast",
    Kind.ALL_REDUCE: "Allreduce",
    Kind.REDUCE: "Reduce",
    Kind.ALL_GATHER: "Allgather",
    Kind.GATHER: "Gather",
    Kind.SCATTER: "Scatter",
    Kind.REDUCE_SCATTER: "Reduce_scatter_block",
    Kind.ALL_TO_ALL: "Alltoall",
}
_UNEVEN = {
    Kind.ALL_GATHER: "Allgatherv",
    Kind.GATHER: "Gatherv",
    Kind.SCATTER: "Scatterv",
    Kind.REDUCE_SCATTER: "Reduce_scatter",
    Kind.ALL_TO_ALL: "Alltoallv",
}


class EagerMpiSchedule:
    """A small movement that is started many times, in buffers of the library, by a persistent request if MPI has such.

    After a rank withdraws, MPI may write into these buffers, but never into buffers of the program.
    """

    __slots__ = ("_again", "_recv", "_request", "_send", "_writes")

    def __init__(self, transport: MpiTransport, comm: MPI.Intracomm, move: Movement, persistent: bool = True) -> None:
        self._send = None if move.send is None else np.empty_like(move.send)
        self._recv = None if move.recv is None else np.empty_like(move.recv)
        # The root of a broadcast gets no result, and its array may be read-only.
        self._writes = not (move.kind is Kind.BROADCAST and move.root == comm.Get_rank())
        owned = replace(move, send=self._send, recv=self._recv)
        self._request: MPI.Prequest | None = None
        self._again: Callable[[], Pollable] = partial(transport.nonblocking, owned)
        if persistent and persistent_collectives():
            if move.kind is Kind.BARRIER:
                self._request = comm.Barrier_init()
            else:
                name, arguments = transport.call(owned)
                self._request = getattr(comm, name + "_init")(*arguments)

    def start(self, move: Movement) -> Pollable:
        """Copy the data of this rank into the buffers, and post the movement."""
        if self._send is not None:
            self._send[...] = move.send
        if self._recv is not None and move.reads_recv:
            self._recv[...] = move.recv
        return self._post()

    def _post(self) -> Pollable:
        if self._request is None:
            return self._again()
        self._request.Start()
        return self._request

    def start_in_place(self, flat: Any) -> Pollable:
        """Copy ``flat``, which is input and output, into the buffers, and post the movement."""
        self._recv[:] = flat  # type: ignore[index]
        return self._post()

    def finish_in_place(self, flat: Any) -> None:
        """Copy the result into ``flat``."""
        if self._writes:
            flat[:] = self._recv

    def finish(self, move: Movement) -> None:
        """Copy the result into the array of the program."""
        if self._recv is not None and self._writes:
            assert move.recv is not None
            move.recv[...] = self._recv

    def free(self) -> None:
        """Free the persistent request, which must not be started."""
        if self._request is not None:
            self._request.Free()
            self._request = None


def _without_long_complex(move: Movement) -> Movement:
    """Return a movement of clongdouble as a movement of twice as many longdouble, and another movement unchanged.

    MPICH 5.0.2: Gather and Igather of MPI_C_LONG_DOUBLE_COMPLEX abort on 4 ranks and more, in blocks of a few KiB
    (typerep_yaksa_pack.c:326, element_size < 0 || *actual_unpack_bytes % element_size == 0).
    """
    buffer = move.recv if move.recv is not None else move.send
    if buffer is None or buffer.dtype.char != "G":
        return move

    def halves(array: Any) -> Any:
        return None if array is None else array.view(np.longdouble)

    def doubled(counts: Any) -> Any:
        return None if counts is None else [2 * count for count in counts]

    return replace(
        move,
        send=halves(move.send),
        recv=halves(move.recv),
        sendcounts=doubled(move.sendcounts),
        recvcounts=doubled(move.recvcounts),
        senddispls=doubled(move.senddispls),
        recvdispls=doubled(move.recvdispls),
    )


@cache
def _type_of_bytes(count: int) -> MPI.Datatype:
    """Return a type of ``count`` bytes, for elements unknown to MPI; it is never freed, as pending messages may use it."""
    return MPI.BYTE.Create_contiguous(count).Commit()


class MpiTransport:
    """Moves host memory by the collectives of MPI (MPI-4.1 chapter 6)."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._types: dict[str, MPI.Datatype] = {}

    def apart_from(self, kind: Kind) -> int:
        """Return the bytes of a block from which on the arrays of a list may stand apart; the same on all members.

        MPI's call for unequal blocks moves them. For the other call they are copied, one behind the other, which takes longer
        from 2 MiB a block on, in an all_gather from 32 MiB in all on (docs/performance.md). The number is larger than
        ``SMALL_BYTES``: smaller movements are copied as a whole (:class:`EagerMpiSchedule`).
        """
        least = 2 * 1024 * 1024
        return max(least, _POSTED_FROM // self._comm.Get_size()) if kind is Kind.ALL_GATHER else least

    def _passes_counts(self, move: Movement) -> bool:
        """Return whether MPI's call for unequal blocks moves a movement; the same on all members.

        In Gather and Scatter blocks pass through other members, in Gatherv and Scatterv each goes straight to its destination.
        With 8 ranks on a node and blocks of 16 MiB, Scatterv of MPICH takes 0.04 of the time, and Gatherv of both MPIs 0.2
        (benchmarks/mpi_calls.py). For small blocks the trees have fewer messages.
        """
        if move.vector:
            return True
        linear = move.kind in (Kind.GATHER, Kind.SCATTER)
        if move.op or not (linear or move.apart):
            return False
        least = self.apart_from(move.kind)
        return block_bytes(move, self._comm.Get_size()) >= (min(64 * 1024, least) if linear and _is_mpich() else least)

    def blocking(self, move: Movement, posted: bool = True) -> None:
        """Make the blocking call, or post and wait for the nonblocking call where that is faster."""
        if move.kind is Kind.BARRIER:
            self._comm.Barrier()
            return
        moved = large_counts.near(move) if move.vector else None
        name, arguments = self.call(move if moved is None else moved[0])
        if posted and _is_posted(name, arguments):
            getattr(self._comm, "I" + name.lower())(*arguments).Wait()
        else:
            getattr(self._comm, name)(*arguments)
        if moved is not None:
            moved[1]()

    def nonblocking(self, move: Movement) -> Pollable:
        """Post the nonblocking call."""
        if move.kind is Kind.BARRIER:
            return self._comm.Ibarrier()
        moved = large_counts.near(move) if move.vector else None
        name, arguments = self.call(move if moved is None else moved[0])
        if name == "Reduce_scatter_block" and _is_mpich():
            # MPICH 5.0.2: Ireduce_scatter_block of 512 KiB to 3 MiB in all takes 6 to 11 times as long (benchmarks/mpi_calls.py).
            sending, receiving, op = arguments
            name, arguments = "Reduce_scatter", (sending, receiving, [receiving[0].size] * self._comm.Get_size(), op)
        request: MPI.Request = getattr(self._comm, "I" + name.lower())(*arguments)
        return request if moved is None else large_counts.CopyAfter(request, moved[1])

    def plan(self, move: Movement, persistent: bool = True) -> EagerMpiSchedule:
        """Return a reusable form of a small movement, in buffers of the library.

        Args:
            persistent: use a persistent collective of MPI-4, which does not match a nonblocking collective of another member.
        """
        return EagerMpiSchedule(self, self._comm, move, persistent)

    def _type(self, array: Any) -> MPI.Datatype:
        char = array.dtype.char
        if char == "V":
            return _type_of_bytes(array.dtype.itemsize)
        found = self._types.get(char)
        if found is None:
            # One type for dtypes that differ in name only: mpi4py has two for long and long long, which are equal on Linux.
            found = self._types[char] = MPI.Datatype.fromcode(np.dtype(array.dtype.str).char)
        return found

    def call(self, move: Movement) -> tuple[str, tuple[Any, ...]]:
        """Return the name and the arguments of the blocking call."""
        if not move.op:
            move = _without_long_complex(move)
        kind, send, recv = move.kind, move.send, move.recv
        if send is not None and recv is not None and not (send.size and recv.size):
            # Open MPI's nonblocking calls take two buffers at one address for MPI_IN_PLACE, also if one of them is empty.
            send, recv = (each if each.size else np.empty(0, each.dtype) for each in (send, recv))
        sending = None if send is None else (send, self._type(send))
        receiving = None if recv is None else (recv, self._type(recv))
        if kind is Kind.BROADCAST:
            return "Bcast", (receiving, move.root)
        if kind is Kind.ALL_REDUCE:
            return "Allreduce", (MPI.IN_PLACE if send is None else sending, receiving, self._op(move))
        if kind is Kind.REDUCE:
            if recv is None:
                return "Reduce", (sending, None, self._op(move), move.root)
            return "Reduce", (MPI.IN_PLACE if send is None else sending, receiving, self._op(move), move.root)
        vector = self._passes_counts(move)
        name = (_UNEVEN if vector else _EVEN)[kind]
        if kind is Kind.REDUCE_SCATTER:
            if move.vector:
                return name, (sending, receiving, self._counts(send, move.sendcounts), self._op(move))
            return name, (sending, receiving, self._op(move))
        if vector:
            if send is not None and kind in (Kind.SCATTER, Kind.ALL_TO_ALL):
                sending = self._vector(send, move.sendcounts, move.senddispls)
            if recv is not None and kind is not Kind.SCATTER:
                receiving = self._vector(recv, move.recvcounts, move.recvdispls)
        if kind in (Kind.GATHER, Kind.SCATTER):
            return name, (sending, receiving, move.root)
        return name, (sending, receiving)

    def _vector(self, buffer: Any, counts: Any, displs: Any) -> Any:
        counts = self._counts(buffer, counts)
        return (buffer, (counts, starts(counts) if displs is None else list(displs)), self._type(buffer))

    def _counts(self, buffer: Any, counts: Any) -> list[int]:
        size = self._comm.Get_size()
        return [buffer.size // size] * size if counts is None else list(counts)

    @staticmethod
    def _op(move: Movement) -> MPI.Op:
        op: MPI.Op = getattr(MPI, move.op)
        return op
