"""Reports on more ranks than a machine has cores for, and across what MPI takes for several nodes."""

from __future__ import annotations

import pytest
from jobs import family, run_job

HEAD = """
import sys, time
import numpy as np
import mpicoll as dist
dist.init_process_group()
r, n = dist.get_rank(), dist.get_world_size()
dist.barrier()
start = time.monotonic()
"""

MISMATCH = """
try:
    dist.all_reduce(np.ones(4, np.float32 if r == n // 2 else np.float64))
except dist.CollectiveMismatchError as error:
    print(f"{time.monotonic() - start:.2f} {error}", flush=True)
dist.barrier()
"""

CYCLE = """
try:
    dist.recv(np.empty(4), (r - 1) % n)
except dist.DeadlockError as error:
    print(f"{time.monotonic() - start:.2f} {error}", flush=True)
time.sleep(3)
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64])
def test_a_mismatch_on_many_ranks(size: int) -> None:
    """It is raised on all ranks within 5 seconds, in a report of the same few lines, and the group goes on."""
    job = run_job(HEAD + MISMATCH, size, limit=150, env={"MPICOLL_TIMEOUT": "120"})
    assert not job.timed_out, job
    assert job.returncode == 0, job
    for out in job.out:
        seconds, text = out.split(" ", 1)
        assert float(seconds) < 5, job
        assert f"as {size - 1} of {size} ranks called" in text, job
        assert f"rank {size // 2}: all_reduce #2 >float32<[4] SUM" in text, job
        assert len(text.splitlines()) <= 40, job


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64])
def test_a_certificate_on_many_ranks(size: int) -> None:
    """A cycle over all ranks is certain within 10 seconds, and its report stays short."""
    job = run_job(HEAD + CYCLE, size, limit=150, env={"MPICOLL_TIMEOUT": "120"})
    assert not job.timed_out, job
    assert job.returncode == 7, job
    for out in job.out:
        seconds, text = out.split(" ", 1)
        assert float(seconds) < 10, job
        assert f"deadlock: ranks 0-{size - 1} wait for each other" in text, job
        assert len(text.splitlines()) <= 40, job


NODES = [{"MPIR_CVAR_NUM_CLIQUES": "2"}, {"MPIR_CVAR_NOLOCAL": "1"}] if family() == "mpich" else []


@pytest.mark.parametrize("nodes", NODES, ids=lambda nodes: next(iter(nodes)))
def test_certificates_across_nodes(nodes: dict[str, str]) -> None:
    """Ranks of different nodes are asked by messages, and found as those of one node are (MPICH imitates the nodes)."""
    job = run_job(HEAD + CYCLE, 4, limit=30, env={"MPICOLL_TIMEOUT": "20", **nodes})
    assert not job.timed_out, job
    assert job.returncode == 7, job
    for out in job.out:
        assert "deadlock: ranks 0-3 wait for each other" in out, job
        assert "cycle: rank 0 waits for 3 -> 2 -> 1 -> 0" in out, job
