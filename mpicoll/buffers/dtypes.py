"""The dtype x op table: which elements move, which are reduced by which operation, and what surrounds the reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicoll.buffers.reduce_op import RedOpType, ReduceOp

__all__ = ["Reduction", "dtype_name", "movable", "resolve_reduction"]

Array = npt.NDArray[Any]

MOVABLE = frozenset("?bBhHiIlLqQfdgFDG")
"""Type characters of the dtypes that move: bool, every integer, float32, float64, longdouble and their complex kin."""


_names: dict[str, str] = {}


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return ``str(dtype)`` of a movable dtype, without making it again (NumPy takes about 5 us)."""
    name = _names.get(dtype.char)
    if name is None:
        name = _names[dtype.char] = str(dtype)
    return name


def movable(dtype: np.dtype[Any]) -> str | None:
    """Return why arrays of ``dtype`` cannot be passed, or None when they can."""
    if dtype.char not in MOVABLE:
        help_ = "; convert with .astype(numpy.float32)" if dtype.kind == "f" else ""
        return f"dtype {dtype} is not supported (bool, integer, float32, float64, longdouble and complex are){help_}"
    if not dtype.isnative:
        return f"dtype {dtype.str} is not in this machine's byte order; convert with .astype(dtype.newbyteorder('='))"
    return None


@dataclass(frozen=True)
class Reduction:
    """How one op runs on one dtype: the name of the MPI operation, and what is done before and after it."""

    mpi_op: str
    op: RedOpType
    factor: Any = None
    average: bool = False

    def before(self, send: Array) -> Array:
        """Return what this rank contributes: ``send`` itself, or a new array for PREMUL_SUM."""
        if self.factor is None:
            return send
        scaled: Array = send * self.factor
        return scaled

    def after(self, result: Array, size: int) -> None:
        """Finish ``result`` in place (AVG divides by the number of members, rounding once)."""
        if self.average:
            np.divide(result, size, out=result)


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


def resolve_reduction(function: str, op: Any, dtype: np.dtype[Any]) -> Reduction:
    """Return how ``op`` runs on ``dtype``.

    Raises:
        TypeError: ``op`` is not a ReduceOp.
        ValueError: the op has no meaning on complex numbers; PREMUL_SUM without a usable factor.
        RuntimeError: a bitwise op on floats; AVG on integers or bools; PREMUL_SUM on bools.
    """
    if type(op) is RedOpType and op is not RedOpType.PREMUL_SUM:
        known = _cache.get((op, dtype.char))
        if known is None:
            known = _cache[op, dtype.char] = Reduction(_mpi_op(function, op, dtype), op, average=op is RedOpType.AVG)
        return known
    if not isinstance(op, (RedOpType, ReduceOp)):
        raise TypeError(f"{function}: op must be a ReduceOp such as ReduceOp.SUM, not {type(op).__name__}")
    full = op if isinstance(op, ReduceOp) else ReduceOp(op)
    if full.op is not RedOpType.PREMUL_SUM:
        return resolve_reduction(function, full.op, dtype)
    return Reduction(_mpi_op(function, full.op, dtype), full.op, factor=_factor(function, full.factor, dtype))


def _mpi_op(function: str, op: RedOpType, dtype: np.dtype[Any]) -> str:
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
            raise RuntimeError(f"{function}: Cannot use {op} with non-integral dtype {dtype}")
        return _BITWISE[op]
    if op is RedOpType.AVG and kind != "f":
        raise RuntimeError(f"{function}: ReduceOp.AVG needs a floating-point dtype: {dtype} cannot hold the average")
    return _NUMERIC[op]


def _factor(function: str, factor: Any, dtype: np.dtype[Any]) -> Any:
    if factor is None:
        raise ValueError(f"{function}: ReduceOp.PREMUL_SUM needs its factor: ReduceOp.PREMUL_SUM(factor)")
    try:
        value = np.asarray(factor)
        fits = value.size == 1 and value.dtype.kind in "biufc"
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"{function}: the factor of ReduceOp.PREMUL_SUM must be a number or an array of one element")
    value = value.reshape(())
    if value.dtype.kind in "biu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not limits.min <= int(value) <= limits.max:
            raise ValueError(f"{function}: the factor {value} of ReduceOp.PREMUL_SUM does not fit {dtype}")
    elif not np.can_cast(value.dtype, dtype, casting="same_kind"):
        raise ValueError(f"{function}: a factor of dtype {value.dtype} would be cut to {dtype} in ReduceOp.PREMUL_SUM")
    return value.astype(dtype)[()]
