"""What all tests share: the plugin for tests on several ranks, and the output of child jobs in failures."""

from __future__ import annotations

import signal
from collections.abc import Generator
from typing import Any

import jobs
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts in the background with Ctrl-C ignored, and the jobs of the tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["mpicoll.pytest_plugin"]


ONE_MPI = {
    f"test_{name}"
    for name in (
        "deadlock",
        "joined_threads",
        "levels",
        "plans",
        "printed_once",
        "programs",
        "pytest_plugin",
        "reports",
    )
}
"""Tests of whole jobs that say little about the MPI below: `make test` runs them on Open MPI, `make test-all` the same on
MPICH, and those that are long on Open MPI alone."""
ONE_MPI |= {"test_slurm", "test_killed_by_the_limit", "test_signal_before_the_limit"}


def pytest_configure() -> None:
    """Show the frames of the library in failures of its own tests."""
    from mpicoll.pytest_plugin import hooks

    hooks.hides_library = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave more to `make test-all` on the second MPI; what is long there, and says little about it, to the first alone."""
    if jobs.family() != "mpich":
        return
    left: list[pytest.Item] = []
    for item in tuple(items):
        if item.path.parent.name == "cluster" and (item.path.stem in ONE_MPI or item.name in ONE_MPI):
            items.remove(item)
            left.append(item)
        if item.path.parent.name != "hang" or item.path.stem not in ONE_MPI:
            continue
        if item.get_closest_marker("slow") is not None:
            items.remove(item)
            left.append(item)
        else:
            item.add_marker(pytest.mark.slow)
    if left:
        config.hook.pytest_deselected(items=left)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Show the jobs that a failed test started."""
    report = (yield).get_result()
    if report.failed:
        report.sections += [(f"job {number + 1}", str(job)) for number, job in enumerate(jobs.FINISHED)]
    if report.when == "teardown":
        jobs.FINISHED.clear()
