"""What a message says of itself comes out at the other end as it went in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpicoll.memory.adapt import adapt
from mpicoll.memory.dtypes import MOVABLE
from mpicoll.runtime.call_site import CallSite, call_site
from mpicoll.transports.mpi.envelope import (
    DTYPE_BEHIND,
    ROOM,
    SMALL_BYTES,
    WORDS,
    KnownSites,
    first_word,
    open_message,
    write,
)


@pytest.mark.parametrize("char", sorted(MOVABLE))
def test_a_message_opens_as_it_was_written(char: str) -> None:
    """dtype, count and elements come back, for every dtype that moves, with and without the words of its place."""
    dtype = np.dtype(char)
    most = SMALL_BYTES // dtype.itemsize
    for count in (0, 1, 3, most, most + 1, 5 * most):
        flat = np.arange(count).astype(dtype)
        for place in (b"", "send at tr\N{LATIN SMALL LETTER A WITH DIAERESIS}in.py:12".encode()):
            message = write(flat, "", 7, place)
            envelope, elements, words = open_message(message)
            assert (envelope.name, envelope.dtype, envelope.count) == (str(dtype), dtype, count)
            assert (envelope.place, envelope.print) == (7, 0)
            assert envelope.nbytes == flat.nbytes
            assert words.encode() == place
            assert envelope.apart == (count > most)
            if not envelope.apart:
                assert (elements.view(dtype) == flat).all()
            assert message.nbytes == WORDS.size + (0 if envelope.apart else flat.nbytes) + len(place)
            assert message.nbytes <= ROOM
            known, _ = WORDS.unpack_from(message.data)
            assert (known == first_word(dtype, count)) == (not place)


def test_a_list_of_objects_opens_as_one() -> None:
    """The length of the list comes back, and nobody takes it for an array of as many bytes."""
    inside = np.zeros(30, np.uint8)
    inside[:8].view(np.int64)[0] = 5
    message = write(inside, "", 7, b"send_object_list at train.py:12", objects=True)
    envelope, elements, words = open_message(message)
    assert (envelope.objects, envelope.describe()) == (5, "a list of 5 objects")
    assert (elements == inside).all()
    assert words == "send_object_list at train.py:12"
    plain = write(inside, "", 7, b"")
    assert open_message(plain)[0].objects == -1
    assert WORDS.unpack_from(plain.data)[0] != WORDS.unpack_from(write(inside, "", 7, b"", objects=True).data)[0]


def test_dtypes_that_differ_have_words_that_differ() -> None:
    """The first word is equal where NumPy calls the dtypes equal, and only there: int64 is "l" and "q"."""
    for a in MOVABLE:
        for b in MOVABLE:
            same = np.dtype(a) == np.dtype(b)
            assert (first_word(np.dtype(a), 3) == first_word(np.dtype(b), 3)) == same, a + b
    assert first_word(np.dtype("d"), 3) != first_word(np.dtype("d"), 4)
    envelope, _, _ = open_message(write(np.zeros(1, "q"), "", 0, b""))
    assert envelope.describe(adapt(np.zeros(3), "x", writable=True)) == "int64, 1 element"


def test_elements_that_mpi_does_not_know() -> None:
    """Halves have a number; texts, dates and structured dtypes fit where dtype and size are the same, and say so."""
    dtypes = ("e", "u2", "U2", "S8", "M8[s]", "m8[s]", "M8[ms]", "i8", "i4,f4", "i4,i4", "i4,f8", "V8", "u8")
    arrays = {text: adapt(np.zeros((5, 3), text)[:, 1], "x", writable=True) for text in dtypes}
    for text, memory in arrays.items():
        envelope, elements, words = open_message(write(memory.filled(), memory.named, 2**31 + 7, b"send at a.py:1"))
        assert (envelope.nbytes, envelope.place, words) == (memory.flat.nbytes, 2**31 + 7, "send at a.py:1")
        assert elements.tobytes() == memory.flat.tobytes()
        assert [other for other in dtypes if envelope.fits(arrays[other])] == [text]
        longer = adapt(np.zeros(6, text), "x", writable=True)
        assert not envelope.fits(longer)
        assert envelope.describe(longer) == f"{memory.name}, 5 elements"
    sent, _, _ = open_message(write(arrays["M8[s]"].filled(), "datetime64[s]", 0, b""))
    assert sent.content(arrays["i8"]) == ("", 40)
    assert sent.describe(arrays["i8"]) == "40 bytes of another dtype, structured or of texts or dates"
    large = adapt(np.zeros(2000, "i4,f8"), "x", writable=True)
    envelope, elements, _ = open_message(write(large.flat, large.named, 0, b""))
    assert (envelope.apart, elements.size, envelope.nbytes) == (True, 0, 24_000)
    assert envelope.fits(large)


def test_a_place_is_told_once_for_each_tag_and_receiver() -> None:
    """Words go with the first message of a place to a receiver under a tag; places that differ have numbers that differ."""
    told = KnownSites()
    here, there = call_site(), call_site()
    number, words = told.place(1, 0, "send", here)
    assert words == f"send at {here}".encode()
    assert told.place(1, 0, "send", here) == (number, b"")
    for peer, tag in ((2, 0), (1, 1)):
        assert told.place(peer, tag, "send", here) == (number, words)
    assert told.place(1, 0, "send", there)[0] != number
    other, words = told.place(1, 0, "isend", here)
    assert other != number
    assert words.startswith(b"isend at ")


def test_a_dtype_is_named_once_for_each_tag_and_receiver() -> None:
    """A dtype without a number goes with the text of the place, also if it is long, and with each other dtype from there."""
    told, here = KnownSites(), call_site()
    long = np.dtype([(f"a_long_name_of_a_field_{i}", "f8") for i in range(20)])
    for dtype in (np.dtype("i4,f8"), np.dtype("f8,i4"), np.dtype("M8[s]"), np.dtype("U3"), long):
        memory = adapt(np.zeros(5, dtype), "x", writable=False)
        number, text = told.place(1, 0, "send", here, memory)
        envelope, _, words = open_message(write(memory.flat, memory.named, number, text))
        place, _, dtype_text = words.partition(DTYPE_BEHIND)
        assert place == f"send at {here}"
        assert replace(envelope, told=dtype_text).describe() == f"{memory.name}, 5 elements"
        assert WORDS.size + memory.flat.nbytes + len(text) <= ROOM
        assert told.place(1, 0, "send", here, memory) == (number, b"")
    known = adapt(np.zeros(5, "e"), "x", writable=False)
    assert told.place(1, 0, "send", here, known)[1] == f"send at {here}".encode()
    assert told.places[1, 0] == f"send at {here}"
    endless = adapt(np.zeros(5, [("f" * 5000, "i4"), ("last", "u1")]), "x", writable=False)
    text = told.place(1, 0, "send", here, endless)[1]
    assert WORDS.size + SMALL_BYTES + len(text) <= ROOM
    words = open_message(write(known.flat, known.named, 7, text))[2]
    assert words.startswith(f"send at {here}{DTYPE_BEHIND}5 [('fff")
    assert words.endswith("ff', '<i4'), ('last', 'u1')]")


def test_a_long_path_is_cut_from_the_left() -> None:
    """A place of any length fits into a message, and keeps its file and line."""
    code = compile("pass", "/" + "d" * 400 + "/train.py", "exec")
    _, words = KnownSites().place(0, 0, "isend", CallSite(code, 0))
    assert words.decode().startswith("isend at \N{HORIZONTAL ELLIPSIS}d")
    assert "/train.py:" in words.decode()
    assert WORDS.size + SMALL_BYTES + len(words) <= ROOM


def test_told_forgets_and_tells_again() -> None:
    """A program with ever new tags does not grow it without bound."""
    told = KnownSites()
    site = call_site()
    for tag in range(10_000):
        assert told.place(0, tag, "send", site)[1]
    assert len(told._known) <= 4096
