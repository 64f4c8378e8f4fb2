"""The runner of the test suite: which stages run at the same time, and what it takes for a test that never ran."""

from __future__ import annotations

import threading
import time

import pytest
import pythons
import stage_plan
import stages
from stage_plan import EXCLUSIVE, KINDS, SIZES, Selection, Stage
from stages import LACKS, Outcome, never_run, not_tested, run_all


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_stages_of_one_kind_run_one_after_the_other(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage runs once, at most ``workers`` at a time, and an exclusive stage at the end and alone."""
    names = [
        "lint ruff",
        "openmpi scale",
        "openmpi mpi n=1",
        "openmpi hang",
        "mpich hang",
        "mpich unit",
        "mpich mpi n=3",
    ]
    running: list[Stage] = []
    ended: list[str] = []
    lock = threading.Lock()

    def run(stage: Stage, limit: float) -> Outcome:
        with lock:
            assert len(running) < (1 if stage.kind == EXCLUSIVE else workers)
            assert stage.kind not in [other.kind for other in running]
            running.append(stage)
        time.sleep(0.02)
        with lock:
            running.remove(stage)
            ended.append(stage.name)
        return Outcome(stage, passed=1)

    monkeypatch.setattr(stages, "run", run)
    made = [Stage(name, (), ".venv-mpich") for name in names]
    assert {stage.kind for stage in made} < {*KINDS, EXCLUSIVE}
    outcomes = run_all(made, 60.0, workers)
    assert [outcome.stage.name for outcome in outcomes] == names
    assert all(outcome.passed == 1 and not outcome.notes for outcome in outcomes)
    assert sorted(ended) == sorted(names)
    assert ended[-1] == "openmpi scale"


def test_other_pythons_run_the_jobs_that_depend_on_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a handler's exit, or a thread, is recognised depends on the Python: the oldest and the newest run these jobs."""
    monkeypatch.setattr(stage_plan, "_has_python", lambda version: version != "3.12")
    made = stage_plan.plan(Selection("slow", ("mpich",), ("python",), SIZES, ()))
    jobs = {stage.venv: stage.command for stage in made if stage.name.endswith(" hang")}
    others = [version for version in pythons.OTHERS if version != "3.12"]
    assert list(jobs) == [f".venv-python{others[0]}", f".venv-python{others[-1]}"]
    for command in jobs.values():
        assert {"tests/hang/test_handlers.py", "tests/hang/test_joined_threads.py", "tests/hang/test_teardown.py"} < {
            *command
        }
    assert any(stage.size for stage in made)


@pytest.mark.parametrize("has_others", [True, False])
def test_short_tests_of_one_number_of_ranks_run_once(has_others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest other Python runs them on the second MPI, or else the environment of that MPI."""
    monkeypatch.setattr(stage_plan, "_has_python", lambda version: has_others)
    made = stage_plan.plan(Selection("slow", ("openmpi", "mpich"), (), SIZES, ()))
    (own,) = (stage for stage in made if stage.name == "mpich mpi n=2")
    others = [stage for stage in made if stage.name.startswith("python") and stage.size == 2]
    assert len(others) == has_others
    assert ("slow and both_mpis" in own.command) == has_others
    assert all("not slow" in stage.command for stage in others)


def test_stages_of_different_kinds_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three stages waits for the others to be running."""
    together = threading.Barrier(3)

    def run(stage: Stage, limit: float) -> Outcome:
        together.wait(30.0)
        return Outcome(stage, passed=1)

    monkeypatch.setattr(stages, "run", run)
    made = [Stage(name, (), ".venv-mpich") for name in ("openmpi hang", "mpich unit", "mpich mpi n=3")]
    assert [outcome.passed for outcome in run_all(made, 60.0, 3)] == [1, 1, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stage_that_cannot_be_run_fails(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other stages run, also those after the stage and the exclusive ones."""

    def run(stage: Stage, limit: float) -> Outcome:
        if stage.name == "mpich hang":
            raise FileNotFoundError("no such Python")
        return Outcome(stage, passed=1)

    monkeypatch.setattr(stages, "run", run)
    names = ["openmpi hang", "mpich hang", "mpich unit", "mpich scale"]
    outcomes = run_all([Stage(name, (), ".venv-mpich") for name in names], 60.0, workers)
    assert [(each.passed, each.failed) for each in outcomes] == [(1, 0), (0, 1), (1, 0), (1, 0)]
    assert "FileNotFoundError: no such Python" in outcomes[1].notes[-1]


def outcome(size: int, tests: dict[str, str], lacking: set[str] | None = None, **special: str) -> Outcome:
    stage = Stage(f"mpich mpi n={size}", (), ".venv-mpich", size, tuple(special.items()))
    skips = {(name, f"{LACKS} memory"): 1 for name in lacking or ()}
    return Outcome(stage, tests=tests, lacking=lacking or set(), skips=skips)


def test_skipped_on_every_number_of_ranks() -> None:
    tests = {"a": "skipped", "b": "skipped"}
    assert never_run([outcome(1, tests), outcome(2, tests)]) == ["mpich a", "mpich b"]
    assert never_run([outcome(1, tests), outcome(2, tests | {"a": "passed"})]) == ["mpich b"]


def test_skipped_in_a_special_environment_alone() -> None:
    assert never_run([outcome(4, {"a": "skipped"}, ENGINE="mpi")]) == []
    assert never_run([outcome(1, {"a": "skipped"}), outcome(4, {"a": "passed"}, ENGINE="mpi")]) == []


def test_skipped_for_want_of_memory() -> None:
    """It is told at the end, and is no failure."""
    outcomes = [outcome(1, {"a": "skipped"}), outcome(2, {"a": "skipped"}, {"a"})]
    assert never_run(outcomes) == []
    assert not_tested("fast", ("mpi",), outcomes) == [f"mpich mpi n=2: 1 tests: {LACKS} memory"]
