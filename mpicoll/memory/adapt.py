"""Adapt arrays that the program passed to flat memory that can be moved.

:func:`adapt` is the only entry: further layouts, dtypes and protocols are added there, and give the same :class:`Memory`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.memory import layouts
from mpicoll.memory.device import array as device_array
from mpicoll.memory.dtypes import element, is_native
from mpicoll.memory.memory import Array, Memory
from mpicoll.memory.protocols import as_numpy


def adapt(
    value: Any,
    name: str,
    *,
    writable: bool,
    direct: str = "",
    nonblocking: bool = False,
    least: int = device_array.DIRECT_BYTES,
    pieces: int | None = None,
) -> Memory:
    """Return the memory of ``value``.

    Args:
        value: an array of any shape (0-d and empty ones too) and layout: of NumPy, on a GPU, or what :func:`as_numpy` knows.
        name: the parameter's name, for messages.
        writable: the call writes into it.
        direct: the operation of MPI that may be handed memory of a GPU, if MPI knows of it and nobody else touches its elements.
        nonblocking: whether that is the nonblocking form.
        least: arrays of more bytes are handed to it.
        pieces: bytes of an array on a GPU above which the call moves it in pieces; None: as a whole.

    Raises:
        TypeError: not an array, or of a dtype that does not move.
        ValueError: read-only, or with elements that share memory, and the call writes into it.
    """
    given = value
    if not isinstance(value, np.ndarray):
        if device_array.on_device(value):
            if direct and device_array.permits(direct, nonblocking):
                own = device_array.direct(value, name, writable=writable, least=least)
                if own is not None:
                    return memory_of(own)
            return memory_of(device_array.stage(value, name, writable=writable, pieces=pieces))
        value = as_numpy(value, name, writable=writable)
    if value is None or isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type numpy.ndarray but got {_type_name(given)} "
            f"instead: {_instead(given)}"
        )
    flags = value.flags
    if is_native(value.dtype) and flags.c_contiguous and flags.aligned and (flags.writeable or not writable):
        return Memory(value.view(np.ndarray).reshape(-1), value.shape)
    try:
        each = element(value.dtype)
    except TypeError as error:
        raise TypeError(f"parameter `{name}`: {error}") from None
    if writable and not flags.writeable:
        raise ValueError(
            f"parameter `{name}` is read-only, and this call writes its result into it: pass x.copy(), and keep it"
        )
    if writable and layouts.overlaps(value):
        raise ValueError(
            f"parameter `{name}` has elements that share memory (shape {value.shape}, strides {value.strides}), and this call "
            "writes its result into it: pass a copy"
        )
    plain = value.view(np.ndarray)
    if flags.c_contiguous and flags.aligned and not each.swapped and not (each.gaps and writable):
        return Memory(plain.view(each.wire).reshape(-1), value.shape, named=each.name)
    flat, pack, unpack = layouts.packed(plain, each)
    return Memory(flat, value.shape, pack=pack, unpack=unpack if writable else None, named=each.name, origin=plain)


def memory_of(found: device_array.DeviceMemory) -> Memory:
    """Return the memory of an array on a GPU: its own, where MPI may have it or pieces of it move; or of the host."""
    return Memory(
        found.flat,
        found.shape,
        pack=found.pack,
        unpack=found.unpack,
        named=found.named,
        origin=found.origin,
        place=found.place,
        ready=found.ready,
        direct=isinstance(found.flat, device_array.DeviceAddresses),
    )


def viewed(value: Any) -> Array | None:
    """Return a NumPy array of the memory of an array that :func:`adapt` has taken before; of one on a GPU its addresses."""
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
        TypeError: not a list (a tuple is refused, as in torch), or an element that :func:`adapt` refuses.
        ValueError: the list has another length than ``length``; the dtypes differ.
    """
    arrays: list[Any] = []
    if isinstance(values, list):
        for i, value in enumerate(values):
            known = isinstance(value, np.ndarray) or device_array.on_device(value)
            arrays.append(value if known else as_numpy(value, f"{name}[{i}]", writable=writable))
    if not isinstance(values, list) or any(array is None for array in arrays):
        if isinstance(values, list):
            strange = {_type_name(v) for v, array in zip(values, arrays, strict=True) if array is None}
            got = "list holding " + ", ".join(sorted(strange))
        else:
            got = _type_name(values)
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
    """Raise ValueError when two arrays of a list that the call writes have bytes in common.

    Args:
        name: the parameter's name, for messages.
        rows: where it is a list of lists, how many are in each.
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
    """Raise ValueError when the memories are not all of one dtype, and in one place."""
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
    """Return what to pass instead of what is no array."""
    if isinstance(value, np.ma.MaskedArray):
        return "its mask would be lost. Fill it, x.filled(0), or move x.data and numpy.ma.getmaskarray(x)"
    if value is None:
        return "a gradient is None before backward(), and where its parameter was not used"
    if isinstance(value, dict) or callable(getattr(value, "parameters", None)):
        return "pass the arrays in it, one by one"
    if hasattr(value, "__next__"):
        return "pass its arrays one by one, or a list of them where one is taken"
    return "pass an array, such as numpy.asarray(x), and keep it if it holds a result"


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
