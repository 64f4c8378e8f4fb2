"""Tests of the node table."""

from __future__ import annotations

import pytest

from mpicoll.transports.topology import share_cores


@pytest.mark.parametrize(
    ("bound", "shared"),
    [
        ([{0, 1}, {0, 1}], False),
        ([{0}, {1}], False),
        ([{0, 1, 2, 3}, {0}], False),
        ([{0, 1}, {0, 1}, {0, 1}], True),
        ([{7}, {7}], True),
        ([{0}, {1, 2, 3}, {0}], True),
        ([{5}], False),
    ],
)
def test_ranks_that_share_cores(bound: list[set[int]], shared: bool) -> None:
    """There are more ranks than cores, of all ranks together or of those with the same cores."""
    assert share_cores([frozenset(cores) for cores in bound]) is shared
