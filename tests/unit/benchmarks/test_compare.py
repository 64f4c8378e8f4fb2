"""``benchmarks/compare.py`` and ``handover.py``: the boundary of near and far, the windows of each, the ratios, the verdict."""

from __future__ import annotations

import importlib
import math
import random
from typing import Any

import pytest
from jobs import ROOT


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return the modules ``compare`` and ``handover``."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("compare"), importlib.import_module("handover")


def spread(seed: int, middle: float, count: int) -> list[float]:
    """Return made-up latencies around a middle."""
    draw = random.Random(seed)
    return [middle * math.exp(draw.gauss(0.0, 0.15)) for _ in range(count)]


@pytest.mark.parametrize(("near", "far"), [(500, 0), (0, 500), (500, 500), (30, 900), (900, 30)])
def test_the_boundary_is_between_near_and_far(scripts: tuple[Any, Any], near: int, far: int) -> None:
    """Whichever of them there are, nearly all latencies have the right label."""
    latencies = [(each, "near") for each in spread(1, 95.0, near)] + [(each, "far") for each in spread(2, 420.0, far)]
    boundary = scripts[1].boundary_of([each for each, _ in latencies])
    right = sum(scripts[1].label_of(each, each, boundary) == label for each, label in latencies)
    assert 150 <= boundary <= 400
    assert right >= 0.98 * len(latencies), boundary


def test_windows_whose_label_changes_are_dropped(scripts: tuple[Any, Any]) -> None:
    """So are those in which a rank has lost its core."""
    label_of = scripts[1].label_of
    assert [label_of(90, 110, 200), label_of(300, 500, 200)] == ["near", "far"]
    assert [label_of(90, 300, 200), label_of(300, 90, 200), label_of(300, 5e6, 200), label_of(5e6, 90, 200)] == [""] * 4


def test_near_and_far_are_reported_apart(scripts: tuple[Any, Any]) -> None:
    """A pair has one label; the near pairs decide if they are at least five."""
    compare, _ = scripts

    def window(latency: float, time: float) -> Any:
        return compare.Window(latency, latency, time)

    near, far = (window(90, 1.0), window(90, 1.1)), (window(350, 2.0), window(350, 2.0))
    pairs = [near] * 5 + [far] * 9 + [(window(90, 1.0), window(350, 9.0)), (window(5e6, 7.0), window(90, 1.1))]
    by_row = compare.results(compare.Measured({}, False, {"a row": pairs, "none": []}), 200.0)
    row = by_row["a row"]
    assert row["near"]["ratios"] == pytest.approx([1.1] * 5)
    assert row["far"]["ratios"] == [1.0] * 9
    assert [len(row[label][key]) for label in ("near", "far") for key in "AB"] == [6, 6, 9, 10]
    assert compare.verdict(row) == pytest.approx(1.1)
    row["near"]["ratios"].pop()
    assert compare.verdict(row) == 1.0
    assert math.isnan(compare.verdict(by_row["none"]))
    *_, line, empty = compare.table(by_row)
    assert line.split("|")[1].split() == ["1.00", "1.10", "1.10", "(1.10", "to", "1.10)", "4"]
    assert line.split("|")[2].split() == ["2.00", "2.00", "1.00", "(1.00", "to", "1.00)", "9"]
    assert empty.split("|")[2].split() == ["-", "-", "-", "0"]


def test_ranks_that_share_cores_are_not_told_apart(scripts: tuple[Any, Any]) -> None:
    """All their windows count as far."""
    compare, _ = scripts
    pairs = {"a row": [(compare.Window(5e6, 4.0, 2.0), compare.Window(90, 8e6, 1.0))]}
    row = compare.results(compare.Measured({}, True, pairs), 200.0)["a row"]
    assert [row["near"]["ratios"], row["far"]["ratios"]] == [[], [0.5]]


def test_rows_have_names_and_sizes(scripts: tuple[Any, Any]) -> None:
    """The sizes of a row are in its code, and patterns choose rows by name."""
    compare, _ = scripts
    rows = compare.rows()
    assert rows["all_reduce 64 KiB"] == ("x = array(65536)", "dist.all_reduce(x)")
    assert rows["all_gather 1 MiB"][0] == "x, y = array(1048576 // size), array(1048576)"
    assert "{'step'" not in rows["all_gather_object"][1]
    assert rows["all_gather_object"][1].endswith("{'loss': 0.5, 'step': 3})")
    for setup, statement in rows.values():
        compile(setup + "\n" + statement, "row", "exec")
    chosen = compare.parse(["A", "B", "--rows", "ping-pong*", "--rows", "barrier", "--quick"])
    assert chosen.names == ["barrier", "ping-pong 8 B", "ping-pong 1 MiB", "ping-pong 64 MiB"]
    assert [chosen.jobs, chosen.rounds] == [1, 2]
    with pytest.raises(SystemExit):
        compare.parse(["A", "B", "--rows", "nothing"])
