"""What arrays of every layout are as memory: what is packed, in which order, and what is written back."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from mpicoll.memory.adapt import adapt, adapt_list, same_dtype
from mpicoll.memory.layouts import in_common, joined, one_buffer, overlaps, spanned


def views(base: Any) -> dict[str, Any]:
    """Return views of an array of three dimensions that are not C-contiguous."""
    return {
        "transposed": base.T,
        "axes in another order": base.transpose(1, 0, 2),
        "every second": base[:, ::2],
        "the last axis cut": base[..., 1:3],
        "backwards": base[::-1, :, ::-1],
        "one column": base[:, :, 1],
        "Fortran": np.asfortranarray(base),
    }


@pytest.mark.parametrize("dtype", ["d", "?", "g", "F", "e", ">i4", ">F", ">g", ">e", ">U2", "M8[s]", ">M8[s]", "i4,f8"])
def test_packed_memory_holds_the_elements_in_c_order_and_goes_back(dtype: str) -> None:
    """Whatever the strides and the byte order, flat memory is the array's elements in C order, natively."""
    numbers = np.arange(3 * 4 * 5).reshape(3, 4, 5) % 2
    base = numbers.astype(dtype) if dtype[-2:] != "U2" else numbers.astype("U2").astype(dtype)
    for what, value in {"swapped alone": base, **views(base)}.items():
        memory = adapt(value, "x", writable=True)
        native = value.astype(value.dtype.newbyteorder("="), order="C")
        if dtype == "i4,f8":
            native = np.ascontiguousarray(value)
        assert memory.shape == value.shape, what
        assert (memory.pack is None) == (what == "swapped alone" and value.dtype.isnative), what
        assert memory.filled().tobytes() == native.tobytes(), what
        assert memory.flat.flags.c_contiguous, what
        assert memory.flat.ndim == 1, what
        if memory.unpack is not None:
            assert not np.may_share_memory(memory.flat, value), what
            memory.flat.view(np.uint8)[...] = 0
            memory.unpack()
            assert np.ascontiguousarray(value).tobytes() == bytes(value.nbytes), what
        value[...] = native


def test_what_is_contiguous_is_not_copied() -> None:
    """Plain arrays, halves, texts, dates and packed records in C order move from and to their own memory."""
    for dtype in ("d", "?", "e", "S3", "U2", "M8[s]", "i4,f8", "V5"):
        for value in (np.zeros((2, 3), dtype), np.zeros((), dtype), np.zeros((0, 4), dtype)):
            memory = adapt(value, "x", writable=True)
            assert memory.pack is None, dtype
            assert memory.unpack is None, dtype
            assert memory.flat.size == value.size, dtype
            assert memory.flat.nbytes == value.nbytes, dtype
            assert np.shares_memory(memory.flat, value) == (value.size > 0), dtype


def test_unaligned_arrays_are_packed() -> None:
    """MPI gets no array whose elements stand at odd addresses."""
    value = np.zeros(25, np.uint8)[1:].view(np.float64)
    assert value.flags.c_contiguous
    assert adapt(value, "x", writable=True).pack is not None


def test_fields_of_another_view_are_left_alone() -> None:
    """What stands in the gaps of a structured dtype is not overwritten: it may be the other fields of the same records."""
    inner = np.dtype("u1,i4", align=True)
    records = np.zeros((2, 3), [("a", "i4"), ("b", "f8"), ("c", inner), ("d", "i2", (2,))])
    records["b"], records["c"]["f1"] = 7, 8
    for order in (records, records.T):
        before = order.copy()
        view = order[["a", "c", "d"]]
        memory = adapt(view, "x", writable=True)
        assert memory.pack is not None
        filled = memory.filled().view(view.dtype)
        assert (filled["c"]["f1"] == 8).all()
        filled["a"], filled["c"]["f0"], filled["d"], memory.flat.view(np.uint8)[4:12] = 1, 2, 3, 255
        assert memory.unpack is not None
        memory.unpack()
        assert (order["a"] == 1).all()
        assert (order["c"]["f0"] == 2).all()
        assert (order["d"] == 3).all()
        assert (order["b"] == 7).all()
        assert (order["c"]["f1"] == 8).all()
        order[...] = before
    assert adapt(np.zeros(3, inner), "x", writable=False).pack is None  # only read: the gaps may travel


def test_elements_that_share_memory() -> None:
    """Broadcast and sliding views are taken as inputs and refused as outputs; views made by indexing are taken."""
    base = np.arange(60.0).reshape(3, 4, 5)
    for what, view in views(base).items():
        assert not overlaps(view), what
    assert not overlaps(np.broadcast_to(base, (1, 3, 4, 5)))
    assert not overlaps(as_strided(np.zeros(30), (2, 3), (16, 24)))  # 0 3 6, 2 5 8: no two alike
    for view in (
        as_strided(base, (5, 60), (0, 8)),
        as_strided(base, (4, 3), (8, 8)),
        as_strided(np.zeros(30), (4, 3), (16, 24)),  # 0 3 6, 2 5 8, 4 7 10, 6: twice
        as_strided(base, (7,), (4,)),
        sliding_window_view(np.zeros(9), 3, writeable=True),
    ):
        assert overlaps(view)
        with pytest.raises(ValueError, match="`x` has elements that share memory"):
            adapt(view, "x", writable=True)
        assert (adapt(view, "x", writable=False).filled() == view.reshape(-1)).all()


def test_arrays_of_one_dtype_may_differ_in_layout_and_byte_order() -> None:
    """A list may mix them; what it may not mix are dtypes, by the names that the program gave them."""
    adapt_list([np.zeros(3), np.zeros(3, ">f8"), np.zeros((3, 2))[:, 0]], "x", writable=True)
    for one, other, text in (
        ("e", "u2", "float16 and uint16"),
        ("e", "f", "float16 and float32"),
        ("M8[s]", "i8", r"datetime64\[s\] and int64"),
        ("M8[s]", "M8[ms]", r"datetime64\[s\] and datetime64\[ms\]"),
        ("S4", "U1", r"\|S4 and <U1"),
    ):
        with pytest.raises(ValueError, match=text):
            same_dtype(adapt(np.zeros(2, one), "x", writable=True), adapt(np.zeros(2, other), "y", writable=True))


def test_arrays_of_a_list_that_share_memory() -> None:
    """Two that have a byte in common are found, wherever they stand; columns of one matrix have none."""
    x, matrix = np.zeros(8), np.zeros((6, 40))
    alone = [np.zeros(3), matrix[:, 3], matrix[:, 4], matrix[::-1, 7], x[:3], x[3:6], np.zeros(0), x[:0]]
    assert in_common(alone) is None
    assert in_common([np.ones(2), x, np.ones(2), x]) == (1, 3)
    assert in_common([*alone, x[2:4]]) in ((4, 8), (5, 8))
    assert in_common([matrix[:, 5], matrix[::-1, 4:6]]) == (0, 1)
    assert in_common([matrix[:, i] for i in range(40)] * 2) is not None


def test_a_span_of_arrays() -> None:
    """It has the place of each array, and lives as long; arrays at parts of elements, or too far away, have none."""
    memory = np.zeros(1000)
    arrays = [memory[700:710], memory[3:5], memory[3:3], memory[100:400].reshape(3, 100)]
    found = spanned(arrays)
    assert found is not None
    span, starts = found
    assert (starts, span.size) == ([697, 0, 0, 97], 707)
    for number, (start, array) in enumerate(zip(starts, arrays, strict=True)):
        span[start : start + array.size] = number + 1
        assert (array == number + 1).all()
    assert (memory != 0).sum() == 312
    alive = weakref.ref(memory)
    del memory, arrays, array, found
    assert alive() is not None
    del span
    assert alive() is None
    odd = np.zeros(800, np.uint8)
    assert spanned([odd[:80].view("d"), odd[84:164].view("d")]) is None
    readonly = np.zeros(10)
    readonly.flags.writeable = False
    for first, writeable in ((readonly, False), (np.zeros(10), True)):
        found = spanned([first, np.zeros(5)])
        assert found is not None
        assert found[0].flags.writeable == writeable
    layouts = sys.modules[spanned.__module__]
    far = np.zeros(3000, np.uint8)
    assert spanned([far[:10], far[2990:]]) is not None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layouts, "_FARTHEST", 2989)
        assert spanned([far[:10], far[2990:]]) is None
        assert spanned([far[:10], far[2990:]], counts=False) is not None


def test_one_buffer_of_a_list() -> None:
    """Arrays one behind the other, or large enough, that share no memory with others nor with one another."""
    memory = np.arange(100.0)
    one, two, other = memory[:50], memory[50:100], np.zeros(50)
    assert one_buffer([one, two], [other], 1)[1] is None
    assert one_buffer([np.zeros(0), np.zeros(0)], [other], 0) == (None, None)
    assert one_buffer([two, one], [other], 400)[1] == [50, 0]
    for arrays, others, least in (
        ([two, one], [other], 401),
        ([one, two], [memory[99:]], 1),
        ([two, one], [memory[99:]], 1),
        ([one, one], [], 1),
    ):
        assert one_buffer(arrays, others, least) == (None, None)


def test_parts_of_one_array_are_joined() -> None:
    """Parts that stand one behind the other are one array, wherever they begin in the memory of the first owner."""
    whole = np.arange(12.0)
    for parts in ([whole[3:5], whole[5:9]], [whole[:6].reshape(2, 3), whole[6:8]]):
        found = joined(parts)
        assert found is not None
        assert (found == np.concatenate([part.reshape(-1) for part in parts])).all()
        found[0] = -1
        assert parts[0].reshape(-1)[0] == -1
    assert joined([whole[3:5], whole[6:8]]) is None
    # Parts that begin within an element of the owner.
    owner = np.zeros(9, complex)
    flat = owner.view(float)[1:17]
    flat[:] = np.arange(16)
    halves = [flat[:8].view(complex), flat[8:].view(complex)]
    assert halves[0].base is owner
    found = joined(halves)
    assert found is not None
    assert (found == np.concatenate(halves)).all()
    # A part that is read-only stays so.
    readonly = whole[:4]
    readonly.setflags(write=False)
    found = joined([readonly[:2], readonly[2:]])
    assert found is None or not found.flags.writeable
