"""Give the tests of the backend a default group of torch.distributed, and reports of all failures."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch_backend.ends import end_groups

import mpicoll.torch  # noqa: F401  (registers the backend)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.optim  # its first import makes a DeprecationWarning

LIMIT = timedelta(seconds=15)
collect_ignore = [] if hasattr(dist.ProcessGroup, "register_pre_hook") else ["test_hooks.py", "test_newer_functions.py"]
"""Tests of torch 2.15: with an older torch no run could have them (make test-torch TORCH=2.15.0 runs them)."""
torch.set_num_threads(1)  # ranks share the cores


@pytest.fixture(scope="session")
def _ended() -> Iterator[None]:
    """End what the tests left open, once."""
    yield
    end_groups()


@pytest.fixture
def job(_ended: None) -> None:
    """Have a default group over MPI, a new one after a test that destroyed it or failed."""
    if _failed:
        end_groups()
        _failed.clear()
    if not dist.is_initialized():
        dist.init_process_group("mpicoll", init_method="mpi://", timeout=LIMIT)


_failed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a failure; the plugin has made it one on all ranks by now."""
    if report.failed:
        _failed.append(report.nodeid)
