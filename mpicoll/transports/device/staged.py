"""Memory of a GPU in pieces: one is copied out while the one before it moves, and the one before that is copied in.

A few pieces of pinned memory take turns, so little of it is needed however large an array is. Copies out are put on one
stream of the library and copies in on another, as a GPU copies both ways at a time. In which order all comes is said in
:mod:`mpicoll.memory.device.array`; here the five are kept piece by piece, and two more, of memory that takes its next turn:

1. pieces are copied out, and in, after what the program has put on its stream before the call;
2. the host reads a piece when it is there;
3. what the program puts on its stream after the call comes after the results;
4. the memory serves other calls when what was copied out of it has left;
5. the next piece is copied out into the memory of an earlier one when that has left;
6. the host writes the next piece into the memory of an earlier one when that has left.

For the first of these the host waits, before anything is put on the library's streams, which serve all calls: one that follows
a kernel of the program's there would hold up those whose streams have come.

Every piece that is put on its way back is at once before what the program does next, not the last one alone: a call that
fails in the middle leaves no copy behind that might come after the memory has been given to another array.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mpicoll.memory.device import pool as device_pool
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.memory.device.array import DeviceAddresses
from mpicoll.transports.base import Array, Kind, Movement, Request, pieces

Steps = Generator[Request, None, None]

PIECE_BYTES = 4 << 20
"""Bytes of a piece: a GPU copies them in 80 to 300 microseconds, and what is done for each may take some 40 on the host."""

TURNS = 3
"""Pieces of host memory for an array: one on its way out, one that the host moves, one on its way back."""

Parts = list[tuple[int, int]]
"""Where parts of an array begin, and how long they are, in bytes."""


class _Come:
    """An event of a GPU as a Request."""

    __slots__ = ("Test",)

    def __init__(self, gpu: device_runtime.Runtime, event: Any) -> None:
        self.Test = partial(device_runtime.over, gpu, event)


class _Place:
    """Host memory that takes turns."""

    __slots__ = ("_wide", "block", "left", "memory")

    def __init__(self, nbytes: int, device: int) -> None:
        self.memory, self.block = device_pool.pool().take(nbytes, device)
        self.left: list[Any] = []
        self._wide: Array | None = None

    def wide(self, memory: Array, dtype: np.dtype[Any], narrower: Any) -> Array:
        """Return memory for elements that move as a dtype: what they are copied to, unless they have a narrower one."""
        if narrower is None:
            return memory.view(dtype)
        count = memory.nbytes // narrower[0].itemsize
        if self._wide is None:
            self._wide = np.empty(count, dtype)
        return self._wide[:count]


class Piece:
    """A piece of an array in host memory.

    Attributes:
        host: its elements, one part behind the other, as which they move.
        copied: the same memory as bytes; of elements that move as a wider dtype, memory for their own.
    """

    __slots__ = ("awaits", "copied", "host", "parts", "place")

    def __init__(self, host: Array, copied: Array, parts: Parts, place: _Place) -> None:
        self.host, self.copied, self.parts, self.place = host, copied, parts, place
        self.awaits: list[Any] = []


class Belt:
    """An array on a GPU that goes through host memory, one piece behind the other.

    Args:
        flat: the array.
        out, back: whether its pieces are copied out, and in when they have moved.
    """

    def __init__(self, flat: DeviceAddresses, *, out: bool, back: bool) -> None:
        self._gpu, self._array, self._finish = device_runtime.runtime(), flat.array, flat.finish
        self._first, self._dtype, self._narrower = flat.ctypes.data, flat.dtype, flat.narrower
        self._times = 1 if flat.narrower is None else flat.itemsize // flat.narrower[0].itemsize
        self._out, self._back = out, back
        gpu, device = self._gpu, self._array.device
        self._outward, self._inward = gpu.copy_stream(device), gpu.copy_stream(device, True)
        self._places: list[_Place] = []
        self._put = 0
        self._comes_after: list[Any] = []
        self._comes_after.append(flat.began)  # 1

    def begin(self) -> Steps:
        """Wait until the GPU has come to the call."""
        for event in self._comes_after:
            yield from self._until(event)

    def parts(self, views: list[Array]) -> Parts:
        """Return where views of the array are in it."""
        first, times = self._first, self._times
        return [((view.ctypes.data - first) // times, view.nbytes // times) for view in views if view.size]

    def put(self, parts: Parts) -> Piece:
        """Give the next piece its memory, and have it copied out."""
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
                place.block.busy = copied  # whatever strikes now
            piece.awaits.append(copied)  # 2
        else:
            piece.awaits += place.left  # 6
        return piece

    def here(self, piece: Piece) -> Steps:
        """Wait until the host may have a piece."""
        for event in piece.awaits:
            yield from self._until(event)
        if self._out and self._narrower is not None:
            own, widen, _ = self._narrower
            widen(piece.copied.view(own), piece.host)

    def _until(self, event: Any) -> Steps:
        if not device_runtime.over(self._gpu, event):
            yield _Come(self._gpu, event)
        self._gpu.await_(event)  # says what has failed

    def take_back(self, piece: Piece) -> None:
        """Have a piece that has moved copied in."""
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
        except BaseException:  # a signal handler's: nothing may come in after what the program does next
            with suppress(Exception):
                gpu.await_(gpu.mark(array.device, self._inward))
            raise

    def end(self) -> None:
        """Wait for what is copied out of ordinary memory."""
        for place in self._places:
            if place.block is None:
                for event in place.left:
                    self._gpu.await_(event)

    def _place(self, nbytes: int) -> _Place:
        number = self._put % TURNS
        self._put += 1
        if number == len(self._places):
            self._places.append(_Place(nbytes, self._array.device))
        return self._places[number]

    def _follow(self, stream: Any, events: list[Any]) -> None:
        for event in events:
            self._gpu.follow(self._array.device, stream, event)


def rank_order_matters(move: Movement) -> bool:
    """Whether the bits of a result depend on the order in which its terms are reduced, as those of floating point do."""
    buffer = move.recv if move.recv is not None else move.send
    return bool(move.op) and buffer is not None and buffer.dtype.kind not in "biu"


class _Staged:
    """One piece of a movement, with host memory in the place of a GPU's."""

    __slots__ = ("held", "move")

    def __init__(self, move: Movement, held: list[tuple[Belt, Piece]]) -> None:
        self.move, self.held = move, held


class _Line:
    """The belts of one movement."""

    def __init__(self, move: Movement, rank: int) -> None:
        send, recv = move.send, move.recv
        gives = send is None and (move.kind is not Kind.BROADCAST or move.root == rank)
        takes = move.kind is not Kind.BROADCAST or move.root != rank
        self._send = Belt(send, out=True, back=False) if isinstance(send, DeviceAddresses) else None
        self._recv = Belt(recv, out=gives, back=takes) if isinstance(recv, DeviceAddresses) else None

    def put(self, piece: Movement) -> _Staged:
        """Give a piece of the movement its memory, and have it copied out."""
        held: list[tuple[Belt, Piece]] = []
        send, recv = piece.send, piece.recv
        if self._send is not None and send is not None:
            views: Any = send  # several, where they would have to be put together on the host
            if not isinstance(views, list):
                views = _blocks(send, piece.sendcounts, piece.senddispls)
            put = self._send.put(self._send.parts(views))
            held.append((self._send, put))
            piece = replace(piece, send=put.host, senddispls=None)
        if self._recv is not None and recv is not None:
            put = self._recv.put(self._recv.parts(_blocks(recv, piece.recvcounts, piece.recvdispls)))
            held.append((self._recv, put))
            piece = replace(piece, recv=put.host, recvdispls=None)
        return _Staged(piece, held)

    def begin(self) -> Steps:
        for belt in (self._send, self._recv):
            if belt is not None:
                yield from belt.begin()

    def end(self) -> None:
        for belt in (self._send, self._recv):
            if belt is not None:
                belt.end()


def _blocks(buffer: Array, counts: Any, displs: Any) -> list[Array]:
    if counts is None or displs is None:  # one behind the other
        return [buffer]
    return [buffer[at : at + count] for at, count in zip(displs, counts, strict=True)]


def move_pieces(
    move: Movement, rank: int, size: int, largest: int, limit: int, moved: Callable[[Movement], Steps]
) -> Steps:
    """Move one piece after the other, those of a GPU by way of the host.

    Args:
        move: the whole movement.
        rank, size, largest, limit: as for :func:`mpicoll.transports.base.pieces`.
        moved: moves a piece that is on the host.
    """
    if not (isinstance(move.send, DeviceAddresses) or isinstance(move.recv, DeviceAddresses)):
        for piece in pieces(move, rank, size, largest, limit):
            yield from moved(piece)
        return
    cut = pieces(move, rank, size, largest, limit, list)
    line = _Line(move, rank)
    yield from line.begin()
    ahead: deque[_Staged] = deque()
    for piece in cut:
        ahead.append(line.put(piece))
        if len(ahead) == TURNS:
            yield from _next(ahead, moved)
    while ahead:
        yield from _next(ahead, moved)
    line.end()


def _next(ahead: deque[_Staged], moved: Callable[[Movement], Steps]) -> Steps:
    staged = ahead[0]
    for belt, piece in staged.held:
        yield from belt.here(piece)
    yield from moved(staged.move)
    for belt, piece in staged.held:
        belt.take_back(piece)
    ahead.popleft()
