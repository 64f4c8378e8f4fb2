"""Ranks that fail while data moves through the memory that they share: the others raise, and nothing is left behind."""

from __future__ import annotations

import re
import signal

import pytest
from jobs import JobResult, RunningJob, family, left_in_memory, run_job

PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import numpy as np
import mpicoll as dist
dist.init_process_group(timeout=timedelta(seconds=LIMIT))
r = dist.get_rank()
x = np.ones(ELEMENTS)
parts = np.ones((3, ELEMENTS))
dist.all_reduce(x)
print("go", flush=True)
try:
    for step in range(100_000_000):
        if ONCE:
            dist.all_gather_single(parts, x)
            dist.scatter(x, list(parts) if r == step % 3 else None, step % 3)
            dist.gather(x, list(parts) if r == step % 3 else None, step % 3)
            work = dist.broadcast(x, step % 3, async_op=step % 2 == 0)
            work is None or work.wait()
            continue
        dist.all_reduce(x, dist.ReduceOp.MAX)
        if step % 3 == 0:
            dist.broadcast(x, step % 2)
except BaseException as error:
    print(type(error).__name__, " ".join(str(error).split()), flush=True)
    raise
"""


def run(act: int, limit: int, elements: int = 1 << 20, once: bool = False) -> JobResult:
    """Run three ranks and let something happen to rank 1 while data moves through shared memory."""

    def meanwhile(job: RunningJob) -> None:
        job.wait_for("go", 0, 1, 2)
        job.signal(act, 1)

    before = left_in_memory()
    program = PROGRAM.replace("LIMIT", str(limit)).replace("ELEMENTS", str(elements)).replace("ONCE", str(once))
    env = {"MPICOLL_ENGINE": "node"}
    job = run_job(program, 3, limit=30, meanwhile=meanwhile, recover=True, settle=10, env=env)
    assert not job.timed_out, job
    assert job.returncode != 0, job
    assert not job.left_running, job
    assert not left_in_memory() - before, job
    return job


@pytest.mark.parametrize(
    "elements",
    [1, pytest.param(5_000, marks=pytest.mark.slow), pytest.param(1 << 20, marks=pytest.mark.slow)],
    ids=["beside the record", "in one step", "in pieces"],
)
def test_kill_nine(elements: int) -> None:
    """A rank that is killed in the middle: the others raise what says so, and no memory is left."""
    job = run(signal.SIGKILL, 20, elements)
    # Its neighbour's thread says so, or the main thread, whichever hears of it first; or MPICH's launcher was faster than both.
    assert (family() == "mpich" and not job.err[0]) or re.search(
        r"rank 1('s| failed: its) process ended without a report", job.err[0]
    ), job
    if family() == "openmpi":  # MPICH's launcher kills the others when it sees the signal
        for rank in (0, 2):
            assert "PeerFailedError rank 1 failed: its process ended without a report" in job.out[rank], job


def test_kill_nine_between_copies() -> None:
    """The same while the ranks copy from process to process, as the kernel refuses copies of a process that has ended."""
    job = run(signal.SIGKILL, 20, 1 << 18, once=True)
    assert (family() == "mpich" and not job.err[0]) or re.search(
        r"rank 1('s| failed: its) process ended without a report", job.err[0]
    ), job
    if family() == "openmpi":
        for rank in (0, 2):
            assert "PeerFailedError rank 1 failed: its process ended without a report" in job.out[rank], job


@pytest.mark.slow
@pytest.mark.parametrize("once", [False, True])
def test_a_rank_that_is_stopped(once: bool) -> None:
    """A rank that is stopped in the middle: the others run into their limit, which names it."""
    job = run(signal.SIGSTOP, 3, once=once)
    assert any("CollectiveTimeoutError" in job.out[rank] for rank in (0, 2)), job
    assert any("rank 1" in job.out[rank] for rank in (0, 2)), job
    assert any(
        "check whether rank 1 is stopped" in job.out[rank] or "find what rank 1 does" in job.out[rank]
        for rank in (0, 2)
    ), job


@pytest.mark.slow
def test_control_c() -> None:
    """Ctrl-C on one rank in the middle raises KeyboardInterrupt there, and what says so on the others."""
    job = run(signal.SIGINT, 20)
    assert "KeyboardInterrupt" in job.out[1], job
    for rank in (0, 2):
        assert "PeerFailedError" in job.out[rank] or "GroupBrokenError" in job.out[rank], job


@pytest.mark.parametrize("level", ["off", pytest.param("roll", marks=pytest.mark.slow)])
def test_short_and_long_ways_of_a_small_call_meet(level: str) -> None:
    """With the node engine forced, a rank whose array is packed makes the same steps as the others, at every level."""
    job = run_job(
        """
import numpy as np
import mpicoll as dist
dist.init_process_group()
r, n = dist.get_rank(), dist.get_world_size()
for step in range(40):
    x = np.full(16, r + 1.0)
    x = x[::2] if r == step % 3 else x[:8]
    dist.all_reduce(x)
    assert (x == n * (n + 1) / 2).all(), (step, x)
    big = np.full(40_000, r + 1.0)
    dist.all_reduce(big[::2] if r == step % 3 else big[:20_000])
    assert (big[:2000:2] == n * (n + 1) / 2).all(), step
""",
        3,
        limit=30,
        env={"MPICOLL_ENGINE": "node", "MPICOLL_CHECK": level, "MPICOLL_TIMEOUT": "10"},
    )
    assert not job.timed_out, job
    assert job.returncode == 0, job


@pytest.mark.slow
def test_control_c_while_the_memory_is_made() -> None:
    """A rank that gives up while the others have not come leaves no file."""
    before = left_in_memory()
    job = run_job(
        """
import os, signal, time
import numpy as np
import mpicoll as dist
dist.init_process_group()
from mpicoll.transports.shm import transport
made = transport._make_segment
def late(*given):
    time.sleep(2)
    yield from made(*given)
if dist.get_rank(): transport._make_segment = late
else: signal.setitimer(signal.ITIMER_REAL, 0.7); signal.signal(signal.SIGALRM, signal.default_int_handler)
dist.all_reduce(np.ones(50_000))
""",
        2,
        limit=20,
    )
    assert not job.timed_out, job
    assert job.returncode != 0, job
    assert "KeyboardInterrupt" in job.err[0], job
    assert not left_in_memory() - before, job


def test_ranks_that_are_bound_to_the_same_core_yield_the_core() -> None:
    """Ranks share cores, also on a node with more cores than ranks, if they are bound to fewer cores, or two of them to one."""
    job = run_job(
        """
import os
import mpicoll as dist
from mpi4py import MPI
from mpicoll.runtime import waiting
os.sched_setaffinity(0, {0})
dist.init_process_group()
print(waiting.oversubscribed, flush=True)
""",
        2,
        limit=20,
    )
    assert (job.returncode, job.out[0], job.out[1]) == (0, "True\n", "True\n"), job
