"""The examples of pages run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpicoll as dist

pytestmark = pytest.mark.mpi

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def run(page: str, count: int, names: dict[str, Any]) -> None:
    """Run the examples of a page, each after those above it, with some names."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == count
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_examples_of_the_page_on_groups() -> None:
    """Each runs on every rank, after those above it, and what it asserts is true."""
    names: dict[str, Any] = {}
    run("groups.md", 8, names)
    for group in (*names["mesh"].get_all_groups(), names["flat"].get_group(), *names["split"].get_all_groups()):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def test_example_of_the_page_on_mpi4py() -> None:
    """What MPI has and torch has not is made of other calls."""
    run("mpi4py.md", 1, {"dist": dist, "np": np, "rank": dist.get_rank(), "size": dist.get_world_size()})


def test_the_page_on_mpi4py_names_functions_that_are_there() -> None:
    """Each name behind `dist.` in the table is a function of the library."""
    named = set(re.findall(r"dist\.(\w+)", (DOCS / "mpi4py.md").read_text()))
    assert len(named) > 20
    assert not [name for name in named if not hasattr(dist, name)]
