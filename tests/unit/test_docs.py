"""What the documentation calculates is calculated right, and the files that it names are there."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "order-checks.md").read_text()
CALLS, STEP, EVERY = 300, 100e-3, 16
_ROW = re.compile(
    r"^\| ([\d,]+) \| (\d+) us \| (\d+) us \| (\d+) to (\d+) % \| ([\d.]+) to ([\d.]+) % \|$", re.MULTILINE
)


def constant(name: str) -> float:
    found = re.search(rf"\| {name} = ([\d.]+) us \|", PAGE)
    assert found is not None, name
    return float(found[1])


def test_the_table_of_the_cost_model() -> None:
    """Each row is what its formula gives for the constants that the page states."""
    a, c, r = constant("a"), constant("c"), constant("r")
    rows = _ROW.findall(PAGE)
    assert [row[0] for row in rows] == ["128", "1,024", "10,240", "131,072"]
    for ranks, *told in rows:
        steps = math.log2(int(ranks.replace(",", "")))
        rounds = [steps * a + c, 2 * steps * a + c]
        shares = [100 * CALLS * each * 1e-6 / STEP for each in rounds]
        rolling = [100 * CALLS * (each / EVERY + r) * 1e-6 / STEP for each in rounds]
        right = [*(f"{each:.0f}" for each in (*rounds, *shares)), *(f"{each:.1f}" for each in rolling)]
        assert told == right, ranks


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/arrays.md",
        "docs/clusters.md",
        "docs/groups.md",
        "docs/order-checks.md",
        "docs/performance.md",
        "docs/waiting.md",
        "docs/design.md",
        "docs/objects.md",
        "docs/torch.md",
    ],
)
def test_named_files_are_there(name: str) -> None:
    """A script or test that a page names in code exists, and so does what it links to."""
    text = (ROOT / name).read_text()
    files = re.findall(r"(?<![\w/.-])((?:benchmarks|docs|examples|tests)/[\w/.-]+\.(?:py|md|txt))", text)
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    missing = [file for file in files if not (ROOT / file).exists()]
    missing += [link for link in links if not ((ROOT / name).parent / link).exists()]
    assert not missing, missing
