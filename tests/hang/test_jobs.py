"""The harness itself: hard limits hold, nothing is left running, and lines belong to ranks."""

from __future__ import annotations

import signal
import textwrap

import pytest
from jobs import RunningJob, run_job

START = """\
import os, signal, sys, time
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
"""


def test_lines_belong_to_ranks() -> None:
    """Each rank's output is kept apart, arguments and environment arrive."""
    source = START + "print(rank, sys.argv[1], os.environ['WORD']); print('bad', rank, file=sys.stderr)"
    result = run_job(source, 3, limit=60, args=["hello"], env={"WORD": "there"})
    assert (result.returncode, result.timed_out, result.left_running) == (0, False, [])
    assert result.out == [f"{rank} hello there\n" for rank in range(3)]
    assert result.err == [f"bad {rank}\n" for rank in range(3)]
    assert "[rank 1] 1 hello there\n" in result.stdout


@pytest.mark.slow
def test_hang_is_killed_at_the_limit() -> None:
    """Ranks that ignore SIGTERM and wait for ever are gone soon after the limit."""
    source = START + "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); MPI.COMM_WORLD.recv()"
    result = run_job(source, 2, limit=3)
    assert result.timed_out
    assert result.seconds < 20
    assert result.out == ["here\n"] * 2


def test_signals_reach_one_rank() -> None:
    """A signal sent in the middle of a job hits the rank that it is meant for."""
    source = START + (
        "hits = []\n"
        "signal.signal(signal.SIGUSR1, lambda *_: hits.append('hit'))\n"
        "print('ready', flush=True)\n"
        "while rank == 1 and not hits:\n"
        "    time.sleep(0.01)\n"
        "MPI.COMM_WORLD.barrier()\n"
        "print(*hits, flush=True)\n"
    )

    def hit(job: RunningJob) -> None:
        job.wait_for("ready", 0, 1)
        job.signal(signal.SIGUSR1, 1)

    result = run_job(source, 2, limit=60, meanwhile=hit)
    assert result.returncode == 0
    assert result.out == ["ready\n\n", "ready\nhit\n"]


def test_a_group_that_is_none_and_partners_on_another_group() -> None:
    """The rank at fault raises its ValueError, and the other ranks end, too: they learn that this rank does not come."""
    source = """
        import numpy as np, mpicoll as dist
        dist.init_process_group()
        group = dist.new_group([0, 1])
        try:
            dist.all_reduce(np.ones(3), group=5 if dist.get_rank() == 0 else group)
        except (ValueError, dist.DistError) as error:
            print(type(error).__name__, flush=True)
            raise SystemExit(3)
        """
    result = run_job(textwrap.dedent(source), 2, limit=60)
    assert not result.timed_out
    assert result.out[0] == "ValueError\n", result
    assert result.out[1].strip() in ("DeadlockError", "PeerFailedError", "PeerExitedError"), result
