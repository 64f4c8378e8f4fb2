"""The node engine: members on one node move data through memory that they share, without MPI.

Every movement is a sequence of steps (see :mod:`mpicoll.transports.shm.segment`): write what the others are to read, come to the
step, wait until those whose data is wanted have come, read. All members make the same steps, whatever their part in them is,
since their number follows from what they have agreed on.

Reductions are bitwise the same on all members and from run to run: every element is reduced in the order of the ranks,
either by one member alone, or by all of them in the same way.

Waiting is done by whoever drives the steps: they yield what has to be so before they go on.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.memory.arithmetic import quietly
from mpicoll.runtime import native
from mpicoll.transports.base import Array, Kind, Movement, Request, starts
from mpicoll.transports.shm.mapping import map_together
from mpicoll.transports.shm.segment import BUFFERS, ORDERED, Meeting, Segment, make_segment

Steps = Generator[Request, None, None]

LARGEST_BUFFER = 1024 * 1024
"""Bytes of a buffer: a piece that is written, and read by the others, while it is in the caches of the cores (measured)."""
SMALLEST_BUFFER = 32 * 1024

PIECE = 256 * 1024
"""Bytes of a piece of what the extension moves in several of them (measured): while one is read the next is written."""

PATIENCE, PATIENCE_CROWDED = 20_000, 500
"""Nanoseconds for which the extension looks for the others."""

WHOLE_BYTES, WHOLE_BYTES_CROWDED = 64 * 1024, 512 * 1024
"""How much more a member may reduce to save a step: up to so many bytes all reduce everything, each for itself."""

DIRECT_BYTES = 64 * 1024
"""From how many bytes on it is asked whether a buffer is in an array that the members share; that takes a step."""

POLLS = 200
MOST_PIECES = 256

OPS: dict[str, Callable[..., Any]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
}


class NodeEngine:
    """Moves host memory between the members of one group on one node.

    Attributes:
        usable: False when there is no shared memory for this group; known to all members alike.
        why: why not, where this member knows.
    """

    def __init__(self, comm: MPI.Intracomm, budget: Budget, crowded: bool, in_python: bool = False) -> None:
        self._comm = comm
        self._machine = None if in_python else native.found
        self._piece = LARGEST_BUFFER if in_python else PIECE
        self._budget = budget
        self._crowded = crowded
        self._polls = 2 if crowded else POLLS
        self._segment: Segment | None = None
        self._arrays: list[weakref.ref[_Shared]] = []
        self._made = 0
        self._pieces: dict[tuple[str, int], tuple[tuple[Array, Array], ...]] = {}
        self.usable = True
        self.why = ""

    @property
    def ready(self) -> bool:
        """Whether the shared memory is there."""
        return self._segment is not None

    def in_one_step(self, kind: Kind, brings: int) -> Segment | None:
        """Return the memory of a call whose members each write all that they bring, and then read what they want; or None.

        Args:
            brings: bytes that each member, or the root alone, contributes.
        """
        segment = self._segment
        if segment is None or brings > segment.room or not ORDERED or (self._made and brings >= DIRECT_BYTES):
            return None
        reduces_all = kind in (Kind.ALL_REDUCE, Kind.REDUCE)
        most = WHOLE_BYTES_CROWDED if self._crowded or kind is Kind.REDUCE else WHOLE_BYTES
        return None if reduces_all and brings * (segment.size - 2) > most else segment

    def in_pieces(self, kind: Kind, brings: int, dtype: np.dtype[Any]) -> tuple[Segment | None, int]:
        """Return the memory of a call of one array that the extension makes in steps, and the bytes of a piece; or None, 0.

        Args:
            brings: bytes that each member, or the root alone, contributes.
        """
        segment = self._segment
        reduces = kind in (Kind.ALL_REDUCE, Kind.REDUCE)
        if segment is None or not ORDERED or self._made or not (reduces or kind is Kind.BROADCAST):
            return None, 0
        least = PIECE if reduces else segment.room  # what is only copied is no faster in pieces
        if brings <= least or (reduces and segment.size > 2) or _UNIT % max(dtype.itemsize, 1):
            return None, 0
        # The same for each dtype: where nothing is compared, members may see the same bytes as different elements.
        return segment, _even(-(-brings // _UNIT), min(segment.room, PIECE) // _UNIT) * _UNIT

    def again(self, move: Movement, largest: int) -> Steps:
        """Move as :meth:`steps` does, with less around it where that is possible."""
        flat = move.recv
        if move.kind is Kind.ALL_REDUCE and move.send is None and flat is not None:
            segment = self._segment
            assert segment is not None
            one = flat.nbytes <= min(segment.room, self._piece) and not (self._made and flat.nbytes >= DIRECT_BYTES)
            if segment.size == 2 and one and self._machine is None:
                return self._reduce_two(segment, flat, move.op)
        return self.steps(move, largest)

    def prepare(self) -> Steps:
        """Make the shared memory, at the first call that wants it; all members do it, and are known to."""
        if self._segment is None and self.usable:
            room = self._budget.room(self._comm.Get_size())
            self._budget.spend(room)  # now: another group may be prepared at the same time
            made = yield from make_segment(self._comm, room, room > 0)
            if isinstance(made, str):
                self.usable, self.why = False, made
                self._budget.spend(-room)
            else:
                self._budget.spend(made.room - room)  # what member 0 has given each
                self._segment = made

    def close(self) -> None:
        """Leave the shared memory, and the room for it to others."""
        if self._segment is not None:
            self._budget.spend(-self._segment.room)
            self._segment, self.usable = None, False

    def share(self, nbytes: int) -> Generator[Request, None, _Shared | str]:
        """Make an array of bytes for each member in memory that all share.

        Called by all members, which are known to; :meth:`prepare` has been. Returns why not where there is none, on all.
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
        """Return in which of the arrays that the members share a buffer is, and where."""
        address = flat.ctypes.data
        for known in self._arrays:
            array = known()
            if array is not None and array.start <= address and address + flat.nbytes <= array.stop:
                return array, address - array.start
        return None, 0

    def steps(self, move: Movement, largest: int) -> Steps:
        """Move; the memory has been prepared.

        Args:
            move: any but a barrier.
            largest: bytes of the largest block of any member.
        """
        segment = self._segment
        assert segment is not None
        kind = move.kind
        if kind is Kind.ALL_REDUCE:
            assert move.recv is not None
            return self.all_reduce(move.recv if move.send is None else move.send, move.recv, move.op)
        if kind is Kind.REDUCE:
            send = move.recv if move.send is None else move.send
            assert send is not None
            return self._reduce(segment, send, move.recv, move.op, move.root)
        if kind is Kind.REDUCE_SCATTER:
            return self._reduce_scatter(segment, move, largest)
        if kind is Kind.BROADCAST:
            assert move.recv is not None
            return self._broadcast(segment, _bytes(move.recv), move.root)
        return self._exchange(segment, move, largest)

    def all_reduce(self, send: Array, recv: Array, op: str) -> Steps:
        """Reduce ``send`` of all members into ``recv``; they may be the same."""
        segment = self._segment
        assert segment is not None
        if self._made and recv.nbytes >= DIRECT_BYTES:
            return self._reduce_shared(segment, send, recv, op)
        return self._reduce_copied(segment, send, recv, op)

    def _reduce_copied(self, segment: Segment, send: Array, recv: Array, op: str) -> Steps:
        extra = recv.nbytes * (segment.size - 2)
        if extra <= (WHOLE_BYTES_CROWDED if self._crowded else WHOLE_BYTES):
            return self._reduce_whole(segment, send, recv, op)
        return self._reduce_parts(segment, send, recv, op, -1)

    def _reduce_shared(self, segment: Segment, send: Array, recv: Array, op: str) -> Steps:
        """Reduce in place what all members have in the same shared array; else go the usual way.

        In a first step each says where its buffer is. Then each reduces its part of the elements, from all arrays into its own,
        and copies the parts of the others. The last step is over when nobody reads this member's array any more.
        """
        me, size = segment.me, segment.size
        array, offset = self._find(recv) if send is recv else (None, 0)
        lines = segment.lines
        step = segment.step
        if not segment.all_at(step):
            yield Meeting(segment.counters, segment.peers, step)
        step += 1
        place = segment.places[me]
        lines[place + 1], lines[place + 2] = (0 if array is None else array.number), offset
        segment.come(step)
        late = self._await(segment, step)
        if late is not None:
            yield late
        if array is None or any((lines[peer + 1], lines[peer + 2]) != (array.number, offset) for peer in segment.peers):
            yield from self._reduce_copied(segment, send, recv, op)
            return
        whole = [part[offset : offset + recv.nbytes].view(recv.dtype) for part in array.parts]
        edges = [recv.size * rank // size for rank in range(size + 1)]
        low, high = edges[me], edges[me + 1]
        width = max(1, LARGEST_BUFFER // recv.itemsize)
        for start in range(low, high, width):
            stop = min(start + width, high)
            terms = [part[start:stop] for part in whole]
            if me > 1:
                terms[me] = terms[me].copy()  # the first two are reduced into its place
            fold(OPS[op], terms, recv[start:stop])
        step += 1
        segment.come(step)
        late = self._await(segment, step)
        if late is not None:
            yield late
        for rank in segment.others:
            recv[edges[rank] : edges[rank + 1]] = whole[rank][edges[rank] : edges[rank + 1]]
        step += 1
        segment.come(step)
        late = self._await(segment, step)
        if late is not None:
            yield late

    def _reduce(self, segment: Segment, send: Array, recv: Array | None, op: str, root: int) -> Steps:
        if send.nbytes * (segment.size - 2) <= WHOLE_BYTES_CROWDED:
            return self._reduce_whole(segment, send, recv, op, root)
        return self._reduce_parts(segment, send, recv, op, root)

    def _await(self, segment: Segment, step: int) -> Request | None:
        """Poll a while for all others to come to a step; return what to wait for if they do not."""
        counters, peers = segment.counters, segment.peers
        for _ in range(self._polls):
            for peer in peers:
                if counters[peer] < step:
                    break
            else:
                return None
        return Meeting(counters, peers, step)

    def _reduce_whole(self, segment: Segment, send: Array, recv: Array | None, op: str, root: int = -1) -> Steps:
        """Each member that wants the result reduces everything, in one step a piece."""
        me, size, dtype, ufunc = segment.me, segment.size, send.dtype, OPS[op]
        buffers = segment.buffers(dtype)
        mine = buffers[me]
        total = send.size
        width = _even(total, min(mine[0].size, self._piece // dtype.itemsize))
        name = native.name_of(op, dtype)
        machine = self._machine_for(segment)
        if machine is not None and machine.knows(name) and (recv is None or recv is send):
            flat = _bytes(send)
            written = [(me, 0, flat)] if root != me or me > 1 else []
            taken = [(me, 0, flat)] if root in (-1, me) else []
            size = dtype.itemsize
            yield from self._in_c(segment, total * size, width * size, written, taken, name, size)
            return
        step = segment.step
        reads = root in (-1, me)
        for start in range(0, total, width):
            part = send[start : start + width]
            many = part.size
            if not segment.all_at(step):
                late = self._await(segment, step)
                if late is not None:
                    yield late
            step += 1
            which = step & 1
            if root != me:
                mine[which][:many] = part
            segment.come(step)
            if not reads:
                continue
            late = self._await(segment, step)
            if late is not None:
                yield late
            assert recv is not None
            out = recv[start : start + width]
            theirs = [part if rank == me else buffers[rank][which][:many] for rank in range(size)]
            if me > 1 and root == -1 and out is not None:
                theirs[me] = mine[which][:many]  # the first two are reduced into where this member's own may stand
            elif me > 1:
                theirs[me] = part.copy()
            fold(ufunc, theirs, out)

    def _machine_for(self, segment: Segment) -> Any:
        """Return the extension, where it can be used: it reads and writes counters as numbers in memory."""
        return self._machine if segment.counters is segment.lines else None

    def _in_c(
        self,
        segment: Segment,
        total: int,
        width: int,
        writes: list[tuple[int, int, Array]],
        reads: list[tuple[int, int, Array]],
        reduction: str = "",
        itemsize: int = 1,
    ) -> Steps:
        """Make the same steps in the extension.

        Args:
            total, width: bytes of the largest block, and of a piece.
            writes, reads: blocks of bytes, with whose buffer they are written to or read from, and where in it.
            reduction: what is done with the blocks of all, which stand first in their buffers; its result is what is read.
        """
        patience = (PATIENCE_CROWDED if self._crowded else PATIENCE) + width // 4
        assert self._machine is not None
        mover = self._machine.Mover(
            **segment.layout(),
            me=segment.me,
            size=segment.size,
            step=segment.step,
            total=total,
            width=width,
            writes=writes,
            reads=reads,
            reduction=reduction,
            itemsize=itemsize,
            patience=patience,
        )
        sources = segment.peers if reduction else tuple(segment.places[rank] for rank, _, _ in reads)
        while not mover.go():
            yield Meeting(segment.counters, sources if mover.has_written else segment.peers, mover.wanted)
        segment.step = mover.step

    def _reduce_two(self, segment: Segment, flat: Array, op: str) -> Steps:
        """Reduce one piece of two members in place: as the general way does it, with less around it."""
        counters, step, peer, me = segment.counters, segment.step, segment.peers[0], segment.me
        key = (flat.dtype.char, flat.size)
        pieces = self._pieces.get(key)
        if pieces is None:
            if len(self._pieces) >= MOST_PIECES:
                self._pieces.clear()
            of = segment.buffers(flat.dtype)
            pieces = self._pieces[key] = tuple((of[me][i][: flat.size], of[1 - me][i][: flat.size]) for i in (0, 1))
        if counters[peer] < step:
            late = self._await(segment, step)
            if late is not None:
                yield late
        step += 1
        mine, other = pieces[step & 1]
        np.copyto(mine, flat)
        segment.come(step)
        for _ in range(self._polls):
            if counters[peer] >= step:
                break
        else:
            yield Meeting(counters, segment.peers, step)
        if me:
            quietly(OPS[op], other, flat, out=flat)
        else:
            quietly(OPS[op], flat, other, out=flat)

    def _reduce_parts(self, segment: Segment, send: Array, recv: Array | None, op: str, root: int) -> Steps:
        """Each member reduces its part of a piece, and then reads the parts of the others: two steps a piece."""
        me, size, dtype, ufunc = segment.me, segment.size, send.dtype, OPS[op]
        buffers = segment.buffers(dtype)
        mine = buffers[me]
        total = send.size
        width = _even(total, mine[0].size)
        reads = root in (-1, me)
        step = segment.step
        for start in range(0, total, width):
            part = send[start : start + width]
            many = part.size
            edges = [many * rank // size for rank in range(size + 1)]
            low, high = edges[me], edges[me + 1]
            if not segment.all_at(step):
                late = self._await(segment, step)
                if late is not None:
                    yield late
            step += 1
            which = step & 1
            buffer = mine[which]
            buffer[:low] = part[:low]
            buffer[high:many] = part[high:]
            segment.come(step)
            late = self._await(segment, step)
            if late is not None:
                yield late
            result = mine[which ^ 1][low:high]
            fold(
                ufunc,
                [part[low:high] if rank == me else buffers[rank][which][low:high] for rank in range(size)],
                result,
            )
            # All have come to this step, so nobody reads the other buffer any more.
            step += 1
            which ^= 1
            segment.come(step)
            if not reads:
                continue
            assert recv is not None
            out = recv[start : start + width]
            out[low:high] = result
            late = self._await(segment, step)
            if late is not None:
                yield late
            for rank in segment.others:
                out[edges[rank] : edges[rank + 1]] = buffers[rank][which][edges[rank] : edges[rank + 1]]

    def _reduce_scatter(self, segment: Segment, move: Movement, largest: int) -> Steps:
        """Each member writes the blocks of the others, and reduces its own from theirs."""
        send, recv = move.send, move.recv
        assert send is not None
        assert recv is not None
        me, size, ufunc = segment.me, segment.size, OPS[move.op]
        itemsize = send.itemsize
        counts = [send.size // size] * size if move.sendcounts is None else list(move.sendcounts)
        displs = starts(counts)
        buffers = segment.buffers(send.dtype)
        mine = buffers[me]
        room = mine[0].size // size
        most = -(-largest // itemsize)
        width = _even(most, room)
        step = segment.step
        for start in range(0, most, width):
            if not segment.all_at(step):
                late = self._await(segment, step)
                if late is not None:
                    yield late
            step += 1
            which = step & 1
            for rank in segment.others:
                many = min(counts[rank] - start, width)
                if many > 0:
                    at = displs[rank] + start
                    mine[which][rank * room : rank * room + many] = send[at : at + many]
            segment.come(step)
            late = self._await(segment, step)
            if late is not None:
                yield late
            many = min(counts[me] - start, width)
            if many > 0:
                at = displs[me] + start
                theirs = [
                    send[at : at + many] if rank == me else buffers[rank][which][me * room : me * room + many]
                    for rank in range(size)
                ]
                fold(ufunc, theirs, recv[start : start + many])

    def _broadcast(self, segment: Segment, memory: Array, root: int) -> Steps:
        """The root writes, one piece ahead of those who read."""
        me = segment.me
        buffers = segment.buffers(memory.dtype)[root]
        total = memory.size
        width = _even(total, min(buffers[0].size, self._piece))
        source = (segment.places[root],)
        if self._machine_for(segment) is not None:
            block = [(root, 0, memory)]
            yield from self._in_c(segment, total, width, block if me == root else [], [] if me == root else block)
            return
        step = segment.step
        for start in range(0, total, width):
            if me == root and not segment.all_at(step):
                late = self._await(segment, step)
                if late is not None:
                    yield late
            step += 1
            which = step & 1
            piece = memory[start : start + width]
            if me == root:
                buffers[which][: piece.size] = piece
                segment.come(step)
                continue
            segment.come(step)
            counters = segment.counters
            for _ in range(self._polls):
                if counters[source[0]] >= step:
                    break
            else:
                yield Meeting(counters, source, step)
            piece[:] = buffers[which][: piece.size]

    def _exchange(self, segment: Segment, move: Movement, largest: int) -> Steps:
        """Move blocks: each member writes those that others want, and reads those that it wants, as bytes."""
        me = segment.me
        writes, reads, room = self._blocks(segment, move)
        buffers = segment.buffers(_BYTE)
        mine = buffers[me]
        width = _even(largest, min(room, self._piece))
        if self._machine_for(segment) is not None:
            written = [(me, place * room, block) for place, block in writes]
            read = [(rank, place * room, block) for rank, place, block in reads]
            yield from self._in_c(segment, largest, width, written, read)
            return
        step = segment.step
        for start in range(0, largest, width):
            if writes and not segment.all_at(step):
                late = self._await(segment, step)
                if late is not None:
                    yield late
            step += 1
            which = step & 1
            for place, block in writes:
                piece = block[start : start + width]
                mine[which][place * room : place * room + piece.size] = piece
            segment.come(step)
            if not reads:
                continue
            late = self._await(segment, step)
            if late is not None:
                yield late
            for rank, place, block in reads:
                piece = block[start : start + width]
                if piece.size:
                    piece[:] = buffers[rank][which][place * room : place * room + piece.size]

    def _blocks(
        self, segment: Segment, move: Movement
    ) -> tuple[list[tuple[int, Array]], list[tuple[int, int, Array]], int]:
        """Return what this member writes (place, block), what it reads (from whom, place, block), and the room of a place.

        Its own block goes straight from where it is to where it goes.
        """
        me, size, kind, root = segment.me, segment.size, move.kind, move.root
        writes: list[tuple[int, Array]] = []
        reads: list[tuple[int, int, Array]] = []
        whole = segment.room
        shared = whole // size // 16 * 16
        if kind in (Kind.ALL_GATHER, Kind.GATHER):
            if move.send is not None and root != me:
                writes = [(0, _bytes(move.send))]
            if move.recv is not None:
                blocks = _cut(move.recv, move.recvcounts, move.recvdispls, size)
                reads = [(rank, 0, blocks[rank]) for rank in segment.others]
                if move.send is not None:
                    blocks[me][:] = _bytes(move.send)
            return writes, reads, whole
        blocks = _cut(move.send, move.sendcounts, move.senddispls, size) if move.send is not None else []
        if kind is Kind.SCATTER:
            assert move.recv is not None
            if me == root:
                writes = [(rank, blocks[rank]) for rank in segment.others]
                _bytes(move.recv)[:] = blocks[me]
            else:
                reads = [(root, me, _bytes(move.recv))]
            return writes, reads, shared
        assert kind is Kind.ALL_TO_ALL
        assert move.recv is not None
        targets = _cut(move.recv, move.recvcounts, move.recvdispls, size)
        targets[me][:] = blocks[me]
        writes = [(rank, blocks[rank]) for rank in segment.others]
        return writes, [(rank, me, targets[rank]) for rank in segment.others], shared


class _Shared:
    """An array of bytes of each member in memory that all of them share.

    Attributes:
        number: which of the group's.
        parts: those of the members, as bytes; this one's is from address ``start`` to ``stop``.
    """

    def __init__(self, number: int, parts: list[Array], me: int) -> None:
        self.number, self.parts = number, parts
        self.start = parts[me].ctypes.data
        self.stop = self.start + parts[me].nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """This member's part; an array made of it keeps this object."""
        return {"shape": (self.stop - self.start,), "typestr": "|u1", "data": (self.start, False), "version": 3}


class Budget:
    """How much shared memory the groups of one process may take: its part of what is given to a node.

    Attributes:
        left: bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self._largest = min(LARGEST_BUFFER, max(SMALLEST_BUFFER, nbytes // 16))

    def room(self, size: int) -> int:
        """Return the bytes of a buffer of one more group; 0: there is none left."""
        room = self._largest
        while room >= SMALLEST_BUFFER:
            if BUFFERS * room <= self.left:
                return room // 4096 * 4096
            room //= 2
        return 0

    def take(self, nbytes: int) -> bool:
        """Take so many bytes for something else, if they are left; less than 0: give them back."""
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True

    def spend(self, room: int) -> None:
        """Note that a group is made with buffers of ``room`` bytes; less than 0: that they are given back."""
        self.left -= BUFFERS * room


_BYTE = np.dtype(np.uint8)
_UNIT = 1024
"""Bytes of which the pieces of a call are multiples: whole elements of every kind of number."""


def _bytes(array: Array) -> Array:
    return array.view(np.uint8)


def _even(total: int, most: int) -> int:
    """Return the width of pieces of at most ``most``, so that all are about equally long."""
    pieces = max(1, math.ceil(total / most))
    return max(1, min(most, math.ceil(total / pieces / 64) * 64))


def _cut(buffer: Array, counts: Any, displs: Any, size: int) -> list[Array]:
    """Return the blocks of a buffer, as bytes."""
    memory, itemsize = _bytes(buffer), buffer.itemsize
    counts = [buffer.size // size] * size if counts is None else counts
    displs = starts(counts) if displs is None else displs
    return [memory[at * itemsize : (at + many) * itemsize] for at, many in zip(displs, counts, strict=True)]


def fold(ufunc: Callable[..., Any], terms: list[Array], out: Array) -> None:
    """Reduce the terms in their order into ``out``, which may be the first or the second of them, and no other."""
    quietly(ufunc, terms[0], terms[1], out=out)
    for term in terms[2:]:
        quietly(ufunc, out, term, out=out)
