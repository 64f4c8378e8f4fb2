"""Objects as memory: a head, which is a checked header and the pickle stream, and the buffers that stay out of the stream.

``head = header | length of each buffer | pickle stream``, all in the order and the byte order of the machine. The buffers
(pickle protocol 5, PEP 574) are the memory of the objects themselves: they are sent from where they are and received where
they stay. What comes from another rank is believed only after :func:`read_header` and :meth:`Arriving.open`: no memory is
allocated for sizes that cannot be.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

HEADER = struct.Struct("=7scqqqqQ")
"""Magic, kind, sequence number, number of buffers, bytes of the stream, bytes of all buffers, CRC-32 of all these."""

_CHECKED = HEADER.size - 8
_CHECKSUM = struct.Struct("=Q")

CHUNK_BYTES = 1 << 30
"""Bytes of one piece at most: MPI counts up to 2**31 - 1."""


_MAGIC = b"mpicoll"
_LENGTH = 8

IN_BAND_BYTES = 16 * 1024
"""Buffers below this size are copied into the stream: one more movement takes longer than copying them twice."""


def need_list(value: Any, name: str) -> None:
    """Raise TypeError unless ``value`` is a list (a tuple is refused, as in torch)."""
    if not isinstance(value, list):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type list but got {type(value).__name__} instead."
        )


class WireError(ValueError):
    """What came is not an object that belongs here; the message says why."""


class Header:
    """What the header of an object says, once it has been checked.

    Attributes:
        buffers: number of buffers out of the stream.
        stream: bytes of the pickle stream.
        tail: bytes of all buffers.
    """

    __slots__ = ("buffers", "stream", "tail")

    def __init__(self, buffers: int, stream: int, tail: int) -> None:
        self.buffers = buffers
        self.stream = stream
        self.tail = tail

    @property
    def prefix_bytes(self) -> int:
        """Bytes before the stream."""
        return HEADER.size + _LENGTH * self.buffers

    @property
    def head_bytes(self) -> int:
        """Bytes of the head."""
        return self.prefix_bytes + self.stream

    @property
    def nbytes(self) -> int:
        """Bytes of head and buffers."""
        return self.head_bytes + self.tail


def cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ends of the pieces of at most ``CHUNK_BYTES`` from ``start`` to ``stop``."""
    for at in range(start, stop, CHUNK_BYTES):
        yield at, min(at + CHUNK_BYTES, stop)


def pieces(parts: list[Bytes]) -> list[Bytes]:
    """Return buffers in pieces, the same for the memory that they are sent from and received in."""
    return [part[a:b] for part in parts for a, b in cut(0, part.size)]


class Packed(Header):
    """An object of this rank, ready to be sent.

    Attributes:
        memory: its stream.
        parts: its buffers, in place.
    """

    __slots__ = ("memory", "parts")

    def __init__(self, stream: bytes, parts: list[Bytes]) -> None:
        self.memory = np.frombuffer(stream, np.uint8)
        self.parts = parts
        super().__init__(len(parts), self.memory.size, sum(part.size for part in parts))

    def prefix(self, kind: bytes, sequence: int) -> Bytes:
        """Return what stands before the stream: header and lengths."""
        prefix = np.empty(self.prefix_bytes, np.uint8)
        HEADER.pack_into(prefix.data, 0, _MAGIC, kind, sequence, self.buffers, self.stream, self.tail, 0)
        _CHECKSUM.pack_into(prefix.data, _CHECKED, zlib.crc32(prefix.data[:_CHECKED]))
        if self.parts:
            prefix[HEADER.size :].view(np.int64)[:] = [part.size for part in self.parts]
        return prefix

    def block(self, prefix: Bytes, into: Bytes) -> None:
        """Fill ``into`` with the first bytes of the head, and zeros if it is shorter."""
        ahead = min(prefix.size, into.size)
        behind = min(self.stream, into.size - ahead)
        into[:ahead] = prefix[:ahead]
        into[ahead : ahead + behind] = self.memory[:behind]
        into[ahead + behind :] = 0

    def rest(self, prefix: Bytes, start: int) -> list[Bytes]:
        """Return the head from ``start`` on, in the same pieces as :meth:`Arriving.rest`."""
        ahead = self.prefix_bytes
        pieces = [prefix[a:b] for a, b in cut(start, ahead)]
        return pieces + [self.memory[a - ahead : b - ahead] for a, b in cut(max(start, ahead), self.head_bytes)]

    def copied(self) -> Arriving:
        """Return a copy, to be loaded here: the buffers are copied, the stream is only read."""
        own = Arriving.__new__(Arriving)
        own.header = self
        own.head = self.memory
        own.start = 0
        own.parts = [part.copy() for part in self.parts]
        return own


class Arriving:
    """An object of another rank, from its first bytes on.

    Attributes:
        header: what its header says.
        head: memory of its head, or of its stream alone, which begins at ``start``.
        parts: memory of its buffers, each by itself, once they are known.
    """

    __slots__ = ("head", "header", "parts", "start")

    def __init__(self, block: Bytes, header: Header) -> None:
        self.header: Header = header
        self.start = header.prefix_bytes
        self.head = np.empty(header.head_bytes, np.uint8)
        known = min(block.size, self.head.size)
        self.head[:known] = block[:known]
        self.parts: list[Bytes] = []

    def rest(self, start: int) -> list[Bytes]:
        """Return where the head from ``start`` on is to be received, in pieces."""
        ahead, end = self.header.prefix_bytes, self.header.head_bytes
        return [self.head[a:b] for a, b in (*cut(start, ahead), *cut(max(start, ahead), end))]

    def open(self) -> None:
        """Allocate the buffers, when the head is here.

        Raises:
            WireError: their lengths do not add up.
        """
        lengths = self.head[HEADER.size : self.start].view(np.int64).tolist()
        if min(lengths, default=0) < 0 or sum(lengths) != self.header.tail:
            raise WireError(f"its {self.header.buffers} buffers do not add up to {self.header.tail} bytes")
        try:
            self.parts = [np.empty(length, np.uint8) for length in lengths]
        except MemoryError as error:
            raise WireError(f"there is no memory for its buffers of {self.header.tail} bytes") from error

    def load(self, whose: str) -> Any:
        """Return the object, when all is here.

        Args:
            whose: what to add to an error: the call, and where the object comes from.

        Raises:
            Exception: what unpickling raises.
        """
        try:
            return pickle.loads(self.head[self.start :].data, buffers=self.parts)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(
                    f"{whose} cannot be unpickled here. The list is as it was, and the group can still be used."
                )
            raise


def pack(value: Any) -> Packed:
    """Pickle an object; the memory of its large buffers is not copied.

    Raises:
        Exception: what pickling raises.
    """
    parts: list[Bytes] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:
            return True  # not contiguous: pickle says so
        if raw.nbytes < IN_BAND_BYTES:
            return True
        parts.append(np.frombuffer(raw, np.uint8))
        return False

    return Packed(pickle.dumps(value, protocol=5, buffer_callback=in_band), parts)


def read_header(block: Bytes, kind: bytes, sequence: int, most: int, most_head: int) -> Header:
    """Return what the header at the start of ``block`` says.

    Args:
        kind, sequence: what it has to say.
        most, most_head: bytes of the largest object, and of the largest head, that may come.

    Raises:
        WireError: it is cut short, of something else, or of sizes that cannot be.
    """
    if block.size < HEADER.size:
        raise WireError(f"it is cut short after {block.size} bytes")
    magic, what, number, buffers, stream, tail, checksum = HEADER.unpack_from(block.data)
    if magic != _MAGIC or checksum != zlib.crc32(block.data[:_CHECKED]):
        raise WireError("it does not begin as objects do")
    if what != kind:
        raise WireError(f"it is of kind {what!r}, not {kind!r}")
    if number != sequence:
        raise WireError(f"it belongs to number {number}, not {sequence}")
    header = Header(buffers, stream, tail)
    if min(buffers, stream, tail) < 0 or header.head_bytes > most_head or header.nbytes > most:
        raise WireError(
            f"its {buffers} buffers of {tail} bytes and its stream of {stream} do not fit into the {most} bytes "
            f"({most_head} before the buffers) that were agreed"
        )
    return header
