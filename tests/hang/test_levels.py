"""Levels: what a program's end compares, and what holds at every level. Each job has a hard limit."""

from __future__ import annotations

import re
import signal
import time

import pytest
from jobs import JobResult, RunningJob, family, run_job

HEAD = """
import os, sys, time
from datetime import timedelta
import numpy as np
import mpicoll as dist
dist.init_process_group()
r, n = dist.get_rank(), dist.get_world_size()
x = np.ones(4)
"""


SLOW = pytest.mark.slow


def line_of(source: str, words: str) -> str:
    """Return the place of the first line of a job's source that holds some words."""
    return f"job.py:{1 + next(at for at, line in enumerate(source.splitlines()) if words in line)}"


ROLL = {"MPICOLL_CHECK": "roll", "MPICOLL_ENGINE": "mpi"}
"""Ranks on one node compare each call where they may share memory."""


def expect_one_report(job: JobResult, *words: str) -> None:
    """All ranks say that their calls differed; the lowest prints all of it, the others one line each."""
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert not job.left_running, job
    assert job.stderr.count("next:") == 1, job
    report = job.err[0].replace(">", "").replace("<", "")  # which mark what differs
    for word in words:
        assert word in report, (word, job)
    assert len(job.err[0].splitlines()) <= 20, job
    for rank, err in enumerate(job.err):
        lines = [line for line in err.splitlines() if line.startswith(f"[rank {rank}] ")]  # MPICH adds one of its own
        assert lines[0].startswith(f"[rank {rank}] CollectiveMismatchError: call "), job
        assert rank == 0 or (len(lines) == 1 and "rank 0 prints the report" in lines[0]), job


def test_the_end_of_the_program_compares() -> None:
    """At roll the last calls are compared at the end: the first that differs is named, with the lines of all."""
    source = (
        HEAD
        + """
for step in range(20):
    dist.all_reduce(x)
if r == 1:
    dist.all_reduce(x, dist.ReduceOp.MAX)
else:
    dist.all_reduce(x, dist.ReduceOp.MIN)
dist.all_reduce(x)
"""
    )
    expect_one_report(
        run_job(source, 3, limit=20, env=ROLL),
        "call 21 on group WORLD (ranks 0-2): its ranks made different calls",
        f"all_reduce #21 float64[4] MIN at {line_of(source, 'MIN')}",
        f"all_reduce #21 float64[4] MAX at {line_of(source, 'MAX')}",
        "data moved since call 21 may be wrong",
    )


def test_the_end_of_the_program_compares_how_many_calls_were_made() -> None:
    """A call that ends on the rank that makes it alone is set against the end of the others' programs."""
    source = HEAD + "dist.all_reduce(x)\nif r == 0: dist.broadcast(x, 0)\n"
    expect_one_report(
        run_job(source, 3, limit=20, env=ROLL),
        f"broadcast #2 float64[4] root 0 at {line_of(source, 'broadcast')}",
        "ranks 1-2: end of the program",
    )


@pytest.mark.parametrize(
    "how", ["dist.destroy_process_group()", pytest.param("dist.destroy_process_group(group)", marks=SLOW)]
)
def test_a_destroyed_group_is_compared_at_the_end(how: str) -> None:
    """What the calls on a group came to that was destroyed is known at the end of the program, at the latest."""
    source = (
        HEAD
        + f"""
group = dist.new_group([0, 2, 1], sort_ranks=False)
dist.broadcast(x, 2 if r else 0, group=group)
time.sleep(0.2 * r)
{how}
"""
    )
    expect_one_report(
        run_job(source, 3, limit=20, env=ROLL),
        "call 1 on group [0, 2, 1]",
        "broadcast #1 float64[4] root",
        line_of(source, "broadcast"),
    )


def to_the_sixteenth(before_the_last: str) -> JobResult:
    """Rank 2 ends after 15 broadcasts. The other ranks make a sixteenth, which compares, after the given line."""
    source = f"""
pair = MPI.COMM_WORLD.Split(r == 2)
for step in range(15 if r == 2 else 16):
    if step == 15: {before_the_last}
    dist.broadcast(x, 2)
"""
    job = run_job("from mpi4py import MPI\n" + HEAD + source, 3, limit=20, env=ROLL)
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert job.stderr.count("next:") == 1, job
    return job


def test_a_rank_at_its_end_tells_those_who_compare_later() -> None:
    """A rank that ends while the others go on to their next comparison tells them what it called: no rank waits for it."""
    job = to_the_sixteenth("pair.Barrier()")  # the two come together
    for err in job.err[:2]:
        assert "CollectiveMismatchError: call 16 on group WORLD" in err, job
    assert re.search("rank 2: >?end of the program", job.err[0]), job


def test_a_rank_that_has_ended_before_all_others_compare() -> None:
    """A rank that waits for a late rank, to compare with, is told of a rank that has ended: it does not wait for the late one."""
    job = to_the_sixteenth("time.sleep(3 * r)")
    assert "PeerExitedError: broadcast #16 float64[4] root 2 on group WORLD" in job.err[0], job
    assert "rank 2 ended the program after 15 calls on this group" in job.err[0], job


LEVELS = pytest.mark.parametrize("level", ["off", pytest.param("roll", marks=SLOW), pytest.param("full", marks=SLOW)])


@LEVELS
def test_waits_end_at_every_level(level: str) -> None:
    """A cycle of receives, a limit that passes, and a rank that leaves early end as they should, whatever is compared."""
    job = run_job(
        HEAD
        + """
right, left = (r + 1) % n, (r - 1) % n
groups = [dist.new_group() for _ in range(3)]
assert all(group.level == os.environ["MPICOLL_CHECK"] for group in groups)
dist.all_reduce(x)
began = time.monotonic()
def said(error):
    global began
    print(type(error).__name__, f"{time.monotonic() - began:.2f}", " ".join(str(error).split()), flush=True)
    began = time.monotonic()
try:
    dist.recv(x, left, group=groups[0])
except dist.DeadlockError as error:
    assert error.ranks == [0, 1, 2], error.ranks
    said(error)
try:
    if r == 1:
        time.sleep(1.2)  # it computes, so nothing is certain
        began = time.monotonic()
    dist.barrier(groups[1], timeout=timedelta(seconds=0.5))
except (dist.CollectiveTimeoutError, dist.GroupBrokenError) as error:
    said(error)
dist.barrier(groups[2])
if r == 2:
    sys.exit(0)
try:
    dist.all_reduce(x, group=groups[2])
except dist.PeerExitedError as error:
    assert error.ranks == [2], error.ranks
    said(error)
    time.sleep(1)  # the other one says so itself
    sys.exit(7)
""",
        3,
        limit=30,
        env={"MPICOLL_TIMEOUT": "20", "MPICOLL_CHECK": level},
    )
    assert not job.timed_out, job
    assert job.returncode == 7, job
    for rank, out in enumerate(job.out):
        told = out.splitlines()
        kind, seconds, text = told[0].split(" ", 2)
        assert kind == "DeadlockError", job
        assert float(seconds) < 5, job
        assert "deadlock: ranks 0-2 wait for each other" in text, job
        kind, seconds, text = told[1].split(" ", 2)
        if rank == 1:
            assert kind == "GroupBrokenError", job
        elif kind == "CollectiveTimeoutError":
            assert float(seconds) > 0.4, job
            assert "rank 1 did not make the matching call" in text, job
    assert any("CollectiveTimeoutError" in out for out in (job.out[0], job.out[2])), job
    for rank in (0, 1):
        kind, seconds, text = job.out[rank].splitlines()[2].split(" ", 2)
        assert kind == "PeerExitedError", job
        assert float(seconds) < 10, job
        assert "rank 2 ended the program after 1 call on this group" in text, job
        assert "job.py:" in text, job


@pytest.mark.slow
@LEVELS
def test_a_killed_rank_is_noticed_at_every_level(level: str) -> None:
    """Ranks that wait for one that was killed raise PeerFailedError that says so, whatever is compared."""

    def kill(job: RunningJob) -> None:
        job.wait_for("go", 0, 1, 2)
        time.sleep(0.5)  # the others wait
        job.signal(signal.SIGKILL, 1)

    job = run_job(
        HEAD
        + """
dist.barrier()
print("go", flush=True)
if r == 1:
    time.sleep(30)
try:
    dist.all_reduce(x)
except dist.PeerFailedError as error:
    print(error, flush=True)
    raise
""",
        3,
        limit=20,
        env={"MPICOLL_TIMEOUT": "20", "MPICOLL_CHECK": level},
        meanwhile=kill,
        recover=True,
        settle=10,
    )
    assert not job.timed_out, job
    assert job.returncode != 0, job
    assert not job.left_running, job
    # Its neighbour's thread says so, or the main thread, whichever hears of it first.
    assert re.search(r"rank 1('s| failed: its) process ended without a report", job.err[0]), job
    if family() == "mpich":
        return  # its mpiexec kills the others all the same when it sees a signal
    for rank in (0, 2):
        assert "rank 1 failed: its process ended without a report" in job.out[rank], job
        assert f"while rank {rank} waited in all_reduce" in job.out[rank], job
