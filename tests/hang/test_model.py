"""Random programs over several groups, correct ones and mutated ones, end as a model of MPI says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from jobs import JobResult, family, run_job

TESTS = Path(__file__).parent.parent
FIRST = int(os.environ.get("TEST_MODEL_SEED", "0"))
"""Other programs than those of every run: TEST_MODEL_SEED=1000000 pytest tests/hang/test_model.py."""

# With those of the first test 5,000 correct programs on MPICH, whose jobs are the faster ones.
MANY = (2, 3, 4) if family() == "mpich" else (4,)


def run_driver(size: int, at_most: float, **options: object) -> tuple[dict[str, dict[str, int]], JobResult]:
    """Run programs in one job, and return the table: what was flagged, harmless, missed and false, by mutation."""
    arguments = [f"--{name}={value}" for name, value in options.items()]
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    job = run_job(["-m", "model.driver", *arguments], size, limit=at_most, env={"PYTHONPATH": path})
    assert not job.timed_out, job
    assert job.returncode == 0, job
    return json.loads(job.out[0].splitlines()[0]), job


def total(table: dict[str, dict[str, int]], column: str) -> int:
    return sum(row[column] for row in table.values())


def expect_right(capsys: pytest.CaptureFixture[str], size: int, at_most: float, correct: int, mutated: int) -> None:
    """Run programs, print what became of them, and have none of them missed or flagged falsely."""
    table, job = run_driver(
        size, at_most, correct=correct, pauses=1 + correct // 300, mutated=mutated, seed=FIRST + 10_000 * size
    )
    good = table["correct"]["harmless"]
    with capsys.disabled():
        print(
            f"\nrandom programs on {size} ranks: {good} correct; {mutated} mutated: {total(table, 'flagged')} flagged, "
            f"{total(table, 'harmless') - good} harmless, {total(table, 'missed')} missed; {total(table, 'false')} false alarms"
        )
        print("\n".join(f"random programs: {line}" for line in job.out[0].splitlines()[1:] if line.strip()))
    assert total(table, "missed") == 0, job.out[0]
    assert total(table, "false") == 0, job.out[0]
    assert good == correct
    assert sum(sum(row.values()) for kind, row in table.items() if kind != "correct") == mutated
    assert total(table, "flagged") > mutated / 2


@pytest.mark.slow
@pytest.mark.both_mpis
def test_random_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """Correct programs are never flagged; of mutated ones all that are wrong are, the harmless ones not."""
    expect_right(capsys, 3, 120, correct=500, mutated=60)


@pytest.mark.slow
@pytest.mark.both_mpis
@pytest.mark.parametrize("size", MANY)
def test_many_random_programs(capsys: pytest.CaptureFixture[str], size: int) -> None:
    """Correct programs are never flagged; of mutated ones all that are wrong are, the harmless ones not."""
    correct, mutated = (1500, 150) if family() == "mpich" else (200, 50)
    expect_right(capsys, size, 700, correct=correct, mutated=mutated)


PLANTED = {
    "dtype": (2, {"mutated": 60, "kinds": "dtype"}, "missed"),
    "busy": (3, {"correct": 8, "pauses": 4}, "false"),
    "blind": (3, {"mutated": 4, "kinds": "drop", "limit": 2}, "missed"),
    "uncounted": (2, {"mutated": 40, "kinds": "drop,duplicate"}, "missed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_the_checker_is_found(fault: str) -> None:
    """A checker that ignores a dtype, takes busy ranks for ended ones, finds no deadlock or no message left does not pass."""
    size, options, column = PLANTED[fault]
    found, job = run_driver(size, 120, plant=fault, **options)
    assert total(found, column) > 0, job.out[0]
    right, job = run_driver(size, 120, **options)
    assert total(right, column) == 0, job.out[0]
