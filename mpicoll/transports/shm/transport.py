"""The shared-memory transport: members on one node move data through memory that they share, without MPI.

The extension moves the data (``native/segment.c``). This file makes the memory, and decides for each collective which blocks a
member writes, reads and reduces. All members make the same number of steps, which follows from the agreement on the call.

Reductions have the same bits on all members and in each run: every element is reduced in the order of the ranks, by one member
only or by all members in the same way.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.runtime import native
from mpicoll.runtime.waiting import Pollable, Steps
from mpicoll.transports.base import Array, Kind, Movement, starts
from mpicoll.transports.shm.mapping import map_together

LARGEST_BUFFER = 1024 * 1024
"""Bytes of a buffer: one piece, which other members read while it is in the caches of the cores (measured)."""
SMALLEST_BUFFER = 32 * 1024

PIECE = 256 * 1024
"""Bytes of a piece of a larger movement (measured): while one piece is read the next is written."""

POLL_NS, POLL_NS_OVERSUBSCRIBED = 20_000, 200_000
"""Nanoseconds for which the extension polls for other members before it returns; ranks that share cores yield meanwhile."""

WHOLE_BYTES, WHOLE_BYTES_OVERSUBSCRIBED = 64 * 1024, 512 * 1024
"""Most bytes that a member reduces in addition to save a step: then each member reduces all elements."""

DIRECT_BYTES, DIRECT_BYTES_OF_TWO = 64 * 1024, 2 * 1024 * 1024
"""Bytes of the smallest buffer for which the members find out, in one step, whether it is in an array that they share. Two
members reduce smaller arrays faster through their buffers, as the extension makes the whole call. Measured: 64 KiB 11 us, in
place 44 us; 1 MiB 130 and 170 us; 4 MiB 510 and 270 us."""


def poll_ns(nbytes: int, oversubscribed: bool) -> int:
    """Return the time for which the extension polls for members that move ``nbytes``: 20 us (200 us) and 0.5 ns a byte."""
    return (POLL_NS_OVERSUBSCRIBED if oversubscribed else POLL_NS) + nbytes // 2


class SharedMemoryTransport:
    """Moves host memory between the members of one group on one node.

    Args:
        single_copy: bytes of the largest block from which calls of a kind copy once, from process to process; the same on all
            members.

    Attributes:
        usable: False if there is no shared memory for this group; the same on all members.
        why: why there is none, if this member knows.
    """

    def __init__(
        self, comm: MPI.Intracomm, budget: Budget, oversubscribed: bool, single_copy: Mapping[Kind, int] | None = None
    ) -> None:
        self._comm = comm
        self._single_copy = single_copy or {}
        self._budget = budget
        self._oversubscribed = oversubscribed
        self._segment: Any = None
        self._arrays: list[weakref.ref[_Shared]] = []
        self._made = 0
        self.usable = True
        self.why = ""

    @property
    def ready(self) -> bool:
        """Whether the shared memory exists."""
        return self._segment is not None

    @property
    def room(self) -> int:
        """Bytes of a buffer of a member; 0 if the shared memory does not exist."""
        return 0 if self._segment is None else int(self._segment.room)

    def in_one_step(self, kind: Kind, brings: int) -> Any:
        """Return the segment of a call in one step: each member writes all its data, and then reads; None if there is none.

        Args:
            brings: bytes that each member, or the root only, contributes.
        """
        segment = self._segment
        if segment is None or brings > segment.room or self._may_be_shared(kind, brings):
            return None
        reduces_all = kind in (Kind.ALL_REDUCE, Kind.REDUCE)
        most = WHOLE_BYTES_OVERSUBSCRIBED if self._oversubscribed or kind is Kind.REDUCE else WHOLE_BYTES
        return None if reduces_all and brings * (segment.size - 2) > most else segment

    def in_single_copy(self, kind: Kind, nbytes: int) -> tuple[Any, int, int]:
        """Return the segment of a call that copies from process to process; if there is none: None, 0 and -1.

        Also return the bytes of a piece, and the bytes between the pieces for two members: for calls that the kernel refuses.
        """
        if self._segment is None or not self._copies_once(kind, nbytes):
            return None, 0, -1
        place = self._place() if kind in _SEPARATE else 0
        return self._segment, _even(nbytes, min(place or self._segment.room, PIECE)), place

    def _place(self) -> int:
        """Return the bytes of a buffer for each member, if a member has other bytes for each."""
        place: int = self._segment.room // self._segment.size // 16 * 16
        return place

    def in_pieces(self, kind: Kind, brings: int, dtype: np.dtype[Any]) -> tuple[Any, int]:
        """Return the segment of a call of one array in several steps, and the bytes of a piece; None and 0 if there is none.

        Args:
            brings: bytes that each member, or the root only, contributes.
        """
        segment = self._segment
        reduces = kind in (Kind.ALL_REDUCE, Kind.REDUCE)
        if segment is None or self._may_be_shared(kind, brings) or not (reduces or kind is Kind.BROADCAST):
            return None, 0
        least = PIECE if reduces else segment.room  # copies are not faster in pieces
        if brings <= least or (reduces and segment.size > 2) or _UNIT % max(dtype.itemsize, 1):
            return None, 0
        # The same for all dtypes: if calls are not compared, members may have different dtypes.
        return segment, _even(-(-brings // _UNIT), min(segment.room, PIECE) // _UNIT) * _UNIT

    def prepare(self) -> Steps:
        """Make the shared memory, at the first call that uses it. All members call this method, and are known to."""
        if self._segment is None and self.usable:
            room = self._budget.room()
            self._budget.spend(room)  # before the wait, as another group may be prepared at the same time
            made, room_made = yield from _make_segment(self._comm, room)
            if isinstance(made, str):
                self.usable, self.why = False, made
                self._budget.spend(-room)
            else:
                self._budget.spend(room_made - room)  # the size that member 0 has chosen
                self._segment = made

    def close(self) -> None:
        """Drop the shared memory, and return its bytes to the budget."""
        if self._segment is not None:
            self._budget.spend(-self._segment.room)
            self._segment, self.usable = None, False

    def share(self, nbytes: int) -> Generator[Pollable, None, _Shared | str]:
        """Make an array of bytes for each member in memory that all share.

        All members call this method, and are known to; :meth:`prepare` was called before. If there is no memory, the method
        returns why on all members.
        """
        page = mmap.PAGESIZE
        made = yield from map_together(self._comm, page, -(-nbytes // page) * page)
        if isinstance(made, str):
            return made
        self._made += 1
        memory = np.frombuffer(made[0], np.uint8)
        parts = [memory[page + rank * made[1] :][:nbytes] for rank in range(self._comm.Get_size())]
        array = _Shared(self._made, parts, self._comm.Get_rank())
        self._arrays = [known for known in self._arrays if known() is not None]
        self._arrays.append(weakref.ref(array))
        return array

    def _find(self, flat: Array) -> tuple[_Shared | None, int]:
        """Return the shared array that contains a buffer, and the place of the buffer in the array."""
        address = flat.ctypes.data
        for known in self._arrays:
            array = known()
            if array is not None and array.start <= address and address + flat.nbytes <= array.stop:
                return array, address - array.start
        return None, 0

    def steps(self, move: Movement, largest: int) -> Steps:
        """Yield the transfers of a movement; the memory has been prepared.

        Args:
            move: any movement except a barrier.
            largest: bytes of the largest block of any member.
        """
        kind = move.kind
        if kind is Kind.ALL_REDUCE:
            assert move.recv is not None
            return self.all_reduce(move.recv if move.send is None else move.send, move.recv, move.op)
        if kind is Kind.REDUCE:
            send = move.recv if move.send is None else move.send
            assert send is not None
            if send.nbytes * (self._segment.size - 2) <= WHOLE_BYTES_OVERSUBSCRIBED:
                return self._reduce_whole(send, move.recv, move.op, move.root)
            return self._reduce_parts(send, move.recv, move.op)
        if kind is Kind.REDUCE_SCATTER:
            return self._reduce_scatter(move, largest)
        if kind is Kind.BROADCAST:
            assert move.recv is not None
            return self._broadcast(_bytes(move.recv), move.root)
        return self._exchange(move, largest)

    def all_reduce(self, send: Array, recv: Array, op: str) -> Steps:
        """Reduce ``send`` of all members into ``recv``; both may be the same array."""
        if self._may_be_shared(Kind.ALL_REDUCE, recv.nbytes):
            return self._reduce_shared(send, recv, op)
        return self._reduce_copied(send, recv, op)

    def _may_be_shared(self, kind: Kind, nbytes: int) -> bool:
        """Return whether the buffers of a call may be in an array that the members share, and are reduced in place then."""
        least = DIRECT_BYTES_OF_TWO if self._segment.size == 2 else DIRECT_BYTES
        return self._made > 0 and kind is Kind.ALL_REDUCE and nbytes >= least

    def _reduce_copied(self, send: Array, recv: Array, op: str) -> Steps:
        extra = recv.nbytes * (self._segment.size - 2)
        if extra <= (WHOLE_BYTES_OVERSUBSCRIBED if self._oversubscribed else WHOLE_BYTES):
            return self._reduce_whole(send, recv, op)
        return self._reduce_parts(send, recv, op)

    def _copies_once(self, kind: Kind, largest: int) -> bool:
        """Return whether a call copies from process to process; the same on all members."""
        least = self._single_copy.get(kind)
        return least is not None and largest >= least and self._segment.room >= self._segment.size * _ENTRY

    def _transfer(self, kind: str, total: int, width: int, **more: Any) -> Pollable:
        """Return a transfer of ``total`` bytes in pieces of ``width`` (``native/segment.h``)."""
        budget = poll_ns(width, self._oversubscribed)
        made: Pollable = native.found.SharedTransfer(self._segment, kind, total, width, budget, **more)
        return made

    def _reduce_shared(self, send: Array, recv: Array, op: str) -> Steps:
        """Reduce in place if all members have their buffers in the same shared array; otherwise reduce copies.

        In the first step each member announces the place of its buffer. Then each member reduces its part of the elements, from
        all arrays into its own, and copies the parts of other members.
        """
        array, offset = self._find(recv) if send is recv else (None, 0)
        mine = (0 if array is None else array.number, offset)
        yield self._transfer("announce", 1, 1, words=mine)
        announced = [self._segment.announced(rank) for rank in range(self._segment.size)]
        if array is None or any(each != mine for each in announced):
            yield from self._reduce_copied(send, recv, op)
            return
        arrays = [part[offset : offset + recv.nbytes] for part in array.parts]
        width = LARGEST_BUFFER // recv.itemsize * recv.itemsize
        yield self._transfer("in place", recv.nbytes, width, arrays=arrays, **_reduction(op, recv.dtype))

    def _reduce_whole(self, send: Array, recv: Array | None, op: str, root: int = -1) -> Steps:
        """Reduce all elements on each member that gets the result, in one step a piece."""
        me, itemsize = self._segment.me, send.itemsize
        width = _even(send.size, min(self._segment.room, PIECE) // itemsize) * itemsize
        memory = _bytes(send)
        # The root reads its own elements from its own memory, unless elements of two other members are reduced there before.
        writes = [(me, 0, memory)] if root != me or (me > 1 and recv is send) else []
        result = _bytes(recv) if recv is not None and root in (-1, me) else None
        own = result if recv is send and result is not None else memory
        yield self._transfer(
            "reduce", send.nbytes, width, writes=writes, send=own, recv=result, **_reduction(op, send.dtype)
        )

    def _reduce_parts(self, send: Array, recv: Array | None, op: str) -> Steps:
        """Reduce a part of each piece on each member, and then read the parts of other members: two steps a piece."""
        width = _even(send.size, self._segment.room // send.itemsize) * send.itemsize
        result = None if recv is None else _bytes(recv)
        yield self._transfer("parts", send.nbytes, width, send=_bytes(send), recv=result, **_reduction(op, send.dtype))

    def _reduce_scatter(self, move: Movement, largest: int) -> Steps:
        """Write the blocks for other members, and reduce this member's block."""
        send, recv = move.send, move.recv
        assert send is not None
        assert recv is not None
        me, size, itemsize = self._segment.me, self._segment.size, send.itemsize
        room = self._place()
        blocks = _cut(send, move.sendcounts, None, size)
        width = _even(-(-largest // itemsize), room // itemsize) * itemsize
        writes = [(me, rank * room, blocks[rank]) for rank in range(size) if rank != me]
        own = blocks[me]
        result = _bytes(recv)[: own.nbytes]
        yield self._transfer(
            "reduce",
            largest,
            width,
            writes=writes,
            send=own,
            recv=result,
            read_at=me * room,
            **_reduction(move.op, send.dtype),
        )

    def _broadcast(self, memory: Array, root: int) -> Steps:
        """Write on the root, one piece ahead of the members that read; or copy once."""
        width = _even(memory.size, min(self._segment.room, PIECE))
        block = [(root, 0, memory)]
        is_root = self._segment.me == root
        kind = "single copy" if self._copies_once(Kind.BROADCAST, memory.size) else "copy"
        yield self._transfer(kind, memory.size, width, writes=block if is_root else [], reads=[] if is_root else block)

    def _exchange(self, move: Movement, largest: int) -> Steps:
        """Move blocks as bytes: each member writes blocks for other members, and reads its blocks; or copies them once."""
        me = self._segment.me
        blocks = self._blocks(move)
        once = self._copies_once(move.kind, largest)
        own: dict[str, Array] = {}
        if blocks.own is not None:
            target, source = blocks.own
            if once:
                own = {"send": source, "recv": target}  # copied while other members copy
            else:
                target[:] = source
        place = blocks.place
        yield self._transfer(
            "single copy" if once else "copy",
            largest,
            _even(largest, min(place or self._segment.room, PIECE)),
            writes=[(me, at * place, block, at if place else -1) for at, block in blocks.writes],
            reads=[(rank, at * place, block) for rank, at, block in blocks.reads],
            **own,
        )

    def exchange_apart(self, send: list[Array], recv: list[Array], largest: int, apart: list[int]) -> Steps:
        """Copy parts of an exchange from process to process, when all members know the lengths of all parts.

        Args:
            send, recv: contiguous arrays for and from each member.
            largest: bytes of the largest part that is copied.
            apart: the members whose parts are copied.
        """
        me, place = self._segment.me, self._place()
        sent, received = ([_bytes(each.reshape(-1)) for each in arrays] for arrays in (send, recv))
        own = {"send": sent[me], "recv": received[me]} if me in apart else {}
        writes = [(me, rank * place, part, rank) for rank, part in enumerate(sent) if rank != me] if own else []
        reads = [(rank, me * place, received[rank]) for rank in apart if rank != me]
        yield self._transfer("single copy", largest, place, writes=writes, reads=reads, **own)

    def _blocks(self, move: Movement) -> _Blocks:
        """Return the blocks of a member."""
        me, size, kind, root = self._segment.me, self._segment.size, move.kind, move.root
        others = [rank for rank in range(size) if rank != me]
        if kind in (Kind.ALL_GATHER, Kind.GATHER):
            send = None if move.send is None else _bytes(move.send)
            found = _Blocks(0, [(0, send)] if send is not None and root != me else [])
            if move.recv is not None:
                blocks = _cut(move.recv, move.recvcounts, move.recvdispls, size)
                found.reads = [(rank, 0, blocks[rank]) for rank in others]
                found.own = None if send is None else (blocks[me], send)
            return found
        assert move.recv is not None
        found = _Blocks(self._place())
        blocks = _cut(move.send, move.sendcounts, move.senddispls, size) if move.send is not None else []
        if kind is Kind.SCATTER:
            targets = {me: _bytes(move.recv)}
            found.reads = [] if me == root else [(root, me, targets[me])]
        else:
            assert kind is Kind.ALL_TO_ALL
            targets = dict(enumerate(_cut(move.recv, move.recvcounts, move.recvdispls, size)))
            found.reads = [(rank, me, targets[rank]) for rank in others]
        if blocks and root in (-1, me):
            found.writes = [(rank, blocks[rank]) for rank in others]
            found.own = targets[me], blocks[me]
        return found


@dataclass
class _Blocks:
    """The blocks that a member writes and reads.

    Attributes:
        place: bytes between the blocks for two members in a buffer; 0 if all members read the same block.
        writes: place and memory of each block for other members.
        reads: the member that writes a block, the place, and the memory for the block.
        own: where the member copies its own block, and the block.
    """

    place: int
    writes: list[tuple[int, Array]] = field(default_factory=list)
    reads: list[tuple[int, int, Array]] = field(default_factory=list)
    own: tuple[Array, Array] | None = None


class _Shared:
    """An array of bytes for each member in memory that all members share.

    Attributes:
        number: number of the array in the group.
        parts: arrays of all members, as bytes; this member's is from address ``start`` to ``stop``.
    """

    def __init__(self, number: int, parts: list[Array], me: int) -> None:
        self.number, self.parts = number, parts
        self.start = parts[me].ctypes.data
        self.stop = self.start + parts[me].nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The part of this member; an array made from the interface holds a reference to this object."""
        return {"shape": (self.stop - self.start,), "typestr": "|u1", "data": (self.start, False), "version": 3}


class Budget:
    """The shared memory that the groups of one process may use: its part of the memory of the node.

    Attributes:
        left: bytes that are left.
    """

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self._largest = min(LARGEST_BUFFER, max(SMALLEST_BUFFER, nbytes // 16))

    def room(self) -> int:
        """Return the bytes of a buffer for one more group; 0 if no memory is left."""
        room = self._largest
        while room >= SMALLEST_BUFFER:
            if _BUFFERS * room <= self.left:
                return room // 4096 * 4096
            room //= 2
        return 0

    def take(self, nbytes: int) -> bool:
        """Reserve bytes for another purpose if they are left, and return whether; a negative number returns bytes."""
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True

    def spend(self, room: int) -> None:
        """Count the buffers of a group, of ``room`` bytes each; a negative number returns them."""
        self.left -= _BUFFERS * room


_LINE, _BUFFERS, _PAGE = 128, 2, mmap.PAGESIZE
"""Bytes between the counters of two members, and buffers of each (``native/segment.h``; a test compares the numbers)."""

_ENTRY = 64
"""Bytes of a buffer for each member, in a transfer that copies once (``native/single_copy.c``; a test compares the numbers)."""

_SEPARATE = (Kind.SCATTER, Kind.ALL_TO_ALL)
"""Kinds in which a member has another block for each member."""

_UNIT = 1024
"""Pieces of a call are multiples of so many bytes: whole elements of each dtype of numbers."""


def _make_segment(comm: MPI.Intracomm, room: int) -> Generator[Pollable, None, tuple[Any, int]]:
    """Make the segment of a group whose members are on one node. All members call this function, and are known to.

    Args:
        room: bytes of a buffer, a multiple of the page size; the value of member 0 counts. 0: this member has no memory left.

    Returns:
        The segment and the bytes of its buffers; or, if there is none, why (on members that know, otherwise "") and 0.
    """
    size = comm.Get_size()
    head = -(-size * _LINE // _PAGE) * _PAGE
    why = "" if room else "the groups of this process use all shared memory that MPICOLL_SHM_MB allows"
    made = yield from map_together(comm, head, _BUFFERS * room, why)
    if isinstance(made, str):
        return made, 0
    memory, part = made
    room = part // _BUFFERS
    return native.found.Segment(memory, comm.Get_rank(), size, head, room), room


def _reduction(op: str, dtype: np.dtype[Any]) -> dict[str, Any]:
    return {"reduction": native.name_of(op, dtype), "itemsize": dtype.itemsize}


def _bytes(array: Array) -> Array:
    return array.view(np.uint8)


def _even(total: int, most: int) -> int:
    """Return the width, at most ``most``, of pieces of about equal length."""
    pieces = max(1, math.ceil(total / most))
    return max(1, min(most, math.ceil(total / pieces / 64) * 64))


def _cut(buffer: Array, counts: Any, displs: Any, size: int) -> list[Array]:
    """Return the blocks of a buffer, as bytes."""
    memory, itemsize = _bytes(buffer), buffer.itemsize
    counts = [buffer.size // size] * size if counts is None else counts
    displs = starts(counts) if displs is None else displs
    return [memory[at * itemsize : (at + many) * itemsize] for at, many in zip(displs, counts, strict=True)]
