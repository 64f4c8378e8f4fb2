"""Temporary memory of a call, which later calls use again.

The pages of new memory are mapped one by one when they are first written. So a copy into new memory can take many times as long
as into memory that was written before (docs/performance.md).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_BYTES = 128 * 1024
"""From so many bytes on memory is used again. The C library uses smaller memory again by itself."""
MOST_BYTES = 64 * 1024 * 1024
"""Most bytes of the memory that a process retains."""

_retained: list[npt.NDArray[np.uint8]] = []


def scratch(shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array without initial values. Its memory is used again when nothing refers to the array or to a view of it."""
    nbytes = (math.prod(shape) if isinstance(shape, tuple) else shape) * dtype.itemsize
    if not LEAST_BYTES <= nbytes <= MOST_BYTES or not _COUNTS:
        return np.empty(shape, dtype)
    memory = _unused(nbytes)
    if memory is None:
        memory = np.empty(nbytes, np.uint8)
    array: npt.NDArray[Any] = memory[:nbytes].view(dtype).reshape(shape)
    _retain(memory)
    return array


def concatenated(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return one-dimensional arrays of one dtype as one array."""
    return np.concatenate(arrays, out=scratch(sum(each.size for each in arrays), arrays[0].dtype))


def _taken(memories: list[npt.NDArray[np.uint8]]) -> tuple[npt.NDArray[np.uint8], int] | None:
    """Return the first memory, which is no longer in the list, and the references to the memory; None if the list is empty."""
    try:
        memory = memories.pop(0)  # at once, so that no other thread gets this memory
    except IndexError:
        return None
    return memory, sys.getrefcount(memory)


def _unused(nbytes: int) -> npt.NDArray[np.uint8] | None:
    """Return memory of at least ``nbytes``, and less than twice as many, that no array uses, or None."""
    for _ in range(len(_retained)):
        taken = _taken(_retained)
        if taken is None:
            return None
        memory, references = taken
        if references == _ALONE and nbytes <= memory.nbytes < 2 * nbytes:
            return memory
        _retained.append(memory)
    return None


def _retain(memory: npt.NDArray[np.uint8]) -> None:
    """Retain memory for later calls instead of what has not been used for longest."""
    _retained.append(memory)
    total = sum(each.nbytes for each in list(_retained))
    while total > MOST_BYTES:
        taken = _taken(_retained)
        if taken is None:
            return
        total -= taken[0].nbytes


def _references_to_one() -> int:
    taken = _taken([np.empty(1, np.uint8)])
    assert taken is not None
    return taken[1]


_ALONE = _references_to_one()
"""What ``sys.getrefcount`` returns for memory that nothing else refers to; the number depends on the version of Python."""
_COUNTS = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether the counts are exact, as they are with the interpreter lock."""
