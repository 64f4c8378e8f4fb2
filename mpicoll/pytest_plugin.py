"""Tests on several ranks that fail on all of them, with the failing rank's words, instead of hanging.

Load it in the top ``conftest.py`` of a test suite, install ``pytest-mpi`` for its marks, and start several ranks::

    # conftest.py
    pytest_plugins = ["mpicoll.pytest_plugin"]

    # test_sum.py
    @pytest.mark.mpi(min_size=2)
    @pytest.mark.mpi_timeout(10)
    def test_sum():
        x = np.ones(4)
        dist.all_reduce(x)
        assert (x == dist.get_world_size()).all()

    $ mpicoll run -n 4 -m pytest --with-mpi

Then

- every rank tells the others how each phase of a test (setup, call, teardown) ended. A phase that failed on one rank
  is a failure on all of them; rank 0, which alone prints, shows the assertion of the rank it failed on;
- ranks that disagree (one skips, another passes) fail the test, and ranks that collected different tests end at once;
- a test that is not over within its limit (``--mpi-timeout``, ini ``mpi_timeout``, the mark; 60 s; a third of it once
  a rank has failed) ends the job with a nonzero exit code, the test's name, which ranks had finished it, and every rank's stack;
- only rank 0 writes the JUnit report.

It is not a ``pytest11`` entry point. Such a plugin is loaded by every pytest of the environment: it would import numpy
and this package before coverage measurement starts, and change the verdicts of other projects' suites. Loaded, it does
nothing, and imports nothing of MPI, without pytest-mpi's ``--with-mpi`` or ``--only-mpi``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.metadata
import io
import json
import os
import re
import shutil
import struct
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from mpicoll.checks.call import name_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

DEFAULT_LIMIT = 60.0
AFTER_FAILURE = 1 / 3  # of the limit is what the others get to come out of a test which a rank has failed
ANSWERS = 2.0  # seconds in which all ranks write down their stacks
NATIVE_GRACE = 10.0  # seconds past the limit after which a process that no thread can stop is ended from C
MOST_TEXT = 1 << 20  # bytes of failure text that one phase sends to every rank, all ranks together

OUTCOMES = ("passed", "failed", "skipped", "xfailed", "xpassed", "xpassed strictly", "ended the session")


def judge(outcomes: Sequence[str]) -> str:
    """Return what a phase is for all ranks: ``"agreed"``, ``"failed"``, ``"xfailed"`` or ``"differ"``."""
    kinds = set(outcomes)
    if len(kinds) == 1:
        return "agreed"
    # A test that is expected to fail has failed when it failed on one rank.
    if "xfailed" in kinds and kinds <= {"xfailed", "xpassed", "xpassed strictly"}:
        return "xfailed"
    if kinds & {"failed", "xpassed strictly"}:
        return "failed"
    return "differ"


def outcome_of(report: Any) -> str:
    """Return which of OUTCOMES a pytest report is."""
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    if report.failed and str(report.longrepr).startswith("[XPASS(strict)]"):
        return "xpassed strictly"
    return str(report.outcome)


def words_of(report: Any) -> str:
    """Return what a report has to say: the reason of a skip, the traceback and captured output of a failure."""
    if report.skipped:
        return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not report.failed:
        return ""
    captured = [f"--- {title} ---\n{content}" for title, content in report.sections]
    return "\n".join([report.longreprtext, *captured])


def prefixed(rank: int, text: str) -> str:
    """Return the text with the rank before each line."""
    return "\n".join(f"[rank {rank}] {line}".rstrip() for line in text.splitlines())


def summary(outcomes: Sequence[str]) -> str:
    """Return who had which outcome: ``"failed on rank 1; passed on ranks 0, 2-3"``."""
    parts = []
    for kind in sorted(dict.fromkeys(outcomes), key=lambda kind: kind != "failed"):
        ranks = [rank for rank, outcome in enumerate(outcomes) if outcome == kind]
        parts.append(f"{kind} on {name_ranks(ranks)}")
    return "; ".join(parts)


class _Crash:
    """What pytest's short summary and JUnit report read of a failure."""

    def __init__(self, message: str) -> None:
        self.message = message


class _PeerRepr:
    """The representation of a failure that happened on other ranks."""

    def __init__(self, headline: str, text: str) -> None:
        self.text = text
        self.reprcrash = _Crash(headline)

    def __str__(self) -> str:
        return f"{self.reprcrash.message}\n\n{self.text}"

    def toterminal(self, out: Any) -> None:
        out.line(self.reprcrash.message, red=True, bold=True)
        out.line("")
        for line in self.text.splitlines():
            out.line(line)


class _Ranks:
    """The plugin's own communicator, on which nothing blocks: it polls, so that Ctrl-C and the limit get through."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        # Never freed: freeing is collective, and at the end of a session nobody knows that all ranks are still there.
        self.comm, request = MPI.COMM_WORLD.Idup()
        self._poll(request)
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()

    def _poll(self, request: MPI.Request) -> None:
        polls = 0
        while not request.Test():
            polls += 1
            time.sleep(0.0 if polls < 200 else min(0.005, polls * 1e-6))

    def gather(self, record: bytes) -> list[bytes]:
        """Return every rank's record; they are of one length."""
        width = len(record)
        everybody = bytearray(width * self.size)
        self._poll(self.comm.Iallgather([record, self.mpi.BYTE], [everybody, self.mpi.BYTE]))
        return [bytes(everybody[start : start + width]) for start in range(0, len(everybody), width)]

    def gather_text(self, text: str) -> list[str]:
        """Return every rank's text, each cut to its share of MOST_TEXT."""
        own = text.encode("utf-8", "replace")[-max(1024, MOST_TEXT // self.size) :]
        counts = [struct.unpack("q", record)[0] for record in self.gather(struct.pack("q", len(own)))]
        everybody = bytearray(sum(counts))
        self._poll(self.comm.Iallgatherv([own, self.mpi.BYTE], [everybody, counts, self.mpi.BYTE]))
        texts, start = [], 0
        for count in counts:
            texts.append(everybody[start : start + count].decode("utf-8", "replace"))
            start += count
        return texts

    def abort(self) -> None:
        """End the job from any thread."""
        if self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE and not self.mpi.Is_finalized():
            self.mpi.COMM_WORLD.Abort(1)
        os._exit(1)


def _stack(frame: FrameType) -> str:
    """Return a thread's stack without the part that is pytest's."""
    entries = traceback.extract_stack(frame)
    inner = [index for index, entry in enumerate(entries) if Path(entry.filename).parent.name in {"_pytest", "pluggy"}]
    own = entries[inner[-1] + 1 :] if inner else entries
    return "".join(traceback.format_list(own or entries))


class _Watchdog(threading.Thread):
    """Ends the job when a test is over its limit, after all ranks that can have written down where they are.

    The ranks meet in a folder of files, which also those can reach whose main thread is stuck: ``alarm`` asks all
    ranks to write ``rank.N``, and the one that creates ``speaker`` prints. A rank that does not see the folder (another
    node) prints its own stack.
    """

    def __init__(self, ranks: _Ranks, err: int) -> None:
        super().__init__(name="mpicoll.pytest_plugin", daemon=True)
        self.ranks = ranks
        self.err = err
        self.where = ""
        self.waits = False
        self.words = ""
        self._what = ""
        self._limit = 0.0
        self._deadline: float | None = None
        self._changed = threading.Condition()
        name = tempfile.mkdtemp(prefix="mpicoll-pytest-") if ranks.rank == 0 else ""
        self.folder = Path(ranks.gather_text(name)[0])
        self.meets = self.folder.is_dir()
        self.start()

    def arm(self, what: str, limit: float, native: bool = True) -> None:
        with self._changed:
            self._what, self._limit, self.words = what, limit, ""
            self._deadline = time.monotonic() + limit
            self._changed.notify()
        if native:
            faulthandler.dump_traceback_later(limit + NATIVE_GRACE, exit=True, file=self.err)

    def hurry(self, words: str) -> None:
        """Give the others less time, since this rank has failed; ``words`` tell how."""
        with self._changed:
            if self._deadline is not None:
                self._deadline = min(self._deadline, time.monotonic() + AFTER_FAILURE * self._limit)
                self.words = words

    def disarm(self, native: bool = True) -> None:
        with self._changed:
            self._deadline = None
        if native:
            faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        self.disarm()
        if self.ranks.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(None if self._deadline is None else 0.2)
                deadline = self._deadline
            if deadline is None:
                continue
            if time.monotonic() > deadline or (self.meets and (self.folder / "alarm").exists()):
                break
        # Whatever goes wrong from here on, the process ends.
        last_word = threading.Timer(ANSWERS + 4.0, os._exit, (1,))
        last_word.daemon, last_word.name = True, f"{self.name} last word"
        last_word.start()
        try:
            self._end_job()
        finally:
            os._exit(1)

    def _end_job(self) -> None:
        account = {"where": self.where, "words": self.words, "waits": self.waits, "stacks": self._stacks()}
        if not self.meets:
            self._print(self._report({self.ranks.rank: account}))
            time.sleep(ANSWERS)
            self.ranks.abort()
        (self.folder / "alarm").touch()
        draft = self.folder / f"draft.{self.ranks.rank}"
        draft.write_text(json.dumps(account))
        draft.rename(self.folder / f"rank.{self.ranks.rank}")
        until = time.monotonic() + ANSWERS
        while len(found := list(self.folder.glob("rank.*"))) < self.ranks.size and time.monotonic() < until:
            time.sleep(0.02)
        try:
            os.close(os.open(self.folder / "speaker", os.O_CREAT | os.O_EXCL))
        except OSError:
            time.sleep(ANSWERS + 2.0)  # Another rank prints, then ends the job.
            return
        self._print(self._report({int(path.name[5:]): json.loads(path.read_text()) for path in sorted(found)}))
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        self.ranks.abort()

    def _stacks(self) -> dict[str, str]:
        # Not those of this plugin and of the library, which wait as they should.
        own = {thread.ident for thread in threading.enumerate() if thread.name.startswith("mpicoll")}
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        return {names.get(ident, str(ident)): _stack(frame) for ident, frame in frames.items() if ident not in own}

    def _report(self, accounts: dict[int, dict[str, Any]]) -> str:
        failed = [rank for rank, account in accounts.items() if account["words"]]
        limit = f"its limit of {self._limit:g} s"
        why = f"within a third of {limit} after a rank had failed" if failed else f"within {limit}"
        lines = ["", "", f"mpicoll: {self._what} was not over on all ranks {why}; the job ends here."]
        places: dict[str, list[int]] = {}
        for rank, account in accounts.items():
            places.setdefault(account["where"], []).append(rank)
        lines += [f"  {name_ranks(on)}: {place}" for place, on in sorted(places.items())]
        if self.meets and (silent := sorted(set(range(self.ranks.size)) - set(accounts))):
            lines.append(f"  no answer (in native code, or on another node): {name_ranks(silent)}")
        for rank in failed:
            lines += ["", prefixed(rank, accounts[rank]["words"])]
        alike: dict[tuple[str, str], list[int]] = {}
        for rank, account in accounts.items():
            for name, stack in account["stacks"].items():
                if not account["waits"]:
                    alike.setdefault((name, stack), []).append(rank)
        for (name, stack), on in sorted(alike.items(), key=lambda entry: min(entry[1])):
            lines += ["", f"{name_ranks(on)}, thread {name}, most recent call last:", prefixed(min(on), stack)]
        return "\n".join(lines) + "\n"

    def _print(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(self.err, data) :]


class _MultiRank:
    """The hooks of one rank."""

    def __init__(self, config: pytest.Config) -> None:
        # Capturing is suspended while plugins are configured: this is the real stderr.
        self.err = os.dup(2)
        self.ranks = _Ranks()
        self.dog = _Watchdog(self.ranks, self.err)
        self.in_step = True
        self.sink: io.StringIO | None = None
        self.default_limit = float(config.getoption("mpi_timeout") or config.getini("mpi_timeout"))
        # The C timer is one for a process; pytest's own faulthandler_timeout has the first claim to it.
        self.native = not float(config.getini("faulthandler_timeout") or 0.0)
        if self.ranks.rank:
            config.option.xmlpath = None
            if config.option.basetemp is None:
                # pytest's folder for a user is numbered and swept by all its sessions; ranks sweep at the same moment.
                above = self.dog.folder if self.dog.meets else Path(tempfile.mkdtemp(prefix="mpicoll-pytest-"))
                config.option.basetemp = str(above / f"tmp.{self.ranks.rank}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if self.ranks.rank and reporter is not None:
            # The reporter has no public way to send it elsewhere, and other plugins hold on to the object.
            self.sink = io.StringIO()
            reporter._tw._file = self.sink

    def _exchange(self, step: str, outcome: str) -> list[str]:
        """Return every rank's outcome of a step, or end the session when the ranks are not at the same one."""
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
        self.dog.where = "collected its tests and waited"
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
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, None]:
        result = yield
        report = result.get_result()
        if not self.in_step:
            return
        outcome = outcome_of(report)
        before = self.dog.where
        self.dog.where = f"{outcome} ({report.when}) and waited for the others"
        if outcome == "failed":
            self.dog.hurry(words_of(report))
        outcomes = self._exchange(f"{report.when} of {item.nodeid}", outcome)
        self.dog.words = ""
        if set(outcomes) == {"passed"}:
            self.dog.where = before
            return
        self._settle(report, outcomes)

    def _settle(self, report: Any, outcomes: list[str]) -> None:
        """Make the report what all ranks agree on."""
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
            report.longrepr = _PeerRepr(f"the ranks disagree: {headline}", reasons)
            return
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome in {"failed", "xpassed strictly"}]
        if own not in {"failed", "xpassed strictly"}:
            first = failed[0]
            report.outcome = "failed"
            report.longrepr = _PeerRepr(headline, prefixed(first, texts[first]))
            return
        others = [rank for rank in failed if rank != self.ranks.rank]
        if others:
            # Ranks that fail in the same way are shown once.
            seen = {_gist(texts[self.ranks.rank])}
            shown = [headline]
            for rank in others:
                if (gist := _gist(texts[rank])) not in seen and len(seen) < 4:
                    seen.add(gist)
                    shown.append(prefixed(rank, texts[rank]))
            report.sections.append(("on the ranks", "\n\n".join(shown)))
        elif self.ranks.size > 1:
            report.sections.append(("on the ranks", headline))

    def pytest_internalerror(self, excrepr: Any) -> None:
        if self.ranks.rank:
            os.write(self.err, (prefixed(self.ranks.rank, str(excrepr)) + "\n").encode())

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, Any, None]:
        result = yield
        if not self.in_step:
            return
        if result.excinfo is not None:
            # Another plugin failed here; it is raised on this rank, and the others get to know.
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
        self.dog.close()


def _gist(text: str) -> str:
    """Return the lines of a failure that tell what went wrong."""
    lines = [line for line in text.splitlines() if line.startswith("E  ")]
    return re.sub(r"0x[0-9a-f]+", "", "\n".join(lines) or text)


def different_collections(collections: Sequence[Sequence[str]]) -> str:
    """Return a message that names the first test on which rank 0 and another rank differ.

    Each collection is the names of its tests, and last a line about errors while collecting.
    """
    first = collections[0]
    rank, other = next((rank, other) for rank, other in enumerate(collections) if list(other) != list(first))
    mine, theirs = list(first[:-1]), list(other[:-1])
    advice = "Parameters must not depend on the rank, on the order of a set or on time"
    if mine == theirs:
        return f"rank 0: {first[-1]}; rank {rank}: {other[-1]}"
    index = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    here, there = (names[index] if index < len(names) else "nothing more" for names in (mine, theirs))
    return (
        f"the ranks collected different tests: rank 0 has {len(mine)}, rank {rank} has {len(theirs)}; "
        f"number {index + 1} is {here} on rank 0 and {there} on rank {rank}. {advice}"
    )


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the limit of a test as an option and as an ini value."""
    group = parser.getgroup("mpicoll")
    text = f"seconds that one test may take on several ranks before the job is ended (default: {DEFAULT_LIMIT:g})"
    group.addoption("--mpi-timeout", type=float, default=None, dest="mpi_timeout", metavar="SECONDS", help=text)
    parser.addini("mpi_timeout", text, default=str(DEFAULT_LIMIT))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start the exchange between the ranks when pytest-mpi's options ask for tests on several ranks."""
    config.addinivalue_line("markers", "mpi_timeout(seconds): the limit of this test on several ranks")
    if _installed("mpi-pytest") and _installed("pytest-mpi"):
        raise pytest.UsageError(
            "pytest-mpi and mpi-pytest are both installed, and both own the module pytest_mpi. "
            "Keep pytest-mpi: pip uninstall -y mpi-pytest pytest-mpi && pip install pytest-mpi"
        )
    if config.getoption("--with-mpi", default=False) or config.getoption("--only-mpi", default=False):
        config.pluginmanager.register(_MultiRank(config), "mpicoll-multi-rank")
