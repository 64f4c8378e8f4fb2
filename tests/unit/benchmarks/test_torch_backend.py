"""``benchmarks/torch_backend.py``: which rounds count, ratios, the table, the verdicts, the page and the picture."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT

ABOUT = {
    "MPI": "MPICH Version: 5.0",
    "torch": "2.13.0",
    "mpi4py": "4.1",
    "Python": "3.11",
    "processor": "a processor",
    "cores": 2,
    "date": "2026-01-01",
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("torch_backend")


def rounds(latency: float, **times: float) -> list[dict[str, Any]]:
    """Return six equal rounds."""
    return [{**times, "latencies": [latency, latency]} for _ in range(6)]


@pytest.fixture
def told(script: Any) -> dict[str, Any]:
    """Return what a job of two ranks may have measured."""
    disturbed = [{"mpicoll": 999.0, "gloo": 1.0, "own": 1.0, "latencies": [90.0, 500.0]}]
    steps = dict(zip(script.STEPS, (1500.0, 2500.0, 1250.0, 1000.0, 1000.0, 1000.0), strict=True))
    rows = {
        "all_reduce 4 B": [*rounds(90.0, mpicoll=20.0, gloo=240.0, own=12.0), *disturbed],
        "all_reduce 1 MiB": rounds(500.0, mpicoll=400.0, gloo=1200.0, own=380.0),
        "broadcast 4 B": rounds(90.0, mpicoll=20.0, gloo=100.0, own=10.0),
        "broadcast 1 MiB": rounds(90.0, mpicoll=200.0, gloo=500.0, own=200.0),
        "barrier": rounds(90.0, mpicoll=10.0, gloo=100.0, own=5.0),
        script.STEP: rounds(90.0, **steps),
    }
    return {"command": "python it", "runs": [{"ranks": 2, "about": ABOUT, "crowded": False, "rows": rows}]}


def test_a_row_is_the_median_of_the_rounds_of_its_label(script: Any, told: dict[str, Any]) -> None:
    lines = script.markdown(told).splitlines()
    assert lines[0] == "MPICH 5.0, torch 2.13.0, mpi4py 4.1, Python 3.11; a processor, 2 cores; 2026-01-01:"
    assert "| 2 | all_reduce | 4 B | 20.0 us | 240.0 us | 12.0 (12.0 to 12.0) | 8.0 (8.0 to 8.0) | near |" in lines
    assert "| 2 | all_reduce | 1 MiB | 400.0 us | 1.20 ms | 3.0 (3.0 to 3.0) | 20.0 (20.0 to 20.0) | far |" in lines
    assert f"| 2 | {script.STEP} |  | 500.0 us | 1.50 ms | 3.0 (3.0 to 3.0) |  | near |" in lines
    assert f"| 2 | {script.LESS_REDUCER} |  | 250.0 us | 1.25 ms | 5.0 |  | near |" in lines


def test_a_step_without_the_reducer_that_is_below_the_noise_has_no_ratio(script: Any, told: dict[str, Any]) -> None:
    for each in told["runs"][0]["rows"][script.STEP]:
        each[script.STEPS[0]] = 900.0
    assert f"| 2 | {script.LESS_REDUCER} |  | -249.0 us | 1.25 ms |  |  | near |" in script.markdown(told).splitlines()


def test_the_verdicts(script: Any, told: dict[str, Any]) -> None:
    lines = script.verdicts(told["runs"][0])
    assert "2 ranks, all_reduce 4 B: 10 times as fast as gloo: met (12.0)" in lines
    assert "2 ranks, all_reduce 1 MiB: 5 times as fast as gloo: missed (3.0)" in lines
    assert "2 ranks, all_reduce 1 MiB: at most 15 us above the own call: missed (20.0)" in lines
    assert f"2 ranks, {script.STEP}: 3 times as fast as gloo: met (3.0)" in lines
    assert len(lines) == 4


def test_crowded_ranks_have_one_label(script: Any, told: dict[str, Any]) -> None:
    told["runs"][0]["crowded"] = True
    assert {label for label, _ in script.kept(told["runs"][0]["rows"], True).values()} == {"far"}
    assert script.markdown(told).count("| shared |") == 7


def test_the_page_and_the_picture(script: Any, told: dict[str, Any], tmp_path: Path) -> None:
    """Both are made of the file without a measurement."""
    file, page, picture = tmp_path / "torch-backend.json", tmp_path / "page.md", tmp_path / "plot.png"
    file.write_text(json.dumps(told))
    page.write_text("Before\n<!-- bench: torch-backend -->\n<!-- end -->\nafter\n")
    script.main(["--page", str(page), "--plot", str(picture), str(file)])
    assert page.read_text() == (f"Before\n<!-- bench: torch-backend -->\n{script.markdown(told)}<!-- end -->\nafter\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_a_call_whose_rounds_were_all_disturbed(script: Any, told: dict[str, Any], tmp_path: Path) -> None:
    """The cores changed their distance in each round: the call has no row, and its axes stay empty."""
    rows, picture = told["runs"][0]["rows"], tmp_path / "plot.png"
    for name in rows:
        if name.startswith("broadcast"):
            rows[name] = [{**each, "latencies": [90.0, 500.0]} for each in rows[name]]
    assert not any(name.startswith("broadcast") for name in script.kept(rows, False))
    script.draw(told, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_page_of_the_docs_shows_what_is_kept(script: Any, tmp_path: Path) -> None:
    """``docs/torch.md`` has the table of ``benchmarks/results/torch-backend.json``, and a place for it."""
    text, file = (ROOT / "docs" / "torch.md").read_text(), ROOT / "benchmarks" / "results" / "torch-backend.json"
    assert text.count("<!-- bench: torch-backend -->\n") == 1
    if file.exists():
        page = tmp_path / "page.md"
        page.write_text(text)
        script.main(["--page", str(page), str(file)])
        assert page.read_text() == text
