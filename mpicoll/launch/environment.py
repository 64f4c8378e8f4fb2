"""What started this process, read from an environment mapping; notices starts that cannot work.

Nothing here imports MPI, and the only thing read besides the mapping is (replaceable) what a file descriptor points
to. The answers serve to notice that something is wrong and to guess before MPI is up; once MPI runs, rank, size and
nodes come from MPI.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from mpicoll.errors import LaunchError

__all__ = [
    "Launcher",
    "check_before_mpi",
    "check_world",
    "local_rank_hint",
    "mark_rank",
    "mpi_family",
    "read_launcher",
    "without_launcher",
]

Family = Literal["openmpi", "mpich", "unknown"]

MARK = "MPICOLL_RANK_PID"


@dataclass(frozen=True)
class Launcher:
    """What started this process, as far as the environment says; ``None`` where it does not say.

    ``kind`` is ``"openmpi"`` (its mpirun, or a relative), ``"hydra"`` (mpiexec of MPICH and Intel MPI), ``"pals"``
    (Cray), ``"mvapich"``, ``"jsm"`` (IBM jsrun), ``"flux"``, ``"slurm-pmix"``, ``"slurm-pmi2"``, ``"slurm"`` (srun
    without an MPI plugin), ``"pmix"``, ``"pmi"``, ``"torchrun"`` or ``"none"``.
    """

    kind: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None


# kind -> variables of rank, size, local rank, local size. Sticky variables make several match (a job started from
# inside another job keeps the outer one's), so the order is from the surest to the vaguest.
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

# What one launch has different from every other one. PMI_FD is compared by what it points to, see _socket.
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

# What launchers leave behind in a rank's environment and a job started from there must not see. MCA settings are the
# user's, apart from the few that Open MPI's mpirun writes itself; SLURM_* describe the allocation, which still holds.
_LEFT_BEHIND = re.compile(
    r"OMPI_(?!MCA_|ALLOW_)\w+|OMPI_MCA_(num_procs|initial_wdir|cpu_type|PREFIXES|orte_\w+|ess\w*)"
    r"|PMIX_(?!MCA_|PREFIX)\w+|PRTE_(?!MCA_|PREFIX|ALLOW_)\w+|OPAL_USER_PARAMS_GIVEN"
    r"|PMI_\w+|PMI2_\w+|HYDI_\w+|MPI_LOCALRANKID|MPI_LOCALNRANKS|MPICOLL_RANK_PID|MPICOLL_RUN_DIR"
)


def mpi_family(library_version: str | None) -> Family:
    """Return which family of launchers a library belongs to, from ``MPI.Get_library_version()``'s text.

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
    """Return what started this process.

    SLURM_* counts only where srun itself started the process: under mpirun inside a Slurm job those variables are
    the launch daemons', not the ranks'.

    Example:
        >>> read_launcher({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}).size
        4
        >>> read_launcher({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}).kind
        'none'
    """
    for kind in _VARIABLES:
        if _present(kind, environ):
            return _read(kind, environ)
    return Launcher("none")


def _present(kind: str, environ: Mapping[str, str]) -> bool:
    pmi = "PMI_RANK" in environ
    pmix = environ.get("PMIX_NAMESPACE")
    if kind == "hydra":
        return pmi and ("MPI_LOCALNRANKS" in environ or "HYDI_CONTROL_FD" in environ)
    if kind == "pals":
        return "PALS_RANKID" in environ
    if kind == "slurm-pmix":
        return pmix is not None and pmix.startswith("slurm.") and _is_step(environ)
    if kind == "slurm-pmi2":
        return pmi and _is_step(environ)
    if kind == "slurm":
        return pmix is None and _is_step(environ)
    if kind == "torchrun":
        # torchrun, or the variables of torch.distributed's env:// set by hand.
        return "RANK" in environ and (
            "TORCHELASTIC_RUN_ID" in environ or {"WORLD_SIZE", "MASTER_ADDR"} <= environ.keys()
        )
    return _VARIABLES[kind][0] in environ


def _is_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process: the script of an sbatch job has SLURM_PROCID=0 too, but is no step."""
    step = _number(environ, "SLURM_STEP_ID")
    # The batch script, the interactive shell of salloc and other special steps have ids from 2^32 - 16 upwards.
    return step is not None and step < 2**32 - 16 and "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ


def _read(kind: str, environ: Mapping[str, str]) -> Launcher:
    rank, size, local_rank, local_size = (_number(environ, name) for name in _VARIABLES[kind])
    return Launcher(kind, rank, size, local_rank, local_size)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip() if name else ""
    return int(text) if text.isdigit() else None


def local_rank_hint(environ: Mapping[str, str]) -> int | None:
    """Return the rank within this node before MPI is up, or ``None`` when nothing says it.

    ``LOCAL_RANK`` comes first (a script or site may set it on purpose), then the launcher's own variable.

    Example:
        >>> local_rank_hint({"MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4", "PMI_RANK": "7"})
        3
    """
    asked = _number(environ, "LOCAL_RANK")
    return read_launcher(environ).local_rank if asked is None else asked


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy from which a new job can be started: without what the launcher of this process left behind."""
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

    Call it once, right before or after MPI is initialised. A process that no launcher started is not recorded: its
    children may use MPI.
    """
    digest = _digest(environ)
    if digest:
        environ[MARK] = f"{pid}:{digest}:{_socket(environ, fd_target)}"


def check_before_mpi(
    environ: Mapping[str, str],
    pid: int,
    which_mpi: str | None = None,
    *,
    fd_target: Callable[[int], str] = _fd_target,
) -> None:
    """Raise LaunchError where initialising MPI would hang or abort. Call it right before ``MPI.Init_thread``.

    ``which_mpi`` is ``MPI.Get_library_version()`` (allowed before MPI is initialised), or ``None``.

    Raises:
        LaunchError: this process inherited the launch environment of a rank that started it (a new mpirun from inside
            a rank brings a new environment and is fine), or the library is an MPICH that cannot talk to the launcher.
    """
    family = mpi_family(which_mpi)
    mark = environ.get(MARK)
    if mark is not None:
        owner, _, rest = mark.partition(":")
        digest, _, recorded = rest.partition(":")
        # The descriptor number of a new launch is often the same, what it points to never is. In an inherited
        # environment it is closed, reused for a file, or still the rank's own socket.
        here = _socket(environ, fd_target)
        if owner != str(pid) and digest == _digest(environ) and here in ("", recorded):
            raise LaunchError(_inherited(environ, owner, family))
    launcher = read_launcher(environ)
    if family == "mpich" and launcher.kind in ("openmpi", "slurm-pmix", "pmix") and "PMI_FD" not in environ:
        text = (which_mpi or "").lower()
        # MPICH 5.0: "Runtime environment uses unsupported PMI version PMIx. Aborting." An MPICH that was built for
        # PMIx says so in its configure line; vendor builds (Cray) do not print theirs.
        if "pmix" not in text and "configure" in text:
            raise LaunchError(_mismatch(environ, launcher, which_mpi or "", "MPI_Init would abort"))


def _inherited(environ: Mapping[str, str], owner: str, family: Family) -> str:
    launcher = read_launcher(environ)
    effect = {"openmpi": "would wait for ever", "mpich": "would abort the job"}.get(family, "would hang or abort")
    return (
        f"this process inherited the launch environment of rank {launcher.rank} (process {owner}), which started it as "
        f"a child: MPI_Init here {effect}, because that rank has already taken its place in the job. "
        "Do not initialise MPI in child processes of a rank (multiprocessing workers and data loaders included). "
        "To run a separate job from inside a rank, start it with `mpicoll run -n N script.py`, which cleans the "
        "environment, or with the site's mpiexec"
    )


# --- a world that is not the job's ----------------------------------------------------------------------------------

_OWN: dict[str, tuple[str, ...]] = {
    "openmpi": ("openmpi", "jsm", "slurm-pmix", "flux", "pmix"),
    "mpich": ("hydra", "pals", "mvapich", "slurm-pmi2", "slurm-pmix", "flux", "pmi"),
    "unknown": (),
}

_NAMES = {
    "openmpi": "Open MPI's mpirun",
    "hydra": "the mpiexec of MPICH or Intel MPI",
    "pals": "Cray's launcher (PALS)",
    "mvapich": "MVAPICH's launcher",
    "jsm": "jsrun",
    "flux": "flux run",
    "slurm-pmix": "srun with PMIx",
    "slurm-pmi2": "srun with PMI-2",
    "slurm": "srun without an MPI plugin",
    "pmix": "a PMIx launcher",
    "pmi": "a PMI launcher",
    "torchrun": "torchrun (or RANK and WORLD_SIZE set by hand)",
}


def check_world(
    environ: Mapping[str, str],
    world_size: int,
    rank: int,
    asked_rank: int = -1,
    asked_world_size: int = -1,
    mpi_library: str | None = None,
    *,
    guest: bool = False,
) -> None:
    """Compare what MPI says with what the launcher and the caller say. Call it once MPI is initialised.

    Args:
        environ: the environment of this process.
        world_size, rank: of COMM_WORLD, or of the caller's communicator where ``guest``.
        asked_rank, asked_world_size: ``init_process_group``'s arguments, -1 where not given.
        mpi_library: ``MPI.Get_library_version()``.
        guest: the caller brought a communicator (``comm=``): its size says nothing about the launch.

    Raises:
        LaunchError: this is one of several silent worlds of size 1, started by a launcher that does not belong to
            the MPI library, or several ranks were asked for and no launcher was used.
        ValueError: ``asked_rank`` or ``asked_world_size`` contradict MPI.
    """
    if world_size == 1 and not guest:
        _check_lonely(environ, asked_world_size, mpi_library)
    if asked_world_size not in (-1, world_size) or asked_rank not in (-1, rank):
        asked = [f"rank={asked_rank}"] * (asked_rank != -1) + [f"world_size={asked_world_size}"] * (
            asked_world_size != -1
        )
        where = "the communicator passed as comm=" if guest else "MPI"
        raise ValueError(
            f"init_process_group({', '.join(asked)}) contradicts {where}, where this process is rank {rank} of "
            f"{world_size}. Leave rank= and world_size= out: they come from the launcher"
        )


def _check_lonely(environ: Mapping[str, str], asked_world_size: int, mpi_library: str | None) -> None:
    own = [kind for kind in _OWN[mpi_family(mpi_library)] if _present(kind, environ)]
    foreign = [kind for kind in _VARIABLES if _present(kind, environ) and kind not in own]
    sized = [launcher for kind in own + foreign if (launcher := _read(kind, environ)).size is not None]
    # A launcher of the library's own family knows best: `mpirun -n 1` from inside a larger job is a world of 1.
    if sized and (sized[0].size or 1) > 1:
        raise LaunchError(_mismatch(environ, sized[0], mpi_library or "", "MPI sees a world of size 1 on each of them"))
    if not sized and asked_world_size > 1:
        raise LaunchError(
            f"init_process_group(world_size={asked_world_size}), but MPI sees a world of size 1 and no launcher "
            f"started this process. Start the job with `{_command(mpi_library, asked_world_size, environ)}`"
        )


def _mismatch(environ: Mapping[str, str], launcher: Launcher, mpi_library: str, effect: str) -> str:
    number = "several processes" if launcher.size is None else f"{launcher.size} processes"
    place = "" if launcher.rank is None else f" (this one as rank {launcher.rank})"
    size = launcher.size or "N"
    library = " ".join(re.split(r"[,\n\0]", mpi_library, maxsplit=1)[0].split()) or "an unknown library"
    return (
        f"{_NAMES[launcher.kind]} started {number}{place}, but the MPI that mpi4py loads here is {library}, which does "
        f"not understand that launcher: {effect}. "
        f"Start the job with `{_command(mpi_library, size, environ)}`; `mpicoll doctor` shows which mpiexec belongs "
        "to which library"
    )


def _command(mpi_library: str | None, size: int | str, environ: Mapping[str, str]) -> str:
    run = f"mpicoll run -n {size} script.py"
    if not ("SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ):
        return run
    plugin = {"openmpi": "pmix", "mpich": "pmi2"}.get(mpi_family(mpi_library), "pmix")
    return f"srun --mpi={plugin} -n {size} python script.py` or, inside the allocation, `{run}"
