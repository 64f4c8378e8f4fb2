"""Find the launcher of this process from an environment mapping.

The module imports no MPI. The only other source is the target of a file descriptor, which tests can replace. `wrong_starts`
finds wrong starts from the answers. Before MPI is initialised the answers replace MPI's; afterwards rank, size and nodes are
MPI's.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

Family = Literal["openmpi", "mpich", "unknown"]

MARK = "MPICOLL_RANK_PID"


@dataclass(frozen=True)
class Launcher:
    """The launcher that this process's environment describes; ``None`` for a fact that the environment lacks.

    ``kind`` is ``"openmpi"`` (also of an MPI based on Open MPI), ``"hydra"`` (mpiexec of MPICH and Intel MPI), ``"pals"``
    (Cray), ``"mvapich"``, ``"jsm"`` (IBM jsrun), ``"flux"``, ``"slurm-pmix"``, ``"slurm-pmi2"``, ``"slurm"`` (srun
    without an MPI plugin), ``"pmix"``, ``"pmi"``, ``"torchrun"`` or ``"none"``.
    """

    kind: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None


# kind -> variables of rank, size, local rank, local size. Several kinds can match, as a job started from inside another job
# inherits the outer job's variables; so the most specific kind is first.
_VARIABLES: dict[str, tuple[str, str, str, str]] = {
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "pals": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    "mvapich": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "jsm": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    "slurm-pmix": ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "slurm-pmi2": ("PMI_RANK", "PMI_SIZE", "SLURM_LOCALID", ""),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "pmix": ("PMIX_RANK", "", "", ""),
    "pmi": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}

KINDS = tuple(_VARIABLES)
"""The kinds of launchers, the most specific first."""

# Variables that identify a launch. PMI_FD is compared by what it points to, see _socket.
_IDENTITY = (
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMIX_SERVER_TMPDIR",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_FILE_LOCATION",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_ID",
    "PMI_FD",
    "PMI_PORT",
    "PMI_JOBID",
    "PMI_HOSTNAME",
    "HYDI_CONTROL_FD",
    "PALS_APID",
    "PALS_RANKID",
    "JSM_NAMESPACE_RANK",
    "FLUX_JOB_ID",
    "FLUX_TASK_RANK",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
)

# Variables that launchers set in a rank's environment and that a job started from there must not see. MCA settings are the
# user's, apart from the few that Open MPI's mpirun sets itself; SLURM_* describe the allocation, which is still valid.
_LEFT_BEHIND = re.compile(
    r"OMPI_(?!MCA_|ALLOW_)\w+|OMPI_MCA_(num_procs|initial_wdir|cpu_type|PREFIXES|orte_\w+|ess\w*)"
    r"|PMIX_(?!MCA_|PREFIX)\w+|PRTE_(?!MCA_|PREFIX|ALLOW_)\w+|OPAL_USER_PARAMS_GIVEN"
    r"|PMI_\w+|PMI2_\w+|HYDI_\w+|MPI_LOCALRANKID|MPI_LOCALNRANKS|MPICOLL_RANK_PID|MPICOLL_RUN_DIR"
)


def mpi_family(library_version: str | None) -> Family:
    """Return the family of launchers that a library belongs to, from the text of ``MPI.Get_library_version()``.

    Example:
        >>> mpi_family("Open MPI v5.0.11, package: ...")
        'openmpi'
        >>> mpi_family("Intel(R) MPI Library 2021.13 for Linux* OS")
        'mpich'
    """
    text = (library_version or "").lower()
    if "open mpi" in text or "openmpi" in text or "spectrum mpi" in text:
        return "openmpi"
    if "mpich" in text or "intel" in text or "impi" in text or "mvapich" in text:
        return "mpich"
    return "unknown"


def read_launcher(environ: Mapping[str, str]) -> Launcher:
    """Return the launcher of this process.

    SLURM_* variables count only if srun itself started the process: under mpirun inside a Slurm job those variables describe
    the launch daemons, not the ranks.

    Example:
        >>> read_launcher({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}).size
        4
        >>> read_launcher({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}).kind
        'none'
    """
    for kind in KINDS:
        if (launcher := launched_by(kind, environ)) is not None:
            return launcher
    return Launcher("none")


def launched_by(kind: str, environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher of this kind that the environment describes, or ``None`` if its variables are not set."""
    if not _present(kind, environ):
        return None
    rank, size, local_rank, local_size = (_number(environ, name) for name in _VARIABLES[kind])
    return Launcher(kind, rank, size, local_rank, local_size)


def _present(kind: str, environ: Mapping[str, str]) -> bool:
    pmi = "PMI_RANK" in environ
    pmix = environ.get("PMIX_NAMESPACE")
    if kind == "hydra":
        return pmi and ("MPI_LOCALNRANKS" in environ or "HYDI_CONTROL_FD" in environ)
    if kind == "pals":
        return "PALS_RANKID" in environ
    if kind == "slurm-pmix":
        return pmix is not None and pmix.startswith("slurm.") and is_step(environ)
    if kind == "slurm-pmi2":
        return pmi and is_step(environ)
    if kind == "slurm":
        return pmix is None and is_step(environ)
    if kind == "torchrun":
        # torchrun, or the variables of torch.distributed's env:// set by hand.
        return "RANK" in environ and (
            "TORCHELASTIC_RUN_ID" in environ or {"WORLD_SIZE", "MASTER_ADDR"} <= environ.keys()
        )
    return _VARIABLES[kind][0] in environ


def is_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process. The script of an sbatch job has SLURM_PROCID=0 too, but is no step."""
    step = _number(environ, "SLURM_STEP_ID")
    # The batch script, the interactive shell of salloc and other special steps have ids from 2^32 - 16 upwards.
    return step is not None and step < 2**32 - 16 and "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip() if name else ""
    return int(text) if text.isdigit() else None


def allocated_tasks(environ: Mapping[str, str]) -> int | None:
    """Return the number of tasks of the Slurm allocation around this process, or ``None`` outside of one.

    Example:
        >>> allocated_tasks({"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2(x3),1"})
        7
    """
    if not ("SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ):
        return None
    tasks = _number(environ, "SLURM_NTASKS")
    if tasks is None:  # a job that asked for nodes only
        each = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_TASKS_PER_NODE", ""))
        tasks = sum(int(number) * int(times or 1) for number, times in each)
    return tasks or None


def local_rank_hint(environ: Mapping[str, str]) -> int | None:
    """Return the rank within this node before MPI is initialised, or ``None`` if no variable holds the rank.

    ``LOCAL_RANK`` comes first (a script or site may set it on purpose), then the launcher's own variable.

    Example:
        >>> local_rank_hint({"MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4", "PMI_RANK": "7"})
        3
    """
    asked = _number(environ, "LOCAL_RANK")
    return read_launcher(environ).local_rank if asked is None else asked


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy without the variables of this process's launcher, from which a new job can be started."""
    return {name: value for name, value in environ.items() if not _LEFT_BEHIND.fullmatch(name)}


# --- a child process that inherits a rank's environment -------------------------------------------------------------


def _fd_target(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _digest(environ: Mapping[str, str]) -> str:
    known = "\n".join(f"{name}={environ[name]}" for name in _IDENTITY if name in environ)
    return hashlib.sha256(known.encode()).hexdigest()[:16] if known else ""


def _socket(environ: Mapping[str, str], fd_target: Callable[[int], str]) -> str:
    """Return the socket that PMI_FD points to, as ``socket:[inode]``, or ``""``."""
    descriptor = _number(environ, "PMI_FD")
    target = "" if descriptor is None else fd_target(descriptor)
    return target if target.startswith("socket:") else ""


def mark_rank(environ: MutableMapping[str, str], pid: int, *, fd_target: Callable[[int], str] = _fd_target) -> None:
    """Record in ``environ`` that process ``pid`` is a rank of the launch that ``environ`` describes.

    Called once, right before or after MPI is initialised. A process without a launcher is not recorded: its children may use
    MPI.
    """
    digest = _digest(environ)
    if digest:
        environ[MARK] = f"{pid}:{digest}:{_socket(environ, fd_target)}"


def inherited(environ: Mapping[str, str], pid: int, *, fd_target: Callable[[int], str] = _fd_target) -> str | None:
    """Return the process id of the rank whose launch environment this process has inherited, or ``None``.

    A new mpirun or srun from inside a rank sets a new environment, which does not count as inherited.
    """
    mark = environ.get(MARK)
    if mark is None:
        return None
    owner, _, rest = mark.partition(":")
    digest, _, recorded = rest.partition(":")
    # The descriptor number of a new launch is often the same, but the descriptor never points to the same socket. In an
    # inherited environment the descriptor is closed, reused for a file, or still the rank's own socket.
    here = _socket(environ, fd_target)
    return owner if owner != str(pid) and digest == _digest(environ) and here in ("", recorded) else None
