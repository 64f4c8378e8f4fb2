"""Every batch script of ``slurm/`` is submitted as it is on a real Slurm; so is what ``mpicoll slurm-script`` prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from jobs import ROOT, family
from slurm import Finished, Slurm, missing

WHY_NOT = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "a Slurm can be had")]

TEMPLATES = sorted(path.stem for path in (ROOT / "slurm").glob("*.sbatch"))
BIN = str(Path(sys.executable).parent)
MPI_TYPE = {"openmpi": "pmix", "mpich": "pmi2"}

# What the tests' hosts are, and a cluster is not: hosts that share two cores, and have no network that UCX would know.
LAB = {
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "PYTHONPATH": str(ROOT),
}

HELLO = """
import os, sys
import numpy as np
import mpicoll as dist

dist.init_process_group()
total = np.ones(1)
dist.all_reduce(total)
variables = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES")]
print("rank", dist.get_rank(), "of", int(total[0]), os.uname().nodename, *variables, sys.argv[1:], flush=True)
dist.destroy_process_group()
"""

FAILS = """
import time
import mpicoll as dist

dist.init_process_group()
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("no luck")
dist.barrier()
time.sleep(600)
"""

FAILS_EARLY = """
import os, sys
import mpicoll as dist

if os.environ["SLURM_PROCID"] == "1":
    sys.exit(7)
dist.init_process_group()
"""

# The stand-in: it checks what it is told, and runs the command here, without an image.
APPTAINER = """#!/bin/bash
[ "$1 $2 $4" = "exec --pwd --bind" ] || exit 90
cd "$3" || exit 91
for folder in ${5//,/ }; do [ -d "$folder" ] || exit 92; done
[ "${6##*/}" = my.sif ] || exit 93
echo "inside $6"
exec "${@:7}"
"""

# In place of the Python that environments are made of: `-m venv` makes one whose pip writes down what it is told, slowly, and
# which otherwise is the Python of the tests. A real build of mpi4py takes minutes.
BASE = """#!/bin/bash
[ "$1 $2" = "-m venv" ] || exit 90
mkdir -p "$3/bin"
cp "{folder}/python" "$3/bin/python"
"""
VENV_PYTHON = """#!/bin/bash
[ "$1 $2" = "-m pip" ] || exec {python} "$@"
sleep 1
echo "$MPICC $*" >> "{folder}/pip.log"
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    """Write the programs into the folder."""
    (folder / "hello.py").write_text(HELLO)
    (folder / "fails.py").write_text(FAILS)
    (folder / "fails_early.py").write_text(FAILS_EARLY)
    return folder


def start(slurm: Slurm, template: str, *args: str, options: Sequence[str] = (), **export: str) -> int:
    """Submit a template as it is, with this Python unless another is given."""
    path = ROOT / "slurm" / f"{template}.sbatch"
    return slurm.start(path, *args, export={"PYTHON": sys.executable, **export}, options=options, env=LAB)


def submit(slurm: Slurm, template: str, *args: str, options: Sequence[str] = (), **export: str) -> Finished:
    """Submit it, and wait for its end."""
    return slurm.finish(start(slurm, template, *args, options=options, **export))


def said(done: Finished) -> list[str]:
    """Return what HELLO's ranks printed, in their order; lines of several ranks may run into each other."""
    return sorted(re.findall(r"rank \d+ of \d+ .*?\]", done.output))


def expected(nodes: str, variables: str, args: list[str]) -> list[str]:
    hosts = nodes.split()
    return [f"rank {rank} of {len(hosts)} {host} {variables} {args}" for rank, host in enumerate(hosts)]


TWO_TWO = "node1 node1 node2 node2"


@pytest.mark.parametrize("template", ["cpu-srun", "cpu-mpirun"])
def test_cpu(slurm: Slurm, folder: Path, template: str) -> None:
    """Two ranks on each of two nodes, one thread each; arguments arrive word by word, whatever srun does by default."""
    exports = {"SCRIPT": str(folder / "hello.py"), "SLURM_MPI_TYPE": "pmix"}  # as a site with MpiDefault=pmix
    done = submit(slurm, template, "a  b", "*", **exports)
    assert (done.state, done.code) == ("COMPLETED", 0), done
    assert said(done) == expected(TWO_TWO, "1 1 None", ["a  b", "*"]), done
    assert "munge" not in done.output, done
    assert "PMIx" not in done.output, done


@pytest.mark.parametrize(
    ("template", "more"),
    [
        ("cpu-srun", ""),
        ("cpu-mpirun", ""),
        *((template, "--kill-on-bad-exit=0") for template in ("cpu-srun", "gpu", "hybrid", "requeue")),
    ],
)
def test_failing_rank(slurm: Slurm, folder: Path, template: str, more: str) -> None:
    """A rank that fails ends the job with a code, although the others would go on for ten minutes; all say why."""
    assert_failed(submit(slurm, template, SCRIPT=str(folder / "fails.py"), SRUN_ARGS=more))


def assert_failed(done: Finished, last: int = 3) -> None:
    """Assert that a job of FAILS with ranks up to ``last`` at least ended by the rank that failed, and that the others say so."""
    assert done.state == "FAILED", done
    assert done.code != 0, done
    assert done.seconds < 90, done
    assert done.output.count('raise ValueError("no luck")') == 1, done
    for rank in {0, 2, 3} & set(range(last + 1)):
        assert f"[rank {rank}] PeerFailedError: rank 1 failed: ValueError: no luck (at fails.py:8)" in done.output, done


def test_rank_that_fails_early(slurm: Slurm, folder: Path) -> None:
    """A rank that fails before it starts MPI, where nobody could tell the others, ends the job through srun."""
    done = submit(slurm, "cpu-srun", SCRIPT=str(folder / "fails_early.py"))
    assert done.state == "FAILED", done
    assert done.code != 0, done
    assert done.seconds < 40, done
    assert "Exited with exit code 7" in done.output, done


def test_gpu(slurm: Slurm, folder: Path) -> None:
    """The job has its GPUs on each node, and no rank is bound to one. They are pretended: nothing computes on them."""
    job = start(slurm, "gpu", "x", SCRIPT=str(folder / "hello.py"))
    done = slurm.finish(job)
    assert (done.state, done.code) == ("COMPLETED", 0), done
    assert slurm.about(job)["TresPerNode"] == "gres:gpu:4"
    # Unbound tasks have no CUDA_VISIBLE_DEVICES in Slurm 22.05, and all of the job's GPUs in others.
    nodes = "node1 " * 4 + "node2 " * 4
    assert said(done) in [expected(nodes, f"1 1 {shown}", ["x"]) for shown in (None, "0,1,2,3")], done


def test_hybrid(slurm: Slurm, folder: Path) -> None:
    """Every rank has two CPUs and as many threads."""
    done = submit(slurm, "hybrid", SCRIPT=str(folder / "hello.py"))
    assert (done.state, done.code) == ("COMPLETED", 0), done
    assert said(done) == expected(TWO_TWO, "2 2 None", []), done


def test_array(slurm: Slurm, folder: Path) -> None:
    """Every line of the list is a job with its own ranks; one past its end fails alone, and says so."""
    (folder / "inputs.txt").write_text("first input\nsecond\n")
    exports = {"SCRIPT": str(folder / "hello.py"), "INPUTS": str(folder / "inputs.txt")}
    first = submit(slurm, "array", "x", options=("--array=1-3",), **exports)
    jobs = [first.job, *(int(job) for job in slurm.ask("squeue", "-h", "-t", "all", "-o", "%A").split())]
    by_number = {}
    for job in dict.fromkeys(jobs):
        about = slurm.about(job)
        if about.get("ArrayJobId") == str(first.job):
            by_number[about["ArrayTaskId"]] = slurm.finish(job)
    assert sorted(by_number) == ["1", "2", "3"], by_number
    for number, name in (("1", "first input"), ("2", "second")):
        done = by_number[number]
        assert (done.state, done.code) == ("COMPLETED", 0), done
        assert [line.split(" ", 5)[5] for line in said(done)] == [f"1 1 None {[name, 'x']}"] * 2, done
    wrong = {**exports, "SCRIPT": str(folder / "fails.py"), "SRUN_ARGS": "--kill-on-bad-exit=0"}
    assert_failed(submit(slurm, "array", options=("--array=1",), **wrong), 1)
    assert by_number["3"].code == 2, by_number["3"]
    assert "line 3 of" in by_number["3"].output, by_number["3"]


def idle(slurm: Slurm, job: int) -> None:
    """Wait until a job is put back and the nodes are idle."""
    until = time.monotonic() + 30
    while slurm.about(job)["JobState"] != "PENDING" or set(slurm.ask("sinfo", "-h", "-N", "-o", "%t").split()) != {
        "idle"
    }:
        assert time.monotonic() < until, slurm.about(job)
        time.sleep(0.1)


def start_again(slurm: Slurm, job: int) -> Finished:
    """Start a job that was put back, and wait for its end, for at most three minutes."""
    # Slurm would let it wait for two minutes, in which the nodes forget that it was killed. It is enough that it starts when
    # they are idle, and with a credential of a later second: else slurmd says "already killed, do not launch".
    time.sleep(2)
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    return slurm.finish(job, limit=180.0)


def test_requeue(slurm: Slurm, folder: Path) -> None:
    """At the signal all ranks save after the same sweep; the job is put back, goes on from there, and ends when it is done."""
    state = folder / "state.npz"
    exports = {"SCRIPT": str(ROOT / "examples" / "checkpoint.py"), "STATE": str(state)}
    job = start(slurm, "requeue", "--pause", "0.005", **exports)
    slurm.wait_for(job, "starting after 0 sweeps")
    assert slurm.about(job)["Requeue"] == "1"
    slurm.signal(job, "USR1")  # what Slurm does by itself --signal=USR1@120 before the limit
    slurm.wait_for(job, "not finished: back into the queue")
    idle(slurm, job)
    assert state.exists()
    done = start_again(slurm, job)
    assert (done.state, done.code) == ("COMPLETED", 0), f"{done}\n{slurm.logs()}"
    saved = re.findall(r"rank \d: signal 10, state saved after (\d+) sweeps", done.output)
    assert len(saved) == 4, done
    assert len(set(saved)) == 1, done
    assert f"start 2 on node[1-2], from {state}" in done.output, done
    assert f"starting after {saved[0]} sweeps" in done.output, done
    assert f"done after 704 sweeps, {704 - int(saved[0])} of them since the start" in done.output, done
    assert not state.exists()


if family() == "openmpi":  # once: it takes minutes

    def test_requeue_at_slurms_own_signal(slurm: Slurm, folder: Path) -> None:
        """The signal that Slurm sends before the limit has all ranks save at the same step, as often as it comes."""
        state = folder / "state.npz"
        exports = {"SCRIPT": str(ROOT / "examples" / "checkpoint.py"), "STATE": str(state)}
        # Slurm may be a minute early: after ten seconds at least.
        options = ["--time=00:02:00", "--signal=USR1@50"]
        job = start(slurm, "requeue", "--pause", "0.12", options=options, **exports)
        put_back = 0
        until = time.monotonic() + 400
        while (now := slurm.about(job)["JobState"]) not in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"):
            assert time.monotonic() < until, slurm.about(job)
            if now == "PENDING" and slurm.output(job).count("back into the queue") > put_back:
                put_back += 1
                time.sleep(3)  # as in test_requeue
                slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
            time.sleep(0.2)
        done = slurm.finish(job)
        assert (done.state, done.code) == ("COMPLETED", 0), f"{done}\n{slurm.logs()}"
        saved = re.findall(r"rank \d: signal 10, state saved after (\d+) sweeps", done.output)
        assert put_back >= 1, done
        assert len(saved) == 4 * put_back, done
        assert all(saved.count(sweeps) == 4 for sweeps in saved), done
        assert "done after 704 sweeps" in done.output, done
        assert not state.exists()


if family() == "mpich":  # the environment with torch has it
    TORCH = {"PYTHON": str(ROOT / ".venv-torch" / "bin" / "python")}
    # MPICH under Slurm's PMI-2 must start before large packages are imported: "Problems" in docs/clusters.md.
    MPI_FIRST = """
import mpi4py.MPI
import runpy
runpy.run_path("{path}", run_name="__main__")
"""

    def mpi_first(folder: Path, name: str) -> str:
        """Return a script that starts MPI and runs an example."""
        (folder / name).write_text(MPI_FIRST.format(path=ROOT / "examples" / name))
        return str(folder / name)

    def test_torch_ddp(slurm: Slurm, folder: Path) -> None:
        """The example of DistributedDataParallel runs on two nodes."""
        job = start(slurm, "torch-ddp", SCRIPT=mpi_first(folder, "torch_ddp.py"), **TORCH)
        done = slurm.finish(job, limit=180.0)  # four imports of torch on two cores take half a minute
        assert (done.state, done.code) == ("COMPLETED", 0), done
        assert "after 20 epochs on 4 ranks" in done.output, done
        assert "one process that trains alone comes to the same parameters" in done.output, done

    def test_torch_fsdp(slurm: Slurm, folder: Path) -> None:
        """At the signal all ranks save a checkpoint; the job is put back, goes on from there, and ends when it is done."""
        state = folder / "checkpoints"
        exports = {"SCRIPT": mpi_first(folder, "torch_fsdp.py"), "STATE": str(state)}
        job = start(slurm, "torch-fsdp", **exports, **TORCH)
        slurm.wait_for(job, "starting after 0 steps", limit=120.0)
        slurm.signal(job, "USR1")
        slurm.wait_for(job, "not finished: back into the queue")
        idle(slurm, job)
        saved = [path.name for path in state.iterdir()]
        done = start_again(slurm, job)
        assert (done.state, done.code) == ("COMPLETED", 0), f"{done}\n{slurm.logs()}"
        assert len(saved) == 1, done
        assert set(re.findall(r"rank \d: signal 10 after step (\d+)", done.output)) == set(saved), done
        assert f"starting after {saved[0]} steps" in done.output, done
        assert f"done after 60 steps, {60 - int(saved[0])} of them since the start" in done.output, done
        assert not state.exists()


def test_requeue_gives_up(slurm: Slurm, folder: Path) -> None:
    """A job that has started as often as it may is not put back; what is saved stays."""
    (folder / "never.py").write_text("import sys, pathlib; pathlib.Path(sys.argv[1]).touch()")
    exports = {"SCRIPT": str(folder / "never.py"), "STATE": str(folder / "state"), "STARTS": "1"}
    done = submit(slurm, "requeue", options=("-N1", "--ntasks-per-node=1"), **exports)
    assert (done.state, done.code) == ("FAILED", 2), done
    assert "not finished after 1 starts" in done.output, done
    assert (folder / "state").exists()


def test_container(slurm: Slurm, folder: Path) -> None:
    """Every rank goes through apptainer, which has the folders that it is told of. It is a stand-in without an image."""
    program = folder / "apptainer"
    program.write_text(APPTAINER)
    program.chmod(0o755)
    (folder / "my.sif").touch()
    exports = {"SCRIPT": str(folder / "hello.py"), "IMAGE": str(folder / "my.sif"), "APPTAINER": str(program)}
    done = submit(slurm, "container", "x y", MPI_TYPE=MPI_TYPE[family()], **exports)
    assert (done.state, done.code) == ("COMPLETED", 0), done
    assert said(done) == expected(TWO_TWO, "1 1 None", ["x y"]), done
    assert done.output.count(f"inside {folder}/my.sif") == 4, done
    wrong = {**exports, "SCRIPT": str(folder / "fails.py"), "SRUN_ARGS": "--kill-on-bad-exit=0"}
    assert_failed(submit(slurm, "container", MPI_TYPE=MPI_TYPE[family()], **wrong))


def test_site_mpi(slurm: Slurm, folder: Path) -> None:
    """Two jobs that start together make one environment, for the MPI's compiler; another compiler is refused."""
    programs = {"base": BASE, "python": VENV_PYTHON, "sitecc": "#!/bin/bash\n", "othercc": "#!/bin/bash\n"}
    for name, text in programs.items():
        (folder / name).write_text(text.replace("{python}", sys.executable).replace("{folder}", str(folder)))
        (folder / name).chmod(0o755)
    exports = {"SCRIPT": str(folder / "hello.py"), "BASE": str(folder / "base"), "VENV": str(folder / "venv")}
    exports |= {"MPICC": str(folder / "sitecc"), "MPICOLL": "mpicoll==0.1"}
    jobs = [start(slurm, "site-mpi", str(number), **exports) for number in range(2)]
    for number, job in enumerate(jobs):
        done = slurm.finish(job)
        assert (done.state, done.code) == ("COMPLETED", 0), done
        assert said(done) == expected(TWO_TWO, "1 1 None", [str(number)]), done
    assert (folder / "pip.log").read_text().splitlines() == [
        f"{folder}/sitecc -m pip install --quiet --no-cache-dir --no-binary=mpi4py mpi4py",
        f"{folder}/sitecc -m pip install --quiet mpicoll==0.1",
    ]
    wrong = {**exports, "SCRIPT": str(folder / "fails.py"), "SRUN_ARGS": "--kill-on-bad-exit=0"}
    assert_failed(submit(slurm, "site-mpi", **wrong))
    other = {**exports, "MPICC": str(folder / "othercc")}
    done = submit(slurm, "site-mpi", options=["-N1", "--ntasks-per-node=1"], **other)
    assert done.code == 2, done
    assert f"{folder}/venv was made with {folder}/sitecc, not {folder}/othercc: name another VENV" in done.output
    login = slurm.run(["bash", str(ROOT / "slurm" / "site-mpi.sbatch")], env={**LAB, **exports})
    assert (login.returncode, login.stdout) == (0, f"{folder}/venv is ready\n"), login


if family() == "mpich":  # once: it takes minutes

    def test_site_mpi_is_built(slurm: Slurm, folder: Path) -> None:
        """On the login node mpi4py is built from source for the MPI of a compiler; the job takes what was made there."""
        compiler = f"{BIN}/mpicc"
        exports = {"MPICC": compiler, "VENV": str(folder / "venv"), "SCRIPT": str(folder / "hello.py")}
        quick = {"CFLAGS": "-O0 -g0", "BASE": getattr(sys, "_base_executable", "python3"), "MPICOLL": str(ROOT)}
        script = str(ROOT / "slurm" / "site-mpi.sbatch")
        made = subprocess.run(
            ["bash", script],
            env={**os.environ, **exports, **quick},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert made.returncode == 0, made
        assert made.stdout == f"making {folder}/venv with {compiler}\n{folder}/venv is ready\n", made
        # The library is the compiler's, wherever this is loaded.
        look = (
            "import mpi4py.MPI; print(*(word for word in open('/proc/self/maps').read().split() if 'libmpi' in word))"
        )
        loaded = subprocess.run([f"{folder}/venv/bin/python", "-c", look], capture_output=True, text=True, timeout=60)
        assert {str(Path(line).parent) for line in loaded.stdout.split()} == {str(Path(BIN).parent / "lib")}, loaded
        done = submit(slurm, "site-mpi", "x", **exports)
        assert (done.state, done.code) == ("COMPLETED", 0), done
        assert said(done) == expected(TWO_TWO, "1 1 None", ["x"]), done


def test_slurm_script(slurm: Slurm, folder: Path) -> None:
    """What `mpicoll slurm-script` prints here is submitted from elsewhere, and runs as asked; also with mpirun."""
    asked = ["--nodes", "2", "--ntasks-per-node", "2", "--time", "2", "--output", "job.sbatch"]
    for launcher in ([], ["--launcher", "mpirun"]):
        command = [sys.executable, "-m", "mpicoll", "slurm-script", *asked, *launcher, "hello.py", "it's"]
        made = slurm.run(command, env=LAB, cwd=folder)
        assert (made.returncode, made.stdout, made.stderr) == (0, "", ""), made
        done = slurm.submit(folder / "job.sbatch", env=LAB)
        assert (done.state, done.code) == ("COMPLETED", 0), done
        assert said(done) == expected(TWO_TWO, "1 1 None", ["it's"]), done


def test_wrong_starts(slurm: Slurm, folder: Path) -> None:
    """What is missing is told in one line before anything starts."""
    hello = str(folder / "hello.py")
    wrong = [
        (template, exports, f"{template}: {words}")
        for template in TEMPLATES
        for exports, words in (
            ({"SCRIPT": "nowhere.py"}, "SCRIPT=nowhere.py: no such file (paths count from /"),
            ({"SCRIPT": hello, "PYTHON": "nowhere/python"}, "PYTHON=nowhere/python cannot import mpicoll"),
        )
        if template not in ("site-mpi", "container")
    ]
    wrong += [
        ("array", {"SCRIPT": hello, "INPUTS": "nowhere.txt"}, "array: INPUTS=nowhere.txt: no such file"),
        ("container", {"SCRIPT": hello}, "container: which image?"),
        ("container", {"SCRIPT": hello, "IMAGE": "nowhere.sif"}, "container: IMAGE=nowhere.sif: no such file"),
        (
            "container",
            {"SCRIPT": hello, "IMAGE": hello, "APPTAINER": "no-such"},
            "container: there is no no-such on this node",
        ),
        ("site-mpi", {"SCRIPT": "nowhere.py"}, "site-mpi: SCRIPT=nowhere.py: no such file"),
        ("site-mpi", {"SCRIPT": hello, "MPICC": "nowhere-cc"}, "site-mpi: there is no nowhere-cc"),
    ]
    jobs = []
    for template, exports, words in wrong:
        options = ["-N1", "--ntasks-per-node=1", *(["--array=1"] if template == "array" else [])]
        options += ["--gpus-per-node=1"] if template == "gpu" else []
        jobs.append((start(slurm, template, options=options, **exports), words))
    for job, words in jobs:
        done = slurm.finish(job)
        assert (done.state, done.code) == ("FAILED", 2), done
        assert words in done.output.splitlines()[-1], done
