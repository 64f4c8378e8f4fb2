"""What Slurm sends to a job on several nodes: answered by all ranks at the same step, or reported when it ends the job."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from jobs import family
from slurm import Slurm, missing

WHY_NOT = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "a Slurm can be had")]

SRUN = f"srun --mpi={'pmix' if family() == 'openmpi' else 'pmi2'} --kill-on-bad-exit=1"

STEPS = """
import sys, time
import numpy as np
import mpicoll as dist
dist.init_process_group()
before = float(sys.argv[1]) if len(sys.argv) > 1 else None
seen = []
dist.on_signal(seen.append)
dist.barrier()
print("ready", flush=True)
step = 0
while not dist.should_stop(before=before):
    step += 1
    time.sleep(0.01)
    assert step < 20_000
told = np.array([step, -step])
dist.all_reduce(told, dist.ReduceOp.MAX)
assert told[0] == -told[1], (step, told)
print("stopped", seen, "left", round(dist.time_left() or -1) if dist.get_rank() == 0 else "", flush=True)
"""

PLACES = """
import time
import numpy as np
import mpicoll as dist

def compute():
    x = np.random.rand(300, 300)
    print("ready", flush=True)
    while True:
        x = x @ x
        x /= x.max()

dist.init_process_group()
dist.barrier()
if dist.get_rank() == 0:
    compute()
print("ready", flush=True)
dist.all_reduce(np.ones(3))
"""


def job(folder: Path, program: str, text: str, options: str = "") -> Path:
    """Write a batch script that runs a program, ``$PROGRAM`` in it, on two ranks of two nodes each."""
    (folder / "program.py").write_text(program)
    script = folder / "job.sbatch"
    text = text.replace("$PROGRAM", f"{sys.executable} {folder / 'program.py'}")
    script.write_text(f"#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=2 {options}\n{text}\n")
    return script


def test_signal_to_all_steps(slurm: Slurm, folder: Path) -> None:
    """``scancel --signal`` reaches all ranks at moments of their own: they stop at the same step, and the job ends well."""
    number = slurm.start(job(folder, STEPS, f"{SRUN} $PROGRAM"))
    slurm.wait_for(number, "ready", times=4)
    slurm.signal(number, "USR1")
    done = slurm.finish(number, limit=40)
    assert (done.state, done.code) == ("COMPLETED", 0), done
    assert done.output.count("stopped [10]") == 4, done


def test_signal_to_the_batch_shell(slurm: Slurm, folder: Path) -> None:
    """A shell that hands it to srun is enough."""
    text = f"{SRUN} $PROGRAM & step=$!\ntrap 'kill -USR1 $step' USR1\nwait $step; wait $step"
    number = slurm.start(job(folder, STEPS, text))
    slurm.wait_for(number, "ready", times=4)
    slurm.signal(number, "USR1", batch=True)
    done = slurm.finish(number, limit=40)
    assert (done.state, done.code) == ("COMPLETED", 0), done
    assert done.output.count("stopped [10]") == 4, done


def test_signal_before_the_limit(slurm: Slurm, folder: Path) -> None:
    """``--signal=USR1@50`` in a job of two minutes: all ranks stop long before the limit."""
    # Slurm may be a minute early: in a job of one minute the signal came before the ranks had started.
    done = slurm.submit(job(folder, STEPS, f"{SRUN} $PROGRAM", "-t 2 --signal=USR1@50"), limit=160)
    assert (done.state, done.code) == ("COMPLETED", 0), done
    assert done.output.count("stopped [10]") == 4, done


def test_time_left(slurm: Slurm, folder: Path) -> None:
    """Without any signal: Slurm is asked how long the job may run, and all ranks stop when less than that is left."""
    done = slurm.submit(job(folder, STEPS, f"{SRUN} $PROGRAM 52", "-t 1"), limit=100)
    assert (done.state, done.code) == ("COMPLETED", 0), done
    assert done.output.count("stopped []") == 4, done
    left = re.search(r"left (\d+)", done.output)
    assert left is not None, done
    assert 0 < int(left[1]) < 53, done


def check_report(text: str) -> None:
    """Assert one report of each node, with the place of every rank (of one that is slow to answer: where it was last seen)."""
    assert sorted(re.findall(r"SIGTERM ends ranks? [\d, -]+ on (node\d)", text)) == ["node1", "node2"], text
    assert re.search(r"rank 0: .*\bprogram.py:\d+ in compute\(\)", text), text
    waits = r"(all_reduce #2 float64\[3\] SUM at|.*at) \S*program.py:18"
    assert re.search(rf"rank 1: {waits}", text), text
    assert re.search(rf"ranks 2-3: {waits}", text) or len(re.findall(rf"rank [23]: {waits}", text)) == 2, text
    assert "Traceback" not in text, text
    assert "Segmentation" not in text, text


def test_cancelled(slurm: Slurm, folder: Path) -> None:
    """A job that is cancelled leaves one report of each node."""
    number = slurm.start(job(folder, PLACES, f"{SRUN} $PROGRAM"))
    slurm.wait_for(number, "ready", times=4)
    slurm.cancel(number)
    check_report(slurm.finish(number, limit=40).output)


def test_killed_by_the_limit(slurm: Slurm, folder: Path) -> None:
    """So does one that comes to its time limit."""
    done = slurm.submit(job(folder, PLACES, f"{SRUN} $PROGRAM", "-t 1"), limit=150)
    assert done.state == "TIMEOUT", done
    check_report(done.output)
