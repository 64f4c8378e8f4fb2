"""Arrays whose elements do not stand in C order, natively and one behind the other, by way of packed memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicoll.buffers.dtypes import Element

__all__ = ["overlaps", "packed"]

Array = npt.NDArray[Any]


def packed(value: Array, element: Element) -> tuple[Array, Callable[[], None], Callable[[], None]]:
    """Return memory for the elements of an array in C order, what fills it, and what writes it back.

    Where elements have gaps, what stands in the array's own gaps is kept: it may be fields of another view.
    """
    if element.swapped:
        source, own = value, np.empty(value.shape, value.dtype.newbyteorder("="))
    else:
        source = value.view(element.wire)  # NumPy would copy a structured dtype field by field
        own = np.empty(value.shape, element.wire)
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


def overlaps(value: Array) -> bool:
    """Whether two elements of an array have a byte in common, as in a broadcast view."""
    flags = value.flags
    if flags.c_contiguous or flags.f_contiguous or value.size < 2:
        return False
    # A view made by indexing: seen from the smallest stride to the largest, each steps over all before it.
    axes = sorted(
        (abs(stride), length) for stride, length in zip(value.strides, value.shape, strict=True) if length > 1
    )
    reach = value.itemsize
    for stride, length in axes:
        if stride < reach:
            break
        reach += stride * (length - 1)
    else:
        return False
    # Anything else comes from as_strided.
    starts = np.zeros(1, np.int64)
    for stride, length in axes:
        starts = np.add.outer(starts, stride * np.arange(length)).reshape(-1)
    starts.sort()
    return bool((np.diff(starts) < value.itemsize).any())
