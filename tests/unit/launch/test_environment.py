"""What started this process: environments as real launchers leave them, without MPI."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpicoll.errors import LaunchError
from mpicoll.launch.environment import (
    _VARIABLES,
    Launcher,
    allocated_tasks,
    local_rank_hint,
    mark_rank,
    mpi_family,
    read_launcher,
    without_launcher,
)
from mpicoll.launch.wrong_starts import (
    check_before_mpi,
    check_child,
    check_runner,
    check_threads,
    check_world,
    script_of,
    unused_allocation,
)
from mpicoll.runtime.child_process import RANK_VARIABLES, is_in_job

OPENMPI_LIBRARY = "Open MPI v5.0.11, package: Open MPI user@host Distribution, ident: 5.0.11, Sep 16, 2026"
MPICH_LIBRARY = "MPICH Version:      5.0.2\nMPICH Device:   ch4:ucx ofi\nMPICH configure: --with-pm=hydra:gforker"
MPICH_PMIX_LIBRARY = "MPICH Version:\t4.2.0\nMPICH configure:\t--with-device=ch4:ofi --with-pmix=/opt/pmix"
INTEL_LIBRARY = "Intel(R) MPI Library 2021.13 for Linux* OS"
CRAY_LIBRARY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)"

LOGIN = {"HOME": "/home/u", "PATH": "/usr/bin", "OMPI_MCA_btl": "self,tcp", "I_MPI_ROOT": "/opt/intel/mpi"}
OPENMPI5 = {
    **LOGIN,
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_FILE_LOCATION": "/tmp/ompi.3688/1/1",
    "OMPI_MCA_num_procs": "4",
    "OPAL_PREFIX": "/opt/openmpi",
    "PMIX_NAMESPACE": "prterun-n1-3688@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_TMPDIR": "/tmp/ompi.3688",
    "PRTE_LAUNCHED": "1",
}
HYDRA = {
    **LOGIN,
    "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "4",
    "MPI_LOCALRANKID": "2",
    "PMI_FD": "9",
    "PMI_HOSTNAME": "n1",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
}
# The script of an sbatch job: SLURM_PROCID is there although no srun has run.
BATCH = {
    **LOGIN,
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "n1",
}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
SRUN_PMIX = {**STEP, "PMIX_NAMESPACE": "slurm.pmix.77.0", "PMIX_RANK": "3", "SLURM_MPI_TYPE": "pmix"}
SRUN_PMI2 = {**STEP, "PMI_FD": "12", "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "77.0"}
MPIRUN_IN_SLURM = {**STEP, **OPENMPI5, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
PALS = {
    **LOGIN,
    "PALS_APID": "8a3c",
    "PALS_RANKID": "5",
    "PALS_LOCAL_RANKID": "1",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
}
TORCHRUN = {
    **LOGIN,
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
SOCKETS = {9: "socket:[100]", 12: "socket:[101]"}


def sockets(descriptor: int) -> str:
    return SOCKETS.get(descriptor, "")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (LOGIN, Launcher("none")),
        (OPENMPI5, Launcher("openmpi", 1, 4, 1, 2)),
        (HYDRA, Launcher("hydra", 2, 4, 2, 4)),
        (BATCH, Launcher("none")),
        (STEP, Launcher("slurm", 3, 4, 1, None)),
        ({**STEP, "SLURM_STEP_ID": "4294967290"}, Launcher("none")),  # the interactive shell of salloc
        (SRUN_PMIX, Launcher("slurm-pmix", 3, 4, 1, None)),
        (SRUN_PMI2, Launcher("slurm-pmi2", 3, 4, 1, None)),
        (MPIRUN_IN_SLURM, Launcher("openmpi", 1, 4, 1, 2)),
        ({**STEP, **HYDRA}, Launcher("hydra", 2, 4, 2, 4)),
        (PALS, Launcher("pals", 5, 8, 1, 4)),
        (TORCHRUN, Launcher("torchrun", 1, 2, 1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Launcher("pmi", 0, 2, None, None)),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}, Launcher("flux", 1, 2, 0, None)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, Launcher("mvapich", 1, 2, None, None)),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"}, Launcher("jsm", 1, 2, None, None)),
        ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": ""}, Launcher("openmpi")),
    ],
)
def test_read_launcher(environ: dict[str, str], expected: Launcher) -> None:
    """Each launcher is known by its own variables, and SLURM_* counts only in a step that srun started."""
    assert read_launcher(environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (LOGIN, None),
        (OPENMPI5, 1),
        (HYDRA, 2),
        (BATCH, None),
        (SRUN_PMIX, 1),
        (MPIRUN_IN_SLURM, 1),
        ({**OPENMPI5, "LOCAL_RANK": "0"}, 0),
        ({"LOCAL_RANK": "junk"}, None),
    ],
)
def test_local_rank_hint(environ: dict[str, str], expected: int | None) -> None:
    """LOCAL_RANK comes first, then the launcher's own variable; SLURM_LOCALID is not believed under mpirun."""
    assert local_rank_hint(environ) == expected


@pytest.mark.parametrize(
    ("text", "family"),
    [
        (OPENMPI_LIBRARY, "openmpi"),
        (MPICH_LIBRARY, "mpich"),
        (INTEL_LIBRARY, "mpich"),
        (CRAY_LIBRARY, "mpich"),
        ("", "unknown"),
        (None, "unknown"),
    ],
)
def test_family(text: str | None, family: str) -> None:
    """The library's own words say which launchers it understands."""
    assert mpi_family(text) == family


# --- children that inherit a rank's environment ---


@pytest.mark.parametrize("environ", [OPENMPI5, HYDRA, SRUN_PMIX, SRUN_PMI2, PALS])
def test_child_of_a_rank_is_refused(environ: dict[str, str]) -> None:
    """A child that inherits the launch environment gets LaunchError, the rank itself and its init again do not."""
    rank = dict(environ)
    check_before_mpi(rank, 100, fd_target=sockets)
    mark_rank(rank, 100, fd_target=sockets)
    check_before_mpi(rank, 100, fd_target=sockets)
    for target in (sockets, lambda fd: "", lambda fd: "/dev/null"):  # inherited, closed, reused for a file
        with pytest.raises(LaunchError, match=r"inherited.*process 100.*mpicoll run"):
            check_before_mpi(rank, 101, fd_target=target)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (OPENMPI5, {"PMIX_NAMESPACE": "prterun-n1-4000@1", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}),
        (OPENMPI5, {"PMIX_NAMESPACE": "prterun-n1-4000@1"}),  # the same rank number in the new job
        (OPENMPI5, {name: HYDRA[name] for name in HYDRA if name not in LOGIN}),
        (SRUN_PMIX, {"SLURM_STEP_ID": "1", "PMIX_NAMESPACE": "slurm.pmix.77.1"}),
        (SRUN_PMIX, OPENMPI5),
        (HYDRA, OPENMPI5),
    ],
)
def test_new_job_inside_a_rank_is_fine(outer: dict[str, str], inner: dict[str, str]) -> None:
    """An mpirun or srun started from inside a rank brings other variables."""
    rank = dict(outer)
    mark_rank(rank, 100, fd_target=sockets)
    check_before_mpi({**rank, **inner}, 200, fd_target=sockets)


def test_new_hydra_job_has_the_same_variables() -> None:
    """MPICH's mpiexec inside a rank of its own sets equal variables: only what PMI_FD points to differs."""
    rank = dict(HYDRA)
    mark_rank(rank, 100, fd_target=sockets)
    check_before_mpi(rank, 200, fd_target=lambda fd: "socket:[555]")


def test_children_of_a_serial_run_are_fine() -> None:
    """Without a launcher nothing is recorded."""
    serial = dict(LOGIN)
    mark_rank(serial, 100)
    assert serial == LOGIN
    check_before_mpi(serial, 101)


def test_without_launcher_makes_a_clean_start() -> None:
    """What the launcher left goes; MCA settings, prefixes and the allocation stay."""
    rank = {**MPIRUN_IN_SLURM, **HYDRA, "PRTE_MCA_rmaps_default_mapping_policy": "node", "MPICOLL_TIMEOUT": "9"}
    mark_rank(rank, 100, fd_target=sockets)
    clean = without_launcher(rank)
    assert read_launcher({k: v for k, v in clean.items() if not k.startswith("SLURM_STEP")}).kind == "none"
    kept = {"OMPI_MCA_btl", "OPAL_PREFIX", "PRTE_MCA_rmaps_default_mapping_policy", "MPICOLL_TIMEOUT", "SLURM_JOB_ID"}
    assert kept <= set(clean)
    assert "MPICOLL_RANK_PID" not in clean
    assert "OMPI_MCA_num_procs" not in clean


# --- wrong starts ---


@pytest.mark.parametrize(
    ("environ", "library", "words"),
    [
        (HYDRA, OPENMPI_LIBRARY, ["mpiexec of MPICH", "4 processes", "rank 2", "Open MPI v5.0.11", "mpicoll run -n 4"]),
        (OPENMPI5, MPICH_PMIX_LIBRARY, ["Open MPI's mpirun", "MPICH Version: 4.2.0", "mpicoll run -n 4"]),
        (SRUN_PMI2, OPENMPI_LIBRARY, ["srun with PMI-2", "srun --mpi=pmix -n 4"]),
        (STEP, OPENMPI_LIBRARY, ["srun without an MPI plugin", "srun --mpi=pmix -n 4"]),
        (STEP, MPICH_LIBRARY, ["srun --mpi=pmi2 -n 4"]),
        (STEP, None, ["unknown library", "srun --mpi="]),
        (TORCHRUN, OPENMPI_LIBRARY, ["torchrun (or RANK and WORLD_SIZE set by hand) started 2", "mpicoll run -n 2"]),
        (PALS, OPENMPI_LIBRARY, ["PALS", "8 processes"]),
        (OPENMPI5, OPENMPI_LIBRARY, ["Open MPI's mpirun"]),  # another version's mpirun
    ],
)
def test_silent_worlds_of_one(environ: dict[str, str], library: str | None, words: list[str]) -> None:
    """A world of 1 inside a job of many names what was found and the command that would work."""
    with pytest.raises(LaunchError) as caught:
        check_world(environ, 1, 0, mpi_library=library)
    for word in words:
        assert word in str(caught.value)
    check_world(environ, 1, 0, mpi_library=library, guest=True)


@pytest.mark.parametrize(
    ("environ", "library"),
    [
        (LOGIN, OPENMPI_LIBRARY),
        (BATCH, OPENMPI_LIBRARY),
        (BATCH, MPICH_LIBRARY),
        ({**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "4"}, OPENMPI_LIBRARY),
        ({**OPENMPI5, "OMPI_COMM_WORLD_SIZE": "1"}, OPENMPI_LIBRARY),
        # mpirun -n 1 of one MPI from inside a job of another: the library's own launcher counts.
        ({**HYDRA, **OPENMPI5, "OMPI_COMM_WORLD_SIZE": "1"}, OPENMPI_LIBRARY),
        ({**OPENMPI5, **HYDRA, "PMI_SIZE": "1"}, MPICH_LIBRARY),
        ({**STEP, **OPENMPI5, "OMPI_COMM_WORLD_SIZE": "1"}, OPENMPI_LIBRARY),
        ({**LOGIN, "RANK": "0", "WORLD_SIZE": "4"}, OPENMPI_LIBRARY),
    ],
)
def test_serial_runs_are_not_refused(environ: dict[str, str], library: str) -> None:
    """One process is one process: also in an allocation, in an sbatch script, under mpirun -n 1."""
    check_world(environ, 1, 0, mpi_library=library)
    check_world(environ, 1, 0, 0, 1, library)


@pytest.mark.parametrize("environ", [OPENMPI5, HYDRA, SRUN_PMIX, SRUN_PMI2, MPIRUN_IN_SLURM, LOGIN])
def test_worlds_of_many_are_believed(environ: dict[str, str]) -> None:
    """Where MPI sees several ranks, nothing else counts."""
    check_world(environ, 4, 2, mpi_library=OPENMPI_LIBRARY)
    check_world(environ, 4, 2, 2, 4, OPENMPI_LIBRARY)


@pytest.mark.parametrize(("rank", "world_size"), [(0, -1), (-1, 8), (0, 4), (3, 8)])
def test_contradicting_arguments(rank: int, world_size: int) -> None:
    """rank= and world_size= that MPI does not confirm are ValueError, and the message holds both sides."""
    with pytest.raises(ValueError, match="rank 2 of 4") as caught:
        check_world(OPENMPI5, 4, 2, rank, world_size, OPENMPI_LIBRARY)
    assert (f"rank={rank}" in str(caught.value)) == (rank != -1)
    assert (f"world_size={world_size}" in str(caught.value)) == (world_size != -1)


def test_several_ranks_without_launcher() -> None:
    """``python script.py`` with world_size=4 names the command that starts four."""
    with pytest.raises(LaunchError, match=r"mpicoll run -n 4 script\.py"):
        check_world(LOGIN, 1, 0, 0, 4, OPENMPI_LIBRARY)
    with pytest.raises(ValueError, match="comm="):
        check_world(LOGIN, 1, 0, 0, 4, OPENMPI_LIBRARY, guest=True)


@pytest.mark.parametrize("environ", [OPENMPI5, SRUN_PMIX])
def test_mpich_under_pmix_is_refused_before_it_aborts(environ: dict[str, str]) -> None:
    """An MPICH without PMIx would abort in MPI_Init; one that was built with it, or does not tell, is let through."""
    with pytest.raises(LaunchError, match="MPI_Init would abort"):
        check_before_mpi(environ, 1, MPICH_LIBRARY, fd_target=sockets)
    for library in (MPICH_PMIX_LIBRARY, CRAY_LIBRARY, INTEL_LIBRARY, OPENMPI_LIBRARY, None):
        check_before_mpi(environ, 1, library, fd_target=sockets)


@pytest.mark.parametrize(
    ("environ", "words"),
    [(SRUN_PMIX, "SLURM_MPI_TYPE=none mpiexec -n 4 python s.py"), (OPENMPI5, "`mpicoll run -n 4 s.py`, which cleans")],
)
def test_mpich_between_two_interfaces(environ: dict[str, str], words: str) -> None:
    """MPICH 5 aborts where srun's default gave PMIx to mpiexec's daemons, or an outer job left it; MPICH 4 does not."""
    both = {**environ, **HYDRA}
    with pytest.raises(LaunchError) as caught:
        check_before_mpi(both, 1, MPICH_LIBRARY, script="s.py", fd_target=sockets)
    assert words in str(caught.value)
    check_before_mpi(both, 1, MPICH_LIBRARY.replace("5.0.2", "4.1.2"), fd_target=sockets)
    check_before_mpi({**both, "MPIR_CVAR_PMI_VERSION": "1"}, 1, MPICH_LIBRARY, fd_target=sockets)
    check_before_mpi(both, 1, OPENMPI_LIBRARY, fd_target=sockets)


@pytest.mark.parametrize("environ", [SRUN_PMI2, STEP, HYDRA])
def test_open_mpi_without_pmix_is_refused_before_mpi(environ: dict[str, str]) -> None:
    """Open MPI 5 without PMIx is alone for certain; version 4 may speak PMI-2, and one process is one process."""
    with pytest.raises(LaunchError, match="world of size 1"):
        check_before_mpi(environ, 1, OPENMPI_LIBRARY, fd_target=sockets)
    check_before_mpi(environ, 1, OPENMPI_LIBRARY.replace("v5.0.11", "v4.1.4"), fd_target=sockets)
    one = {**environ, "PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"}
    check_before_mpi(one, 1, OPENMPI_LIBRARY, fd_target=sockets)
    check_before_mpi(BATCH, 1, OPENMPI_LIBRARY, fd_target=sockets)


@pytest.mark.parametrize("environ", [SRUN_PMI2, STEP])
def test_debians_open_mpi_under_srun(environ: dict[str, str]) -> None:
    """Debian's Open MPI 4.1 aborts under srun without PMIx, also alone; in a batch script and under PMIx it starts."""
    debian = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"
    one = {**environ, "PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "SLURM_PROCID": "0"}
    for step, size in ((environ, 4), (one, 1)):
        with pytest.raises(LaunchError, match=rf"abort.*`srun --mpi=pmix -n {size} python s\.py`"):
            check_before_mpi(step, 1, debian, script="s.py", fd_target=sockets)
    for fine in (BATCH, SRUN_PMIX, MPIRUN_IN_SLURM, LOGIN):
        check_before_mpi(fine, 1, debian, fd_target=sockets)
    with pytest.raises(LaunchError, match="world of size 1"):
        check_before_mpi(HYDRA, 1, debian, fd_target=sockets)


def test_one_rank_tells_the_others_are_short() -> None:
    """Rank 0 says all and asks srun what it offers; the others say the line that would work and ask nobody."""
    asked = []

    def listing() -> list[str]:
        asked.append(1)
        return ["none", "pmix_v4"]

    def said(rank: int) -> str:
        environ = {**STEP, "SLURM_PROCID": f"{rank}"}
        with pytest.raises(LaunchError) as caught:
            check_before_mpi(environ, 1, OPENMPI_LIBRARY, script="t.py -x", listing=listing)
        return str(caught.value)

    first, other = said(0), said(3)
    assert asked == [1]
    assert "`srun --mpi=pmix_v4 -n 4 python t.py -x`" in first
    assert "`mpicoll run -n 4 t.py -x`" in first
    assert "`srun --mpi=pmix -n 4 python t.py -x`; rank 0 prints the full message" in other
    assert len(other) < len(first) * 0.7


def test_srun_that_cannot_start_this_mpi() -> None:
    """Where srun has no plugin for the MPI, the line is that of mpicoll run, and says why."""
    with pytest.raises(LaunchError, match=r"`mpicoll run -n 4 script\.py` .*needs PMIx and srun offers none, pmi2"):
        check_world({**STEP, "SLURM_PROCID": "0"}, 1, 0, mpi_library=OPENMPI_LIBRARY, listing=lambda: ["none", "pmi2"])


def test_unused_allocation() -> None:
    """``python script.py`` in a batch script with several tasks gets a warning with the line; other starts do not."""
    warning = unused_allocation(BATCH, 1, OPENMPI_LIBRARY, script="s.py")
    assert warning is not None
    for words in ("Slurm job 77", "4 tasks", "`srun --mpi=pmix -n 4 python s.py`", "`mpicoll run -n 4 s.py`"):
        assert words in warning
    assert "--mpi=pmi2" in (unused_allocation(BATCH, 1, MPICH_LIBRARY) or "")
    for environ, size in (
        (BATCH, 4),
        ({**BATCH, "SLURM_NTASKS": "1"}, 1),
        (STEP, 1),  # an error, and not ours
        ({**STEP, **OPENMPI5, "OMPI_COMM_WORLD_SIZE": "1"}, 1),
        ({**BATCH, **HYDRA, "PMI_SIZE": "1"}, 1),
        (LOGIN, 1),
    ):
        assert unused_allocation(environ, size, OPENMPI_LIBRARY) is None, environ


@pytest.mark.parametrize(
    ("environ", "tasks"),
    [
        (BATCH, 4),
        (LOGIN, None),
        ({"SLURM_JOB_ID": "1", "SLURM_TASKS_PER_NODE": "2(x3),1"}, 7),
        ({"SLURM_JOB_ID": "1"}, None),
        ({"SLURM_NTASKS": "4"}, None),
    ],
)
def test_allocated_tasks(environ: dict[str, str], tasks: int | None) -> None:
    """The tasks of an allocation, also of one that asked for nodes alone."""
    assert allocated_tasks(environ) == tasks


@pytest.mark.parametrize("environ", [STEP, SRUN_PMI2, OPENMPI5, HYDRA])
def test_several_copies_of_mpicoll_run(environ: dict[str, str]) -> None:
    """``srun mpicoll run script.py`` is refused; with -n each copy may be meant to start a job of its own."""
    with pytest.raises(LaunchError, match=r"4 copies of `mpicoll run`.*`mpicoll run -n 4 s\.py`"):
        check_runner(environ, None, "s.py")
    check_runner(environ, 2, "s.py")
    check_runner(BATCH, None, "s.py")
    check_runner({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, None, "s.py")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/usr/bin/python", "train.py", "--name", "a b"], "train.py --name 'a b'"),
        (["python", "-uB", "-m", "pkg.mod", "1"], "-m pkg.mod 1"),
        (["python", "-c", "import x"], "script.py"),
        (["python", "-W", "error", "x.py"], "script.py"),
        (["python"], "script.py"),
        (["python", "x.py", "y" * 300], "x.py ..."),
        (["python", "-m", "pkg.mod", "a\nb"], "-m pkg.mod ..."),
    ],
)
def test_script_of(arguments: list[str], expected: str) -> None:
    """The line that would work starts what the user started, or a name that stands for it."""
    assert script_of(arguments) == expected


def test_script_that_runs(tmp_path: Path) -> None:
    """Where Python's own arguments do not name the script that runs, ``sys.argv`` does: children, ranks of spawn, options."""
    script = tmp_path / "train.py"
    script.touch()
    child = ["-c", "from multiprocessing.spawn import spawn_main; ...", "--multiprocessing-fork"]
    for arguments in (
        child,
        ["/x/spawn_child.py", "/tmp/folder"],
        ["-W", "error", str(script), "1"],
        ["-Xdev", str(script)],
    ):
        assert script_of(["python", *arguments], [str(script), "1"]) == f"{script} 1"
    assert script_of(["python", "-m", "pkg.train", "1"], [str(script), "1"]) == "-m pkg.train 1"
    assert script_of(["python", "x.py"], ["changed by the program"]) == "x.py"
    assert script_of(["python", "-c", "import x"], ["-c"]) == "script.py"


@pytest.mark.parametrize(
    ("environ", "asked", "joined", "words"),
    [
        (HYDRA, -1, False, "would take the place of rank"),
        (OPENMPI5, 1, False, "would take the place of rank 1"),
        (SRUN_PMI2, -1, False, "would take the place of rank"),
        (LOGIN, 2, False, "would make a world of size 1"),
        (STEP, -1, False, "would make a world of size 1"),
        (LOGIN, -1, True, "a copy of process 7, in which MPI runs"),
        (LOGIN, -1, False, None),
        (STEP, 1, False, None),
    ],
)
def test_a_child_of_multiprocessing(environ: dict[str, str], asked: int, joined: bool, words: str | None) -> None:
    """A child is told of dist.spawn, with the script, under each launcher; outside of jobs it may be a world of size 1."""
    check_child(environ, None, asked, joined=joined)
    if words is None:
        check_child(environ, ("Process-3", 7), asked, joined=joined)
        return
    with pytest.raises(LaunchError) as caught:
        check_child(environ, ("Process-3", 7), asked, joined=joined, script="train.py")
    text = str(caught.value)
    assert "this process is Process-3, which multiprocessing started in process 7" in text
    assert words in text
    assert "call `dist.spawn(run, args, nprocs)` in place of `mp.spawn`" in text
    assert "`python train.py`" in text


def test_ranks_started_by_hand() -> None:
    """RANK, WORLD_SIZE and MASTER_ADDR set by hand, as for torch's env://, do not make two silent worlds of one."""
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with pytest.raises(LaunchError, match="mpicoll run -n 2"):
        check_world(environ, 1, 0, mpi_library="Open MPI v5.0.11")
    check_world(environ, 2, 1, mpi_library="Open MPI v5.0.11")
    check_world({**environ, "WORLD_SIZE": "1", "RANK": "0"}, 1, 0, mpi_library="Open MPI v5.0.11")


def test_the_variables_of_a_rank() -> None:
    """A child of multiprocessing is in a job if a launcher that starts MPI has passed the rank to its parent."""
    with_mpi = [names[0] for kind, names in _VARIABLES.items() if kind not in ("slurm", "torchrun")]
    assert set(RANK_VARIABLES) == set(with_mpi)
    assert not is_in_job({"RANK": "1", "SLURM_PROCID": "1"})
    assert is_in_job({"PMI_RANK": "0"})


def test_threads_that_gevent_has_replaced() -> None:
    """The library's threads cannot be greenlets: init_process_group says so, before MPI starts."""

    def gevent(*patched: str) -> dict[str, Any]:
        return {"gevent.monkey": SimpleNamespace(is_module_patched=lambda name: name in patched)}

    check_threads({})
    check_threads(gevent("socket"))
    with pytest.raises(LaunchError, match=r"monkey.patch_all\(thread=False\)"):
        check_threads(gevent("socket", "threading"))
