"""Describe movements, the input of a transport, and cut a movement into pieces.

A transport (here ``Engine``) gets contiguous one-dimensional arrays of one dtype, counts in elements, the root as a rank of the
group, and the kind of memory. It knows neither the arguments of the program nor the agreement of the members.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from mpicoll.memory.device.addresses import DeviceAddresses
from mpicoll.memory.device.array import picked
from mpicoll.runtime.waiting import Pollable
from mpicoll.transports.control import AS_IT_IS, IN_PIECES, NO_DEVICE

if TYPE_CHECKING:
    from mpi4py import MPI

Array = npt.NDArray[Any]

SMALL_BYTES = 16 * 1024
"""Bytes of the largest block that moves by polled requests through buffers of the library."""


EXCHANGE_BYTES = 256 * 1024
"""Most bytes that a member sends in an exchange of parts of any size that moves in one step of shared memory."""

EAGER_BYTES = 2048
"""Bytes that a member may send with a round through shared memory (``native/ring.h``; a test compares the numbers)."""


class Kind(enum.Enum):
    """The collective movements (MPI-4.1 chapter 6)."""

    BARRIER = "barrier"
    BROADCAST = "broadcast"
    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    ALL_GATHER = "all_gather"
    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


WHOLE = frozenset({Kind.BROADCAST, Kind.ALL_REDUCE, Kind.REDUCE})
"""Kinds whose block is the whole array of a rank, with the same number of elements on all ranks: any part can move by itself."""


@dataclass(slots=True)
class Movement:
    """One rank's part in one collective.

    Attributes:
        kind: kind of the collective.
        send: elements that this rank contributes; None if there are none, or if they are in ``recv`` (in place).
        recv: memory for the result of this rank; None if this rank gets no result.
        sendcounts, recvcounts: number of elements to, or from, each rank; None if all blocks are equal.
        senddispls, recvdispls: start of each block; None if the blocks stand one behind the other.
        root: rank in the group; -1 if there is none.
        op: name of the MPI operation; "" if the call does not reduce.
        vector: blocks of some rank may differ in size; the same on all members (MPI does not match Gather with Gatherv).
        apart: an ``all_gather`` or ``all_to_all`` of lists, whose arrays may stand apart; the same on all members.
        more: further movements of the same call, made afterwards; each member knows the sizes of their blocks from its own
            arguments.
    """

    kind: Kind
    send: Array | None = None
    recv: Array | None = None
    sendcounts: Sequence[int] | None = None
    recvcounts: Sequence[int] | None = None
    senddispls: Sequence[int] | None = None
    recvdispls: Sequence[int] | None = None
    root: int = -1
    op: str = ""
    vector: bool = False
    apart: bool = False
    more: tuple[Movement, ...] = ()

    @property
    def on_gpu(self) -> list[DeviceAddresses]:
        """The buffers that are memory of a GPU, which is not copied as a whole."""
        return [array for array in (self.send, self.recv) if isinstance(array, DeviceAddresses)]

    @property
    def device(self) -> int:
        """How memory of a GPU moves that is not copied as a whole: `AS_IT_IS` or `IN_PIECES`; `NO_DEVICE`: there is none."""
        direct = [array.passed_directly for array in (self.send, self.recv) if isinstance(array, DeviceAddresses)]
        return (AS_IT_IS if all(direct) else IN_PIECES) if direct else NO_DEVICE

    def is_ready(self) -> bool:
        """Return whether the GPU of this rank has reached the call."""
        return all(array.is_ready() for array in self.on_gpu)

    @property
    def order_matters(self) -> bool:
        """Whether the bits of the result depend on the order of its terms, as in floating point."""
        buffer = self.recv if self.recv is not None else self.send
        return bool(self.op) and buffer is not None and buffer.dtype.kind not in "biu"

    @property
    def parts(self) -> tuple[Movement, ...]:
        """The movements of the call, each without ``more``."""
        return (replace(self, more=()), *self.more) if self.more else (self,)

    def into(self, recv: Array) -> Movement:
        """Return this movement with other memory for the result (``dataclasses.replace`` takes ten times as long)."""
        return Movement(
            self.kind,
            self.send,
            recv,
            self.sendcounts,
            self.recvcounts,
            self.senddispls,
            self.recvdispls,
            self.root,
            self.op,
            self.vector,
            self.apart,
            self.more,
        )

    @property
    def reads_recv(self) -> bool:
        """Whether ``recv`` holds this rank's contribution as well (in place), or must keep its elements (broadcast)."""
        return self.send is None


class Engine(Protocol):
    """A transport: a way to move bytes between the members of one group."""

    def apart_from(self, kind: Kind) -> int:
        """Return the bytes of a block from which on the arrays of a list may stand apart; the same on all members."""

    def blocking(self, move: Movement, posted: bool = True) -> None:
        """Move the data; return when the part of this rank is complete. All members are known to make the same call.

        Args:
            posted: the transport may post a nonblocking call of MPI and wait; the same on all members.
        """

    def nonblocking(self, move: Movement) -> Pollable:
        """Post the movement, and return its request at once."""

    def plan(self, move: Movement, persistent: bool = True) -> Plan:
        """Return a reusable form of a small movement; not ``persistent``: other members may make a nonblocking call."""


class Preferred(Protocol):
    """A schedule by which a call moves if all members have one for it.

    Attributes:
        device: how memory of a GPU moves otherwise.
        nbytes: bytes that move otherwise.
        fallback: prepares the call otherwise: returns the movement, the test whether it can begin, and the functions to call
            before and after it.
    """

    device: int
    nbytes: int
    fallback: Callable[[], Any]

    def is_ready(self) -> bool:
        """Return whether the GPU of this rank has reached the call."""

    def steps(self, comm: MPI.Intracomm) -> Generator[Pollable, None, bool]:
        """Move, after all members have agreed; return whether that was possible, the same on all members."""


class Plan(Protocol):
    """A small movement that is started many times, through buffers of the transport."""

    def start(self, move: Movement) -> Pollable:
        """Copy the data of this rank into the buffers, and post the movement."""

    def finish(self, move: Movement) -> None:
        """Copy the result into the array of the program."""

    def start_in_place(self, flat: Any) -> Pollable:
        """Copy ``flat``, which is input and output, into the buffers, and post the movement."""

    def finish_in_place(self, flat: Any) -> None:
        """Copy the result into ``flat``."""

    def free(self) -> None:
        """Free the requests of MPI, of which none may be pending."""


def block_elements(move: Movement, size: int) -> int:
    """Return the largest number of elements that this rank moves to or from one peer."""
    if move.kind in (Kind.BARRIER,):
        return 0
    if move.kind in WHOLE:
        buffer = move.recv if move.recv is not None else move.send
        return 0 if buffer is None else buffer.size
    most = 0
    for buffer, counts, whole in (
        (move.send, move.sendcounts, move.kind in (Kind.ALL_GATHER, Kind.GATHER)),
        (move.recv, move.recvcounts, move.kind in (Kind.SCATTER, Kind.REDUCE_SCATTER)),
    ):
        if buffer is None:
            continue
        if counts is not None:
            most = max(most, max(counts, default=0))
        else:
            most = max(most, buffer.size if whole else buffer.size // size)
    return most


def block_bytes(move: Movement, size: int) -> int:
    """Return the largest number of bytes that this rank moves to or from one peer."""
    most = 0
    for part in move.parts:
        buffer = part.recv if part.recv is not None else part.send
        if buffer is not None:
            most = max(most, block_elements(part, size) * buffer.dtype.itemsize)
    return most


Pack = Callable[[list[Array]], Any]


def piece_elements(move: Movement, itemsize: int, size: int, limit: int) -> int:
    """Return how many elements of a block are in one piece of a movement."""
    spread = 1 if move.kind in WHOLE else size
    return max(1, limit // (itemsize * spread))


def pieces(move: Movement, size: int, largest: int, limit: int, pack: Pack = np.concatenate) -> Iterator[Movement]:
    """Cut a movement so that no rank passes more than about ``limit`` bytes through one native call.

    Args:
        move: movement to cut.
        size: size of the group.
        largest: bytes of the largest block of any member (agreed, so that all members cut in the same way).
        limit: most bytes of a native call.
        pack: joins arrays that must stand one behind the other.
    """
    if move.more:
        for part in move.parts:
            yield from pieces(part, size, block_bytes(part, size), limit, pack)
        return
    buffer = move.recv if move.recv is not None else move.send
    if buffer is None:  # a barrier
        yield move
        return
    itemsize = buffer.dtype.itemsize
    step = piece_elements(move, itemsize, size, limit)
    total = -(-largest // itemsize)
    if total <= step:
        yield move
        return
    for start in range(0, total, step):
        yield _piece(move, size, start, start + step, pack)


def _piece(move: Movement, size: int, start: int, stop: int, pack: Pack) -> Movement:
    if move.kind in WHOLE:
        return replace(
            move,
            send=None if move.send is None else move.send[start:stop],
            recv=None if move.recv is None else move.recv[start:stop],
        )
    if move.kind is Kind.REDUCE_SCATTER:
        return _reduce_scatter_piece(move, size, start, stop, pack)
    # Each block keeps its place in the whole buffer, and only its part from start to stop moves.
    send, sendcounts, senddispls = move.send, move.sendcounts, move.senddispls
    recv, recvcounts, recvdispls = move.recv, move.recvcounts, move.recvdispls
    if send is not None:
        if move.kind in (Kind.ALL_GATHER, Kind.GATHER):
            send = send[start:stop]
        else:
            sendcounts, senddispls = _cut(send, sendcounts, senddispls, size, start, stop)
    if recv is not None:
        if move.kind is Kind.SCATTER:
            recv = recv[start:stop]
        else:
            recvcounts, recvdispls = _cut(recv, recvcounts, recvdispls, size, start, stop)
    return replace(
        move,
        send=send,
        recv=recv,
        sendcounts=sendcounts,
        senddispls=senddispls,
        recvcounts=recvcounts,
        recvdispls=recvdispls,
        vector=True,
    )


def _cut(
    buffer: Array, counts: Sequence[int] | None, displs: Sequence[int] | None, size: int, start: int, stop: int
) -> tuple[list[int], list[int]]:
    counts = [buffer.size // size] * size if counts is None else counts
    displs = starts(counts) if displs is None else displs
    lengths = [max(0, min(count, stop) - start) for count in counts]
    return lengths, [displ + min(start, count) for displ, count in zip(displs, counts, strict=True)]


def starts(counts: Sequence[int]) -> list[int]:
    """Return where each block starts when blocks of ``counts`` elements stand one behind the other."""
    return list(accumulate(counts, initial=0))[:-1]


def _reduce_scatter_piece(move: Movement, size: int, start: int, stop: int, pack: Pack) -> Movement:
    # MPI wants the blocks of a reduce-scatter one behind the other, so a piece is packed.
    assert move.send is not None
    assert move.recv is not None
    counts, displs = _cut(move.send, move.sendcounts, None, size, start, stop)
    parts = [slice(at, at + count) for at, count in zip(displs, counts, strict=True)]
    if pack is np.concatenate and isinstance(move.send, DeviceAddresses):
        packed: Any = picked(move.send, parts)
    else:
        packed = pack([move.send[part] for part in parts])
    # Equal blocks stay equal: Open MPI has Reduce_scatter_block for GPUs, but not Reduce_scatter.
    if not move.vector:
        return replace(move, send=packed, recv=move.recv[start:stop])
    return replace(move, send=packed, recv=move.recv[start:stop], sendcounts=counts)
