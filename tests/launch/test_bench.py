"""`mpicoll bench` in a real job: it runs, and what it times gives right results. Nothing here asserts a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launch.launching import call

BENCH = [sys.executable, "-m", "mpicoll", "bench"]


def test_short_bench(tmp_path: Path) -> None:
    """Every operation is timed in every way, beside raw MPI; the table is printed and the figures are written."""
    result = call(
        [*BENCH, "-n", "2", "--rounds", "1", "--sizes", "8,32K", "--no-torch", "--json", str(tmp_path / "b.json")]
    )
    assert result.code == 0, result
    told = json.loads((tmp_path / "b.json").read_text())
    assert told["ranks"] == 2
    assert len(told["measured"]) == 2 * 8 + 1, told
    for each in told["measured"]:
        assert len(each["raw"]) == len(each["ours"]) == 5, each
        assert all(time > 0 for times in each["ours"].values() for time in times), each
    assert "all_reduce" in result.out
    assert "with all checks mpicoll takes" in " ".join(result.out.split())
    assert told["about"]["command"].startswith("mpicoll bench")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "1"], "two ranks at least"),
        ([], "two ranks at least"),
        (["-n", "2", "--sizes", "3"], "multiple of 8"),
        (["--ops", "all_reduces"], "no all_reduces; there are all_reduce,"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_arguments(words: list[str], said: str) -> None:
    """One line each, and nothing is started."""
    result = call([*BENCH, *words])
    assert result.code == 2, result
    assert said in result.err, result
    assert "Traceback" not in result.err, result
