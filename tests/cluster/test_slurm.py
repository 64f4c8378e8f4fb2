"""The Slurm of the tests: it is a real one, breaks as one, and is gone with the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from jobs import marked
from slurm import Slurm, missing, slurm

WHY_NOT = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "a Slurm can be had")]


def script(folder: Path, text: str, options: str = "-N 2 --ntasks-per-node=2") -> Path:
    path = folder / "job.sbatch"
    path.write_text(f"#!/bin/bash\n#SBATCH {options}\n{text}\n")
    return path


def test_batch_job(slurm: Slurm, folder: Path) -> None:
    """A job has its nodes, its GPUs, what was exported and its arguments; its output and exit code come back."""
    text = "srun --gpus-per-node=2 sh -c 'echo \"$GREETING $SLURM_PROCID $(hostname) $CUDA_VISIBLE_DEVICES\"'\necho $1; exit 3"
    done = slurm.submit(script(folder, text), "argument", export={"GREETING": "hello"}, options=["--gpus-per-node=2"])
    assert (done.state, done.code) == ("FAILED", 3), done
    assert sorted(done.output.split("\n")) == sorted(
        ["", "argument", "hello 0 node1 0,1", "hello 1 node1 0,1", "hello 2 node2 0,1", "hello 3 node2 0,1"]
    ), done


def test_limit_and_signals(slurm: Slurm, folder: Path) -> None:
    """A job past the test's limit is cancelled, a signal gets to it, and one that is put back starts again."""
    text = "trap 'echo usr1' USR1; echo here\nfor i in $(seq 600); do sleep 0.1; done"
    job = slurm.start(script(folder, text, "-N 1 --requeue --open-mode=append"))
    slurm.wait_for(job, "here")
    slurm.signal(job, "USR1", batch=True)
    slurm.wait_for(job, "usr1")
    done = slurm.finish(job, limit=0.1)
    assert done.state == "LIMIT", done
    assert slurm.job_state(job) == "CANCELLED"


def state() -> set[str]:
    """Return the links, mounts and named network namespaces of the machine, which others may change meanwhile."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    mounts = Path("/proc/mounts").read_text()
    return (
        {f"link {name}" for name in os.listdir("/sys/class/net")} | set(mounts.splitlines()) | set(spaces.splitlines())
    )


def ours(found: set[str], folder: Path) -> set[str]:
    """Return those that a Slurm in a folder may have made."""
    names = ("link", str(folder), "/etc/slurm", "node1", "node2", "login", "switch")
    return {each for each in found if any(name in each for name in names)}


def test_killed_node(folder: Path) -> None:
    """A node without power ends the jobs on it; afterwards the machine has the links, mounts and processes that it had."""
    before = state()
    with slurm(folder) as up:
        assert not ours(state() - before, folder)
        job = up.start(script(folder, "srun -l sh -c 'echo here; sleep 600'", "-N 2 --no-requeue"))
        up.wait_for(job, "0: here")
        up.wait_for(job, "1: here")
        up.kill_node("node2")
        done = up.finish(job, limit=200)
        assert done.state == "NODE_FAIL", done
        assert "node2" in done.output, done
        spaces = [os.readlink(f"/proc/{up.hosts.first[host]}/ns/pid") for host in ("node1", "login")]
    assert not ours(state() - before, folder)
    assert not within(*spaces)


def within(*spaces: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") in spaces:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_ends_with_a_killed_test(folder: Path) -> None:
    """Daemons and jobs are gone at once when the process that made the Slurm is killed."""
    code = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from slurm import slurm
with slurm(Path(sys.argv[1])) as up:
    job = Path(sys.argv[1]) / "job.sbatch"
    job.write_text("#!/bin/bash\\n#SBATCH -N 2\\necho here; srun sleep 600\\n")
    up.wait_for(up.start(job), "here")
    print("up", flush=True)
    time.sleep(600)
"""
    here = Path(__file__).parent
    mark = f"killed-{os.getpid()}"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(here), str(here.parent / "support")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TEST_JOB_ID": mark},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        assert len(marked(mark)) > 5
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    until = time.monotonic() + 20
    while left := marked(mark):
        assert time.monotonic() < until, left
        time.sleep(0.05)
