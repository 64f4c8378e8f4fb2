"""``collective_raises``: assert that a block of a test raises on every rank."""

from __future__ import annotations

import json
import re
import sys
import traceback
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

import pytest

from mpicoll.diagnosis.report.entries import name_ranks
from mpicoll.diagnosis.report.text_layout import clip
from mpicoll.errors import in_one_line
from mpicoll.pytest_plugin.ranks import MOST_TEXT
from mpicoll.pytest_plugin.watchdog import Watchdog

E = TypeVar("E", bound=BaseException)

LINE = 300

watchdog: Watchdog | None = None
"""The limit and the ranks of this session; None if there is one rank."""


class CollectiveInfo(Generic[E]):
    """The exceptions of a block: on this rank as ``pytest.raises`` gives them, on the other ranks as text.

    Attributes:
        excinfo: pytest's own ``ExceptionInfo``; None until the block has ended.
        per_rank: for each rank (of COMM_WORLD) the type and the whole message of its exception.
    """

    def __init__(self) -> None:
        self.excinfo: pytest.ExceptionInfo[E] | None = None
        self.per_rank: dict[int, str] = {}

    def _ended(self) -> pytest.ExceptionInfo[E]:
        if self.excinfo is None:
            raise AttributeError("the exception is known only after the block of collective_raises has ended")
        return self.excinfo

    @property
    def value(self) -> E:
        """The exception."""
        return self._ended().value

    @property
    def type(self) -> type[E]:
        """The class of the exception."""
        return self._ended().type

    @property
    def tb(self) -> TracebackType:
        """The traceback of the exception."""
        return self._ended().tb

    def match(self, pattern: str | re.Pattern[str]) -> bool:
        """Assert that a regular expression is found in this rank's message."""
        __tracebackhide__ = True
        return bool(self._ended().match(pattern))


def collective_raises(
    expected: type[E] | tuple[type[E], ...], match: str | re.Pattern[str] | None = None, *, group: Any = None
) -> Block[E]:
    """Assert that the block raises on every rank; otherwise fail on all ranks.

    All ranks enter the block, and at its end exchange how it ended. So a rank on which nothing was raised does not continue to
    its next call, where it would wait for the ranks that have failed. The failure has a line for each set of ranks whose blocks
    ended in the same way::

        with collective_raises(dist.CollectiveMismatchError, match="all_reduce") as caught:
            dist.all_reduce(np.ones(1 + dist.get_rank()))
        assert len({text.replace(" <- this rank", "") for text in caught.per_rank.values()}) == 1

        collective_raises: not every rank raised the expected exception
          ranks 0, 2: CollectiveMismatchError: call 3 on group WORLD (ranks 0-2): its ranks made different calls
          rank 1: nothing raised (CollectiveMismatchError expected)

    A rank that has failed, been skipped or returned before the block is named, too, and the other ranks do not wait for it. A
    rank that never leaves the block exceeds the limit of the test. An exception that is no ``Exception`` (Ctrl-C,
    ``pytest.skip``) passes through at once.

    Without ``--with-mpi``, and on one rank, the function is ``pytest.raises``.

    Args:
        expected: a class of exceptions, or several; subclasses match, too. Ranks may expect different classes.
        match: a regular expression that must be found in this rank's message. Ranks may pass different expressions.
        group: a process group, or an mpi4py communicator: only its members enter the block. None: every rank of the job,
            even if the default group has fewer ranks.

    Returns:
        A context manager, whose value is a :class:`CollectiveInfo`.
    """
    return Block(expected, match, group, sys._getframe(1))


class Block(Generic[E]):
    """The context manager of :func:`collective_raises`."""

    def __init__(
        self,
        expected: type[E] | tuple[type[E], ...],
        match: str | re.Pattern[str] | None,
        group: Any,
        frame: FrameType,
    ) -> None:
        self._expected = expected
        self._match = match
        self._site = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        # Also checks the arguments.
        self._alone = pytest.raises(expected, match=match)
        self._ranks: tuple[int, ...] = (0,)
        if watchdog is not None:
            self._ranks = watchdog.ranks.members(group)
        self.info: CollectiveInfo[E] = CollectiveInfo()

    def __enter__(self) -> CollectiveInfo[E]:
        if len(self._ranks) == 1:
            self.info.excinfo = self._alone.__enter__()
        return self.info

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> bool:
        __tracebackhide__ = True
        if watchdog is None or len(self._ranks) == 1:
            done = self._alone.__exit__(kind, value, tb)
            rank = 0 if watchdog is None else watchdog.ranks.rank
            self.info.per_rank = {rank: f"{type(value).__name__}: {value}"}
            return bool(done)
        if value is not None and not isinstance(value, (Exception, self._expected)):
            return False  # the other ranks learn of the exception at the end of the step
        line, good = self._verdict(value)
        text = "nothing raised" if value is None else f"{type(value).__name__}: {value}"
        members = zlib.crc32(repr(self._ranks).encode())
        text = text[: max(1000, MOST_TEXT // len(self._ranks))]
        mine = {"good": good, "line": line, "text": text, "members": members, "site": self._site}
        before = watchdog.where, watchdog.waits
        watchdog.where = f"ended the block of collective_raises at {self._site} ({line}) and waited for the other ranks"
        watchdog.waits = True
        if not good:
            watchdog.hurry(f"{self._site}: {line}\n" + "".join(traceback.format_exception(value) if value else []))
        try:
            texts, elsewhere = watchdog.ranks.exchange(json.dumps(mine), self._ranks)
        finally:
            watchdog.where, watchdog.waits = before
        accounts = {rank: json.loads(text) for rank, text in texts.items()}
        self.info.per_rank = {rank: account["text"] for rank, account in sorted(accounts.items())}
        other_block = {rank: account for rank, account in accounts.items() if account["members"] != members}
        if not elsewhere and not other_block and all(account["good"] for account in accounts.values()):
            assert value is not None
            self.info.excinfo = pytest.ExceptionInfo.from_exception(value)  # type: ignore[arg-type]
            return True
        lines = {rank: account["line"] for rank, account in accounts.items()}
        lines.update({rank: f"is in another block, at {account['site']}" for rank, account in other_block.items()})
        lines.update({rank: f"did not end this block: {where}" for rank, where in elsewhere.items()})
        raise pytest.fail.Exception(difference(lines)) from (None if good else value)

    def _verdict(self, value: BaseException | None) -> tuple[str, bool]:
        """Return how the block ended in one line, and whether it ended as expected."""
        classes = self._expected if isinstance(self._expected, tuple) else (self._expected,)
        expected = " or ".join(each.__name__ for each in classes)
        if value is None:
            return f"nothing raised ({expected} expected)", False
        line = clip(f"{type(value).__name__}: {in_one_line(value)}", LINE)
        if not isinstance(value, self._expected):
            return f"{line} ({expected} expected)", False
        if self._match is not None:
            try:
                pytest.ExceptionInfo.from_exception(value).match(self._match)
            except AssertionError:
                pattern = self._match if isinstance(self._match, str) else self._match.pattern
                return f"{line} (no match of {pattern!r})", False
        return line, True


def difference(lines: Mapping[int, str]) -> str:
    """Return the message of a block that did not raise as expected on all ranks; pure."""
    alike: dict[str, list[int]] = {}
    for rank, line in sorted(lines.items()):
        alike.setdefault(line, []).append(rank)
    rows: Iterable[str] = (f"  {name_ranks(ranks)}: {line}" for line, ranks in alike.items())
    return "\n".join(["collective_raises: not every rank raised the expected exception", *rows])
