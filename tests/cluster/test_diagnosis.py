"""Starts on a real Slurm: wrong ones name the line that works, and it does; mpicoll run and the map of a job on two nodes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from jobs import family, mpiexec
from slurm import Finished, Slurm, missing

WHY_NOT = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "a Slurm can be had")]

RIGHT, WRONG = ("pmix", "pmi2") if family() == "openmpi" else ("pmi2", "pmix")
# Between namespaces of one machine every host would bind its first rank to the same core.
UNBOUND = {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMPI_MCA_hwloc_base_binding_policy": "none"}

SIZE = """
import sys
import mpicoll as dist
dist.init_process_group()
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""

# Every rank compares what MPI and the groups say with the names of the hosts, which all tell each other.
TOPOLOGY = """
import os, sys
import mpicoll as dist
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
hosts = [None] * size
dist.all_gather_object(hosts, os.uname().nodename)
here = [r for r in range(size) if hosts[r] == hosts[rank]]
first = [r for r in range(size) if hosts.index(hosts[r]) == r]
assert dist.get_node_local_rank() == here.index(rank), (rank, dist.get_node_local_rank(), hosts)
assert dist.get_process_group_ranks(dist.node_group()) == here, hosts
leaders = dist.leaders_group()
if rank in first:
    assert dist.get_process_group_ranks(leaders) == first, hosts
dist.barrier(dist.node_group())
from mpicoll.groups.registry import state
topology = state().topology
assert [topology.hosts[node] for node in topology.node_of] == hosts, (topology, hosts)
if rank == 0:
    sys.stdout.write(f"{size} ranks as on " + " ".join(hosts) + "\\n")
    sys.stdout.flush()
dist.destroy_process_group()
"""

FAILING = """
import sys, time
import mpicoll as dist
dist.init_process_group()
rank = dist.get_rank()
dist.barrier()
if sys.argv[1] == "wait":
    sys.stdout.write(f"up {rank}\\n")
    sys.stdout.flush()
    time.sleep(300)
if rank == int(sys.argv[2]):
    sys.exit(7)
dist.barrier()
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    """Write the scripts above into the folder."""
    for script, source in (("size.py", SIZE), ("topology.py", TOPOLOGY), ("failing.py", FAILING)):
        (folder / script).write_text(source)
    return folder


def batch(slurm: Slurm, folder: Path, text: str, options: str = "-N 2 -n 3", limit: float = 240.0) -> Finished:
    """Submit a script; each ``say NAME`` in it begins a part of the output."""
    path = folder / "job.sbatch"
    bin_folders = f"{Path(sys.executable).parent}:{Path(mpiexec()).parent}"
    start = (
        f'export PATH={bin_folders}:$PATH\ncd {folder}\nsay() {{ echo; echo "=== $1"; }}\nrun="python -m mpicoll run"'
    )
    path.write_text(f"#!/bin/bash\n#SBATCH {options}\nexec 2>&1\n{start}\n{text}\n")
    return slurm.submit(path, env=UNBOUND, limit=limit)


def parts(done: Finished) -> dict[str, str]:
    """Return what stands in the output behind each ``say NAME``."""
    pieces = re.split(r"^=== (.*)\n", done.output, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def ranks_said(text: str) -> list[str]:
    """Return the lines of size.py, also where two ranks' output came in one line."""
    return sorted(re.findall(r"rank \d+ of \d+", text))


THREE = [f"rank {rank} of 3" for rank in range(3)]


def test_wrong_starts_name_the_line_that_works(slurm: Slurm, folder: Path) -> None:
    """srun without the right plugin, no srun, srun before mpicoll run: one long message each, and its line works."""
    text = f"""
say alone; python size.py
say none; srun --mpi=none python size.py
say wrong; srun --mpi={WRONG} python size.py
say copies; srun --mpi=none -n 2 mpicoll run size.py
say mpiexec; SLURM_MPI_TYPE=pmix {mpiexec()} -n 3 python size.py
"""
    done = batch(slurm, folder, text)
    said = parts(done)
    assert ranks_said(said["alone"]) == ["rank 0 of 1"], done
    assert "was given 3 tasks, but only this process was started" in said["alone"], done
    lines = [f"srun --mpi={RIGHT} -n 3 python size.py", "mpicoll run -n 3 size.py"]
    for start in ("alone", "none", "wrong"):
        for line in lines:
            assert f"`{line}`" in said[start], done
    for start in ("none", "wrong"):
        assert ranks_said(said[start]) == [], done
        assert len(re.findall("LaunchError: .* started 3 processes .*which does not understand", said[start])) == 1, (
            done
        )
        assert len(re.findall("LaunchError: ", said[start])) == 3, done
        assert "Traceback" in said[start]
        assert "internal_Init" not in said[start], done  # MPICH's own words when it aborts
        assert "no-pmix" not in said[start], done  # Open MPI's own words when it is alone
    assert "2 copies of `mpicoll run`" in said["copies"], done
    assert "`mpicoll run -n 2 size.py`" in said["copies"], done
    if family() == "mpich":
        lines.append("SLURM_MPI_TYPE=none mpiexec -n 3 python size.py")
        assert f"`{lines[-1]}`" in said["mpiexec"], done
        assert "internal_Init" not in said["mpiexec"], done
    else:
        assert ranks_said(said["mpiexec"]) == THREE, done
    done = batch(slurm, folder, "\n".join(f"say '{line}'; {line}" for line in lines))
    for line in lines:
        assert ranks_said(parts(done)[line]) == THREE, done


def test_mpicoll_run_in_an_allocation(slurm: Slurm, folder: Path) -> None:
    """It starts as many ranks as there are tasks, on both nodes, and hands on the code of a rank on the other node."""
    text = """
say plain; $run size.py; echo code $?
say pmix; SLURM_MPI_TYPE=pmix $run size.py
say srun; $run --launcher srun --tag-output size.py; echo code $?
say two; $run -n 2 size.py
say dry; $run --dry-run size.py
say "dry srun"; $run --launcher srun --dry-run size.py
say other; $run failing.py exit 2; echo code $?
say here; $run failing.py exit 0; echo code $?
say late; $run --timeout 8 failing.py wait; echo code $?
say topology; $run topology.py
say many; $run -n 4 size.py; echo code $?
say oversubscribed; $run -n 4 --mpiexec-args=--oversubscribe size.py; echo code $?
"""
    if family() == "mpich":  # it starts as many as it is told, and has no such option
        text = text[: text.index("say many")]
    done = batch(slurm, folder, text, limit=400)
    said = parts(done)
    for start in ("plain", "pmix", "srun"):
        assert ranks_said(said[start]) == THREE, done
    assert "code 0" in said["plain"], done
    assert re.search(r"^1: rank 1 of 3$", said["srun"], re.MULTILINE), done
    assert ranks_said(said["two"]) == ["rank 0 of 2", "rank 1 of 2"], done
    assert f"{mpiexec()}" in said["dry"] or "mpiexec" in said["dry"], done
    assert re.search(r" -n 3 \S*python\S* size\.py$", said["dry"], re.MULTILINE), done
    assert "Sorry" not in said["srun"], done  # the wheel's PMIx, of security that it has not
    assert f"srun --mpi={RIGHT} --kill-on-bad-exit=1 -n 3" in said["dry srun"], done
    assert "code 7" in said["other"], done
    assert "code 7" in said["here"], done
    assert "code 124" in said["late"], done
    assert "3 ranks as on node1 node1 node2" in said["topology"], done
    if "many" in said:
        assert "mpicoll run: Open MPI has fewer slots than the 4 ranks of this job" in said["many"], done
        assert "code 0" not in said["many"], done
        assert "code 0" in said["oversubscribed"], done
        assert len(ranks_said(said["oversubscribed"])) == 4, done


@pytest.mark.parametrize(
    ("launcher", "sent", "code"), [("mpiexec", "TERM", 143), ("mpiexec", "INT", 130), ("srun", "TERM", 143)]
)
def test_ending_a_job_of_two_nodes(launcher: str, sent: str, code: int, slurm: Slurm, folder: Path) -> None:
    """SIGTERM to mpicoll run, or Ctrl-C, ends the ranks on both nodes, and its exit code says so."""
    text = f"""
touch said
env --default-signal=INT $run --launcher {launcher} failing.py wait > said & runner=$!
for i in $(seq 600); do [ "$(grep -c '^up [0-9]' said)" = 3 ] && break; sleep 0.1; done
cat said; kill -{sent} $runner; wait $runner; echo code $?
for i in $(seq 100); do
left=$(srun --overlap -N 2 -n 2 pgrep -f 'failing.py [w]ait' | wc -l); [ $left = 0 ] && break; sleep 0.1
done
echo left $left
"""
    done = batch(slurm, folder, text)
    assert len(re.findall(r"^up \d", done.output, re.MULTILINE)) == 3, done
    assert f"code {code}" in done.output, done
    assert "left 0" in done.output, done


def test_topology_of_uneven_nodes(slurm: Slurm, folder: Path) -> None:
    """Nodes, local ranks and groups are right with 3 and 2 ranks on two nodes, in blocks and in turns, by both ways."""
    text = f"""
say block; srun --mpi={RIGHT} -n 5 -m block python topology.py
say cyclic; srun --mpi={RIGHT} -n 5 -m cyclic python topology.py
say run; $run -n 5 topology.py
"""
    done = batch(slurm, folder, text, "-N 2 -n 5 --ntasks-per-node=3")
    said = parts(done)
    assert "5 ranks as on node1 node1 node1 node2 node2" in said["block"], done
    assert "5 ranks as on node1 node2 node1 node2 node1" in said["cyclic"], done
    assert re.search("5 ranks as on node1 node1 node1 node2 node2", said["run"]), done


def test_map_of_a_job(slurm: Slurm, folder: Path) -> None:
    """doctor --job tells where the ranks are, their GPUs, the links within and between nodes, and what is wrong."""
    plot = " --plot map.png" if _has_matplotlib() else ""
    text = f"""
say run; $run -m mpicoll doctor --job{plot}; echo code $?
say gpus; srun --mpi={RIGHT} --gpus-per-node=2 python -m mpicoll doctor --job; echo code $?
say shared; CUDA_VISIBLE_DEVICES=0 $run -m mpicoll doctor --job; echo code $?
"""
    done = batch(slurm, folder, text, "-N 2 -n 3 --gpus-per-node=2", limit=300)
    said = parts(done)
    for start in ("run", "gpus", "shared"):
        assert said[start].count("3 ranks on 2 nodes") == 1, done
        assert "code 0" in said[start], done
        rows = [line.split() for line in said[start].splitlines()]
        placed = [row[:3] for row in rows if len(row) > 4 and row[0].isdigit() and row[2].isdigit()]
        assert placed == [["0", "node1", "0"], ["1", "node1", "1"], ["2", "node2", "0"]], done
        assert re.search(r"within node1 +0, 1 +[\d.]+ [um]s +[\d.]+ [GM]B/s", said[start]), done
        assert re.search(r"node1 - node2 +0, 2 +[\d.]+ [um]s +[\d.]+ [GM]B/s", said[start]), done
    assert re.search(r"0, 1 +not set", said["gpus"]), done
    assert "node1: 2 ranks share GPU 0 (ranks 0-1)" in said["shared"], done
    assert "share GPU" not in said["gpus"], done
    if plot:
        assert (folder / "map.png").read_bytes().startswith(b"\x89PNG"), done


def _has_matplotlib() -> bool:
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None
