"""The model of ``benchmarks/growth_model.py``: values computed by hand, how it grows, its fit, its tables and its picture."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT
from scripts import load

FOLDER = ROOT / "benchmarks"
model = load(FOLDER / "growth_model.py")
NETWORK = model.Network(latency=1.0, overhead=0.5, gap=0.01, per_byte=0.0001)
CONSTANTS = model.Constants(
    start={model.BARRIER: 0.0, model.SMALL: 0.5},
    step={model.BARRIER: 1.0, model.SMALL: 1.5},
    per_byte=0.0002,
    two={model.BARRIER: 3.0, model.SMALL: 5.0, model.LARGE: 300.0},
    member={model.BARRIER: 0.2, model.SMALL: 2.0, model.LARGE: 0.2},
    added={model.BARRIER: 8.0, model.SMALL: 10.0, model.LARGE: 20.0},
)


def synthetic(ranks: int, cores: int = 64, library: str = "Open MPI v5.0.11") -> dict[str, Any]:
    """A run whose times follow the model without noise, as ``growth.py`` writes it."""
    n = model.BYTES[model.LARGE]
    level = math.log2(ranks)
    raw = {
        model.BARRIER: 1.0 * level,
        model.SMALL: 0.5 + 1.5 * level,
        model.LARGE: 2 * 1.5 * level + 2 * n * (1 - 1 / ranks) * 0.0002,
    }
    through = {
        model.BARRIER: 8.0 + 1.5 * level,
        model.SMALL: 10.0 + 1.5 * level + raw[model.SMALL],
        model.LARGE: 20.0 + 1.5 * level + raw[model.LARGE],
    }
    two = CONSTANTS.two
    run: dict[str, Any] = {
        "ranks": ranks,
        "about": {"MPI": library, "cores": cores},
        "calls": {
            call: {
                "raw/full": [raw[call]] * 3,
                "full": [two[call]] * 3,
                "raw/through MPI": [raw[call]] * 3,
                "through MPI": [through[call]] * 3,
                "others": [0.012],
            }
            for call in model.CALLS
        },
        "reading": {
            size: {"barrier": [2.0 + 0.2 * size] * 3, "all_reduce": [1.0 + 2.0 * size] * 3} for size in (2, 8, 64)
        },
        "sizes": {8: {"raw/full": [1.0, 2.0, 3.0], "full": [2.0, 4.0, 6.0], "others": [0.5]}},
        "memory": [
            {"after": "raw calls", "resident": {"VmRSS": 10_240, "RssShmem": 0}, "files": {}},
            {"after": "init", "resident": {"VmRSS": 20_480, "RssShmem": 1024}, "files": {"segment": 2 << 20}},
        ],
    }
    found: dict[str, Any] = json.loads(json.dumps(run))
    return found


def test_a_level_between_nodes() -> None:
    """o + (k - 1) G + L + o, and for each other rank of the node that shares the port g, or its bytes if they take longer."""
    assert NETWORK.level(1, 1) == pytest.approx(2.0)
    assert NETWORK.level(1001, 1) == pytest.approx(2.1)
    assert NETWORK.level(1, 64) == pytest.approx(2.0 + 63 * 0.01)
    assert NETWORK.level(1000, 3) == pytest.approx(2.0 + 0.0999 + 2 * 0.1)


def test_levels() -> None:
    """On the node first, then between nodes."""
    assert [model.levels(ranks) for ranks in (2, 3, 64, 65, 128, 129, 10_000)] == [
        (1, 0),
        (2, 0),
        (6, 0),
        (6, 1),
        (6, 1),
        (6, 2),
        (6, 8),
    ]


def test_raw_by_hand() -> None:
    """Small calls take their levels; a large one twice as many, and its bytes."""
    assert model.raw(CONSTANTS, NETWORK, model.BARRIER, 8) == pytest.approx(3.0)
    assert model.raw(CONSTANTS, NETWORK, model.SMALL, 8) == pytest.approx(0.5 + 4.5)
    between = 2.0 + 7 * 0.0001 + 63 * 0.01
    assert model.raw(CONSTANTS, NETWORK, model.SMALL, 128) == pytest.approx(0.5 + 9.0 + between)
    n = 1 << 20
    assert model.raw(CONSTANTS, NETWORK, model.LARGE, 2) == pytest.approx(3.0 + n * 0.0002)
    near = 2 * 64 * 2 * n * (63 / 64) / 200e3  # what the memory of a node moves is less than what its ranks would
    assert model.raw(CONSTANTS, NETWORK, model.LARGE, 128) == pytest.approx(2 * (9.0 + 2.63) + near + n * 0.0001)


def test_ours_by_hand() -> None:
    """On a node each member adds the reading of its record; on several nodes a round of 112 bytes is added to MPI's call."""
    assert model.ours(CONSTANTS, NETWORK, model.BARRIER, 2) == 3.0
    assert model.ours(CONSTANTS, NETWORK, model.BARRIER, 64) == pytest.approx(3.0 + 62 * (0.2 + 0.2))
    assert model.ours(CONSTANTS, NETWORK, model.SMALL, 64) == pytest.approx(5.0 + 62 * (2.0 + 0.3))
    assert model.ours(CONSTANTS, NETWORK, model.LARGE, 2) == 300.0
    round_ = 9.0 + 2.0 + 111 * 0.0001 + 63 * 112 * 0.0001  # the bytes take longer than the gap
    assert model.ours(CONSTANTS, NETWORK, model.BARRIER, 128) == pytest.approx(8.0 + round_)
    for call, added in ((model.SMALL, 10.0), (model.LARGE, 20.0)):
        raw = model.raw(CONSTANTS, NETWORK, call, 128)
        assert model.ours(CONSTANTS, NETWORK, call, 128) == pytest.approx(added + round_ + raw)


def test_it_grows_with_the_logarithm_of_ranks() -> None:
    """On several nodes each doubling adds the same; no call gets cheaper by more ranks, but where rounds leave shared memory."""
    for of in (model.raw, model.ours):
        for call in (model.BARRIER, model.SMALL):
            times = [of(CONSTANTS, NETWORK, call, 64 * 2**i) for i in range(1, 8)]
            steps = [later - before for before, later in itertools.pairwise(times)]
            assert max(steps) - min(steps) < 1e-9 < min(steps)
    for call in model.CALLS:
        for ranks in ((2, 4, 8, 16, 32, 64), (128, 1000, 10_000)):
            for of in (model.raw, model.ours):
                times = [of(CONSTANTS, NETWORK, call, n) for n in ranks]
                assert times == sorted(times), (call, times)


def test_constants_of_the_library() -> None:
    """Those that the model repeats are those of the code."""
    from mpicoll.runtime.settings import Settings
    from mpicoll.transports.mpi.control import _ROUND
    from mpicoll.transports.shm.control import MOST_MEMBERS
    from mpicoll.transports.shm.transport import Budget

    assert (_ROUND.size, MOST_MEMBERS, Settings().shm_mb << 20) == (model.ROUND, model.NODE, model.SHM)
    for ranks in (2, 8, 33, 64):
        assert model.room(ranks) == Budget(model.SHM // ranks).room()


def test_lines() -> None:
    """A line is found again; one point gives a line through zero; a far larger value does not outweigh the small ones."""
    start, slope = model.fit_line([(x, 3.0 + 0.5 * x) for x in (1, 2, 8, 64)])
    assert (start, slope) == (pytest.approx(3.0), pytest.approx(0.5))
    assert model.fit_line([(2.0, 5.0)]) == (0.0, 2.5)
    start, slope = model.fit_line([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (1000.0, 1100.0)])
    assert slope == pytest.approx(1.0, rel=0.15)


def test_a_fit_finds_the_constants() -> None:
    """Those of which times were made; runs with more ranks than cores have no part in it."""
    crowded = synthetic(16, cores=8)
    for times in crowded["calls"].values():
        for how in times:
            times[how] = [1e6] * 3
    found = model.fit([synthetic(2, 8), synthetic(4, 8), synthetic(8, 8), crowded])
    for name in ("start", "step", "two", "member", "added"):
        expected = getattr(CONSTANTS, name)
        assert getattr(found, name) == {call: pytest.approx(value, abs=1e-9) for call, value in expected.items()}, name
    assert found.per_byte == pytest.approx(CONSTANTS.per_byte)
    with pytest.raises(ValueError, match="no run of two ranks"):
        model.fit([crowded])


def test_the_last_run_counts() -> None:
    """Of each library and number of ranks; the sizes are those of the last that has some."""
    early, late = synthetic(2), synthetic(2)
    late["about"]["cores"], late["sizes"] = 3, {}
    (kept,) = model.by_library([early, late, late])["Open MPI v5.0.11"]
    assert (kept["sizes"], kept["sizes_about"]["cores"], kept["about"]["cores"]) == (early["sizes"], 64, 3)
    found = model.by_library([early, late, synthetic(2, library="MPICH Version: 5.0.2")])
    assert {name: [run["about"]["cores"] for run in runs] for name, runs in found.items()} == {
        "MPICH Version: 5.0.2": [64],
        "Open MPI v5.0.11": [3],
    }


def test_tables_and_picture(tmp_path: Path) -> None:
    """The script prints them, puts them between their marks and nowhere else, and draws."""
    pytest.importorskip("matplotlib")
    told = tmp_path / "growth.json"
    told.write_text(json.dumps([synthetic(2, 2), synthetic(4, 2), synthetic(2, library="MPICH Version: 5.0.2")]))
    text = tmp_path / "text.md"
    text.write_text(
        "before\n<!-- growth: sizes -->\nold\n<!-- end -->\nbetween\n<!-- growth: model -->\n\n<!-- end -->\n"
    )
    command = [sys.executable, str(FOLDER / "growth_model.py"), str(told)]
    for more in ([], ["--markdown"], ["--update", str(text), "--plot", str(tmp_path / "growth.png")]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=True)
        assert more[:1] == ["--update"] or "Open MPI 5.0.11" in done.stdout, done
    lines = text.read_text().splitlines()
    assert lines[0] == "before"
    assert "between" in lines
    assert "old" not in lines
    assert "| Open MPI 5.0.11 | 2 | 8 B | 2.00 (1.50 to 2.50) | 4.00 (3.00 to 5.00) | 2.00 | 0.002 | 50 % |" in lines
    assert any("10,000 | 157 |" in line for line in lines)
    assert (tmp_path / "growth.png").stat().st_size > 10_000
