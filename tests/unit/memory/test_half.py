"""Halves become float32 exactly, and float32 becomes halves by one rounding to nearest, ties to even."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicoll.memory.half import narrow, wide, widen
from mpicoll.memory.memory import Memory
from mpicoll.runtime import native

WORDS = np.arange(1 << 16, dtype=np.uint16)


@pytest.fixture(autouse=True, params=["extension", "NumPy"])
def converter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "NumPy":
        monkeypatch.setattr(native, "found", None)
    elif native.found is None:
        pytest.skip("no C extension")


def reference(name: str) -> Any:
    return np.dtype("e") if name == "float16" else np.dtype(pytest.importorskip("ml_dtypes").bfloat16)


def bits_of_float32(seed: int) -> Any:
    """Return float32 of all sizes: random words, every half with what stands next to it and next to its middle."""
    halves = WORDS.astype(np.uint32) << 16
    near = [halves + np.uint32(offset) for offset in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    with np.errstate(all="ignore"):
        float16 = WORDS.view(np.float16).astype(np.float32).view(np.uint32)
        near += [float16 + np.uint32(offset % 2**32) for offset in (-1, 0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF)]
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.integers(0, 1 << 32, 1 << 18, np.uint32), *near]).view(np.float32)


def same_or_nan(got: Any, wanted: Any) -> None:
    with np.errstate(all="ignore"):
        nan = np.isnan(wanted.astype(np.float64))
        assert (np.isnan(got.astype(np.float64)) == nan).all()
    size = np.dtype(f"u{wanted.dtype.itemsize}")
    assert (got.view(size)[~nan] == wanted.view(size)[~nan]).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_half_is_widened_exactly_and_comes_back(name: str) -> None:
    """All 65,536 words become the float32 that they stand for, and the same words again; NaN stays NaN, with its sign."""
    dtype, out, back = reference(name), np.empty(1 << 16, np.float32), np.empty(1 << 16, np.uint16)
    widen(name, WORDS, out)
    with np.errstate(all="ignore"):
        same_or_nan(out, WORDS.view(dtype).astype(np.float32))
    narrow(name, out, back)
    same_or_nan(back.view(dtype), WORDS.view(dtype))
    assert ((back ^ WORDS) & 0x8000 == 0).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_float32_is_rounded_to_nearest_even(name: str) -> None:
    """Ties, subnormals, overflow to infinity and NaN come out as in NumPy and ml_dtypes, without a warning."""
    values = bits_of_float32(len(name))
    out = np.empty(values.size, np.uint16)
    narrow(name, values, out)
    with np.errstate(all="ignore"):
        same_or_nan(out.view(reference(name)), values.astype(reference(name)))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_any_number_of_elements(name: str) -> None:
    """Numbers of elements that the instructions do not divide, at any address: no element beyond the last one is touched."""
    for count in range(20):
        for start in range(3):
            words, out, back = (
                WORDS[start : start + count] + 0x3C00,
                np.full(24, -1, np.float32),
                np.full(24, 7, np.uint16),
            )
            widen(name, words, out[start : start + count])
            same_or_nan(out[start : start + count], words.view(reference(name)).astype(np.float32))
            assert (out[:start] == -1).all()
            assert (out[start + count :] == -1).all()
            narrow(name, out[start : start + count], back[start : start + count])
            assert (back[start : start + count] == words).all()
            assert (back[:start] == 7).all()
            assert (back[start + count :] == 7).all()


def test_the_corners_of_bfloat16() -> None:
    """What rounds up carries into the exponent, up to infinity; a NaN whose payload is cut off stays one."""
    for given, wanted in (
        (0x3F800000, 0x3F80),  # 1
        (0x3F808000, 0x3F80),  # a tie, to even
        (0x3F818000, 0x3F82),
        (0x3F808001, 0x3F81),
        (0x3FFF8000, 0x4000),  # into the exponent
        (0x7F7FFFFF, 0x7F80),  # the largest float32: infinity
        (0xFF7F8000, 0xFF80),
        (0x7F800000, 0x7F80),
        (0x80000000, 0x8000),
        (0x00008001, 0x0001),  # subnormal
        (0x7F800001, 0x7FC0),  # a NaN with its payload in the lower half
        (0xFFFFFFFF, 0xFFFF),
    ):
        out = np.empty(1, np.uint16)
        narrow("bfloat16", np.array([given], np.uint32).view(np.float32), out)
        assert out[0] == wanted, f"{given:#x} became {int(out[0]):#x}"


def test_wide_memory_is_packed_and_unpacked_through_that_below_it() -> None:
    """A memory of halves becomes one of float32 over whatever hooks it has; others stay themselves."""
    plain = Memory(np.zeros(3), (3,))
    assert wide(plain) is plain
    user, words = np.array([1, 2, 3], np.float16)[::-1], np.empty(3, np.uint16)

    def pack() -> None:
        words.view(np.float16)[...] = user

    def unpack() -> None:
        user[...] = words.view(np.float16)

    memory = wide(Memory(words, (3,), pack=pack, unpack=unpack, named="float16", origin=user))
    assert (memory.name, memory.dtype) == ("float16", np.dtype(np.float32))
    assert memory.own is user
    assert (memory.filled() == [3, 2, 1]).all()
    memory.flat *= 0.5
    assert memory.unpack is not None
    memory.unpack()
    assert (user == [1.5, 1, 0.5]).all()
