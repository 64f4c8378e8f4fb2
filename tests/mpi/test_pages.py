"""The examples of pages about groups run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import mpicoll as dist

pytestmark = pytest.mark.mpi

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "groups.md"


def test_examples_of_the_page_on_groups() -> None:
    """Each runs on every rank, after those above it, and what it asserts is true."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 8
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    for group in (*names["mesh"].get_all_groups(), names["flat"].get_group(), *names["split"].get_all_groups()):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
