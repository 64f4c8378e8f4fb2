"""How much time a job has left: what variables and batch systems say, read without one."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from mpicoll.runtime.settings import read_settings
from mpicoll.training.time_limit import Clock, duration, hours_and_minutes, qstat_left


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1:00", 60.0),
        ("0:07\n", 7.0),
        ("10:00:01", 36001.0),
        ("2-01:00:00", 176400.0),
        ("1-12", 129600.0),
        ("1-00:30", 88200.0),
        ("00:00:00", 0.0),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("12", None),
        ("", None),
        ("-1:00", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    """Slurm's and PBS's durations, and what they say where there is no limit."""
    assert duration(text) == seconds


def test_lsf() -> None:
    """LSF tells hours and minutes, with a letter that says how it knows."""
    assert hours_and_minutes("1:05 L\n") == 3900.0
    assert hours_and_minutes("-\n") is None


def test_qstat() -> None:
    """PBS tells the limit and when the job began, or at least how long it has run; both end in the same."""
    now = 1_700_000_000.0
    stime = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(now - 600))
    limit, used = "    Resource_List.walltime = 01:00:00\n", "    resources_used.walltime = 00:05:00\n"
    assert qstat_left(f"Job Id: 7.pbs\n{used}{limit}    stime = {stime}\n", now) == 3000.0
    assert qstat_left(f"Job Id: 7.pbs\n{used}{limit}", now) == 3300.0
    assert qstat_left("Job Id: 7.pbs\n    Resource_List.ncpus = 4\n", now) is None


class Batch:
    """A batch system that notes what it is asked."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.asked: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> str:
        self.asked.append(list(command))
        return self.answer


def test_a_variable_tells_without_asking() -> None:
    """The end of the job in the environment counts, and no batch system is asked."""
    for name in ("MPICOLL_JOB_END", "SLURM_JOB_END_TIME"):
        batch = Batch("1:00")
        clock = Clock({name: str(time.time() + 500), "SLURM_JOB_ID": "7"}, batch)
        left = clock.left(ask=True)
        assert left is not None
        assert 490 < left <= 500
        assert not batch.asked


@pytest.mark.parametrize(
    ("variable", "answer", "program", "seconds"),
    [
        ("SLURM_JOB_ID", "7 1:40\n", "squeue", 100),
        ("SLURM_JOB_ID", "9 0:10\n8 0:20\n7 1:40\n", "squeue", 100),
        ("SLURM_JOB_ID", "7 UNLIMITED\n", "squeue", None),
        ("SLURM_JOB_ID", "", "squeue", None),
        ("PBS_JOBID", "    Resource_List.walltime = 00:01:40\n", "qstat", 100),
        ("LSB_JOBID", "0:02 L\n", "bjobs", 120),
    ],
)
def test_a_batch_system_is_asked_once(variable: str, answer: str, program: str, seconds: float | None) -> None:
    """Only where it is wanted, and once; then the clock of this process goes on."""
    batch = Batch(answer)
    clock = Clock({variable: "7"}, batch)
    assert clock.left(ask=False) is None
    assert not batch.asked
    for ask in (True, True, False):
        left = clock.left(ask=ask)
        assert (left is None) == (seconds is None)
        if seconds is not None and left is not None:
            assert seconds - 10 < left <= seconds
    assert [command[0] for command in batch.asked] == [program]
    assert "7" in batch.asked[0]


def test_nothing_tells() -> None:
    """Outside a job there is no limit; a number that is none is passed over here, and refused by the settings."""
    batch = Batch("1:00")
    assert Clock({}, batch).left(ask=True) is None
    assert Clock({"MPICOLL_JOB_END": "tomorrow"}, batch).left(ask=True) is None
    assert not batch.asked
    with pytest.raises(ValueError, match="MPICOLL_JOB_END"):
        read_settings({"MPICOLL_JOB_END": "tomorrow"})


def test_a_batch_system_that_is_not_there(tmp_path: object) -> None:
    """A missing program, as in a container, is no answer and no error."""
    clock = Clock({"LSB_JOBID": "7"})
    assert clock.left(ask=True) is None
