"""float16 and bfloat16: widened to float32 for a reduction, and rounded once when it is done.

MPI reduces neither. Two of them multiplied are exact in float32, and sums of them nearly are: float32 has 13 bits more than
float16, and 16 more than bfloat16. Elements are taken as 16-bit words, so that memory of another library serves as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mpicoll.buffers.array import Memory

__all__ = ["HALVES", "narrow", "wide", "widen"]

Words = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]

WIDE: np.dtype[Any] = np.dtype(np.float32)
"""What halves are reduced as, between the ranks and on each of them."""

_STEP = 1 << 16  # elements converted at once, so that what is needed in between stays small


def _widen_float16(words: Words, out: Floats) -> None:
    with np.errstate(all="ignore"):
        out[...] = words.view(np.float16)


def _narrow_float16(values: Floats, out: Words) -> None:
    with np.errstate(all="ignore"):
        out.view(np.float16)[...] = values  # to nearest, ties to even; what is too large becomes infinity


def _widen_bfloat16(words: Words, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[...] = words
    bits <<= 16


def _narrow_bfloat16(values: Floats, out: Words) -> None:
    # The upper half of float32, to nearest, ties to even: add just under half a unit, and one more when the last bit is set.
    # A carry into the exponent is right, up to infinity. A NaN stays one: the rounding could carry it into the sign.
    bits = values.view(np.uint32)
    kept = bits >> 16
    rounded = (bits + (np.uint32(0x7FFF) + (kept & 1))) >> 16
    out[...] = np.where((bits & 0x7FFFFFFF) > 0x7F800000, kept | 0x0040, rounded)


HALVES: dict[str, tuple[Callable[[Words, Floats], None], Callable[[Floats, Words], None]]] = {
    "float16": (_widen_float16, _narrow_float16),
    "bfloat16": (_widen_bfloat16, _narrow_bfloat16),
}
"""By name: what makes float32 of words, and words of float32."""


def widen(name: str, words: Words, out: Floats) -> None:
    """Write halves, given as 16-bit words, into float32: exactly."""
    convert = HALVES[name][0]
    for at in range(0, words.size, _STEP):
        convert(words[at : at + _STEP], out[at : at + _STEP])


def narrow(name: str, values: Floats, out: Words) -> None:
    """Round float32 to halves: to nearest, ties to even."""
    convert = HALVES[name][1]
    for at in range(0, values.size, _STEP):
        convert(values[at : at + _STEP], out[at : at + _STEP])


def wide(memory: Memory) -> Memory:
    """Return a memory as which another one is reduced: float32 for halves, others as they are."""
    if memory.named not in HALVES:
        return memory
    if memory.direct:
        shadow: Any = memory.flat
        wider = shadow.widened(WIDE, partial(widen, memory.named), partial(narrow, memory.named))
        return replace(memory, flat=wider, origin=memory.own)
    name, words, values = memory.named, memory.flat, np.empty(memory.flat.size, WIDE)

    def pack() -> None:
        widen(name, memory.filled(), values)

    def unpack() -> None:
        narrow(name, values, words)
        if memory.unpack is not None:
            memory.unpack()

    return replace(memory, flat=values, pack=pack, unpack=unpack, origin=memory.own)
