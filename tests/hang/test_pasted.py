"""Every report in docs/order-checks.md is what the program above it prints."""

from __future__ import annotations

import pytest
from pasted import PAGE, Pasted, printed, read, same

REPORTS = read(PAGE.read_text())


def test_there_are_reports() -> None:
    """Each kind of error that the page is about has its report."""
    text = "".join(each.text for each in REPORTS)
    for word in (
        "CollectiveMismatchError",
        "PeerExitedError",
        "rank 2 failed: ",
        "DeadlockError",
        "CollectiveTimeoutError",
        "BufferInUseError",
        "had not been received",
        "Calls are compared every 16 calls",
    ):
        assert word in text, word


@pytest.mark.slow
@pytest.mark.parametrize("pasted", REPORTS, ids=lambda pasted: pasted.name)
def test_what_is_pasted_is_what_is_printed(pasted: Pasted) -> None:
    """But for the seconds, and once in three times: who has just begun to wait may be missing from a table.

    ``python tests/support/pasted.py --write`` pastes it anew.
    """
    texts = []
    for _ in range(3):
        texts.append(printed(pasted))
        if same(texts[-1], pasted.text):
            return
    pytest.fail("\n".join(texts))
