"""The wire format of objects: what is believed of what comes from another rank."""

from __future__ import annotations

import pickle
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest

from mpicoll.memory import pickled
from mpicoll.memory.pickled import (
    HEADER,
    IN_BAND_BYTES,
    IncomingObject,
    Packed,
    WireError,
    joined,
    read_header,
    separated,
    stream_of,
)

LARGE = 1 << 50


def pack(value: Any) -> Packed:
    return Packed(*stream_of(value))


def head_of(packed: Packed, kind: bytes = b"A", sequence: int = 7) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the whole head."""
    head = np.empty(packed.head_bytes, np.uint8)
    packed.block(packed.prefix(kind, sequence), head)
    return head


def moved(packed: Packed, first: int) -> Any:
    """Move an object as a call does, with ``first`` bytes of its head in a block of their own; return what arrives."""
    prefix = packed.prefix(b"A", 7)
    block = np.full(first, 255, np.uint8)
    packed.block(prefix, block)
    header = read_header(block, b"A", 7, packed.nbytes, packed.head_bytes)
    incoming = IncomingObject(block, header)
    for send, recv in zip(packed.rest(prefix, first), incoming.rest(first), strict=True):
        assert 0 < send.size <= pickled.CHUNK_BYTES
        recv[:] = send
    incoming.open()
    for send, recv in zip(pickled.pieces(packed.parts), pickled.pieces(incoming.parts), strict=True):
        recv[:] = send
    return incoming.load("an object")


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 30])
@pytest.mark.parametrize("first", [HEADER.size, HEADER.size + 3, HEADER.size + 16, 200, 1000])
def test_an_object_arrives_in_whatever_pieces(first: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the first block ends and however small the pieces are, the object is the same."""
    monkeypatch.setattr(pickled, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(pickled, "IN_BAND_BYTES", 32)
    value = {"a": np.arange(10.0), "text": "x" * 90, "b": np.zeros((2, 4), np.int16), "c": np.ones(5, bool)}
    packed = pack(value)
    assert packed.buffers == 1
    came = moved(packed, first)
    assert came["text"] == value["text"]
    for name in "abc":
        assert came[name].dtype == value[name].dtype
        assert (came[name] == value[name]).all()
        assert came[name].flags.writeable
    own = packed.copied().load("an object")
    assert (own["a"] == value["a"]).all()
    assert not np.shares_memory(own["a"], value["a"])


def test_arrays_are_not_copied_into_the_stream() -> None:
    """Large buffers stay where they are, once each; small ones and those that are not contiguous go into the stream."""
    large, small = np.ones(IN_BAND_BYTES, np.uint8), np.ones(IN_BAND_BYTES - 1, np.uint8)
    packed = pack([large, large, small, np.ones((200, 200))[:, ::2], large.T])
    assert [np.shares_memory(part, large) for part in packed.parts] == [True, True]
    assert packed.tail == 2 * IN_BAND_BYTES
    assert small.size < packed.stream < small.size + 200 * 100 * 8 + 1000
    with pytest.raises(pickle.PicklingError):
        pack(pickle.PickleBuffer(memoryview(bytes(100_000))[::2]))


def test_a_head_is_cut_short() -> None:
    """A block without a whole header is refused."""
    head = head_of(pack("text"))
    for size in (0, 1, HEADER.size - 1):
        with pytest.raises(WireError, match=f"cut short after {size} bytes"):
            read_header(head[:size], b"A", 7, LARGE, LARGE)


def test_every_corrupt_byte_is_noticed() -> None:
    """Whichever byte of a header is another one, it is refused; also what is all zeros or random."""
    head = head_of(pack([np.ones(9000)]))
    for at in range(HEADER.size):
        for bit in (1, 128):
            odd = head.copy()
            odd[at] ^= bit
            with pytest.raises(WireError):
                read_header(odd, b"A", 7, LARGE, LARGE)
    random = np.random.default_rng(5).integers(0, 256, HEADER.size).astype(np.uint8)
    for odd in (np.zeros(HEADER.size, np.uint8), random):
        with pytest.raises(WireError, match="do not begin with the header of an object"):
            read_header(odd, b"A", 7, LARGE, LARGE)


def test_another_call_is_noticed() -> None:
    """A header of another kind of call, or of another number, is refused and both are named."""
    head = head_of(pack("text"), b"A", 7)
    with pytest.raises(WireError, match=r"kind b'A', not b'B'"):
        read_header(head, b"B", 7, LARGE, LARGE)
    with pytest.raises(WireError, match="number 7, not 8"):
        read_header(head, b"A", 8, LARGE, LARGE)


def made_up(buffers: int, stream: int, tail: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a header with a right checksum and these sizes."""
    words = b"mpicoll", b"A", 7, buffers, stream, tail
    checksum = zlib.crc32(HEADER.pack(*words, 0)[:-8])
    return np.frombuffer(HEADER.pack(*words, checksum), np.uint8)


def test_sizes_that_cannot_be_allocate_nothing() -> None:
    """Sizes that are negative or larger than was agreed raise before memory of that size is asked for."""
    tracemalloc.start()
    try:
        wrong = [
            (0, 1 << 40, 0),
            (1, 50, 1 << 40),
            (1 << 40, 50, 0),
            (-1, 50, 0),
            (0, -1, 0),
            (1, 50, -(1 << 40)),
            (0, 2000, 0),
        ]
        for sizes in wrong:
            with pytest.raises(WireError, match="do not fit"):
                read_header(made_up(*sizes), b"A", 7, 5000, 1000)
        with pytest.raises(WireError, match="do not fit"):
            read_header(made_up(0, 950, 0), b"A", 7, 5000, 990)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert read_header(made_up(2, 50, 4000), b"A", 7, 5000, 1000).nbytes == HEADER.size + 16 + 50 + 4000


@pytest.mark.parametrize("lengths", [[1 << 40, 100], [72_001, -1], [-72_000, 144_000], [0, 0]])
def test_lengths_that_do_not_add_up_allocate_nothing(lengths: list[int]) -> None:
    """The lengths of the buffers have to be those of the header's sum."""
    packed = pack([np.ones(4500), np.ones(4500)])
    incoming = IncomingObject(head_of(packed), read_header(head_of(packed), b"A", 7, packed.nbytes, packed.head_bytes))
    incoming.head[HEADER.size : HEADER.size + 16].view(np.int64)[:] = lengths
    with pytest.raises(WireError, match="2 buffers do not add up to 72000 bytes"):
        incoming.open()
    assert not incoming.parts


@pytest.mark.parametrize("sizes", [(), (20_000,), (16_384, 3 << 14, 100_000)])
def test_joined_and_separated(sizes: tuple[int, ...]) -> None:
    """A stream and its buffers in one bytes object are found again; without buffers it is the stream."""
    stream, parts = stream_of([1, *[np.arange(size, dtype=np.uint8) for size in sizes]])
    message = joined(stream, parts)
    assert (message is stream) == (not sizes)
    found, buffers = separated(message)
    assert bytes(found) == stream
    assert [each.tobytes() for each in buffers] == [each.tobytes() for each in parts]
