"""Pickle objects to memory that can be moved: a head with a header and the pickle stream, and buffers outside the stream.

``head = header | length of each buffer | pickle stream``, all in the byte order of the machine. The buffers (pickle protocol
5, PEP 574) are the memory of the objects: they are sent and received without a copy. Bytes of another rank are used only after
the checks of :func:`read_header` and :meth:`IncomingObject.open`: no memory is allocated for impossible sizes.
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
"""Magic, kind, sequence number, number of buffers, bytes of the stream, bytes of all buffers, CRC-32 of the fields before."""

_FIELDS = struct.Struct("=7scqqqq")
_CHECKED = _FIELDS.size
_CHECKSUM = struct.Struct("=Q")

CHUNK_BYTES = 1 << 30
"""Most bytes of one piece: counts of MPI end at 2**31 - 1."""


_MAGIC = b"mpicoll"
_LENGTH = 8
_JOINED = b"mpicoll\n"
"""The beginning of a stream with buffers: no pickle begins so."""

IN_BAND_BYTES = 16 * 1024
"""Smaller buffers are copied into the stream: two copies take less time than one more transfer."""


def need_list(value: Any, name: str) -> None:
    """Raise TypeError unless ``value`` is a list (a tuple is refused, as in torch)."""
    if not isinstance(value, list):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type list but got {type(value).__name__} instead."
        )


class WireError(ValueError):
    """Received bytes are not an object that belongs to this call; the message says why."""


class Header:
    """The checked fields of an object's header.

    Attributes:
        buffers: number of buffers outside the stream.
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
    """Yield start and end of each piece of at most ``CHUNK_BYTES`` from ``start`` to ``stop``."""
    for at in range(start, stop, CHUNK_BYTES):
        yield at, min(at + CHUNK_BYTES, stop)


def pieces(parts: list[Bytes]) -> list[Bytes]:
    """Cut buffers into pieces, on the sender and on the receiver alike."""
    return [part[a:b] for part in parts for a, b in cut(0, part.size)]


class Packed(Header):
    """An object of this rank, ready to be sent.

    Attributes:
        memory: pickle stream.
        parts: buffers of the object, not copied.
    """

    __slots__ = ("memory", "parts")

    def __init__(self, stream: bytes, parts: list[Bytes]) -> None:
        self.memory = np.frombuffer(stream, np.uint8)
        self.parts = parts
        super().__init__(len(parts), self.memory.size, sum(part.size for part in parts))

    def prefix(self, kind: bytes, sequence: int) -> Bytes:
        """Return the bytes before the stream: header and lengths of the buffers."""
        prefix = np.empty(self.prefix_bytes, np.uint8)
        prefix[: HEADER.size].data[:] = header_of(kind, sequence, self.buffers, self.stream, self.tail)
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
        """Return the head from ``start`` on, in the same pieces as :meth:`IncomingObject.rest`."""
        ahead = self.prefix_bytes
        pieces = [prefix[a:b] for a, b in cut(start, ahead)]
        return pieces + [self.memory[a - ahead : b - ahead] for a, b in cut(max(start, ahead), self.head_bytes)]

    def copied(self) -> IncomingObject:
        """Return a copy that this rank can load: the buffers are copied, the stream is only read."""
        own = IncomingObject.__new__(IncomingObject)
        own.header = self
        own.head = self.memory
        own.start = 0
        own.parts = [part.copy() for part in self.parts]
        return own


class IncomingObject:
    """An object of another rank, whose first bytes have been received.

    Attributes:
        header: fields of the header.
        head: memory of the head, or only of the stream, which begins at ``start``.
        parts: memory of each buffer, after :meth:`open`.
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
        """Return the memory in which the head from ``start`` on is received, in pieces."""
        ahead, end = self.header.prefix_bytes, self.header.head_bytes
        return [self.head[a:b] for a, b in (*cut(start, ahead), *cut(max(start, ahead), end))]

    def open(self) -> None:
        """Allocate the buffers, after the head has been received.

        Raises:
            WireError: the lengths of the buffers do not add up, or there is no memory.
        """
        lengths = self.head[HEADER.size : self.start].view(np.int64).tolist()
        if min(lengths, default=0) < 0 or sum(lengths) != self.header.tail:
            raise WireError(f"the {self.header.buffers} buffers do not add up to {self.header.tail} bytes")
        try:
            self.parts = [np.empty(length, np.uint8) for length in lengths]
        except MemoryError as error:
            raise WireError(f"there is no memory for the buffers of {self.header.tail} bytes") from error

    @property
    def stream(self) -> memoryview:
        """The pickle stream, after the head has been received."""
        return self.head[self.start :].data

    def load(self, whose: str, weights_only: bool = False) -> Any:
        """Unpickle the object, after all of it has been received.

        Args:
            whose: words for an error: the call, and the rank that sent the object.
            weights_only: load data only (see :func:`mpicoll.memory.data_unpickler.load_data`).

        Raises:
            Exception: as unpickling raises.
        """
        return load(self.stream, self.parts, whose, weights_only)


def load(stream: bytes | memoryview, parts: list[Bytes], whose: str, weights_only: bool) -> Any:
    """Unpickle a stream and its buffers; arguments and errors as :meth:`IncomingObject.load`."""
    try:
        if weights_only:
            from mpicoll.memory.data_unpickler import load_data  # few programs ask for it

            return load_data(memoryview(stream), parts)
        return pickle.loads(stream, buffers=parts)
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(
                f"{whose} cannot be unpickled on this rank. The list is unchanged, and the group can still be used."
            )
        raise


def stream_of(value: Any) -> tuple[bytes, list[Bytes]]:
    """Pickle an object; return the stream, and the large buffers outside the stream, which are not copied.

    Raises:
        Exception: as pickling raises.
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

    return pickle.dumps(value, protocol=5, buffer_callback=in_band), parts


def joined(stream: bytes, parts: list[Bytes]) -> bytes:
    """Return a stream and its buffers in one bytes object: the stream itself if there are no buffers."""
    if not parts:
        return stream
    lengths = np.array([len(parts), len(stream), *[part.size for part in parts]], np.int64)
    return b"".join((_JOINED, lengths.tobytes(), stream, *(part.data for part in parts)))


def separated(message: bytes) -> tuple[bytes, list[Bytes]]:
    """Return the stream and the buffers of such a bytes object; the buffers are memory of the object."""
    if not message.startswith(_JOINED):
        return message, []
    (count,) = np.frombuffer(message, np.int64, 1, len(_JOINED)).tolist()
    length, *sizes = np.frombuffer(message, np.int64, count + 1, len(_JOINED) + _LENGTH).tolist()
    start = len(_JOINED) + _LENGTH * (count + 2)
    parts, at = [], start + length
    for size in sizes:
        parts.append(np.frombuffer(message, np.uint8, size, at))
        at += size
    return message[start : start + length], parts


def header_of(kind: bytes, sequence: int, buffers: int, stream: int, tail: int) -> bytes:
    """Return the header of an object; arguments as the fields of :data:`HEADER`."""
    fields = _FIELDS.pack(_MAGIC, kind, sequence, buffers, stream, tail)
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def read_header(block: Bytes, kind: bytes, sequence: int, most: int, most_head: int) -> Header:
    """Check the header at the start of ``block``, and return its fields.

    Args:
        kind, sequence: required fields.
        most, most_head: most bytes of the object, and of its head.

    Raises:
        WireError: the header is cut short, belongs to another call, or has impossible sizes.
    """
    if block.size < HEADER.size:
        raise WireError(f"the header is cut short after {block.size} bytes")
    magic, what, number, buffers, stream, tail, checksum = HEADER.unpack_from(block.data)
    if magic != _MAGIC or checksum != zlib.crc32(block.data[:_CHECKED]):
        raise WireError("the bytes do not begin with the header of an object")
    if what != kind:
        raise WireError(f"the header is of kind {what!r}, not {kind!r}")
    if number != sequence:
        raise WireError(f"the header belongs to number {number}, not {sequence}")
    header = Header(buffers, stream, tail)
    if min(buffers, stream, tail) < 0 or header.head_bytes > most_head or header.nbytes > most:
        raise WireError(
            f"{buffers} buffers of {tail} bytes and a stream of {stream} bytes do not fit into the {most} bytes "
            f"({most_head} before the buffers) that were agreed"
        )
    return header
