"""Adapt arrays of the program to flat memory that transports can move.

:func:`adapt` is the only entry. Further layouts, dtypes and protocols are added here, and give the same :class:`Memory`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.memory import layouts
from mpicoll.memory.device import array as device_array
from mpicoll.memory.dtypes import element_of, is_native
from mpicoll.memory.memory import Array, Memory
from mpicoll.memory.protocols import as_numpy, type_name


def adapt(
    value: Any,
    name: str,
    *,
    writable: bool,
    direct: str = "",
    nonblocking: bool = False,
    least: int = device_array.DIRECT_BYTES,
    pieces: int = 0,
    checked: device_array.MovableArray | None = None,
) -> Memory:
    """Return the memory of ``value``.

    Args:
        value: an array of any shape and layout: of NumPy, on a GPU, or of a kind that :func:`as_numpy` knows.
        name: the name of the parameter, for messages.
        writable: the call writes into the array.
        direct: name of the operation of MPI that may get memory of a GPU directly; "" for none.
        nonblocking: whether the operation has the nonblocking form.
        least: arrays of more bytes are passed to MPI directly.
        pieces: contiguous arrays on a GPU move in pieces if this many of them have more than ``PIECES_FROM`` bytes; 0: none does.
        checked: the array on a GPU, if it was checked before.

    Raises:
        TypeError: not an array, or the dtype cannot be moved.
        ValueError: the call writes into the array, which is read-only or has elements that share memory.
    """
    given = value
    if not isinstance(value, np.ndarray):
        if device_array.on_device(value):
            if direct and device_array.permits(direct, nonblocking):
                own = device_array.direct(value, name, writable=writable, least=least)
                if own is not None:
                    return own
            checked = checked or device_array.movable_array(value, name, writable=writable)
            return checked.stage(writable=writable, pieces=pieces)
        value = as_numpy(value, name, writable=writable)
    if value is None or isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type numpy.ndarray but got {type_name(given)} "
            f"instead: {_instead(given)}"
        )
    flags = value.flags
    if is_native(value.dtype) and flags.c_contiguous and flags.aligned and (flags.writeable or not writable):
        return Memory(value.view(np.ndarray).reshape(-1), value.shape)
    each = element_of(value.dtype, name)
    if writable:
        layouts.check_result(value, name, not flags.writeable)
    plain = value.view(np.ndarray)
    if flags.c_contiguous and flags.aligned and not each.swapped and not (each.gaps and writable):
        return Memory(plain.view(each.wire).reshape(-1), value.shape, named=each.name)
    flat, pack, unpack = layouts.packed(plain, each)
    return Memory(flat, value.shape, pack=pack, unpack=unpack if writable else None, named=each.name, origin=plain)


def check_array(value: Any, name: str, *, writable: bool) -> None:
    """Raise what :func:`adapt` raises for ``value``, in less time for an array of NumPy."""
    if type(value) is not np.ndarray or not is_native(value.dtype):
        adapt(value, name, writable=writable)
    elif writable and not value.flags.carray:
        layouts.check_result(value, name, not value.flags.writeable)


def viewed(value: Any) -> Array | None:
    """Return a NumPy array of the memory of an array that :func:`adapt` accepts; for an array on a GPU its addresses."""
    if isinstance(value, np.ndarray):
        return value
    if device_array.on_device(value):
        return device_array.place_of(value, "tensor")
    return as_numpy(value, "tensor", writable=False)


def adapt_list(
    values: Any,
    name: str,
    *,
    writable: bool,
    length: int | None = None,
    direct: str = "",
    least: int = device_array.DIRECT_BYTES,
) -> list[Memory]:
    """Return the memories of a list of arrays of one dtype; ``direct`` and ``least`` as in :func:`adapt`.

    Raises:
        TypeError: not a list (a tuple is an error, as in torch), or :func:`adapt` raises for an element.
        ValueError: the list has another length than ``length``, or the dtypes differ.
    """
    arrays: list[Any] = []
    if isinstance(values, list):
        for i, value in enumerate(values):
            known = isinstance(value, np.ndarray) or device_array.on_device(value)
            arrays.append(value if known else as_numpy(value, f"{name}[{i}]", writable=writable))
    if not isinstance(values, list) or any(array is None for array in arrays):
        if isinstance(values, list):
            strange = {type_name(v) for v, array in zip(values, arrays, strict=True) if array is None}
            got = "list holding " + ", ".join(sorted(strange))
        else:
            got = type_name(values)
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type List[numpy.ndarray] but got {got} instead."
        )
    if length is not None and len(values) != length:
        raise ValueError(f"parameter `{name}` must hold one array for each of the {length} ranks, got {len(values)}")
    memories = [
        adapt(value, f"{name}[{i}]", writable=writable, direct=direct, least=least) for i, value in enumerate(arrays)
    ]
    same_dtype(*memories)
    if writable:
        apart([memory.own for memory in memories], name)
    return memories


def apart(arrays: list[Array], name: str, rows: Sequence[int] = ()) -> None:
    """Raise ValueError if two arrays of a list that the call writes have bytes in common.

    Args:
        name: the name of the parameter, for messages.
        rows: lengths of the inner lists if the parameter is a list of lists.
    """
    found = layouts.in_common(arrays) if len(arrays) > 1 else None
    if found is not None:
        places = [f"[{place}]" for place in range(len(arrays))]
        if rows:
            places = [f"[{row}][{place}]" for row, length in enumerate(rows) for place in range(length)]
        one, other = (f"{name}{places[place]}" for place in found)
        raise ValueError(
            f"parameter `{name}`: {one} and {other} share memory, and this call writes into both. [x] * n "
            "holds the same array n times: use [numpy.empty_like(x) for _ in range(n)]"
        )


def same_dtype(*memories: Memory) -> None:
    """Raise ValueError if the memories have several dtypes or places."""
    for memory in memories[1:]:
        if memory.place != memories[0].place:
            raise ValueError(
                f"the arrays of one call must all be on the host, or all on one GPU: found {memories[0].place} and {memory.place}"
            )
        if memory.name != memories[0].name:
            raise ValueError(
                f"Invalid usage of tensors with different dtypes: found {memories[0].name} and {memory.name}"
            )


def _instead(value: Any) -> str:
    """Return what to pass instead of an object that is no array."""
    if isinstance(value, np.ma.MaskedArray):
        return "its mask would be lost. Fill it, x.filled(0), or move x.data and numpy.ma.getmaskarray(x)"
    if value is None:
        return "a gradient is None before backward(), and if its parameter was not used"
    if isinstance(value, dict) or callable(getattr(value, "parameters", None)):
        return "pass the arrays in it, one by one"
    if hasattr(value, "__next__"):
        return "pass the arrays one by one, or in a list if the call accepts a list"
    return "pass an array, such as numpy.asarray(x), and keep it if it holds a result"
