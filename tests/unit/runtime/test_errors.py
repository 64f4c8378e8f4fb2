"""The words of an exception that end a call or a rank."""

from __future__ import annotations

import pytest

from mpicoll.errors import DistError, GroupBrokenError, reason_of


class _Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class _Report:
    def one_line(self) -> str:
        return "the headline"


def _reported() -> DistError:
    error = GroupBrokenError("first\nsecond")
    error.report = _Report()
    return error


@pytest.mark.parametrize(
    ("error", "of_call", "of_rank"),
    [
        (ValueError("first\nsecond"), "ValueError: first", "ValueError: first\nsecond"),
        (ValueError(), "ValueError", "ValueError"),
        (_Silent(), "_Silent: <exception str() failed>", "_Silent: <exception str() failed>"),
        (GroupBrokenError("first\nsecond"), "first", "GroupBrokenError: first\nsecond"),
        (_reported(), "the headline", "GroupBrokenError: the headline"),
    ],
)
def test_reasons(error: BaseException, of_call: str, of_rank: str) -> None:
    """The reason of a call is one line, with the class of a program's error; that of a rank has the class, and all lines."""
    assert (reason_of(error), reason_of(error, whole=True)) == (of_call, of_rank)
