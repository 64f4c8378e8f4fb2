"""The C extension ``mpicoll._native``, if it was built for this Python and this version of the library."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

VERSION = "615ba8dc"
"""The CRC-32 of the sources in ``native/``. An extension that was built from other sources is not used."""


def _load() -> tuple[Any, str]:
    probe = np.zeros((2, 3))
    try:
        loaded: Any = importlib.import_module("mpicoll._native")
        if loaded.VERSION != VERSION:
            return None, "it was built for another version: install mpicoll again"
        loaded.check_arrays(probe, probe.__array_interface__["data"][0])
    except (ImportError, AttributeError, TypeError) as error:
        return None, str(error)
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None, "it needs the interpreter lock, which is off (PYTHON_GIL=0)"
    return loaded, ""


found, why_not = _load()
"""The module, or None; and the reason if there is none."""


def name_of(op: str, dtype: Any) -> str:
    """Return the extension's name of a reduction by an operation of MPI, of native elements: ``"SUM f8"``."""
    return f"{op} {dtype.kind}{dtype.itemsize}"


def reduce_rows(op: str, rows: Any, size: int, out: Any) -> None:
    """Reduce ``size`` rows, which follow each other in an array, into another array in the order of the rows."""
    found.reduce_rows(rows, size, out, name_of(op, out.dtype))


def convert_half(name: str, source: Any, out: Any) -> bool:
    """Convert contiguous words of a half type to float32, or back, and return whether the extension did so."""
    return found is not None and bool(found.convert_half(name, source, out))
