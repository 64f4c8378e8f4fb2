"""The native engine: every movement is one MPI collective on the group's data communicator."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicoll.engines.base import Kind, Movement, Request, starts

__all__ = ["MpiEngine"]

# One name each for the blocking call; the nonblocking one is "I" and the same name in lower case.
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


class MpiEngine:
    """Moves host memory by the collectives of MPI (MPI-4.1 chapter 6)."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._types: dict[str, MPI.Datatype] = {}

    def blocking(self, move: Movement) -> None:
        """Move by the blocking call."""
        if move.kind is Kind.BARRIER:
            self._comm.Barrier()
            return
        name, arguments = self._call(move)
        getattr(self._comm, name)(*arguments)

    def nonblocking(self, move: Movement) -> Request:
        """Post the nonblocking call."""
        if move.kind is Kind.BARRIER:
            return self._comm.Ibarrier()
        name, arguments = self._call(move)
        request: MPI.Request = getattr(self._comm, "I" + name.lower())(*arguments)
        return request

    def _type(self, array: Any) -> MPI.Datatype:
        char = array.dtype.char
        found = self._types.get(char)
        if found is None:
            found = self._types[char] = MPI.Datatype.fromcode(char)
        return found

    def _call(self, move: Movement) -> tuple[str, tuple[Any, ...]]:
        kind, send, recv = move.kind, move.send, move.recv
        uneven = move.sendcounts is not None or move.recvcounts is not None
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
        name = (_UNEVEN if uneven else _EVEN)[kind]
        if kind is Kind.REDUCE_SCATTER:
            if uneven:
                return name, (sending, receiving, list(move.sendcounts or ()), self._op(move))
            return name, (sending, receiving, self._op(move))
        if uneven:
            if send is not None and move.sendcounts is not None:
                sending = self._vector(send, move.sendcounts, move.senddispls)
            if recv is not None and move.recvcounts is not None:
                receiving = self._vector(recv, move.recvcounts, move.recvdispls)
        if kind in (Kind.GATHER, Kind.SCATTER):
            return name, (sending, receiving, move.root)
        return name, (sending, receiving)

    def _vector(self, buffer: Any, counts: Any, displs: Any) -> Any:
        return (buffer, (list(counts), starts(counts) if displs is None else list(displs)), self._type(buffer))

    @staticmethod
    def _op(move: Movement) -> MPI.Op:
        op: MPI.Op = getattr(MPI, move.op)
        return op
