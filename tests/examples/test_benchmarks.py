"""Every script of ``benchmarks/`` runs and prints its figures (what they are depends on the machine)."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from jobs import ROOT, run_job

FOLDER = ROOT / "benchmarks"
RUNS = {
    "checks.py": (2, ["--rounds", "5"], [r"all_reduce 8 bytes +full +\d", r"target 2.5: (met|missed)"]),
    "objects.py": (2, ["1048576"], [r"1048576 bytes: mpi4py \d.* mpicoll \d.* times as fast"]),
    "pingpong.py": (2, ["8"], [r"8 bytes: raw \d.* mpicoll \d.* times"]),
    "fused.py": (2, ["20", "1024"], [r"average_gradients +\d.* the loop takes \d"]),
    "waiting.py": (2, [], ["2 ranks, quiet: raw", "2 ranks, beside a busy process: raw"]),
    "round.py": (2, [], [r"2 ranks: a round \d"]),
    "scale.py": (3, ["cycle"], [r"cycle on 3 ranks: raised on all after \d+\.\d+ s, \d+ lines"]),
    "zero_first.py": (2, [], [r"zero_first\(\) +\d+ +\d+ to \d+"]),
    "searches.py": (2, [], ["2 real ranks, 0 on other nodes", r"a message takes \d"]),
}


def test_each_script_is_tried() -> None:
    """Those that only help the others aside."""
    assert {path.name for path in FOLDER.glob("*.py")} == {*RUNS, "quiet.py"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark(name: str) -> None:
    """It ends well, and its lines hold figures."""
    size, arguments, patterns = RUNS[name]
    job = run_job(FOLDER / name, size, limit=120, args=arguments, env={"BENCHMARK_SECONDS": "0"})
    assert not job.timed_out, job
    assert job.returncode == 0, job
    for pattern in patterns:
        assert re.search(pattern, job.out[0]), job
    assert not any(job.out[1:]), job


@pytest.mark.slow
def test_benchmarks_of_many_ranks() -> None:
    """A mismatch on 100,000 ranks is told in some hundred bytes; searches among made-up ranks are few, whatever their number."""
    job = run_job(FOLDER / "scale.py", 1, limit=60, args=["table"])
    assert re.search(r"100000 ranks, one of them odd: a table of \d{3} bytes", job.out[0]), job
    job = run_job(FOLDER / "scale.py", 2, limit=60, args=["mismatch"])
    assert "mismatch on 2 ranks: raised on all" in job.out[0], job
    command = [sys.executable, str(FOLDER / "searches.py"), "--seconds", "10", "16", "4", "48", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    counts = re.findall(r"0-1 s: ([\d.]+) searches, \d+ messages; 1-10 s: ([\d.]+) searches", done.stdout)
    assert len(counts) == 2, done
    assert all(1 <= float(first) < 10 and 9 <= float(rest) < 150 for first, rest in counts), done
