"""Run on a real GPU, with CuPy; skipped, with the reason, where there is none."""

from __future__ import annotations

from typing import Any

import pytest

# As in tests/mpi: the names are fixtures and a hook of pytest.
from mpi.conftest import _initialised, _mpicoll, pytest_runtest_logreport  # noqa: F401


def why_not() -> str:
    """Return why there is no GPU to test on, or ""."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"no GPU: {type(error).__name__}: {error}"
    return ""


WHY_NOT = why_not()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if WHY_NOT:
        for item in items:
            if item.path.parent.name == "gpu":
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))
