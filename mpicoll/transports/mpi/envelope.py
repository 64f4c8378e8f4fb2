"""What a message says of itself: dtype, number of elements, and where in the program it was sent.

Every message on a group's data communicator begins with two 64-bit words. The first holds flags, the dtype and the number
of elements; the second the number of the place that it was sent from, and the length of that place's words. Elements of
which there is no number (structured ones, texts, dates) travel as bytes, and the words hold a hash of their dtype. Behind them
stand the elements, if they are few; those of a large message travel apart, on the control communicator, once a receive
wants them. The words of a place (``send at train.py:12``) stand at the end of the first message that comes from there, so
that the receiver knows them when it has to: the sender may be busy or gone by then.
"""

from __future__ import annotations

import functools
import itertools
import struct
import zlib
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np

from mpicoll.memory.dtypes import FOREIGN, MOVABLE, Element, dtype_name, named_element
from mpicoll.memory.memory import Memory
from mpicoll.runtime.call_site import Site

WORDS = struct.Struct("=2q")
_LENGTH = struct.Struct("=q")

SMALL_BYTES = 4000
"""Up to this size the elements stand behind the words, so that the message with its envelope is still sent eagerly by Open MPI
(4 KiB between processes of a node). Above it one message that is copied in and out takes longer than two that are not."""

EAGER_BYTES = 16 * 1024
"""Up to this size a send may be complete before it is received, if MPI has room for it; above it never is."""

_PLACE_BYTES = 240

ROOM = WORDS.size + SMALL_BYTES + _PLACE_BYTES
"""Bytes of the longest message on a data communicator."""

_COUNT_BITS = 48
_COUNT = (1 << _COUNT_BITS) - 1
_APART = 1 << 56
_PLACED = 1 << 57
_OBJECTS = 1 << 58
_PLACE_BITS = 32
_PLACE = (1 << _PLACE_BITS) - 1
_WORDS_BITS = 8
_PRINT_BITS = 23
_MOST_TOLD = 4096

# The same dtype by another name (on Linux int64 is "l" and "q") has the same number: numbered by name, which is also the
# same on all ranks.
_NATIVE = {str(dtype): Element(dtype) for dtype in (np.dtype(char) for char in sorted(MOVABLE))}
_NAMED = {name: found for name in ("float16", *FOREIGN) if (found := named_element(name)) is not None}
_KNOWN = {**{name: _NATIVE[name] for name in sorted(_NATIVE)}, **{name: _NAMED[name] for name in sorted(_NAMED)}}
_NUMBERS = {name: number for number, name in enumerate(_KNOWN)}
_ELEMENTS = tuple(_KNOWN.items())
_OTHER = 0xFF
_BYTE: np.dtype[Any] = np.dtype(np.uint8)


@dataclass(slots=True, frozen=True)
class Envelope:
    """What the two words of one message say.

    Attributes:
        name: of the dtype of its elements; "" where it has no number.
        dtype, count: as which its elements travel, and how many of those.
        apart: its elements travel on the control communicator.
        place: number of the place that it was sent from, which is the sender's own.
        print: hash of its dtype, where that has no number.
        objects: length of the list that its elements, bytes, are the pickle of (they begin with it); -1: they are an array.
    """

    name: str
    dtype: np.dtype[Any]
    count: int
    apart: bool
    place: int
    print: int = 0
    objects: int = -1

    @property
    def nbytes(self) -> int:
        """Size of its elements."""
        return self.count * self.dtype.itemsize

    def alike(self, memory: Memory) -> bool:
        """Whether its elements are of the dtype of a memory."""
        if self.objects >= 0:
            return False
        if self.name:
            return self.name == memory.name
        return memory.named not in ("", *_NUMBERS) and self.print == _fingerprint(memory.named)

    def fits(self, memory: Memory) -> bool:
        """Whether it has as many elements as a memory, of the same dtype."""
        return self.nbytes == memory.flat.nbytes and self.alike(memory)

    def describe(self, memory: Memory | None = None) -> str:
        """Return ``float32, 4 elements`` or ``a list of 2 objects``, as it is told to a receive into a memory."""
        if self.objects >= 0:
            return describe_list(self.objects)
        if self.name:
            return describe(self.name, self.count)
        if memory is not None and self.alike(memory):
            return describe(memory.name, self.count // memory.flat.itemsize)
        return f"{self.count} byte{'s' if self.count != 1 else ''} of another dtype, structured or of texts or dates"


def describe(name: str, count: int) -> str:
    """Return ``float32, 4 elements``."""
    return f"{name}, {count} element{'s' if count != 1 else ''}"


@functools.lru_cache(maxsize=_MOST_TOLD)
def _fingerprint(name: str) -> int:
    """Return a number of 23 bits for a dtype's name, the same on all ranks and never 0."""
    return zlib.crc32(name.encode()) % ((1 << _PRINT_BITS) - 1) + 1


def describe_list(length: int) -> str:
    """Return ``a list of 2 objects``."""
    return f"a list of {length} object{'s' if length != 1 else ''}"


def first_word(dtype: np.dtype[Any], count: int) -> int:
    """Return the first word of a message whose place is known to its receiver."""
    word = _NUMBERS[dtype_name(dtype)] << _COUNT_BITS | count
    return word if count * dtype.itemsize <= SMALL_BYTES else word | _APART


def _first(flat: np.ndarray[Any, Any], named: str) -> int:
    if not named:
        return first_word(flat.dtype, flat.size)
    known = _NUMBERS.get(named)
    word = _OTHER << _COUNT_BITS | flat.nbytes if known is None else known << _COUNT_BITS | flat.size
    return word if flat.nbytes <= SMALL_BYTES else word | _APART


def write(
    flat: np.ndarray[Any, Any], named: str, number: int, place: bytes, objects: bool = False
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a message: its words, the elements of ``flat`` if they are few, and the words of its place if it says them.

    Args:
        flat: the elements as they travel.
        named: the name of their dtype, where it is not that of ``flat``.
        number: of the place.
        place: its words, or empty when the receiver has been told.
        objects: the elements, few bytes, are a pickled list's length (one 64-bit word) and what belongs to its pickle.
    """
    word, print_ = _first(flat, named) | (_OBJECTS if objects else 0), 0
    if named and named not in _NUMBERS:
        print_ = _fingerprint(named)
    number = number & _PLACE | len(place) << _PLACE_BITS | print_ << _PLACE_BITS + _WORDS_BITS
    inside = 0 if word & _APART else flat.nbytes
    buffer = np.empty(WORDS.size + inside + len(place), np.uint8)
    WORDS.pack_into(buffer.data, 0, word | _PLACED if place else word, number)
    if inside:
        buffer[WORDS.size : WORDS.size + inside] = flat.view(np.uint8)
    if place:
        buffer[WORDS.size + inside :] = np.frombuffer(place, np.uint8)
    return buffer


def open_message(buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[Envelope, np.ndarray[Any, Any], str]:
    """Return what a message says of itself, the bytes of its elements (none if they are apart), and its place or "".

    The buffer may be longer than the message.
    """
    word, place = WORDS.unpack_from(buffer.data)
    number = word >> _COUNT_BITS & 0xFF
    name, dtype = ("", _BYTE) if number == _OTHER else (_ELEMENTS[number][0], _ELEMENTS[number][1].wire)
    print_ = place >> _PLACE_BITS + _WORDS_BITS
    objects = _LENGTH.unpack_from(buffer.data, WORDS.size)[0] if word & _OBJECTS else -1
    envelope = Envelope(name, dtype, word & _COUNT, bool(word & _APART), place & _PLACE, print_, objects)
    end = WORDS.size + (0 if envelope.apart else envelope.nbytes)
    words = buffer[end : end + (place >> _PLACE_BITS & (1 << _WORDS_BITS) - 1)].tobytes().decode(errors="replace")
    return envelope, buffer[WORDS.size : end], words


class KnownSites:
    """What a sender has told each receiver about the places of its messages."""

    def __init__(self) -> None:
        self._told: set[tuple[int, int, int]] = set()
        self.places: dict[tuple[int, int], str] = {}
        """The place of a message to each (receiver, tag): the last that was made out of the ordinary."""

    def place(self, peer: int, tag: int, op: str, site: Site) -> tuple[int, bytes]:
        """Return the number of a place, and its words if this is the first message of ``tag`` to ``peer`` from there.

        Messages of one tag are received in order, those of two may not be: so it is told once for each tag.
        """
        number, words = _place(op, site)
        key = (peer, tag, number)
        if len(self.places) < _MOST_TOLD:
            self.places[peer, tag] = words.decode(errors="replace")
        if key in self._told:
            return number, b""
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()  # they are told again: the receiver keeps those it knows
        self._told.add(key)
        return number, words

    def known(self, peer: int, tag: int, op: str, site: Site) -> int | None:
        """Return the number of a place that the receiver has been told of under this tag, else None."""
        number, _ = _place(op, site)
        return number if (peer, tag, number) in self._told else None


_places: dict[tuple[str, int, int], tuple[int, bytes, CodeType]] = {}
_numbers = itertools.count(1)


def _place(op: str, site: Site) -> tuple[int, bytes]:
    # By identity, with the code kept alive: code objects are equal across files, and take long to hash.
    key = (op, id(site.code), site.instruction)
    known = _places.get(key)
    if known is None:
        if len(_places) >= _MOST_TOLD:
            _places.clear()
        words = f"{op} at {site}".encode()
        if len(words) > _PLACE_BYTES:
            words = f"{op} at …".encode() + words[-(_PLACE_BYTES - 32) :]
        known = _places[key] = (next(_numbers), words, site.code)
    return known[:2]
