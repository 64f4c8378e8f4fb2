"""A job that goes wrong says so once: one rank prints the report, each other one line. Each job has a hard limit."""

from __future__ import annotations

import re

import pytest
from jobs import family, run_job

HEAD = """
import sys, time
from datetime import timedelta
import numpy as np
import mpicoll as dist
dist.init_process_group()
r, n = dist.get_rank(), dist.get_world_size()
x = np.ones(4)
dist.barrier()
"""

# What the program does, the error of each rank, the rank that prints the report, and words of the others' lines.
WRONG = {
    "mismatch": (
        "dist.all_reduce(x, dist.ReduceOp.MAX if r == 1 else dist.ReduceOp.SUM)",
        ["CollectiveMismatchError"] * 4,
        0,
        "rank 0 prints the report",
    ),
    "mismatch in a group": (
        "group = dist.new_group([1, 2, 3])\nif r: dist.all_reduce(np.ones(r), group=group)\nelse: time.sleep(1)",
        ["", *["CollectiveMismatchError"] * 3],
        1,
        "rank 1 prints the report",
    ),
    "wrong argument": (
        "dist.all_reduce([1.0] if r == 2 else x)",
        ["CollectiveMismatchError", "CollectiveMismatchError", "TypeError", "CollectiveMismatchError"],
        0,
        "rank 0 prints the report",
    ),
    "deadlock": ("dist.recv(x, (r + 1) % n)", ["DeadlockError"] * 4, 0, "rank 0 prints the report"),
    "time limit": (
        "if r == 2: time.sleep(4)\ndist.barrier(timeout=timedelta(seconds=1))",
        ["CollectiveTimeoutError", "CollectiveTimeoutError", "GroupBrokenError", "CollectiveTimeoutError"],
        0,
        "rank 0 prints the report",
    ),
    "early exit": (
        "if r == 2: sys.exit(0)\ndist.all_reduce(x)",
        ["PeerExitedError", "PeerExitedError", "", "PeerExitedError"],
        0,
        "rank 0 prints the report",
    ),
}


# What each rank finds by itself: on a busy machine another one may be the first, and rank 0 hears of it.
NOT_AGREED = {"early exit", "time limit"}
SLOW = {"mismatch in a group", "wrong argument", "time limit"}


@pytest.mark.parametrize("what", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in WRONG])
def test_printed_once(what: str) -> None:
    """An error that several ranks raise is told by one of them, in a report with the next step; each other has one line."""
    source, raised, reporter, words = WRONG[what]
    job = run_job(HEAD + source + "\n", 4, limit=30, env={"MPICOLL_TIMEOUT": "20"})
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert not job.left_running, job
    assert len(re.findall(r"^\[rank \d+\]   next: ", "".join(job.err), re.MULTILINE)) == 1, job
    if what in NOT_AGREED:
        reporter = next(rank for rank, err in enumerate(job.err) if "  next: " in err)
        words = "prints the report"
    assert job.err[reporter].count("  next: ") == 1, job
    for rank, (err, error) in enumerate(zip(job.err, raised, strict=True)):
        lines = [line for line in err.splitlines() if line.startswith(f"[rank {rank}] ")]
        rest = [line for line in err.splitlines() if line not in lines]
        # MPICH says itself that a rank has ended the job.
        assert all("Abort(" in line for line in rest) if family() == "mpich" else not rest, job
        if rank == reporter:
            assert err.count(f"{error}: ") == 1, job
        elif not error:
            assert not lines, job
        elif error == "TypeError":  # its own arguments: its own line of the program
            assert err.count("Traceback") == 1, job
            assert "TypeError: " in err, job
            assert len(lines) <= 6, job
        else:
            assert len(lines) == 1, job
            found = re.match(rf"\[rank {rank}\] ({error}|PeerFailedError|GroupBrokenError): ", lines[0])
            assert found is not None, job
            if found[1] == error != "GroupBrokenError":  # the two others name who failed or gave the group up
                assert words in lines[0], job


CAUGHT = {
    "mismatch": ("dist.all_reduce(x, dist.ReduceOp.MAX if r == 1 else dist.ReduceOp.SUM)", "CollectiveMismatchError"),
    "deadlock": ("dist.recv(x, (r + 1) % n)", "DeadlockError"),
    "time limit": (
        "if r == 3: time.sleep(3)\n    dist.barrier(timeout=timedelta(seconds=1))",
        "CollectiveTimeoutError",
    ),
}


@pytest.mark.parametrize(
    ("what", "then"),
    [
        ("mismatch", "pass"),
        pytest.param("mismatch", "time.sleep(30)", marks=pytest.mark.slow),
        pytest.param("mismatch", "raise ValueError('of its own')", marks=pytest.mark.slow),
        pytest.param("mismatch", "dist.barrier()", marks=pytest.mark.slow),
        pytest.param("deadlock", "pass", marks=pytest.mark.slow),
        pytest.param("time limit", "pass", marks=pytest.mark.slow),
    ],
)
def test_a_reporter_that_handles_its_error(what: str, then: str) -> None:
    """If the rank that was to print the report catches its error, the lowest rank that ends with the error prints the report."""
    call, error = CAUGHT[what]
    caught = f"try:\n    {call}\nexcept dist.DistError:\n    if r: raise\n"
    job = run_job(f"{HEAD}{caught}{then}\n", 4, limit=30, env={"MPICOLL_TIMEOUT": "20"})
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert not job.left_running, job
    assert "  next: " not in job.err[0], job
    told = [rank for rank, err in enumerate(job.err) if "  next: " in err]
    assert told == [1] if what != "time limit" else told, job
    first, why, *report = job.err[told[0]].splitlines()
    assert first.startswith(f"[rank {told[0]}] {error}: "), job
    assert why == f"[rank {told[0]}] mpicoll: rank 0, which was to print the report, may not have done so:", job
    assert sum(f"{error}: " in line for line in report) == 1, job


@pytest.mark.parametrize(
    ("calls", "errors"),
    [
        (
            "works = [dist.all_reduce(np.ones(n + (n == 8 and r)), async_op=True) for n in (4, 8, 2)]\n"
            "for work in reversed(works): work.wait()\n",
            ["GroupBrokenError", "GroupBrokenError"],
        ),
        (
            "made = [lambda: dist.all_reduce(x, async_op=True), lambda: dist.broadcast(np.ones(2), 0, async_op=True)]\n"
            "works = [each() for each in (made if r == 0 else made[::-1])]\n"
            "works[1 if r == 0 else 0].wait()\n",
            ["GroupBrokenError", "CollectiveMismatchError"],
        ),
    ],
    ids=["all wait for the last call", "one rank waits for its last call"],
)
def test_the_first_of_several_pending_calls_differs(calls: str, errors: list[str]) -> None:
    """The error of the call that the program waits for comes with the report of the call that differs, once."""
    job = run_job(HEAD + calls, 2, limit=30, env={"MPICOLL_TIMEOUT": "20"})
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert job.stderr.count("  next: ") == 1, job
    report = r"CollectiveMismatchError: call [23] on group WORLD .*: its ranks made different calls"
    assert re.search(report, job.err[0]), job
    assert f"{errors[0]}: " in job.err[0], job
    assert "rank 1: " in job.err[0], job
    (line,) = (line for line in job.err[1].splitlines() if line.startswith("[rank 1] "))
    assert line.startswith(f"[rank 1] {errors[1]}: "), job
    assert "its CollectiveMismatchError has the report" in line or line.endswith("rank 0 prints the report)"), job
