"""Ranges of memory that operations use, and snapshots of the contents of arrays."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicoll.memory import layouts
from mpicoll.memory.device.addresses import DeviceAddresses
from mpicoll.runtime.native import found as extension

SNAPSHOT_BYTES = 64 * 1024
"""Bytes of the largest buffer that is compared as a whole to find writes of the program; of a larger one a sample is compared."""

PLACES: tuple[tuple[int, int], ...] = ((2560, 32), (4096, 128), (24 * 1024, 1024))
"""How many places a sample has: one for so many bytes, but at most so many. The rule that gives most places counts."""

_END_BYTES, _PLACE_BYTES = 128, 32

EVERYWHERE = 0, sys.maxsize
"""The bounds of memory whose addresses are not known."""

_MOST_WORK = 10_000
_address = MPI.Get_address
_too_hard: type[Exception] = getattr(np, "exceptions", np).TooHardError

Array = npt.NDArray[Any]


def span(array: Array) -> tuple[int, int]:
    """Return what :func:`layouts.span` returns, of a contiguous array in a tenth of the time."""
    if array.flags.c_contiguous:
        try:
            start = _address(array)
        except (BufferError, TypeError, ValueError):  # a dtype without a buffer
            return layouts.span(array)
        return start, start + array.nbytes
    return layouts.span(array)


class Range:
    """The memory of one array of one operation."""

    __slots__ = ("array", "claim", "end", "start", "writes")

    def __init__(self, array: Array, claim: Any, writes: bool) -> None:
        self.start, self.end = span(array)
        self.array = array
        self.claim = claim
        self.writes = writes

    def __lt__(self, other: Range) -> bool:
        return self.start < other.start

    def shares(self, other: Range) -> bool:
        """Return whether two ranges have a byte in common; False if the test takes too long."""
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.array.flags.c_contiguous and other.array.flags.c_contiguous:
            return True
        try:
            return bool(np.shares_memory(self.array, other.array, max_work=_MOST_WORK))  # type: ignore[arg-type]
        except _too_hard:
            return False


def bounds(ranges: list[Range]) -> tuple[int, int]:
    """Return the address of the first byte of some ranges and the address behind the last byte; 0 and 0 without ranges."""
    if not ranges:
        return 0, 0
    start, end = ranges[0].start, ranges[0].end
    for each in ranges[1:]:
        start = each.start if each.start < start else start
        end = each.end if each.end > end else end
    return start, end


class Snapshot:
    """The contents of some arrays, to find out later whether the arrays were written. Memory of a GPU is not looked at."""

    __slots__ = ("_arrays", "_held")

    def __init__(self, arrays: Iterable[Array]) -> None:
        self._arrays = [array for array in arrays if type(array) is not DeviceAddresses]
        self._held = contents(self._arrays)

    def is_changed(self) -> bool:
        """Return whether the contents of an array have changed."""
        return differ(self._arrays, self._held)


def seal(arrays: Any) -> bytes | Snapshot:
    """Return the contents of an array or a list of arrays, to find writes; empty for None."""
    if arrays is None:
        return b""
    found: bytes | None = None if extension is None else extension.contents(arrays)
    if found is not None:
        return found
    if _has_fields(arrays):  # the snapshot has no bytes between fields
        return Snapshot(arrays if isinstance(arrays, list) else [arrays])
    return contents(arrays)


def _has_fields(arrays: Any) -> bool:
    if isinstance(arrays, list):
        return any(each.dtype.names is not None for each in arrays)
    return arrays.dtype.names is not None


def is_sampled(arrays: Any) -> bool:
    """Return whether the contents of an array, or of the arrays of a list, are a sample."""
    if isinstance(arrays, list):
        return bool(sum(each.nbytes for each in arrays) > SNAPSHOT_BYTES)
    return arrays is not None and bool(arrays.nbytes > SNAPSHOT_BYTES)


def contents(arrays: Any) -> bytes:
    """Return the bytes of an array, or of the arrays of a list one behind the other.

    Of more than ``SNAPSHOT_BYTES`` the result is a sample of each array: 128 bytes at both ends, and 32 bytes at each of some
    places (``PLACES``). The array is cut into as many parts of equal length, and one place stands anywhere in each part. So a
    write to all bytes of two parts in a row is always seen. Of the places of a list one half belongs to the arrays in equal
    shares, the other half by their bytes.
    """
    if extension is not None:
        found: bytes | None = extension.contents(arrays)
        if found is not None:
            return found
    if type(arrays) is np.ndarray and arrays.nbytes <= SNAPSHOT_BYTES and arrays.dtype.names is None:
        return arrays.tobytes()
    given = arrays if isinstance(arrays, list) else [arrays]
    if not is_sampled(given):
        return b"".join(_bytes(each, -1) for each in given)
    total = sum(each.nbytes for each in given)
    half = max((min(total // each, most) for each, most in PLACES), default=0) // 2
    return b"".join(_bytes(each, half // len(given) + half * (each.nbytes // 64) // (total // 64)) for each in given)


def differ(arrays: Any, held: bytes) -> bool:
    """Return whether an array, or the arrays of a list, have other contents than :func:`contents` has returned."""
    if extension is not None:
        found: bool | None = extension.differ(arrays, held)
        if found is not None:
            return found
    return contents(arrays) != held


def set_places(rules: tuple[tuple[int, int], ...]) -> None:
    """Set ``PLACES``, also for the extension."""
    global PLACES
    PLACES = rules
    if extension is not None:
        extension.set_places(rules)


set_places(PLACES)


def _bytes(array: Array, places: int) -> bytes:
    """Return the bytes of an array, or a sample with so many places; -1: all bytes."""
    if array.dtype.names is not None:
        # Field by field: bytes between fields may belong to another array, and are arbitrary in a copy.
        return b"".join(_bytes(array[name], places) for name in array.dtype.names)
    if places < 0 or array.nbytes <= 2 * _END_BYTES + (places + 1) * _PLACE_BYTES:
        return array.tobytes()
    if not array.flags.c_contiguous:
        ends, some = _END_BYTES // array.itemsize + 1, min(places, array.size)
        chosen = np.concatenate(
            [np.arange(ends), _scattered(some, array.size), np.arange(array.size - ends, array.size)]
        )
        return bytes(array[np.unravel_index(chosen, array.shape)].tobytes())
    raw = array.reshape(-1).view(np.uint8)
    skew = -raw.__array_interface__["data"][0] % _PLACE_BYTES
    lines = raw[skew : skew + (array.nbytes - skew) // _PLACE_BYTES * _PLACE_BYTES].reshape(-1, _PLACE_BYTES)
    between = lines[_scattered(places, len(lines))]
    return bytes(raw[:_END_BYTES].tobytes() + raw[-_END_BYTES:].tobytes() + between.tobytes())


@lru_cache(64)
def _scattered(places: int, length: int) -> npt.NDArray[np.intp]:
    """Return one number out of each of so many equal parts of ``range(length)``, as ``native/objects/memory_in_use.c`` does."""
    number = np.arange(places, dtype=np.uint64)
    part = (length << 16) // max(places, 1)
    mixed = (number * number * np.uint64(0x85EBCA77) + number * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)
    within = mixed * np.uint64(part >> 16) >> np.uint64(32)
    chosen: npt.NDArray[np.intp] = ((number * np.uint64(part) >> np.uint64(16)) + within).astype(np.intp)
    return chosen


class Ranges:
    """Ranges sorted by start address, in one list for each order of magnitude of the length.

    A range overlaps a given range only if the distance of its start before the given range is at most the length of its list.
    So only a few of many adjacent ranges are compared.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[Range]] = {}
        self._starts: dict[int, list[int]] = {}

    def add(self, new: Range) -> None:
        size = (new.end - new.start).bit_length()
        insort(self._lists.setdefault(size, []), new)
        insort(self._starts.setdefault(size, []), new.start)

    def remove(self, old: Range) -> None:
        size = (old.end - old.start).bit_length()
        ranges, starts = self._lists[size], self._starts[size]
        at = bisect_left(starts, old.start)
        while ranges[at] is not old:
            at += 1
        del ranges[at], starts[at]
        if not ranges:
            del self._lists[size], self._starts[size]

    def near(self, wanted: Range) -> Iterator[Range]:
        """Yield all ranges that may overlap the given range."""
        for size, starts in self._starts.items():
            first = bisect_left(starts, wanted.start - (1 << size))
            yield from self._lists[size][first : bisect_left(starts, wanted.end)]
