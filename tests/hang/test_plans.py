"""Plans whose other ranks do not come, fail or give up: each wait ends, and says why. Each job has a hard limit."""

from __future__ import annotations

import pytest
from jobs import run_job

HEAD = """
import os, signal, sys, time
from datetime import timedelta
import numpy as np
import mpicoll as dist
"""
INIT = HEAD + "dist.init_process_group(timeout=timedelta(seconds=20))\nr, n = dist.get_rank(), dist.get_world_size()\n"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 5000])
def test_a_wait_has_a_limit(count: int) -> None:
    """The limit of one wait names the rank that has not started; then the group is broken, and a start says so.

    The late rank finds it broken at once, or has the right result: the other's elements were there.
    """
    job = run_job(
        INIT
        + f"""
x = np.ones({count})
plan = dist.all_reduce_init(x)
if r == 1:
    time.sleep(2.5)
try:
    plan.start()
    plan.wait(timedelta(seconds=1))
    assert (x == 2).all()
    print("right", flush=True)
except dist.CollectiveTimeoutError as error:
    print("late", error, flush=True)
except dist.GroupBrokenError as error:
    print("broken", error, flush=True)
try:
    plan.start()
    plan.wait()
except dist.GroupBrokenError as error:
    print("later", error, flush=True)
time.sleep(3 if r == 0 else 0.5)
sys.exit(4)
""",
        2,
        limit=25,
    )
    assert not job.timed_out, job
    assert job.returncode == 4, job
    assert "late time limit: Timed out waiting 1 s in all_reduce #" in job.out[0], job
    assert "rank 1 did not make the matching call" in " ".join(job.out[0].split()), job
    assert job.out[1].startswith(("right", "broken")), job
    assert all("later all_reduce" in out for out in job.out), job


@pytest.mark.parametrize("count", [1, 5000])
def test_a_rank_that_fails_while_a_plan_is_under_way(count: int) -> None:
    """The others' wait ends with what the failing rank raised."""
    job = run_job(
        INIT
        + f"""
plan = dist.all_reduce_init(np.ones({count}))
for step in range(5):
    if (r, step) == (1, 3):
        raise ValueError("a bad batch")
    plan.start()
    plan.wait()
""",
        3,
        limit=25,
    )
    assert not job.timed_out, job
    assert job.returncode != 0, job
    assert "a bad batch" in job.stderr, job


def test_a_forked_child_starts_nothing() -> None:
    """A plan is refused in a forked child, and goes on in its parent."""
    job = run_job(
        INIT
        + """
x = np.ones(1)
plan = dist.all_reduce_init(x)
plan.start()
child = os.fork()
if not child:
    said = []
    for _ in range(2):
        try:
            plan.wait()
        except RuntimeError as error:
            said.append("forked child" in str(error))
    os._exit(0 if said == [True, True] else 1)
assert os.waitpid(child, 0)[1] == 0
plan.wait()
child = os.fork()
if not child:
    try:
        plan.start()
    except RuntimeError as error:
        os._exit(0 if "forked child" in str(error) else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
plan.start()
plan.wait()
assert x[0] == n * n
print("done", flush=True)
""",
        2,
        limit=25,
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job
    assert all("done" in out for out in job.out), job
