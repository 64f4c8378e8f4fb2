"""Widen float16 and bfloat16 to float32 for a reduction, and round the result once.

MPI reduces neither type. A product of two elements is exact in float32, and sums are nearly exact: float32 has 13 bits more
than float16, and 16 bits more than bfloat16. Elements are 16-bit words here, so that arrays of other packages need no copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.memory.dtypes import HALVES, Floats, Words
from mpicoll.memory.scratch import scratch
from mpicoll.runtime.native import convert_half

if TYPE_CHECKING:
    from mpicoll.memory.memory import Memory


WIDE: np.dtype[Any] = np.dtype(np.float32)
"""The dtype in which half types are reduced."""

_STEP = 1 << 16  # elements converted at a time, so that temporary memory is small


def widen(name: str, words: Words, out: Floats) -> None:
    """Convert elements of a half type, as 16-bit words, to float32 without rounding."""
    _convert(name, HALVES[name][0], words, out)


def narrow(name: str, values: Floats, out: Words) -> None:
    """Round float32 to a half type: to nearest, ties to even."""
    _convert(name, HALVES[name][1], values, out)


def _convert(name: str, by_numpy: Callable[[Any, Any], None], source: Any, out: Any) -> None:
    for at in range(0, source.size, _STEP):
        part, result = source[at : at + _STEP], out[at : at + _STEP]
        if not convert_half(name, part, result):
            by_numpy(part, result)


def wide(memory: Memory) -> Memory:
    """Return the float32 memory in which a memory of a half type is reduced; another memory unchanged."""
    if memory.named not in HALVES:
        return memory
    if memory.direct:
        addresses: Any = memory.flat
        wider = addresses.widened(WIDE, partial(widen, memory.named), partial(narrow, memory.named))
        return replace(memory, flat=wider, origin=memory.own)
    name, words, values = memory.named, memory.flat, scratch(memory.flat.size, WIDE)

    def pack() -> None:
        widen(name, memory.filled(), values)

    def unpack() -> None:
        narrow(name, values, words)
        if memory.unpack is not None:
            memory.unpack()

    return replace(memory, flat=values, pack=pack, unpack=unpack, origin=memory.own)
