"""The pytest hooks of one rank: they give all ranks the same outcome of each test."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import sys
import tempfile
import zlib
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.config import create_terminal_writer

from mpicoll.pytest_plugin import raises
from mpicoll.pytest_plugin.ranks import Ranks
from mpicoll.pytest_plugin.verdicts import (
    OUTCOMES,
    PeerRepr,
    different_collections,
    gist,
    judge,
    outcome_of,
    prefixed,
    summary,
    words_of,
)
from mpicoll.pytest_plugin.watchdog import Watchdog

hides_library = True
"""Whether pytest shows no frames of the library in the tracebacks of tests; the tests of the library set this to False."""


def hide_library() -> None:
    """Let pytest hide the frames of the library, unless ``--full-trace`` is given: the last frame is the call of the program."""
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] == "mpicoll" and isinstance(module, ModuleType):
            vars(module).setdefault("__tracebackhide__", True)


class MultiRank:
    """The pytest hooks of one rank."""

    def __init__(self, config: pytest.Config) -> None:
        # Capturing is suspended while plugins are configured, so descriptor 2 is the real stderr.
        self.err = os.dup(2)
        self.ranks = Ranks()
        self.dog = Watchdog(self.ranks, self.err)
        self.ranks.where = lambda: self.dog.where
        raises.watchdog = self.dog
        self.dog.failures = self._failures
        self.config = config
        self.in_step = True
        self.has_summary = False
        self.sink: io.StringIO | None = None
        self.default_limit = float(config.getoption("mpi_timeout") or config.getini("mpi_timeout"))
        # A process has one C timer; pytest's own faulthandler_timeout takes precedence.
        self.native = not float(config.getini("faulthandler_timeout") or 0.0)
        if self.ranks.rank:
            config.option.xmlpath = None
            if config.option.basetemp is None:
                # All sessions of a user number and clean up one folder of pytest; ranks would do so at the same moment.
                above = self.dog.folder if self.dog.meets else Path(tempfile.mkdtemp(prefix="mpicoll-pytest-"))
                config.option.basetemp = str(above / f"tmp.{self.ranks.rank}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if self.ranks.rank and reporter is not None:
            # The reporter has no public way to redirect its output, and other plugins have references to the object.
            self.sink = io.StringIO()
            reporter._tw._file = self.sink

    def _exchange(self, step: str, outcome: str) -> list[str]:
        """Return every rank's outcome of a step; end the session if the ranks are at different steps."""
        own = struct.pack("qq", zlib.crc32(step.encode()), OUTCOMES.index(outcome))
        self.dog.waits = True
        records = [struct.unpack("qq", record) for record in self.ranks.gather(own)]
        self.dog.waits = False
        if len({step for step, _ in records}) > 1:
            self.in_step = False
            texts = self.ranks.gather_text(step)
            at = "\n".join(f"  rank {rank} is at {text}" for rank, text in enumerate(texts))
            pytest.exit(f"the ranks are not at the same step of the session:\n{at}", returncode=1)
        return [OUTCOMES[code] for _, code in records]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        names = [item.nodeid for item in session.items]
        digest = zlib.crc32("\n".join([*names, f"{session.testsfailed} errors"]).encode())
        self.dog.where = "collected its tests and waited for the other ranks"
        self.dog.arm("the collection of tests", self.default_limit, self.native)
        if len(set(self.ranks.gather(struct.pack("q", digest)))) > 1:
            self.in_step = False
            texts = self.ranks.gather_text("\n".join([*names, f"errors while collecting: {session.testsfailed}"]))
            self.dog.disarm(self.native)
            raise pytest.UsageError(different_collections([text.split("\n") for text in texts]))
        self.dog.disarm(self.native)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, None]:
        mark = item.get_closest_marker("mpi_timeout")
        limit = float(mark.args[0]) if mark else self.default_limit
        self.dog.where = "did not finish setup"
        self.dog.arm(item.nodeid, limit, self.native)
        yield
        self.dog.disarm(self.native)

    def pytest_runtest_call(self) -> None:
        self.dog.where = "did not finish the test"

    def pytest_runtest_teardown(self) -> None:
        self.dog.where = "did not finish teardown"

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, None]:
        if call.excinfo is not None and hides_library:
            hide_library()
        result = yield
        report = result.get_result()
        if not self.in_step:
            return
        outcome = outcome_of(report)
        before = self.dog.where
        self.dog.where = f"{outcome} ({report.when}) and waited for the other ranks"
        if outcome == "failed":
            self.dog.hurry(words_of(report))
        outcomes = self._exchange(f"{report.when} of {item.nodeid}", outcome)
        self.dog.words = ""
        if set(outcomes) == {"passed"}:
            self.dog.where = before
            return
        self._settle(report, outcomes)

    def _settle(self, report: Any, outcomes: list[str]) -> None:
        """Change the report to the outcome of all ranks."""
        verdict = judge(outcomes)
        own = outcomes[self.ranks.rank]
        if verdict == "xfailed":
            if own != "xfailed":
                report.outcome, report.wasxfail, report.longrepr = "skipped", "reason: failed on another rank", None
            return
        if verdict == "agreed" and own != "failed":
            return
        texts = self.ranks.gather_text(words_of(report))
        headline = summary(outcomes)
        if verdict == "differ":
            reasons = "\n".join(prefixed(rank, text) for rank, text in enumerate(texts) if text)
            report.outcome = "failed"
            report.longrepr = PeerRepr(f"the ranks disagree: {headline}", reasons)
            return
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome in {"failed", "xpassed strictly"}]
        if own not in {"failed", "xpassed strictly"}:
            first = failed[0]
            report.outcome = "failed"
            report.longrepr = PeerRepr(headline, prefixed(first, texts[first]))
            return
        others = [rank for rank in failed if rank != self.ranks.rank]
        if others:
            # Ranks that fail in the same way are shown once.
            seen = {gist(texts[self.ranks.rank])}
            shown = [headline]
            for rank in others:
                if (words := gist(texts[rank])) not in seen and len(seen) < 4:
                    seen.add(words)
                    shown.append(prefixed(rank, texts[rank]))
            report.sections.append(("on the ranks", "\n\n".join(shown)))
        elif self.ranks.size > 1:
            report.sections.append(("on the ranks", headline))

    def _failures(self) -> str:
        """Return the failures so far, as pytest prints them; empty if there are none, or if pytest has printed them."""
        reporter: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or self.has_summary or not {"failed", "error"} & {*reporter.stats}:
            return ""
        # pytest has no public way to write its summary elsewhere. The main thread hangs, so it does not write meanwhile.
        text = io.StringIO()
        before, reporter._tw = reporter._tw, create_terminal_writer(self.config, text)
        try:
            reporter.summary_errors()
            reporter.summary_failures()
            reporter.short_test_summary()
        finally:
            reporter._tw = before
        return text.getvalue()

    def pytest_internalerror(self, excrepr: Any) -> None:
        if self.ranks.rank:
            os.write(self.err, (prefixed(self.ranks.rank, str(excrepr)) + "\n").encode())

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, Any, None]:
        result = yield
        self.has_summary = True
        if not self.in_step:
            return
        if result.excinfo is not None:
            # Another plugin failed here: this rank raises its error, and the other ranks get the exit status.
            exitstatus = pytest.ExitCode.INTERNAL_ERROR
        self.dog.where = f"ended its session with exit status {int(exitstatus)}"
        self.dog.arm("the end of the session", self.default_limit, self.native)
        statuses: list[int] = []
        with contextlib.suppress(pytest.exit.Exception):
            self._exchange("the end of its session", "ended the session")
            statuses = [
                struct.unpack("q", record)[0] for record in self.ranks.gather(struct.pack("q", int(exitstatus)))
            ]
        self.dog.disarm(self.native)
        if not statuses:
            session.exitstatus = exitstatus or 1
        elif not exitstatus and any(statuses):
            session.exitstatus = next(status for status in statuses if status)
        elif exitstatus and not statuses[0] and self.sink is not None:
            os.write(self.err, (prefixed(self.ranks.rank, self.sink.getvalue()) + "\n").encode())

    def pytest_unconfigure(self) -> None:
        raises.watchdog = None
        self.dog.close()
