"""Every example runs as its docstring says, also on other numbers of ranks, and notices when a result is wrong."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from jobs import ROOT, JobResult, RunningJob, run_job

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ARGS = {"straggler": ["--delay", "1", "--within", "0.5"]}  # machines that run tests are busy

# Beside the number of ranks that the docstring names.
OTHER_SIZES = [
    ("average_gradients", 1),
    ("average_gradients", 3),
    ("collectives", 1),
    ("collectives", 5),
    ("cache_per_node", 1),
    ("cache_per_node", 5),
    ("hello_barrier", 1),
    ("hello_barrier", 2),
    ("prepare_once", 1),
    ("prepare_once", 5),
    ("rank0_first", 1),
    ("rank0_first", 2),
    ("send_recv", 3),
    ("straggler", 5),
    *((name, size) for name in ("transpose", "ring", "mean_variance", "checkpoint") for size in (1, 2, 5)),
    *(("train_like_one", size) for size in (1, 2, 3, 5)),
    ("train_digits", 1),
    ("train_digits", 2),
    ("train_digits", 3),
    ("train_digits", 5),
]

# What to break so that the result is wrong: the function then does nothing.
BROKEN = [
    ("average_gradients", "all_reduce"),
    ("collectives", "gather"),
    ("hello_barrier", "barrier"),
    ("mean_variance", "all_reduce"),
    ("rank0_first", "barrier"),
    ("send_recv", "recv"),
    ("straggler", "barrier"),
    ("train_digits", "all_reduce"),
    ("train_digits", "scatter"),
    ("train_like_one", "average_gradients"),
    ("train_like_one", "broadcast_parameters"),
    ("transpose", "all_to_all_single"),
]


def run_example(name: str, size: int, folder: Path, args: list[str] | None = None, broken: str = "") -> JobResult:
    """Run an example in a folder of its own, so that this is where it writes to."""
    path = ROOT / "examples" / f"{name}.py"
    program = [str(path)]
    if broken:
        stub = f"import runpy, sys, mpicoll; mpicoll.{broken} = lambda *args, **kwargs: None; del sys.argv[0]"
        program = ["-c", f"{stub}; runpy.run_path(sys.argv[0], run_name='__main__')", str(path)]
    arguments = ARGS.get(name, []) if args is None else args
    return run_job(program, size, limit=120, cwd=folder, args=arguments, env={"MPLBACKEND": "Agg"})


def check_passed(result: JobResult) -> None:
    assert not result.timed_out
    assert result.returncode == 0
    assert not result.left_running


# test_with_torch.py has those of torch.
PLAIN = [path for path in EXAMPLES if path.stem not in ("train_digits", "missing_barrier", "torch_ddp", "torch_fsdp")]


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path) -> None:
    """The exit code is 0 and no process is left."""
    said = re.search(r"-n (\d+)", path.read_text())
    check_passed(run_example(path.stem, int(said.group(1)) if said else 4, tmp_path))


@pytest.mark.parametrize(("name", "size"), OTHER_SIZES)
@pytest.mark.slow
def test_other_sizes(name: str, size: int, tmp_path: Path) -> None:
    """It works on other numbers of ranks, too."""
    check_passed(run_example(name, size, tmp_path, ["--epochs", "5", "--no-plot"] if name == "train_digits" else None))


@pytest.mark.parametrize(("name", "function"), BROKEN)
@pytest.mark.slow
def test_wrong_result(name: str, function: str, tmp_path: Path) -> None:
    """When a function of the library does nothing, the example says what is wrong and the job fails."""
    args = ["--epochs", "1", "--no-plot"] if name == "train_digits" else None
    result = run_example(name, 2, tmp_path, args, broken=function)
    assert not result.timed_out
    assert result.returncode != 0
    assert not result.left_running
    assert any(line.strip() for text in result.err for line in text.splitlines())


def test_digits(tmp_path: Path) -> None:
    """The main job prints an accuracy of at least 95 %, on rank 0 only, and draws its picture."""
    result = run_example("train_digits", 4, tmp_path)
    check_passed(result)
    accuracy = re.search(r"^test accuracy ([\d.]+)%", result.out[0], re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy.group(1)) >= 95
    assert "one process that trains alone comes to the same parameters" in result.out[0]
    assert not any(result.out[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["digits.png"]
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "size", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_parameters_of_many_and_of_one(size: int, tmp_path: Path) -> None:
    """They are those that one process comes to: on one rank bit for bit; on more to the rounding of sums in another order."""
    result = run_example("train_like_one", size, tmp_path)
    check_passed(result)
    said = re.search(rf"^{size} ranks? .* parameters at most (\S+) apart$", result.out[0], re.MULTILINE)
    assert said is not None, result
    # 400 steps, each of which rounds in the sixteenth digit of parameters of the size of 1.
    assert float(said.group(1)) <= (1e-12 if size > 1 else 0.0)
    assert not any(result.out[1:])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_missing_barrier(size: int, tmp_path: Path) -> None:
    """The ranks that wait are told, within seconds, which rank ended after which barrier; the job fails."""
    result = run_example("missing_barrier", size, tmp_path)
    assert not result.timed_out
    assert not result.left_running
    assert result.returncode == 1
    assert result.seconds < 15
    for rank in set(range(size)) - {1}:
        assert "past the first" in result.out[rank]
        assert "past the second" not in result.out[rank]
        assert "PeerExitedError: barrier #2 on group WORLD at missing_barrier.py:17" in result.err[rank]
        assert "rank 1 ended the program after 1 call on this group" in result.err[rank]
    # One of the waiting ranks prints the report: the rank that tells the other ranks of the end of rank 1.
    reports = [err for err in result.err if "  next: " in err]
    assert len(reports) == 1, result
    assert re.search(r"last call barrier at\s+(\[rank \d\]\s+)*missing_barrier.py:14", reports[0])


@pytest.mark.slow
def test_checkpoint(tmp_path: Path) -> None:
    """A signal to one rank ends all after the same sweep; the next start, on fewer ranks, goes on from there to the result."""
    program, args = ROOT / "examples" / "checkpoint.py", ["state.npz", "--pause", "0.02"]

    def interrupt(job: RunningJob) -> None:
        job.wait_for("starting after 0 sweeps", 0)
        job.signal(signal.SIGUSR1, 1)

    first = run_job(program, 3, limit=60, cwd=tmp_path, args=args, meanwhile=interrupt)
    check_passed(first)
    sweeps = [re.search(r"signal 10, state saved after (\d+) sweeps", text) for text in first.out]
    assert len({found and found.group(1) for found in sweeps}) == 1, first
    assert sweeps[0] is not None, first
    done = int(sweeps[0].group(1))
    assert 0 < done < 704, first
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]
    second = run_job(program, 2, limit=60, cwd=tmp_path, args=["state.npz"])
    check_passed(second)
    assert f"done after 704 sweeps, {704 - done} of them since the start" in second.out[0], second
    assert not list(tmp_path.iterdir())


def test_table() -> None:
    """examples/README.md lists every example, and none that is not there."""
    listed = re.findall(r"^\| \[`(\w+)\.py`\]", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [path.stem for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_docstring(path: Path) -> None:
    """The docstring names the one command that runs the example."""
    assert re.search(rf'^"""[^"]*^    (mpicoll run -n \d+|python) examples/{path.name}', path.read_text(), re.MULTILINE)
