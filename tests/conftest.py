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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Show the jobs that a failed test started."""
    report = (yield).get_result()
    if report.failed:
        report.sections += [(f"job {number + 1}", str(job)) for number, job in enumerate(jobs.FINISHED)]
    if report.when == "teardown":
        jobs.FINISHED.clear()
