"""Run on a real GPU, with CuPy, or with CuPy on a stand-in for CUDA; skipped, with the reason, where there is neither."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from mpi import conftest as several_ranks

# As in tests/mpi: the names are fixtures and a hook of pytest.
from mpi.conftest import _initialised, _mpicoll, pytest_runtest_logreport  # noqa: F401

# Kernels are compiled where they are first used.
several_ranks.LIMIT = timedelta(seconds=60)
LIMIT = 240.0


def kind() -> tuple[str, bool]:
    """Return why there is no GPU to test on, or "", and whether it is a stand-in."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
        return "", cupy.cuda.runtime.getDeviceProperties(0)["name"].startswith(b"a stand-in")
    except Exception as error:
        return f"no GPU: {type(error).__name__}: {error}", False


WHY_NOT, STANDIN = kind()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timed: tells how fast a GPU is")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if item.path.parent.name != "gpu":
            continue
        item.add_marker(pytest.mark.mpi_timeout(LIMIT))
        if WHY_NOT:
            item.add_marker(pytest.mark.skip(reason=WHY_NOT))
        elif STANDIN and item.get_closest_marker("timed") is not None:
            item.add_marker(pytest.mark.skip(reason="a stand-in for a GPU is not as fast as one"))
