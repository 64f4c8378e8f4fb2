"""What the ranks of a multi-rank test make of each other's outcomes."""

from __future__ import annotations

import pytest

from mpicoll.pytest_plugin.verdicts import different_collections, judge, prefixed, summary


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (["passed", "passed"], "agreed"),
        (["skipped", "skipped"], "agreed"),
        (["failed", "failed"], "agreed"),
        (["passed", "failed", "skipped"], "failed"),
        (["passed", "skipped"], "differ"),
        (["xfailed", "xpassed"], "xfailed"),
        (["xfailed", "xpassed strictly"], "xfailed"),
        (["xfailed", "passed"], "differ"),
        (["xfailed", "failed"], "failed"),
    ],
)
def test_judge(outcomes: list[str], verdict: str) -> None:
    """One failure fails all, an expected failure on one rank is one, and anything else must be the same."""
    assert judge(outcomes) == verdict


def test_summary_names_the_failures_first() -> None:
    """Who had which outcome, in compressed ranks."""
    assert summary(["passed", "failed", "passed", "passed"]) == "failed on rank 1; passed on ranks 0, 2-3"
    assert prefixed(3, "a\n\nb") == "[rank 3] a\n[rank 3]\n[rank 3] b"


def test_different_collections_names_the_first_difference() -> None:
    """The message has the test, or the errors when only those differ."""
    assert "number 2 is b on rank 0 and c on rank 2" in different_collections(
        [["a", "b", ""], ["a", "b", ""], ["a", "c", ""]]
    )
    assert different_collections([["a", "0 errors"], ["a", "1 errors"]]) == "rank 0: 0 errors; rank 1: 1 errors"
