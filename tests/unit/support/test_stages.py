"""What the runner of the test suite takes for a test that never ran."""

from __future__ import annotations

from stage_plan import Stage
from stages import LACKS, Outcome, never_run, not_tested


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
