"""Pack arrays whose elements are not contiguous in C order, or not native; find arrays that share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicoll.memory.dtypes import Element
from mpicoll.memory.scratch import Owner, scratch

Array = npt.NDArray[Any]


def packed(value: Array, element: Element) -> tuple[Array, Callable[[], None], Callable[[], None]]:
    """Return memory for the elements of an array in C order, the function that fills it, and the function that copies it back.

    Bytes in gaps between fields of the array are not overwritten: they may be fields of another view.
    """
    if element.swapped:
        source, own = value, scratch(value.shape, value.dtype.newbyteorder("="))
    else:
        source = value.view(element.wire)  # NumPy would copy a structured dtype field by field
        own = scratch(value.shape, element.wire)
    target = own.view(value.dtype) if element.gaps else own

    def pack() -> None:
        own[...] = source

    def unpack() -> None:
        if element.gaps:
            _copy_fields(value, target)
        else:
            source[...] = own

    return own.reshape(-1).view(element.wire), pack, unpack


def _copy_fields(into: Array, out_of: Array) -> None:
    assert into.dtype.names is not None
    for name in into.dtype.names:
        if into.dtype[name].base.names is not None:
            _copy_fields(into[name], out_of[name])
        else:
            into[name][...] = out_of[name]


def joined(arrays: Sequence[Array]) -> Array | None:
    """Return one flat array over arrays that stand one behind the other in one array, or None.

    Parts of one array stand so: ``list(x.reshape(n, -1))``, ``numpy.split``, ``torch.chunk``.

    Args:
        arrays: contiguous arrays of one dtype.
    """
    base = arrays[0].base
    if base is None or any(each.base is not base for each in arrays):
        return None
    at = start = arrays[0].__array_interface__["data"][0]
    for each in arrays:
        if each.__array_interface__["data"][0] != at:
            return None
        at += each.nbytes
    first = arrays[0].reshape(-1)
    if not first.size or at == start:
        return None
    count = (at - start) // first.itemsize
    flags = first.flags
    if type(base) is np.ndarray and base.flags.carray and flags.writeable and base.dtype == first.dtype:
        place, rest = divmod(start - base.__array_interface__["data"][0], first.itemsize)
        if not rest:
            return base.reshape(-1)[place : place + count]  # takes a tenth of the time
    return np.lib.stride_tricks.as_strided(first, (count,), (first.itemsize,), writeable=flags.writeable)


_FARTHEST = 2**30 - 1
"""Elements: counts of MPI-3 are C ints, and a clongdouble moves as two elements."""


def spanned(arrays: Sequence[Array], counts: bool = True) -> tuple[Array, list[int]] | None:
    """Return one flat array from the lowest address of some arrays to the highest, and the element at which each array starts.

    Addresses between the arrays may be unmapped: only the bytes of the arrays may be read or written. (MPI-4.1 section 5.1.12
    asks for one variable. All addresses of a process are one range on the machines of MPI's libraries.) None if an array does
    not start at a whole element of the flat array, or starts farther away than MPI counts.

    Args:
        arrays: contiguous arrays of one dtype, of which one at least has elements.
        counts: MPI counts the elements.
    """
    dtype = arrays[0].dtype
    places = [each.__array_interface__["data"][0] for each in arrays]
    start = min(place for place, each in zip(places, arrays, strict=True) if each.size)
    starts, rests = np.divmod([place - start for place in places], dtype.itemsize)
    filled = np.array([each.size > 0 for each in arrays])
    starts[~filled] = 0
    if rests[filled].any() or (counts and starts.max() > _FARTHEST):
        return None
    count = max(int(at) + each.size for at, each in zip(starts, arrays, strict=True))
    readonly = not all(each.flags.writeable for each in arrays)
    owner = Owner(start, count * dtype.itemsize, readonly, held=list(arrays))
    return np.asarray(owner).view(dtype), starts.tolist()


def one_buffer(
    arrays: Sequence[Array], others: Sequence[Array], apart: int, counts: bool = True
) -> tuple[Array, list[int] | None] | tuple[None, None]:
    """Return one flat array over a list of arrays, and the element at which each array starts.

    The starts are None if the arrays stand one behind the other. Both are None if there is no such array, or if the arrays share
    memory with ``others``.

    Args:
        arrays: contiguous arrays of one dtype.
        apart: the arrays may stand apart if one of them has at least so many bytes.
        counts: MPI counts the elements from one array to another.
    """
    whole = joined(arrays)
    if whole is not None:
        return (None, None) if any(np.may_share_memory(whole, other) for other in others) else (whole, None)
    if max(each.nbytes for each in arrays) < max(apart, 1) or not are_disjoint([*arrays, *others]):
        return None, None
    return spanned(arrays, counts) or (None, None)


def are_disjoint(arrays: list[Any]) -> bool:
    """Return whether certainly no two arrays of a list have bytes in common."""
    if any(type(each) is not np.ndarray for each in arrays):
        return False
    if all(each.base is None for each in arrays):  # each has memory of its own
        return len(set(map(id, arrays))) == len(arrays)
    if len(arrays) <= _FEW:
        return not any(np.may_share_memory(one, other) for one, other in combinations(arrays, 2))
    places = sorted((each.__array_interface__["data"][0], each.nbytes) for each in arrays)
    return all(start + nbytes <= after for (start, nbytes), (after, _) in pairwise(places))


def may_share(array: Any, others: Sequence[Any]) -> bool:
    """Return whether an array may have bytes in common with others; of two arrays this takes a tenth of :func:`are_disjoint`."""
    if len(others) > 1:
        return not are_disjoint([array, *others])
    for other in others:
        if not (array.base is None and other.base is None and array is not other):
            return bool(np.may_share_memory(array, other))
    return False


_FEW = 3
_MOST_COMPARED = 4096
_MOST_WORK: Any = 10_000


def span(array: Array) -> tuple[int, int]:
    """Return the address of the first byte of an array and the address behind the last byte."""
    start: int = array.__array_interface__["data"][0]
    if array.flags.c_contiguous or not array.size:
        return start, start + array.nbytes
    end = start
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            start += (length - 1) * stride
        else:
            end += (length - 1) * stride
    return start, end + array.itemsize


def in_common(arrays: Sequence[Array]) -> tuple[int, int] | None:
    """Return the places of two arrays of a list that have memory in common, or None.

    Of interleaved arrays, such as the columns of one matrix, a few thousand pairs are compared.
    """
    seen: dict[Any, int] = {}
    for place, array in enumerate(arrays):
        if array.size:
            first = seen.setdefault((array.__array_interface__["data"][0], array.shape, array.strides), place)
            if first != place:
                return first, place
    spans = sorted((*span(array), place) for place, array in enumerate(arrays) if array.size)
    compared = 0
    before: list[tuple[int, int]] = []  # end and place of arrays that begin before and may overlap
    for start, end, place in spans:
        before = [(stop, other) for stop, other in before if stop > start]
        for _, other in before:
            compared += 1
            if compared > _MOST_COMPARED:
                return None
            try:
                common = np.shares_memory(arrays[place], arrays[other], max_work=_MOST_WORK)
            except RuntimeError:  # TooHardError
                common = False
            if common:
                return min(place, other), max(place, other)
        before.append((end, place))
    return None


def check_result(array: Array, name: str, readonly: bool) -> None:
    """Raise ValueError if a call cannot write its result into the array that is passed for the parameter ``name``."""
    if readonly:
        raise ValueError(
            f"parameter `{name}` is read-only, and this call writes its result into it: pass x.copy(), and keep it"
        )
    if overlaps(array):
        raise ValueError(
            f"parameter `{name}` has elements that share memory (shape {array.shape}, strides {array.strides}), and this call "
            "writes its result into it: pass a copy"
        )


def overlaps(value: Array) -> bool:
    """Return whether two elements of an array have a byte in common, as in a broadcast view."""
    flags = value.flags
    return not (flags.c_contiguous or flags.f_contiguous) and _overlap(value.shape, value.strides, value.itemsize)


@lru_cache(maxsize=256)
def _overlap(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if 0 in shape:
        return False
    # In a view made by indexing, each stride covers the extent of all axes with smaller strides.
    axes = sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True) if length > 1)
    if axes and axes[0][0] < itemsize:
        return True  # neighbours along this axis
    reach = itemsize
    for stride, length in axes:
        if stride < reach:
            break
        reach += stride * (length - 1)
    else:
        return False
    # Other arrays are results of as_strided.
    starts = np.zeros(1, np.int64)
    for stride, length in axes:
        starts = np.add.outer(starts, stride * np.arange(length)).reshape(-1)
    starts.sort()
    return bool((np.diff(starts) < itemsize).any())
