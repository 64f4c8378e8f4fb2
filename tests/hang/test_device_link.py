"""Ranks that fail while they reduce on a GPU that they share, a stand-in: the others raise, and nobody hangs or crashes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from jobs import ROOT, JobResult, RunningJob, family, left_in_memory, run_job

pytestmark = pytest.mark.slow

START = """
import os, signal, sys, time
from datetime import timedelta
import numpy as np
from standin_gpu import Gpu
import mpicoll as dist
from mpicoll.memory.device import runtime as device_runtime
from mpicoll.transports.device import ipc
ipc.LEAST_BYTES, ipc.SMALLEST_BUFFER, ipc.LARGEST_BUFFER = 32768, 4096, 262144
gpu = device_runtime._runtime = Gpu("lazy")
dist.init_process_group(timeout=timedelta(seconds=20))
r, n = dist.get_rank(), dist.get_world_size()
x = np.ones(1 << 20)
dist.all_reduce(gpu.array_of(x))
link = dist.group.WORLD.opened["device_ipc"]
assert link.usable, link.why
"""

LOOP = """
print("go", flush=True)
try:
    for step in range(100_000_000):
        dist.all_reduce(gpu.array_of(x), dist.ReduceOp.MAX)
except BaseException as error:
    print(type(error).__name__, " ".join(str(error).split()), flush=True)
    raise
"""

STUCK = """
if r == 1:
    gpu.seconds = 1000.0  # a kernel that does not end
print("go", flush=True)
try:
    dist.all_reduce(gpu.array_of(x), timeout=timedelta(seconds=2))
except dist.DistError as error:
    print(type(error).__name__, " ".join(str(error).split()), flush=True)
    dist.destroy_process_group()
    print("left", flush=True)
"""


UNDER_WAY = """
taken = gpu.taken
for step in range(10):
    arrays = [np.full(1 << 17, i + 1.0) for i in range(3)]
    works = [dist.all_reduce(gpu.array_of(each), async_op=True) for each in arrays]
    time.sleep(0.01)
    for work in works:
        work.wait()
    gpu.finish()
    assert all((each == n * (i + 1.0)).all() for i, each in enumerate(arrays)), step
assert gpu.taken == taken + 10 * 3 * 4
"""

THREADS = """
import threading
from standin_gpu import Stream

class PerThread(Gpu):
    def __init__(self):
        self.own = threading.local()
        super().__init__("lazy")

    def copy_stream(self, device):
        self.own.copies = getattr(self.own, "copies", None) or Stream()
        return self.own.copies

    current = property(lambda self: self.own.__dict__.setdefault("stream", Stream()), lambda self, stream: None)

gpu = device_runtime._runtime = PerThread()
groups, right = [dist.new_group() for _ in range(3)], []

def work(i):
    for step in range(20):
        x = np.full((1 << 17) + i, i + step + 1.0)
        dist.all_reduce(gpu.array_of(x), group=groups[i])
        gpu.finish()
        right.append(bool((x == n * (i + step + 1.0)).all()))

threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert right == [True] * 60, right
assert all(group.opened["device_ipc"].usable for group in groups)
dist.destroy_process_group()
"""


def run(program: str, ranks: int, room: Path, act: int | None = None, where: int = 1, **more: str) -> JobResult:
    """Run a program, and have a signal sent to one rank when all have said that they go."""

    def meanwhile(job: RunningJob) -> None:
        if act is not None:
            job.wait_for("go", *range(ranks))
            job.signal(act, where)

    before = left_in_memory()
    env = {"PYTHONPATH": f"{ROOT / 'tests' / 'support'}:{ROOT}", "STANDIN_GPU_DIR": str(room), **more}
    job = run_job(START + program, ranks, limit=40, meanwhile=meanwhile, recover=True, settle=10, env=env)
    assert not job.timed_out, job
    assert not job.left_running, job
    assert not left_in_memory() - before, job
    return job


def test_kill_nine(tmp_path: Path) -> None:
    """A rank that is killed in the middle: the others raise what says so."""
    job = run(LOOP, 3, tmp_path, signal.SIGKILL)
    assert job.returncode != 0, job
    assert (family() == "mpich" and not job.err[0]) or re.search(
        r"rank 1('s| failed: its) process ended without a report", job.err[0]
    ), job


@pytest.mark.parametrize("where", [0, 1])
def test_interrupt(where: int, tmp_path: Path) -> None:
    """Ctrl-C on one rank in the middle raises KeyboardInterrupt there, and what says so on the others."""
    job = run(LOOP, 3, tmp_path, signal.SIGINT, where)
    assert job.returncode != 0, job
    assert "KeyboardInterrupt" in job.out[where], job
    for rank in {0, 1, 2} - {where}:
        assert re.search(r"(PeerFailed|GroupBroken)Error.*KeyboardInterrupt", job.out[rank]), job


def test_a_kernel_that_does_not_end(tmp_path: Path) -> None:
    """The device of one rank never comes to the end of a copy: all run into the limit, and can leave the group."""
    job = run(STUCK, 2, tmp_path)
    for rank in (0, 1):
        assert "left" in job.out[rank], job
        assert re.search("CollectiveTimeoutError|GroupBrokenError|PeerFailedError", job.out[rank]), job


def test_the_progress_thread(tmp_path: Path) -> None:
    """Calls that are not waited for are moved on by the library's thread, too."""
    job = run(UNDER_WAY, 3, tmp_path, MPICOLL_PROGRESS="thread")
    assert job.returncode == 0, job


def test_threads_with_a_group_each(tmp_path: Path) -> None:
    """Several threads reduce at a time, each on a group of its own."""
    job = run(THREADS, 2, tmp_path)
    assert job.returncode == 0, job
    assert not list(tmp_path.iterdir()), job


ENDS = {
    "as it comes": "",
    "destroyed": "dist.destroy_process_group()",
    "destroyed by one": "if r == 1: dist.destroy_process_group()",
    "finalised": "from mpi4py import MPI; MPI.Finalize()",
    "forked": """
if os.fork() == 0:
    dist.destroy_process_group()
    os._exit(0)
assert os.wait()[1] == 0
dist.all_reduce(gpu.array_of(x))
gpu.finish()
dist.destroy_process_group()
""",
    "again": """
dist.destroy_process_group()
dist.init_process_group()
dist.all_reduce(gpu.array_of(x))
assert dist.group.WORLD.opened["device_ipc"].usable
dist.destroy_process_group()
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_ends(end: str, tmp_path: Path) -> None:
    """A program ends well, whatever it does with its groups; where all destroy them the window is freed."""
    job = run(ENDS[end], 3, tmp_path)
    assert job.returncode == 0, job
    assert "Traceback" not in str(job), job
    assert bool(list(tmp_path.iterdir())) == (end in ("as it comes", "destroyed by one", "finalised")), job
