"""Temporary memory of a call, which later calls use again.

The pages of new memory are mapped one by one when they are first written. So a copy into new memory can take many times as long
as into memory that was written before (docs/performance.md).
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_BYTES = 128 * 1024
"""From so many bytes on memory is used again. The C library uses smaller memory again by itself."""
MOST_BYTES = 64 * 1024 * 1024
"""Most bytes of the memory that is used again, of a process."""

Bytes = npt.NDArray[np.uint8]


class Owner:
    """What an array over some bytes and all views of the array refer to. It retains ``held`` as long as they live."""

    __slots__ = ("__array_interface__", "__weakref__", "_held")

    def __init__(self, start: int, nbytes: int, readonly: bool = False, held: Any = None) -> None:
        self._held = held
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (start, readonly), "version": 3}


class _Lent(weakref.ref[Owner]):
    """Memory that an array uses: when nothing refers to its owner any more, this object is appended to ``_released``.

    The callback is a function of C. A function of Python could be interrupted by a signal handler, whose exception would be lost.
    """

    __slots__ = ("memory",)
    memory: Bytes


_lent: set[_Lent] = set()
_released: deque[_Lent] = deque()
_unused: deque[Bytes] = deque()


def scratch(shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array without initial values. Its memory is used again when nothing refers to the array or to a view of it."""
    nbytes = (math.prod(shape) if isinstance(shape, tuple) else shape) * dtype.itemsize
    if not LEAST_BYTES <= nbytes <= MOST_BYTES:
        return np.empty(shape, dtype)
    memory = _taken(nbytes)
    if memory is None:
        return np.empty(shape, dtype)
    owner = Owner(memory.__array_interface__["data"][0], nbytes)
    lent = _Lent(owner, _released.append)
    lent.memory = memory
    _lent.add(lent)
    array: npt.NDArray[Any] = np.asarray(owner).view(dtype).reshape(shape)
    return array


def concatenated(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return one-dimensional arrays of one dtype as one array."""
    return np.concatenate(arrays, out=scratch(sum(each.size for each in arrays), arrays[0].dtype))


def _taken(nbytes: int) -> Bytes | None:
    """Return memory of at least ``nbytes``, and less than twice as many; None if all memory would be more than ``MOST_BYTES``."""
    while (lent := _first(_released)) is not None:
        _lent.discard(lent)
        _unused.append(lent.memory)
    for _ in range(len(_unused)):
        memory: Bytes | None = _first(_unused)
        if memory is None:
            break
        if nbytes <= memory.nbytes < 2 * nbytes:
            return memory
        _unused.append(memory)
    while (
        nbytes + sum(each.memory.nbytes for each in list(_lent)) + sum(each.nbytes for each in list(_unused))
        > MOST_BYTES
    ):
        if _first(_unused) is None:
            return None
    return np.empty(nbytes, np.uint8)


def _first(queue: deque[Any]) -> Any:
    """Take the first object of a queue, at once, so that no other thread gets it; None if the queue is empty."""
    try:
        return queue.popleft()
    except IndexError:
        return None
