"""Levels: what a program's end compares, and what holds at every level. Each job has a hard limit."""

from __future__ import annotations

import re

import pytest
from jobs import JobResult, run_job

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
        assert rank == 0 or (len(lines) == 1 and "rank 0 tells more" in lines[0]), job


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
        run_job(source, 3, limit=20, env={"MPICOLL_CHECK": "roll"}),
        "call 21 on group WORLD (ranks 0-2): its ranks made different calls",
        f"all_reduce #21 float64[4] MIN at {line_of(source, 'MIN')}",
        f"all_reduce #21 float64[4] MAX at {line_of(source, 'MAX')}",
        "what moved since call 21 may be wrong",
    )


def test_the_end_of_the_program_compares_how_many_calls_were_made() -> None:
    """A call that ends on the rank that makes it alone is set against the end of the others' programs."""
    source = HEAD + "dist.all_reduce(x)\nif r == 0: dist.broadcast(x, 0)\n"
    expect_one_report(
        run_job(source, 3, limit=20, env={"MPICOLL_CHECK": "roll"}),
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
        run_job(source, 3, limit=20, env={"MPICOLL_CHECK": "roll"}),
        "call 1 on group [0, 2, 1]",
        "broadcast #1 float64[4] root",
        line_of(source, "broadcast"),
    )


def test_a_rank_at_its_end_tells_those_who_compare_later() -> None:
    """A rank that ends while the others go on to their next comparison tells them what it called: no rank waits for it."""
    source = HEAD + "for step in range(15 if r == 2 else 16): dist.broadcast(x, 2)\n"
    # The last step's broadcast compares, being the sixteenth.
    job = run_job(source, 3, limit=20, env={"MPICOLL_CHECK": "roll"})
    assert not job.timed_out, job
    assert job.returncode == 1, job
    assert job.stderr.count("next:") == 1, job
    for err in job.err[:2]:
        assert "CollectiveMismatchError: call 16 on group WORLD" in err, job
    assert re.search("rank 2: >?end of the program", job.err[0]), job
