"""Give every multi-rank test a default group that works."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

import mpicoll as dist
from mpicoll.groups import registry
from mpicoll.transports.selection import DEFAULT, NEVER

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
        for group in registry.state().groups.values():
            group.unwaited.clear()  # of the failed test; a rank that keeps its groups would leave the others to their limit
        with contextlib.suppress(dist.DistError):
            dist.destroy_process_group()
    _failed.clear()
    if not dist.is_initialized():
        dist.init_process_group(timeout=LIMIT)
    # Groups that earlier tests broke keep their shared memory for good, and this one may need some.
    registry.state().pool._budget = None


@pytest.fixture
def rounds_of_mpi(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have all groups make their rounds, and move their small data, through MPI, as on several nodes."""
    world = dist.group.WORLD
    assert world is not None
    monkeypatch.setattr("mpicoll.groups.communicators.MOST_MEMBERS", 1)
    monkeypatch.setattr("mpicoll.groups.communicators.DEFAULT", dict.fromkeys(DEFAULT, ((16 * 1024 + 1, NEVER),)))
    agreement, before, choice = world.pair.agreement, world.pair.agreement.channel, world.pair.selection
    dist.barrier()
    agreement.use(None)
    world.pair.selection = replace(choice, ranges=dict.fromkeys(DEFAULT, ((16 * 1024 + 1, NEVER),)))
    world.prepared.clear()
    yield
    if dist.is_initialized() and dist.group.WORLD is world and world.broken is None:
        dist.barrier()
        agreement.use(before)
        world.prepared.clear()
    world.pair.selection = choice


_failed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a failure; the plugin has made it one on all ranks by now."""
    if report.failed:
        _failed.append(report.nodeid)
