"""The oracle for reductions: NumPy, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

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
