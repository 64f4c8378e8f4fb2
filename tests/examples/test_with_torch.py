"""The examples and the benchmark of mpicoll.torch: jobs with torch, in an environment of their own (stage_plan.py)."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from examples.test_examples import check_passed, run_example
from jobs import ROOT, RunningJob, run_job
from pasted import TORCH_PAGE, Pasted, printed, read, same

pytest.importorskip("torch")


@pytest.mark.parametrize("size", [4, 3])
def test_ddp(size: int, tmp_path: Path) -> None:
    """It reads the digits, and one process comes to the same parameters."""
    result = run_example("torch_ddp", size, tmp_path)
    check_passed(result)
    accuracy = re.search(r"^test accuracy ([\d.]+)%", result.out[0], re.MULTILINE)
    assert accuracy is not None, result
    assert float(accuracy.group(1)) >= 95
    assert "one process that trains alone comes to the same parameters" in result.out[0]
    assert not any([*result.out[1:], *result.err]), result


def test_fsdp(tmp_path: Path) -> None:
    """A signal to one rank has all save a checkpoint; a run on fewer ranks goes on from there, and ends as one process does."""

    def interrupt(job: RunningJob) -> None:
        job.wait_for("starting after 0 steps", 0)
        job.signal(signal.SIGUSR1, 1)

    first = run_job(ROOT / "examples" / "torch_fsdp.py", 3, limit=120, cwd=tmp_path, meanwhile=interrupt)
    check_passed(first)
    signals = [re.search(r"signal 10 after step (\d+)", text) for text in first.out]
    assert len({found and found.group(1) for found in signals}) == 1, first
    assert signals[0] is not None, first
    done = int(signals[0].group(1))
    assert 0 < done < 60, first
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(done)]
    second = run_example("torch_fsdp", 2, tmp_path)
    check_passed(second)
    assert f"starting after {done} steps; rank 0 holds 59264 of 118528 parameters" in second.out[0], second
    assert f"done after 60 steps, {60 - done} of them since the start" in second.out[0], second
    assert not list(tmp_path.iterdir())
    assert not any([*second.out[1:], *second.err]), second


def test_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick form prints a row for each call of which a round counts, writes the rounds, and draws.

    A round does not count during which the cores have moved, or other programs have disturbed the ranks. A difference of two
    times, as in the row of DistributedDataParallel, may be below zero on a busy machine.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = str(ROOT / "benchmarks" / "torch_backend.py")
    spec = importlib.util.spec_from_file_location("benchmark", script)  # tests/torch_backend has the name of the file
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)
    spec.loader.exec_module(benchmark)
    told, picture = tmp_path / "told.json", tmp_path / "plot.png"
    command = [sys.executable, script, "--quick", "--ranks", "2", "--json", str(told), "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done
    run = json.loads(told.read_text())["runs"][0]
    assert run["ranks"] == 2
    counted = benchmark.kept(run["rows"], run["crowded"])
    for row in ("all_reduce 4 B", "broadcast 1 MiB", "barrier", benchmark.STEP):
        assert len(run["rows"][row]) >= 3, run
        call, size = (row, "") if row == benchmark.STEP else row.partition(" ")[::2]
        line = rf"^\| 2 \| {re.escape(call)} \| {re.escape(size)} \| -?[\d.]+ [um]s \| "
        assert (re.search(line, done.stdout, re.MULTILINE) is not None) == (row in counted), (row, done)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("pasted", read(TORCH_PAGE.read_text()), ids=lambda pasted: pasted.name)
def test_what_is_pasted_is_what_is_printed(pasted: Pasted) -> None:
    """The reports in ``docs/torch.md`` are those of the programs above them."""
    text = printed(pasted)
    assert same(text, pasted.text), text


@pytest.mark.parametrize(
    ("name", "function"), [("torch_ddp", "collectives.all_reduce"), ("torch_fsdp", "scattering.reduce_scatter_single")]
)
def test_wrong_result(name: str, function: str, tmp_path: Path) -> None:
    """When the function of the library below torch's calls does nothing, the example says so and the job fails."""
    module = function.partition(".")[0]
    stub = f"import runpy, sys; from mpicoll.api import {module}; {function} = lambda *args, **kwargs: None; del sys.argv[0]"
    program = ["-c", f"{stub}; runpy.run_path(sys.argv[0], run_name='__main__')", f"{ROOT}/examples/{name}.py"]
    result = run_job(program, 2, limit=120, cwd=tmp_path)
    assert not result.timed_out
    assert result.returncode != 0
    assert not result.left_running
    assert any("the ranks" in text for text in result.err), result
