"""Judge the outcomes of all ranks: pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mpicoll.diagnosis.report.entries import name_ranks

OUTCOMES = ("passed", "failed", "skipped", "xfailed", "xpassed", "xpassed strictly", "ended the session")


def judge(outcomes: Sequence[str]) -> str:
    """Return the verdict on a phase for all ranks: ``"agreed"``, ``"failed"``, ``"xfailed"`` or ``"differ"``."""
    kinds = set(outcomes)
    if len(kinds) == 1:
        return "agreed"
    # A test that is expected to fail counts as failed if it failed on one rank.
    if "xfailed" in kinds and kinds <= {"xfailed", "xpassed", "xpassed strictly"}:
        return "xfailed"
    if kinds & {"failed", "xpassed strictly"}:
        return "failed"
    return "differ"


def outcome_of(report: Any) -> str:
    """Return the outcome of a pytest report, one of OUTCOMES."""
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    if report.failed and str(report.longrepr).startswith("[XPASS(strict)]"):
        return "xpassed strictly"
    return str(report.outcome)


def words_of(report: Any) -> str:
    """Return the text of a report: the reason of a skip, or the traceback and captured output of a failure."""
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
    """Return the ranks of each outcome: ``"failed on rank 1; passed on ranks 0, 2-3"``."""
    parts = []
    for kind in sorted(dict.fromkeys(outcomes), key=lambda kind: kind != "failed"):
        ranks = [rank for rank, outcome in enumerate(outcomes) if outcome == kind]
        parts.append(f"{kind} on {name_ranks(ranks)}")
    return "; ".join(parts)


class _Crash:
    """The message of a failure, as pytest's short summary and JUnit report read it."""

    def __init__(self, message: str) -> None:
        self.message = message


class PeerRepr:
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


def gist(text: str) -> str:
    """Return the error lines of a failure, without addresses."""
    lines = [line for line in text.splitlines() if line.startswith("E  ")]
    return re.sub(r"0x[0-9a-f]+", "", "\n".join(lines) or text)


def different_collections(collections: Sequence[Sequence[str]]) -> str:
    """Return a message that names the first test on which rank 0 and another rank differ.

    Each collection has the names of its tests, and as its last item a line about errors while collecting.
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
