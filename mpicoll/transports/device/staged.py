"""Move memory of a GPU in pieces: one piece is copied out while the piece before moves, and the one before that is copied in.

A few pieces of pinned memory are used again and again, so that arrays of any size need little. Copies to the host are put on one
stream of the library, copies to the GPU on another one, as a GPU copies in both directions at a time. The rules of
:mod:`mpicoll.memory.device.array` hold for each piece, and two more for pinned memory that is used again:

1. pieces are copied out, and in, after the work that the program put on its stream before the call;
2. the host reads a piece after its copy is complete;
3. work that the program puts on its stream after the call runs after the copies of the results;
4. other calls use the memory after the copies from it are complete;
5. the next piece is copied to the memory of an earlier piece after the copies from that memory are complete;
6. the host writes the next piece into the memory of an earlier piece after the copies from that memory are complete.

For rule 1 the host waits before it puts copies on the library's streams. These serve all calls: a copy that waits for a kernel
of the program would delay calls whose streams are ready.

Rule 3 holds for each piece at once, not only for the last: a call that fails in the middle leaves no copy that could follow the
reuse of the memory for another array.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from mpicoll.memory.device import pool as device_pool
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.memory.device.addresses import DeviceAddresses
from mpicoll.memory.device.array import on_host
from mpicoll.runtime.waiting import Condition, Steps
from mpicoll.transports.base import Array, Kind, Movement, piece_elements, pieces

PIECE_BYTES = 4 << 20
"""Bytes of a piece: a GPU copies a piece in 80 to 300 us, and the host needs about 40 us for each."""

PIECE_BUFFERS = 3
"""Pieces of host memory for an array: one being copied out, one being moved by the host, one being copied in."""

Parts = list[tuple[int, int]]
"""Start and length of parts of an array, in bytes."""


class _PieceMemory:
    """Host memory that serves one piece after the other."""

    __slots__ = ("_wide", "block", "left", "memory")

    def __init__(self, nbytes: int, device: int) -> None:
        self.memory, self.block = device_pool.pool().take(nbytes, device)
        self.left: list[Any] = []
        self._wide: Array | None = None

    def wide(self, memory: Array, dtype: np.dtype[Any], narrower: Any) -> Array:
        """Return memory for elements that move as a dtype: the memory of the copy, unless the elements have a narrower dtype."""
        if narrower is None:
            return memory.view(dtype)
        count = memory.nbytes // narrower[0].itemsize
        if self._wide is None:
            self._wide = np.empty(count, dtype)
        return self._wide[:count]


class Piece:
    """A piece of an array in host memory.

    Attributes:
        host: elements as they move, one part behind the other.
        copied: the same memory as bytes; if elements move as a wider dtype, memory for elements of the array's dtype.
    """

    __slots__ = ("awaits", "copied", "host", "parts", "place")

    def __init__(self, host: Array, copied: Array, parts: Parts, place: _PieceMemory) -> None:
        self.host, self.copied, self.parts, self.place = host, copied, parts, place
        self.awaits: list[Any] = []


class CopyPipeline:
    """Copies of an array on a GPU through host memory, piece after piece.

    Args:
        flat: the array.
        out, back: whether pieces are copied to the host before they move, and to the GPU after they have moved.
    """

    def __init__(self, flat: DeviceAddresses, *, out: bool, back: bool) -> None:
        self._gpu, self._array, self._finish = device_runtime.runtime(), flat.array, flat.finish
        self._first, self._dtype, self._narrower = flat.ctypes.data, flat.dtype, flat.narrower
        self._times = 1 if flat.narrower is None else flat.itemsize // flat.narrower[0].itemsize
        self._out, self._back = out, back
        gpu, device = self._gpu, self._array.device
        self._outward, self._inward = gpu.copy_stream(device), gpu.copy_stream(device, True)
        self._places: list[_PieceMemory] = []
        self._put = 0
        self._began: list[Any] = []
        self._began.append(flat.began)  # 1

    def begin(self) -> Steps:
        """Wait until the GPU has reached the call."""
        for event in self._began:
            yield from device_runtime.await_event(self._gpu, event)

    def parts(self, views: list[Array]) -> Parts:
        """Return the places of views of the array in the array."""
        first, times = self._first, self._times
        return [((view.ctypes.data - first) // times, view.nbytes // times) for view in views if view.size]

    def put(self, parts: Parts) -> Piece:
        """Give the next piece its memory, and start its copy to the host."""
        gpu, array = self._gpu, self._array
        nbytes = sum(length for _, length in parts)
        place = self._place(nbytes)
        memory = place.memory[:nbytes]
        piece = Piece(place.wide(memory, self._dtype, self._narrower), memory, parts, place)
        if self._out:
            self._follow(self._outward, place.left)  # 5
            at = 0
            for begin, length in parts:
                gpu.copy_out(memory[at : at + length], array, self._outward, begin)
                at += length
            copied = gpu.mark(array.device, self._outward)
            if place.block is not None:
                place.block.busy = copied  # now, as a signal handler may raise at any time
            piece.awaits.append(copied)  # 2
        else:
            piece.awaits += place.left  # 6
        return piece

    def wait(self, piece: Piece) -> Steps:
        """Wait until the host may use the memory of a piece."""
        for event in piece.awaits:
            yield from device_runtime.await_event(self._gpu, event)
        if self._out and self._narrower is not None:
            own, widen, _ = self._narrower
            widen(piece.copied.view(own), piece.host)

    def copy_back(self, piece: Piece) -> None:
        """Start the copy of a moved piece to the GPU."""
        if not self._back:
            return
        gpu, array, place = self._gpu, self._array, piece.place
        if self._finish is not None:
            self._finish(piece.host)
        memory, at = piece.copied, 0
        if self._narrower is not None:
            own, _, narrow = self._narrower
            narrow(piece.host, memory.view(own))
        try:
            for begin, length in piece.parts:
                gpu.copy_in(array, memory[at : at + length], self._inward, begin)
                at += length
            left = gpu.mark(array.device, self._inward)
            place.left = [left]
            if place.block is not None:
                place.block.busy = left  # 4
            gpu.follow(array.device, array.stream, left)  # 3
        except BaseException:  # a signal handler's: no copy may follow the next work of the program
            with suppress(Exception):
                gpu.await_(gpu.mark(array.device, self._inward))
            raise

    def end(self) -> None:
        """Wait for copies from host memory that is not pinned."""
        for place in self._places:
            if place.block is None:
                for event in place.left:
                    self._gpu.await_(event)

    def _place(self, nbytes: int) -> _PieceMemory:
        number = self._put % PIECE_BUFFERS
        self._put += 1
        if number == len(self._places):
            self._places.append(_PieceMemory(nbytes, self._array.device))
        return self._places[number]

    def _follow(self, stream: Any, events: list[Any]) -> None:
        for event in events:
            self._gpu.follow(self._array.device, stream, event)


class _StagedPiece:
    """One piece of a movement, with host memory in place of memory of a GPU."""

    __slots__ = ("held", "move")

    def __init__(self, move: Movement, held: list[tuple[CopyPipeline, Piece]]) -> None:
        self.move, self.held = move, held


class _Pipelines:
    """The copy pipelines of one movement."""

    def __init__(self, move: Movement, rank: int) -> None:
        send, recv = move.send, move.recv
        sends = send is None and (move.kind is not Kind.BROADCAST or move.root == rank)
        receives = move.kind is not Kind.BROADCAST or move.root != rank
        self._send = CopyPipeline(send, out=True, back=False) if isinstance(send, DeviceAddresses) else None
        self._recv = CopyPipeline(recv, out=sends, back=receives) if isinstance(recv, DeviceAddresses) else None

    def put(self, piece: Movement) -> _StagedPiece:
        """Give a piece of the movement its memory, and start its copy to the host."""
        held: list[tuple[CopyPipeline, Piece]] = []
        send, recv = piece.send, piece.recv
        if self._send is not None and send is not None:
            views: Any = send  # a list, if parts of the array have to be packed on the host
            if not isinstance(views, list):
                views = _blocks(send, piece.sendcounts, piece.senddispls)
            put = self._send.put(self._send.parts(views))
            held.append((self._send, put))
            piece = replace(piece, send=put.host, senddispls=None)
        if self._recv is not None and recv is not None:
            put = self._recv.put(self._recv.parts(_blocks(recv, piece.recvcounts, piece.recvdispls)))
            held.append((self._recv, put))
            piece = replace(piece, recv=put.host, recvdispls=None)
        return _StagedPiece(piece, held)

    def begin(self) -> Steps:
        for pipeline in (self._send, self._recv):
            if pipeline is not None:
                yield from pipeline.begin()

    def end(self) -> None:
        for pipeline in (self._send, self._recv):
            if pipeline is not None:
                pipeline.end()


def _blocks(buffer: Array, counts: Any, displs: Any) -> list[Array]:
    if counts is None or displs is None:  # blocks stand one behind the other
        return [buffer]
    return [buffer[at : at + count] for at, count in zip(displs, counts, strict=True)]


def move_pieces(
    move: Movement, rank: int, size: int, largest: int, limit: int, moved: Callable[[Movement], Steps]
) -> Steps:
    """Move one piece after the other; pieces on a GPU move through the host.

    Args:
        move: the whole movement.
        rank: of this rank in its group.
        size, largest, limit: as for :func:`mpicoll.transports.base.pieces`.
        moved: moves a piece in host memory.
    """
    if not move.on_gpu:
        for piece in pieces(move, size, largest, limit):
            yield from moved(piece)
        return
    cut = pieces(move, size, largest, limit, list)
    pipelines = _Pipelines(move, rank)
    yield from pipelines.begin()
    ahead: deque[_StagedPiece] = deque()
    for piece in cut:
        ahead.append(pipelines.put(piece))
        if len(ahead) == PIECE_BUFFERS:
            yield from _next(ahead, moved)
    while ahead:
        yield from _next(ahead, moved)
    pipelines.end()


def _next(ahead: deque[_StagedPiece], moved: Callable[[Movement], Steps]) -> Steps:
    staged = ahead[0]
    for pipeline, piece in staged.held:
        yield from pipeline.wait(piece)
    yield from moved(staged.move)
    for pipeline, piece in staged.held:
        pipeline.copy_back(piece)
    ahead.popleft()


class Staged:
    """A schedule of memory of a GPU that moves through the host, over the transport that host memory would take.

    This one copies whole arrays, for an MPI that gets no memory of a GPU in the form that all members use.

    Attributes:
        block_bytes: of the largest block that moves at a time.
    """

    def __init__(self, move: Movement, block_bytes: int) -> None:
        self._move, self.block_bytes = move, block_bytes
        self._unpack: Callable[[], None] | None = None

    def steps(self, inner: Callable[[Movement], Steps]) -> Steps:
        """Copy to the host, and move there; ``inner`` moves host memory."""
        move = self._move
        send, recv = move.send, move.recv
        for array in move.on_gpu:
            yield Condition(array.is_ready)
        if isinstance(send, DeviceAddresses):
            send, pack, _ = on_host(send)
            pack()
        if isinstance(recv, DeviceAddresses):
            recv, pack, self._unpack = on_host(recv)
            if move.reads_recv:
                pack()
        yield from inner(replace(move, send=send, recv=recv))

    def finish(self) -> None:
        """Copy to the GPU what :meth:`steps` has not copied. An error concerns this rank only."""
        if self._unpack is not None:
            self._unpack()


class StagedInPieces(Staged):
    """The schedule of :func:`move_pieces`."""

    def __init__(self, move: Movement, rank: int, size: int, largest: int, limit: int) -> None:
        buffer = move.recv if move.recv is not None else move.send
        assert buffer is not None
        super().__init__(move, min(piece_elements(move, buffer.itemsize, size, limit) * buffer.itemsize, largest))
        self._sizes = rank, size, largest, limit

    def steps(self, inner: Callable[[Movement], Steps]) -> Steps:
        """Move in pieces."""
        return move_pieces(self._move, *self._sizes, inner)
