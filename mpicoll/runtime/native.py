"""The C extension (``_riding.c``), where it was built for this Python and this version of the library."""

from __future__ import annotations

import importlib
from typing import Any

VERSION = "c1894b97"
"""The sum (CRC-32) of ``_riding.c``, with which it was built: one of another source is not used. A test knows the sum."""


def _load() -> tuple[Any, str]:
    try:
        loaded: Any = importlib.import_module("mpicoll._riding")
        version = loaded.VERSION
    except (ImportError, AttributeError) as error:
        return None, str(error)
    return (loaded, "") if version == VERSION else (None, "it was built for another version: install mpicoll again")


found, why_not = _load()
"""The module, or None and why there is none."""


def name_of(op: str, dtype: Any) -> str:
    """Return how the extension calls a reduction by an op of MPI's; "" for elements whose bytes are in the other order."""
    return f"{op} {dtype.kind}{dtype.itemsize}" if dtype.isnative else ""
