"""Every way to start ranks in a job of Slurm: who is where comes from MPI, whatever SLURM_* say."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import ROOT, family, mpiexec

sys.path.insert(0, str(Path(__file__).parent))
from slurm import Finished, Slurm, missing
from slurm import slurm as bring_up

WHY_NOT = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "a Slurm can be had")]

NODES, PER_NODE = 2, 2
RANKS = NODES * PER_NODE
DEBIAN = ROOT / ".venv-debian" / "bin" / "python"


@dataclass(frozen=True)
class Way:
    """A way to start ranks: an MPI's Python and the line of a batch script before it."""

    name: str
    python: str
    line: str

    def script(self, folder: Path, program: str, options: str = "") -> Path:
        """Write a batch script that starts a program this way."""
        (folder / "job.py").write_text(program)
        path = folder / "job.sbatch"
        size = f"#SBATCH --nodes={NODES} --ntasks-per-node={PER_NODE} --time=5 {options}"
        path.write_text(f"#!/bin/bash\n{size}\n{self.line} {self.python} {folder / 'job.py'}\n")
        return path


def ways() -> list[Way]:
    """Return the ways of the MPI that the tests run with, and on Open MPI those of Debian's if it is there."""
    if family() == "mpich":
        hydra = f"{mpiexec()} -n {RANKS} -ppn {PER_NODE}"
        return [
            Way("mpich-srun", sys.executable, "srun --mpi=pmi2 --kill-on-bad-exit=1"),
            Way("mpich-mpiexec", sys.executable, hydra),
        ]
    found = [
        Way("openmpi-srun", sys.executable, "srun --mpi=pmix --kill-on-bad-exit=1"),
        Way("openmpi-mpirun", sys.executable, f"{mpiexec()} --bind-to none"),
    ]
    if DEBIAN.exists() and shutil.which("mpirun.openmpi"):
        found += [
            Way("debian-srun", str(DEBIAN), "srun --mpi=pmix --kill-on-bad-exit=1"),
            Way("debian-mpirun", str(DEBIAN), "mpirun.openmpi --bind-to none"),
        ]
    return found


WAYS = [pytest.param(way, id=way.name) for way in ways()]

PROBE = """
import json, os, socket
import numpy as np
import mpicoll as dist
dist.init_process_group()
rank = dist.get_rank()
node, leaders = dist.node_group(), dist.leaders_group()
seen = {
    "rank": rank,
    "size": dist.get_world_size(),
    "local": dist.get_node_local_rank(),
    "host": socket.gethostname(),
    "node": dist.get_process_group_ranks(node),
    "leaders": dist.get_process_group_ranks(leaders) if dist.get_node_local_rank() == 0 else None,
    "SLURM_PROCID": os.environ.get("SLURM_PROCID"),
}
x = np.full(5, rank + 1.0)
dist.all_reduce(x)
seen["sum"] = x.tolist()
big = np.full(100_000, rank + 1.0)
dist.all_reduce(big, group=node)
seen["sum of the node"] = sorted(set(big.tolist()))
try:
    dist.all_reduce(x, dist.ReduceOp.MAX if rank == 3 else dist.ReduceOp.SUM)
except dist.CollectiveMismatchError as error:
    seen["mismatch"] = error.ranks
everything = [None] * dist.get_world_size()
dist.all_gather_object(everything, seen)
if rank == 0:
    print("SEEN", json.dumps(everything), flush=True)
"""


@pytest.mark.parametrize("way", WAYS)
def test_who_is_where(slurm: Slurm, folder: Path, way: Way) -> None:
    """Ranks, nodes, local ranks and groups are right, a collective works, and a mismatch is named."""
    done = slurm.submit(way.script(folder, PROBE), limit=90)
    assert (done.state, done.code) == ("COMPLETED", 0), done
    lines = [line for line in done.output.splitlines() if line.startswith("SEEN ")]
    assert len(lines) == 1, done
    everything = json.loads(lines[0].removeprefix("SEEN "))
    procids = [seen.pop("SLURM_PROCID") for seen in everything]
    total = sum(range(1, RANKS + 1))
    for rank, seen in enumerate(everything):
        first = rank - rank % PER_NODE
        assert seen == {
            "rank": rank,
            "size": RANKS,
            "local": rank % PER_NODE,
            "host": f"node{rank // PER_NODE + 1}",
            "node": list(range(first, first + PER_NODE)),
            "leaders": [0, 2] if rank == first else None,
            "sum": [total] * 5,
            "sum of the node": [sum(range(first + 1, first + PER_NODE + 1))],
            "mismatch": [3],
        }, done
    right = [str(rank) for rank in range(RANKS)]
    assert (procids == right) == ("srun" in way.name), f"SLURM_PROCID was right where it is not known to be: {procids}"


@pytest.mark.parametrize("way", WAYS)
def test_failure(slurm: Slurm, folder: Path, way: Way) -> None:
    """An exception on one rank ends the job with an exit code that is not 0, and nothing is left."""
    program = """
import numpy as np
import mpicoll as dist
dist.init_process_group()
dist.barrier()
if dist.get_rank() == 2:
    raise RuntimeError("this is it")
dist.all_reduce(np.ones(3))
"""
    done = slurm.submit(way.script(folder, program), limit=90)
    assert done.state == "FAILED", done
    assert done.code != 0, done
    assert "RuntimeError: this is it" in done.output, done
    assert "rank 2 failed" in done.output, done
    assert not left(slurm, folder), done


# What Slurm does then does not depend on the MPI; it takes long.
@pytest.mark.parametrize("way", [way for way in WAYS if not str(way.id).startswith("debian")])
def test_lost_node(folder: Path, way: Way) -> None:
    """A node that dies ends the job in an error, and none of its ranks is left on the other one."""
    program = """
import time
import numpy as np
import mpicoll as dist
dist.init_process_group()
x = np.ones(4)
dist.all_reduce(x)
if dist.get_rank() == 0:
    print("ready", flush=True)
while True:
    dist.all_reduce(x)
    time.sleep(0.01)
"""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, bring_up(Path(name)) as up:
        job = up.start(way.script(folder, program, "--no-requeue"), env={"MPICOLL_TIMEOUT": "6"})
        up.wait_for(job, "ready")
        time.sleep(0.5)
        # The batch script and its launcher run on the first node.
        up.kill_node("node2")
        done = up.finish(job, limit=120)
        assert done.state in ("NODE_FAIL", "FAILED"), done
        assert_told(done)
        until = time.monotonic() + 40
        while there := left(up, folder, "node1"):
            assert time.monotonic() < until, (there, done)
            time.sleep(0.1)


def assert_told(done: Finished) -> None:
    """Somebody has said why: the library, or Slurm when it was first."""
    words = ("did not make the matching call", "it has been inside MPI for", "NODE FAILURE", "Node failure", "node2")
    assert any(word in done.output for word in words), done


def left(slurm: Slurm, folder: Path, *nodes: str) -> list[str]:
    """Return the ranks of a program in this folder that run on the nodes of a cluster."""
    spaces = [os.readlink(f"/proc/{slurm.hosts.first[node]}/ns/pid") for node in nodes or slurm.nodes]
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") in spaces:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if str(folder / "job.py").encode() in words and b"python" in words[0]:
                    found.append(b" ".join(words).decode())
        except OSError:
            continue
    return found
