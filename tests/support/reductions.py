"""The oracle for reductions, NumPy in the order of the ranks, and the elements that show the differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["OPS", "fold", "is_same", "values"]

OPS: dict[str, Callable[..., Any]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
}
"""By the name of MPI's operation."""


def fold(op: str, terms: list[Any]) -> Any:
    """Return the reduction of arrays in their order, without warnings."""
    with np.errstate(all="ignore"):
        result = terms[0].copy()
        for term in terms[1:]:
            OPS[op](result, term, out=result)
    return result


def values(dtype: str, count: int, rank: int) -> Any:
    """Return elements of a rank: random bits for integers; ordinary and special values (NaN, -0.0, subnormal) for floats."""
    random = np.random.default_rng([rank, count])
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        return np.frombuffer(random.bytes(count * kind.itemsize), kind).copy()
    if kind.kind == "b":
        return random.integers(0, 2, count).astype(bool)
    if kind.kind == "S":
        return random.integers(1, 100, count).astype(dtype)
    real = kind if kind.kind == "f" else np.dtype(f"f{kind.itemsize // 2}")
    many = count if kind.kind == "f" else 2 * count
    tiny = np.finfo(real).smallest_subnormal
    special = np.array([0.0, -0.0, np.inf, -np.inf, tiny, -tiny, 1.5, -2.5, np.finfo(real).max, np.nan], real)
    found = np.where(random.random(many) < 0.5, random.choice(special, many), random.standard_normal(many).astype(real))
    return found.astype(real).view(kind)


def is_same(found: Any, expected: Any, op: str) -> bool:
    """Return whether arrays are the same, bit for bit except the sign of NaNs and of the larger of two zeros."""
    if found.dtype.kind not in "fc":
        return bool(found.tobytes() == expected.tobytes())
    parts = np.dtype(f"f{found.itemsize // (2 if found.dtype.kind == 'c' else 1)}")
    one, other = found.view(parts), expected.view(parts)
    signs = (np.signbit(one) == np.signbit(other)) | np.isnan(other) | ((other == 0) & (op in ("MAX", "MIN")))
    return bool(np.array_equal(one, other, equal_nan=True) and signs.all())
