"""The envelope of a message: dtype, number of elements, and the call site of the send.

Each message on the data communicator of a group begins with two 64-bit words. The first word has flags, the dtype and the
number of elements. The second word has the number of the call site, and the length of its text. Dtypes without a number
(structured dtypes, texts, dates) move as bytes, and the words have a hash of the dtype. Few elements stand behind the words.
The elements of a large message move apart, on the control communicator, after a receive has matched. The text of a call site
(``send at train.py:12``) stands at the end of the first message from there: later the sender may be busy or gone. A dtype without
a number is named behind it, with the size of its elements.
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

from mpicoll.memory.dtypes import FOREIGN, MOVABLE, Element, dtype_name, element, is_native, named_element
from mpicoll.memory.memory import Memory
from mpicoll.runtime.call_site import CallSite

WORDS = struct.Struct("=2q")
_LENGTH = struct.Struct("=q")

SMALL_BYTES = 4000
"""Up to this size elements stand behind the words, so that Open MPI still sends the message eagerly (4 KiB between processes
of a node). For more bytes one message that is copied in and out takes longer than two messages without copies."""

EAGER_BYTES = 16 * 1024
"""Up to this size a send may be complete before it is received, if MPI has buffers for it; a larger send never is."""

_PLACE_BYTES = 240
_DTYPE_BYTES = 1000

ROOM = WORDS.size + SMALL_BYTES + _PLACE_BYTES + _DTYPE_BYTES
"""Bytes of the longest message on a data communicator."""

DTYPE_BEHIND = "\0"
"""The text of a call site ends here, and that on a dtype begins: size and name."""

_COUNT_BITS = 48
_COUNT = (1 << _COUNT_BITS) - 1
_APART = 1 << 56
_PLACED = 1 << 57
_OBJECTS = 1 << 58
_LONG_BITS = 59  # here are the upper bits of the length of the text
_PLACE_BITS = 32
_PLACE = (1 << _PLACE_BITS) - 1
_WORDS_BITS = 8
_PRINT_BITS = 23
_MOST_KNOWN = 4096

# Numbers go by names, which are the same on all ranks: equal dtypes with two type characters (on Linux int64 is "l" and "q")
# have one number.
_NATIVE = {str(dtype): Element(dtype) for dtype in (np.dtype(char) for char in sorted(MOVABLE))}
_NAMED = {name: found for name in ("float16", *FOREIGN) if (found := named_element(name)) is not None}
_KNOWN = {**{name: _NATIVE[name] for name in sorted(_NATIVE)}, **{name: _NAMED[name] for name in sorted(_NAMED)}}
_NUMBERS = {name: number for number, name in enumerate(_KNOWN)}
_ELEMENTS = tuple(_KNOWN.items())
_OTHER = 0xFF
_BYTE: np.dtype[Any] = np.dtype(np.uint8)


@dataclass(slots=True, frozen=True)
class Envelope:
    """The decoded words of one message.

    Attributes:
        name: name of the dtype; "" if the dtype has no number.
        dtype, count: dtype as which elements move, and number of elements of that dtype.
        apart: the elements move on the control communicator.
        place: number of the call site, given by the sender.
        print: hash of the dtype, if it has no number.
        objects: length of the list whose pickle is the message; -1 for an array.
        told: text on a dtype that has no number: size and name; "" if it is not known.
    """

    name: str
    dtype: np.dtype[Any]
    count: int
    apart: bool
    place: int
    print: int = 0
    objects: int = -1
    told: str = ""

    @property
    def nbytes(self) -> int:
        """The size of the elements, in bytes."""
        return self.count * self.dtype.itemsize

    def alike(self, memory: Memory) -> bool:
        """Return whether the elements have the dtype of a memory."""
        if self.objects >= 0:
            return False
        if self.name:
            return self.name == memory.name
        return memory.named not in ("", *_NUMBERS) and self.print == _fingerprint(memory.named)

    def fits(self, memory: Memory) -> bool:
        """Return whether the message has the dtype and number of elements of a memory."""
        return self.nbytes == memory.flat.nbytes and self.alike(memory)

    def content(self, memory: Memory | None = None) -> tuple[str, int]:
        """Return the name of the dtype, "" if it is not known, and the number of elements (then of bytes).

        Args:
            memory: memory of the receive, which may have the dtype.
        """
        if self.name:
            return self.name, self.count
        if memory is not None and self.alike(memory):
            return memory.name, self.count // memory.flat.itemsize
        size, _, name = self.told.partition(" ")
        return name, self.count // int(size or 1)

    def describe(self, memory: Memory | None = None) -> str:
        """Return ``float32, 4 elements`` or ``a list of 2 objects``, for a message about a receive into a memory."""
        if self.objects >= 0:
            return describe_list(self.objects)
        name, count = self.content(memory)
        if name:
            return describe(name, count)
        return f"{self.count} byte{'s' if self.count != 1 else ''} of another dtype, structured or of texts or dates"


def describe(name: str, count: int) -> str:
    """Return ``float32, 4 elements``."""
    return f"{name}, {count} element{'s' if count != 1 else ''}"


@functools.lru_cache(maxsize=_MOST_KNOWN)
def _fingerprint(name: str) -> int:
    """Return a hash of 23 bits of a dtype's name, the same on all ranks and never 0."""
    return zlib.crc32(name.encode()) % ((1 << _PRINT_BITS) - 1) + 1


def describe_list(length: int) -> str:
    """Return ``a list of 2 objects``."""
    return f"a list of {length} object{'s' if length != 1 else ''}"


def first_word(dtype: np.dtype[Any], count: int) -> int:
    """Return the first word of a message whose call site the receiver knows."""
    word = _NUMBERS[element_name(dtype)] << _COUNT_BITS | count
    return word if count * dtype.itemsize <= SMALL_BYTES else word | _APART


def element_name(dtype: np.dtype[Any]) -> str:
    """Return the name by which elements of a dtype are known on all ranks."""
    return dtype_name(dtype) if is_native(dtype) else element(dtype).name or dtype_name(dtype)


def has_number(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype has a number, in the byte order of this machine."""
    try:
        return bool(dtype.isnative) and element_name(dtype) in _NUMBERS
    except TypeError:
        return False  # it cannot be moved


def _first(flat: np.ndarray[Any, Any], named: str) -> int:
    if not named:
        return first_word(flat.dtype, flat.size)
    known = _NUMBERS.get(named)
    word = _OTHER << _COUNT_BITS | flat.nbytes if known is None else known << _COUNT_BITS | flat.size
    return word if flat.nbytes <= SMALL_BYTES else word | _APART


def write(
    flat: np.ndarray[Any, Any], named: str, number: int, place: bytes, objects: bool = False
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a message: words, the elements of ``flat`` if they are few, and the text of the call site.

    Args:
        flat: elements as they move.
        named: name of the dtype, if ``flat`` has another dtype.
        number: number of the call site.
        place: text of the call site, and on the dtype; empty if the receiver knows it.
        objects: the elements are the length of a list (one 64-bit word) and the start of its pickle.
    """
    word, print_ = _first(flat, named) | (_OBJECTS if objects else 0), 0
    if named and named not in _NUMBERS:
        print_ = _fingerprint(named)
    low, high = len(place) & (1 << _WORDS_BITS) - 1, len(place) >> _WORDS_BITS
    number = number & _PLACE | low << _PLACE_BITS | print_ << _PLACE_BITS + _WORDS_BITS
    word |= high << _LONG_BITS
    inside = 0 if word & _APART else flat.nbytes
    buffer = np.empty(WORDS.size + inside + len(place), np.uint8)
    WORDS.pack_into(buffer.data, 0, word | _PLACED if place else word, number)
    if inside:
        buffer[WORDS.size : WORDS.size + inside] = flat.view(np.uint8)
    if place:
        buffer[WORDS.size + inside :] = np.frombuffer(place, np.uint8)
    return buffer


_LIST = _OBJECTS | _NUMBERS["uint8"] << _COUNT_BITS


def write_list(number: int, content: bytes) -> bytes:
    """Return the bytes of a short list of objects from a call site that the receiver knows.

    Args:
        number: number of the call site.
        content: the length of the list (one 64-bit word) and its pickle, together up to ``SMALL_BYTES``.
    """
    return WORDS.pack(_LIST | len(content), number & _PLACE) + content


def list_in(buffer: Any) -> memoryview | None:
    """Return the content of a message as :func:`write_list` writes it; None for another message."""
    word, _ = WORDS.unpack_from(buffer)
    return memoryview(buffer)[WORDS.size :] if word & ~_COUNT == _LIST else None


def open_message(buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[Envelope, np.ndarray[Any, Any], str]:
    """Return the envelope of a message, the bytes of its elements (none if they move apart), and its text or "".

    The buffer may be longer than the message.
    """
    word, place = WORDS.unpack_from(buffer.data)
    number = word >> _COUNT_BITS & 0xFF
    name, dtype = ("", _BYTE) if number == _OTHER else (_ELEMENTS[number][0], _ELEMENTS[number][1].wire)
    print_ = place >> _PLACE_BITS + _WORDS_BITS
    objects = _LENGTH.unpack_from(buffer.data, WORDS.size)[0] if word & _OBJECTS else -1
    envelope = Envelope(name, dtype, word & _COUNT, bool(word & _APART), place & _PLACE, print_, objects)
    end = WORDS.size + (0 if envelope.apart else envelope.nbytes)
    length = place >> _PLACE_BITS & (1 << _WORDS_BITS) - 1 | word >> _LONG_BITS << _WORDS_BITS
    words = buffer[end : end + length].tobytes().decode(errors="replace")
    return envelope, buffer[WORDS.size : end], words


class KnownSites:
    """The call sites that a sender has sent to each receiver."""

    def __init__(self) -> None:
        self._known: set[tuple[int, int, int, str]] = set()
        self.places: dict[tuple[int, int], str] = {}
        """The call site of a message to each (receiver, tag): the last one that was not sent by a persistent request."""

    def place(self, peer: int, tag: int, op: str, site: CallSite, memory: Memory | None = None) -> tuple[int, bytes]:
        """Return the number of a call site, and its text if this is its first message of ``tag`` to ``peer``, with its dtype.

        The text is sent once for each tag, as only messages of one tag are received in order.

        Args:
            memory: the array to send.
        """
        number, words = _place(op, site)
        named = "" if memory is None or memory.named in _NUMBERS else memory.named
        key = (peer, tag, number, named)
        if len(self.places) < _MOST_KNOWN:
            self.places[peer, tag] = words.decode(errors="replace")
        if key in self._known:
            return number, b""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()  # texts are sent again, which does no harm
        self._known.add(key)
        if named and memory is not None:
            dtype = f"{DTYPE_BEHIND}{memory.flat.itemsize} {named}".encode(errors="replace")
            half = _DTYPE_BYTES // 2 - 2
            words += dtype if len(dtype) <= _DTYPE_BYTES else dtype[:half] + "…".encode() + dtype[-half:]
        return number, words

    def known(self, peer: int, tag: int, op: str, site: CallSite) -> int | None:
        """Return the number of a call site that the receiver knows for this tag, otherwise None."""
        number, _ = _place(op, site)
        return number if (peer, tag, number, "") in self._known else None


_places: dict[tuple[str, int, int], tuple[int, bytes, CodeType]] = {}
_numbers = itertools.count(1)


def _place(op: str, site: CallSite) -> tuple[int, bytes]:
    # By identity, with a reference to the code object: code objects of several files may be equal, and are slow to hash.
    key = (op, id(site.code), site.instruction)
    known = _places.get(key)
    if known is None:
        if len(_places) >= _MOST_KNOWN:
            _places.clear()
        words = f"{op} at {site}".encode()
        if len(words) > _PLACE_BYTES:
            words = f"{op} at …".encode() + words[-(_PLACE_BYTES - 32) :]
        known = _places[key] = (next(_numbers), words, site.code)
    return known[:2]
