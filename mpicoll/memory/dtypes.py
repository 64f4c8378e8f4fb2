"""The table of dtypes and reductions: how elements move, which operation of MPI reduces them, and work before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicoll.memory.arithmetic import without_warnings
from mpicoll.memory.protocols import bare_name, type_name
from mpicoll.memory.reduce_op import RedOpType, ReduceOp, WholeAverage

Array = npt.NDArray[Any]

MOVABLE = frozenset("?bBhHiIlLqQfdgFDG")
"""Type characters of the dtypes that MPI knows: bool, integers, float32, float64, longdouble and complex dtypes of these."""

# Looked up by number, as ml_dtypes uses type characters of NumPy, such as "G" (clongdouble) for float8_e4m3fnuz.
_NATIVE = frozenset(np.dtype(char).num for char in MOVABLE)
_FLOAT16, _DATES, _TEXTS, _VOID = np.dtype("e").num, frozenset((21, 22)), frozenset((18, 19)), 20

FOREIGN = {
    "bfloat16": 2,
    **dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"), 1),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"), 1),
    **dict.fromkeys(("int1", "int2", "int4", "uint1", "uint2", "uint4"), 1),
    **dict.fromkeys(("bcomplex32", "complex32"), 4),
}
"""Names and sizes of the dtypes of ml_dtypes, which is not imported for that."""

_WIRES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


@dataclass(frozen=True, slots=True)
class Element:
    """How elements of a dtype move.

    Attributes:
        wire: dtype as which the bytes move, in the byte order of this machine.
        name: name of the dtype if ``wire`` has another name, otherwise "". Arrays of one name match in a call.
        swapped: the bytes have the other byte order.
        gaps: some bytes belong to no field, and may belong to another array.
    """

    wire: np.dtype[Any]
    name: str = ""
    swapped: bool = False
    gaps: bool = False


_names: dict[int, str] = {}


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return ``str(dtype)`` of a movable dtype from a cache (NumPy takes about 5 us to make the string)."""
    name = _names.get(dtype.num)
    if name is None:
        name = str(dtype)
        if dtype.num in _NATIVE and dtype.isnative:
            _names[dtype.num] = name
    return name


def named_element(name: str) -> Element | None:
    """Return the element of a dtype by its name, for float16 and dtypes of other packages; None for other dtypes."""
    size = 2 if name == "float16" else FOREIGN.get(name)
    return None if size is None else Element(_WIRES[size], name)


def is_native(dtype: np.dtype[Any]) -> bool:
    """Return whether MPI has a type for the elements."""
    return dtype.num in _NATIVE and dtype.isnative


@lru_cache(maxsize=1024)
def element(dtype: np.dtype[Any]) -> Element:
    """Return how elements of a dtype move.

    Raises:
        TypeError: elements of the dtype cannot be moved.
    """
    if dtype.num in _NATIVE:
        return Element(dtype if dtype.isnative else dtype.newbyteorder("="), swapped=not dtype.isnative)
    if dtype.hasobject or not dtype.itemsize:
        raise TypeError(_refusal(dtype))
    if dtype.num == _VOID:
        bare = named_element(bare_name(dtype) or "")
        if bare is not None:
            return bare
        return Element(opaque(dtype.itemsize), str(_bare(dtype)), gaps=_gaps(dtype))
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    if dtype.num in _TEXTS or dtype.num in _DATES:
        wire = np.dtype(np.int64) if dtype.num in _DATES else opaque(dtype.itemsize)
        return Element(wire, str(native), swapped=not dtype.isnative)
    name = "float16" if dtype.num == _FLOAT16 else dtype.name
    if dtype.num != _FLOAT16 and FOREIGN.get(name) != dtype.itemsize:
        raise TypeError(_refusal(dtype))
    return Element(_WIRES[dtype.itemsize], name, swapped=not dtype.isnative)


def opaque(itemsize: int) -> np.dtype[Any]:
    """Return the dtype as which elements move of which only the size is known."""
    return _WIRES.get(itemsize, np.dtype(f"V{itemsize}"))


def _bare(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a structured dtype without titles and record types, so that a recarray matches a plain array of its fields."""
    if dtype.subdtype is not None:
        return np.dtype((_bare(dtype.subdtype[0]), dtype.subdtype[1]))
    if dtype.names is None or dtype.fields is None:
        return dtype
    fields = [dtype.fields[name] for name in dtype.names]
    return np.dtype(
        {
            "names": list(dtype.names),
            "formats": [_bare(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "itemsize": dtype.itemsize,
        }
    )


def _gaps(dtype: np.dtype[Any]) -> bool:
    """Return whether some bytes of a structured dtype belong to none of its fields."""
    base = dtype.base
    if base.fields is None:
        return False
    end = 0
    for field, offset in sorted((found[:2] for found in base.fields.values()), key=lambda found: found[1]):
        if offset > end or _gaps(field):
            return True
        end = max(end, offset + field.itemsize)
    return end < base.itemsize


def _refusal(dtype: np.dtype[Any]) -> str:
    if dtype.hasobject:
        return f"dtype {dtype} is not supported: its elements are Python objects; use a call such as all_gather_object"
    if not dtype.itemsize:
        return f"dtype {dtype} is not supported: its elements have no bytes"
    return f"dtype {dtype} is not supported; convert with .astype(numpy.float32), or pass .view(numpy.uint8)"


def element_of(dtype: np.dtype[Any], name: str) -> Element:
    """Return how elements of the parameter ``name`` move; raise TypeError, with that name, if they cannot be moved."""
    try:
        return element(dtype)
    except TypeError as error:
        raise TypeError(f"parameter `{name}`: {error}") from None


@dataclass(frozen=True)
class Reduction:
    """One reduction on one dtype: the name of the MPI operation, and the work before and after it.

    Attributes:
        factor: of PREMUL_SUM.
        average: the result is divided by the number of members.
        rounds: the elements are integers, and the average is rounded toward zero.
    """

    mpi_op: str
    op: RedOpType
    factor: Any = None
    average: bool = False
    rounds: bool = False

    def before(self, send: Array) -> Array:
        """Return the input of this rank: ``send`` itself, or a new array for PREMUL_SUM."""
        if self.factor is None:
            return send
        scaled: Array = without_warnings(
            np.multiply, send, self.factor
        )  # all are known to make the call, or soon will be
        return scaled

    def after(self, result: Array, size: int) -> None:
        """Finish ``result`` in place: AVG divides by the number of members, and rounds once, integers toward zero."""
        if self.rounds:
            total = result.astype(f"{result.dtype.kind}8", copy=False)
            quotient = np.fmod(total, size)
            np.subtract(total, quotient, out=quotient)
            np.floor_divide(quotient, size, out=quotient)
            result[...] = quotient
        elif self.average:
            without_warnings(np.divide, result, size, out=result)


_NUMERIC = {
    RedOpType.SUM: "SUM",
    RedOpType.AVG: "SUM",
    RedOpType.PREMUL_SUM: "SUM",
    RedOpType.PRODUCT: "PROD",
    RedOpType.MIN: "MIN",
    RedOpType.MAX: "MAX",
}
_BITWISE = {RedOpType.BAND: "BAND", RedOpType.BOR: "BOR", RedOpType.BXOR: "BXOR"}
# MPI has only logical operations for booleans (MPI-4.1 section 6.9.2): the sum of bools is "or", as in torch.
_BOOL = {
    RedOpType.SUM: "LOR",
    RedOpType.MAX: "LOR",
    RedOpType.BOR: "LOR",
    RedOpType.PRODUCT: "LAND",
    RedOpType.MIN: "LAND",
    RedOpType.BAND: "LAND",
    RedOpType.BXOR: "LXOR",
}
_COMPLEX = frozenset({RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM})

_cache: dict[tuple[RedOpType, str], Reduction] = {}


def resolve_reduction(function: str, op: Any, dtype: np.dtype[Any], name: str = "") -> Reduction:
    """Return the reduction of ``op`` on ``dtype``.

    Args:
        function: the public function, for messages.
        op: object that the program passed.
        dtype: dtype in which the elements are reduced.
        name: name of the program's dtype if it is another one (``Element.name``).

    Raises:
        TypeError: ``op`` is not a ReduceOp.
        ValueError: the op is not defined on complex numbers, or PREMUL_SUM has no usable factor.
        RuntimeError: a bitwise op on floats, AVG on integers or bools, PREMUL_SUM on bools, or any op on elements that only move.
    """
    if type(op) is RedOpType and op is not RedOpType.PREMUL_SUM:
        known = None if name else _cache.get((op, dtype.char))
        if known is None:
            known = Reduction(_mpi_op(function, op, dtype, name), op, average=op is RedOpType.AVG)
            if not name:
                _cache[op, dtype.char] = known
        return known
    if not isinstance(op, ReduceOp):
        raise TypeError(f"{function}: op must be a mpicoll.ReduceOp such as ReduceOp.SUM, not {type_name(op)}")
    full = ReduceOp(op) if isinstance(op, RedOpType) else op
    if type(full) is WholeAverage and dtype.kind in "iu" and not name:
        return Reduction("SUM", full.op, average=True, rounds=True)
    if full.op is not RedOpType.PREMUL_SUM:
        return resolve_reduction(function, full.op, dtype, name)
    return Reduction(_mpi_op(function, full.op, dtype, name), full.op, factor=_factor(function, full.factor, dtype))


def _mpi_op(function: str, op: RedOpType, dtype: np.dtype[Any], name: str) -> str:
    if name and name not in HALVES:
        raise RuntimeError(f"{function}: Cannot use {op} with dtype {name}: its elements are moved, not reduced")
    kind = dtype.kind
    if kind == "b":
        if op not in _BOOL:
            raise RuntimeError(f"{function}: {op} is not defined on {dtype}")
        return _BOOL[op]
    if kind == "c":
        if op not in _COMPLEX:
            raise ValueError(f"{function} does not support {op} on complex tensors")
        return "SUM"
    if op in _BITWISE:
        if kind == "f":
            raise RuntimeError(f"{function}: Cannot use {op} with non-integral dtype {name or dtype}")
        return _BITWISE[op]
    if op is RedOpType.AVG and kind != "f":
        raise RuntimeError(f"{function}: ReduceOp.AVG needs a floating-point dtype: {dtype} cannot hold the average")
    return _NUMERIC[op]


def _factor(function: str, factor: Any, dtype: np.dtype[Any]) -> Any:
    if factor is None:
        raise ValueError(f"{function}: ReduceOp.PREMUL_SUM needs its factor: ReduceOp.PREMUL_SUM(factor)")
    try:
        plain = isinstance(factor, (np.ndarray, np.generic)) and factor.dtype.kind in "biufc"
        item = None if plain else getattr(factor, "item", None)  # of a tensor, or a number of ml_dtypes
        value = np.asarray(item() if callable(item) else factor)
        fits = value.size == 1 and value.dtype.kind in "biufc"
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise ValueError(f"{function}: the factor of ReduceOp.PREMUL_SUM must be a number or an array of one element")
    value = value.reshape(())
    if value.dtype.kind in "biu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not limits.min <= int(value) <= limits.max:
            raise ValueError(f"{function}: the factor {value} of ReduceOp.PREMUL_SUM does not fit {dtype}")
    elif not np.can_cast(value.dtype, dtype, casting="same_kind"):
        raise ValueError(
            f"{function}: the factor of ReduceOp.PREMUL_SUM has dtype {value.dtype}, which {dtype} cannot represent"
        )
    with np.errstate(all="ignore"):
        return value.astype(dtype)[()]


Words = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]


def _widen_float16(words: Words, out: Floats) -> None:
    with np.errstate(all="ignore"):
        out[...] = words.view(np.float16)


def _narrow_float16(values: Floats, out: Words) -> None:
    with np.errstate(all="ignore"):
        out.view(np.float16)[...] = values  # to nearest, ties to even; too large values become infinity


def _widen_bfloat16(words: Words, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[...] = words
    bits <<= 16


def _narrow_bfloat16(values: Floats, out: Words) -> None:
    # The upper half of float32, to nearest, ties to even: add just under half a unit, and one more if the last bit is set.
    # A carry into the exponent is right, up to infinity. NaNs are treated apart, as rounding could carry into their sign.
    bits = values.view(np.uint32)
    upper = bits >> 16
    rounded = (bits + (np.uint32(0x7FFF) + (upper & 1))) >> 16
    out[...] = np.where((bits & 0x7FFFFFFF) > 0x7F800000, upper | 0x0040, rounded)


HALVES: dict[str, tuple[Callable[[Words, Floats], None], Callable[[Floats, Words], None]]] = {
    "float16": (_widen_float16, _narrow_float16),
    "bfloat16": (_widen_bfloat16, _narrow_bfloat16),
}
"""By name: the function that converts words to float32, and the function that rounds float32 to words."""
