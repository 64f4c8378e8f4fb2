"""The bodies of PyTorch's own suite of distributed tests, each a test."""

from __future__ import annotations

import os

import pytest
from torch_backend import suite
from torch_backend.bodies import REASONS

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.filterwarnings("ignore")]
RUN = os.environ.get("TEST_TORCH_LISTED", "no") != "no"
"""Whether the bodies of the table are run as well; it is an error if one passes."""


def named(name: str) -> object:
    """Return a parameter; a body of the table is expected to fail, for its reason."""
    marks = [pytest.mark.xfail(reason=REASONS[name], strict=True, run=RUN)] if name in REASONS else []
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize("name", [named(name) for name in sorted(suite.BODIES)])
def test_body(name: str) -> None:
    """A body passes."""
    fewest, exact = suite.ranks_needed(name)
    if suite.WORLD.size < fewest or (exact and suite.WORLD.size > fewest):
        pytest.skip(f"it needs {fewest} ranks")
    with suite.folder_of_all() as folder:
        suite.run(name, folder)


def test_table() -> None:
    """The table names bodies that the suite has."""
    assert not {*REASONS} - {*suite.BODIES}
