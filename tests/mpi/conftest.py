"""Start mpicoll once for the multi-rank tests."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

import mpicoll as dist


@pytest.fixture(scope="session", autouse=True)
def _mpicoll() -> Iterator[None]:
    """End what the tests left open, once."""
    yield
    if hasattr(dist, "is_initialized") and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _initialised(_mpicoll: None) -> None:
    """Give every test a default group, also after one that destroyed it; its limit is below the limit of a test."""
    if hasattr(dist, "init_process_group") and not dist.is_initialized():
        dist.init_process_group(timeout=timedelta(seconds=30))
