"""Every script of ``benchmarks/`` runs and prints its figures (what they are depends on the machine)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, run_job

FOLDER = ROOT / "benchmarks"
RUNS = {
    "checks.py": (2, ["--rounds", "5"], [r"all_reduce 8 bytes +full +\d", r"target 2.5: (met|missed)"]),
    "sample.py": (2, ["--rounds", "5", "--sizes", "128"], [r"128 KiB +all_reduce +\d", r"lists\) .* %: (met|missed)"]),
    "objects.py": (2, ["1048576"], [r"1048576 bytes: mpi4py \d.* mpicoll \d.* times as fast"]),
    "pingpong.py": (2, ["8"], [r"8 bytes: raw \d.* mpicoll \d.* times"]),
    "pingpong.py --exchange": (2, ["--exchange", "8"], [r"8 bytes: raw \d.* mpicoll \d.* times"]),
    "fused.py": (2, ["20", "1024"], [r"average_gradients +\d.* the loop takes \d"]),
    "overhead.py": (2, [], [r"MPI's own +\d", r"the call +\d", r"asynchronous, and waited for +\d"]),
    "waiting.py": (2, [], ["2 ranks, quiet: raw", "2 ranks, beside a busy process: raw"]),
    "round.py": (2, [], [r"2 ranks: a round \d"]),
    "scale.py": (3, ["cycle"], [r"cycle on 3 ranks: raised on all after \d+\.\d+ s, \d+ lines"]),
    "zero_first.py": (2, [], [r"zero_first\(\) +\d+ +\d+ to \d+"]),
    "growth.py": (2, ["--rounds", "3", "--groups", "2"], [r"barrier: raw \d.*, full \d", r"KiB after init.* slots 44"]),
    "tcpstore.py": (
        1,
        ["--clients", "3", "--rounds", "2"],
        [r"\| set, 3 clients \| \d", r"\| barrier, 3 clients \| \d"],
    ),
    "overlap.py": (
        2,
        ["--sizes", "64K", "--rounds", "3"],
        [r"\| 64 KiB \| thread \| \d", r"\| layer by layer, .* \| \d"],
    ),
    "pieces.py": (2, ["--sizes", "16", "--rounds", "2"], [r"\| 16 MiB \| 4 \| \d.* \| \d+\.\d\d \|"]),
    "mpi_calls.py": (2, ["8"], [r"Allgatherv, 8 KiB +[\d,]+ us +nonblocking \d", r"4 pieces \d.*, nonblocking \d"]),
    "packed.py": (
        2,
        ["8"],
        [r"all_to_all, lists, 8 KiB +[\d,]+ us +mpicoll \d", r"float16, 8 KiB +[\d,]+ us +mpicoll \d"],
    ),
    "searches.py": (2, [], ["2 real ranks, 0 on other nodes", r"a message takes \d"]),
}


def test_each_script_is_tried() -> None:
    """Those that only help the others aside."""
    assert {path.name for path in FOLDER.glob("*.py")} == {
        *(name.split()[0] for name in RUNS),
        "compare.py",
        "handover.py",
        "machine.py",
        "output.py",
        "quiet.py",
        "growth_model.py",
        "bench_page.py",
        "torch_backend.py",  # test_with_torch.py has it
    }


def test_the_page_shows_what_is_kept(tmp_path: Path) -> None:
    """``docs/performance.md`` has the tables of the files in ``benchmarks/results``, as ``bench_page.py`` makes them."""
    page, files = tmp_path / "page.md", sorted((FOLDER / "results").glob("bench-*.json"))
    text = (ROOT / "docs" / "performance.md").read_text()
    page.write_text(re.sub(r"\| all_reduce \| 8 B \|", "| something else |", text))
    subprocess.run([sys.executable, str(FOLDER / "bench_page.py"), str(page), *map(str, files)], timeout=60, check=True)
    assert len(files) == 2
    assert page.read_text() == text


def test_the_page_shows_what_overlaps(tmp_path: Path) -> None:
    """``docs/performance.md`` has the tables of ``benchmarks/results/overlap-*.json``, as ``overlap.py --page`` makes them."""
    page, files = tmp_path / "page.md", sorted((FOLDER / "results").glob("overlap-*.json"))
    text = (ROOT / "docs" / "performance.md").read_text()
    page.write_text(re.sub(r"\| 64 KiB \| none \|", "| something else |", text))
    command = [sys.executable, str(FOLDER / "overlap.py"), "--page", str(page), *map(str, files)]
    subprocess.run(command, timeout=60, check=True)
    assert len(files) == 2
    assert page.read_text() == text


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark(name: str) -> None:
    """It ends well, and its lines hold figures."""
    size, arguments, patterns = RUNS[name]
    job = run_job(FOLDER / name.split()[0], size, limit=120, args=arguments, env={"BENCHMARK_SECONDS": "0"})
    assert not job.timed_out, job
    assert job.returncode == 0, job
    for pattern in patterns:
        assert re.search(pattern, job.out[0]), job
    assert not any(job.out[1:]), job


@pytest.mark.slow
def test_output() -> None:
    """The rate of the output of two ranks, with tags and without."""
    command = [sys.executable, str(FOLDER / "output.py"), "--ranks", "2", "--megabytes", "4", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert len(re.findall(r"bytes.*: +\d+ .* MB/s, target 100: (?:met|missed)", done.stdout)) == 4, done


@pytest.mark.slow
def test_growth_and_its_model(tmp_path: Path) -> None:
    """Each run of growth.py stands behind the others in its file, and the model takes its constants from there."""
    told = tmp_path / "growth.json"
    for more in ([], ["--sizes", "8,32K,1M"]):
        arguments = ["--rounds", "3", "--groups", "2", *more, "--json", str(told)]
        job = run_job(FOLDER / "growth.py", 2, limit=120, args=arguments, env={"BENCHMARK_SECONDS": "0"})
        assert job.returncode == 0, job
    runs = json.loads(told.read_text())
    assert [list(run["sizes"]) for run in runs] == [[], ["8", "32768", "1048576"]]
    memory = runs[0]["memory"]
    assert memory[0]["files"] == {}
    assert memory[1]["files"] == {"slots": 2 * 22 << 10, "segment": 2 * 36 << 10}
    assert memory[-1]["files"] == memory[-2]["files"]  # destroyed groups leave their memory to the next ones
    command = [sys.executable, str(FOLDER / "growth_model.py"), str(told), "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"\| 10,000 \| 157 \| \d", done.stdout), done


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


@pytest.mark.slow
@pytest.mark.both_mpis
def test_a_tree_is_compared_with_itself(tmp_path: Path) -> None:
    """Both trees are installed, with the extension and without it; what ``--json`` writes is what the table shows."""
    file = tmp_path / "compared.json"
    words = [sys.executable, str(FOLDER / "compare.py"), str(ROOT), str(ROOT), "--quick", "--json", str(file)]
    for more in (["--extension", "auto"], ["--extension", "off", "--engine", "mpi", "--limit", "1e9"]):
        command = [*words, *more, "--rows", "all_reduce 8 B", "--rows", "ping-pong 8 B"]
        for _ in range(3):
            done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
            if "(nan)" not in done.stdout:  # else the cores moved between near and far in each pair of a row
                break
        assert done.returncode == 0, done
        found = json.loads(file.read_text())
        assert list(found["rows"]) == ["all_reduce 8 B", "ping-pong 8 B"]
        assert found["windows"]["near"] + found["windows"]["far"] > 0, found
        assert len(found["latencies_ns"]) == 2 * 2 * 8
        for name, row in found["rows"].items():
            assert all(0 < time < 1e6 for label in row.values() for key in "AB" for time in label[key]), found
            assert re.search(rf"^{name} +\|", done.stdout, re.MULTILINE), done
    assert "above 1e+09, or without pairs: no row" in done.stdout, done


@pytest.mark.slow
def test_no_tree_is_compared_with_another_library(tmp_path: Path) -> None:
    """A rank that imports another tree's library ends with its file, and so does a tree that is none."""
    words = [sys.executable, str(FOLDER / "compare.py"), "--rank", "socket", "file", str(tmp_path), "auto"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    assert re.search(f"not the library of {tmp_path}, extension auto: .*__init__.py", done.stderr), done
    words = [sys.executable, str(FOLDER / "compare.py"), "no-such-revision", str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    assert "no-such-revision" in done.stderr, done
