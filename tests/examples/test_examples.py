"""Every example runs as its docstring says, on that many ranks, and ends with exit code 0."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import ROOT, run_job

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path) -> None:
    """The exit code is 0 and no process is left; what it writes goes to a folder of its own."""
    said = re.search(r"-n (\d+)", path.read_text())
    result = run_job(path, int(said.group(1)) if said else 4, limit=120, cwd=tmp_path, env={"MPLBACKEND": "Agg"})
    assert not result.timed_out
    assert result.returncode == 0
    assert not result.left_running
