"""Give every multi-rank test a default group that works."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import pytest

import mpicoll as dist

# Below what the others get when a rank has failed, so that they come out with an error and the next test can begin.
LIMIT = timedelta(seconds=15)


@pytest.fixture(scope="session", autouse=True)
def _mpicoll() -> Iterator[None]:
    """End what the tests left open, once."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _initialised(_mpicoll: None) -> None:
    """Start, also after a test that destroyed the default group, and anew after one that failed and may have broken it."""
    if _failed and dist.is_initialized():
        with contextlib.suppress(dist.DistError):
            dist.destroy_process_group()
    _failed.clear()
    if not dist.is_initialized():
        dist.init_process_group(timeout=LIMIT)


_failed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a failure; the plugin has made it one on all ranks by now."""
    if report.failed:
        _failed.append(report.nodeid)
