"""Starts that cannot work: what is wrong, and the line that would work. Pure functions of the environment.

Everything here was tried with Slurm 22.05, Open MPI 5.0 and 4.1 and MPICH 5.0. SLURM_* is never believed where another
launcher has spoken: under mpirun inside a job it describes the launch daemons.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence

from mpicoll.errors import LaunchError
from mpicoll.launch.environment import (
    KINDS,
    Family,
    Launcher,
    allocated_tasks,
    inherited,
    launched_by,
    mpi_family,
    read_launcher,
)

PLUGINS = ("pmix", "pmi2", "none")
"""What srun is taken to offer where nobody asks it."""

_OWN: dict[Family, tuple[str, ...]] = {
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

ALONE = "each of them is alone, in a world of size 1"

Listing = Callable[[], Sequence[str]]


def _assumed() -> Sequence[str]:
    return PLUGINS


def ask_srun() -> Sequence[str]:
    """Return what this site's srun offers (a short process of its own), or `PLUGINS` where it does not say."""
    from mpicoll.launch.slurm import find_plugins

    try:
        return find_plugins()
    except LaunchError:
        return PLUGINS


class Script(str):
    """What stands behind ``python`` in a command line.

    Attributes:
        python: how the program called Python, for a line that works from where it was started.
    """

    python = "python"


def _python(script: str) -> str:
    return script.python if isinstance(script, Script) else "python"


def script_of(arguments: Sequence[str]) -> Script:
    """Return what stands behind ``python`` in a command line (``sys.orig_argv``), for a line that the user can copy.

    Example:
        >>> script_of(["/usr/bin/python3", "-u", "train.py", "--lr", "0.1"])
        'train.py --lr 0.1'
        >>> script_of(["python", "-m", "my.training"])
        '-m my.training'
    """
    rest = list(arguments[1:])
    while rest and re.fullmatch(r"-[bBdEiIOPqsSuvx]+", rest[0]):
        rest.pop(0)
    text = shlex.join(rest)
    # python -c, options with values, an interactive session, very long lines: a name that stands for all of them.
    usable = rest and (rest[0] == "-m" or not rest[0].startswith("-")) and len(text) <= 200 and "\n" not in text
    script = Script(text if usable else "script.py")
    if arguments and arguments[0] and "\n" not in arguments[0]:
        word = arguments[0]
        name = os.path.basename(word)
        # srun hands on the whole path of what it has found by its name.
        script.python = name if name and shutil.which(name) == word else shlex.quote(word)
    return script


# --- before MPI is initialised --------------------------------------------------------------------------------------


def check_before_mpi(
    environ: Mapping[str, str],
    pid: int,
    which_mpi: str | None = None,
    *,
    script: str = "script.py",
    listing: Listing = _assumed,
    fd_target: Callable[[int], str] | None = None,
    asked_world_size: int = -1,
) -> None:
    """Raise LaunchError where initialising MPI would hang, abort or make many worlds of one process.

    Call it right before ``MPI.Init_thread``.

    Args:
        environ: the environment of this process.
        pid: its process id.
        which_mpi: ``MPI.Get_library_version()`` (allowed before MPI is initialised), or ``None``.
        script: what the line that would work is to start.
        listing: asks srun for its MPI plugins; called by one process of the job, and only when something is wrong.
        fd_target: what a file descriptor points to; for tests.
        asked_world_size: what the program says, or -1; 1: each process is meant to be alone.

    Raises:
        LaunchError: this process inherited the launch environment of a rank that started it (a new mpirun from inside
            a rank brings a new environment and is fine), or the library cannot talk to the launcher.
    """
    family = mpi_family(which_mpi)
    text = which_mpi or ""
    owner = inherited(environ, pid) if fd_target is None else inherited(environ, pid, fd_target=fd_target)
    if owner is not None:
        raise LaunchError(_inherited(environ, owner, family))
    launcher = read_launcher(environ)
    # An MPICH that was built for PMIx says so in its configure line; vendor builds (Cray) do not print theirs.
    plain_mpich = family == "mpich" and "configure" in text.lower() and "pmix" not in text.lower()
    if plain_mpich and launcher.kind in ("openmpi", "slurm-pmix", "pmix") and "PMI_FD" not in environ:
        # MPICH 5.0: "Runtime environment uses unsupported PMI version PMIx. Aborting."
        raise LaunchError(_mismatch(environ, launcher, text, "MPI_Init would abort", script, listing))
    chosen = {"MPIR_CVAR_PMI_VERSION", "MPIR_CVAR_PMI_DISABLE"} & environ.keys()
    if plain_mpich and _major(text) >= 5 and {"PMI_SIZE", "PMIX_NAMESPACE"} <= environ.keys() and not chosen:
        raise LaunchError(_two_interfaces(environ, launcher, text, script))
    if family == "openmpi" and "PMIX_NAMESPACE" not in environ:
        # Nobody but a PMIx server can tell Open MPI 5 of other ranks. Version 4 may speak PMI-2 as well, if it was built
        # for it, which Debian's is not: it aborts under srun, also alone ("OMPI was not built with SLURM's PMI support").
        if "Debian" in text and launcher.kind in ("slurm", "slurm-pmi2"):
            raise LaunchError(_mismatch(environ, launcher, text, "MPI_Init would abort", script, listing))
        if _major(text) >= 5 or "Debian" in text:
            _check_lonely(environ, asked_world_size, text, script, listing)


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


def _two_interfaces(environ: Mapping[str, str], launcher: Launcher, text: str, script: str) -> str:
    """Say what to do about an mpiexec of MPICH that started its daemons by an srun which gave them PMIx.

    MPICH 5.0: "Auto-detection of PMI version failed. Found both env vars PMI_SIZE and PMIX_NAMESPACE. Aborting."
    """
    size = launcher.size or "N"
    run = f"`mpicoll run -n {size} {script}`"
    if environ["PMIX_NAMESPACE"].startswith("slurm."):
        return (
            f"mpiexec started this process through srun, whose default here is --mpi=pmix, and {_library(text)} would "
            "abort in MPI_Init: it finds both PMI_SIZE (mpiexec's) and PMIX_NAMESPACE (srun's). "
            f"Start the job with `SLURM_MPI_TYPE=none mpiexec -n {size} {_python(script)} {script}`, or with {run}, which sets it"
        )
    return (
        "mpiexec was started inside a job of another launcher, which left PMIX_NAMESPACE in the environment, and "
        f"{_library(text)} would abort in MPI_Init. Start the job with {run}, which cleans the environment"
    )


# --- a world that is not the job's ----------------------------------------------------------------------------------


def check_world(
    environ: Mapping[str, str],
    world_size: int,
    rank: int,
    asked_rank: int = -1,
    asked_world_size: int = -1,
    mpi_library: str | None = None,
    *,
    guest: bool = False,
    script: str = "script.py",
    listing: Listing = _assumed,
) -> None:
    """Compare what MPI says with what the launcher and the caller say. Call it once MPI is initialised.

    Args:
        environ: the environment of this process.
        world_size, rank: of COMM_WORLD, or of the caller's communicator where ``guest``.
        asked_rank, asked_world_size: ``init_process_group``'s arguments, -1 where not given.
        mpi_library: ``MPI.Get_library_version()``.
        guest: the caller brought a communicator (``comm=``): its size says nothing about the launch.
        script, listing: as for `check_before_mpi`.

    Raises:
        LaunchError: this is one of several silent worlds of size 1, started by a launcher that does not belong to
            the MPI library, or several ranks were asked for and no launcher was used.
        ValueError: ``asked_rank`` or ``asked_world_size`` contradict MPI.
    """
    if world_size == 1 and not guest:
        _check_lonely(environ, asked_world_size, mpi_library, script, listing)
    if asked_world_size not in (-1, world_size) or asked_rank not in (-1, rank):
        asked = [f"rank={asked_rank}"] * (asked_rank != -1) + [f"world_size={asked_world_size}"] * (
            asked_world_size != -1
        )
        where = "the communicator passed as comm=" if guest else "MPI"
        raise ValueError(
            f"init_process_group({', '.join(asked)}) contradicts {where}, where this process is rank {rank} of "
            f"{world_size}. Leave rank= and world_size= out: they come from the launcher"
        )


def _check_lonely(
    environ: Mapping[str, str], asked_world_size: int, mpi_library: str | None, script: str, listing: Listing
) -> None:
    if asked_world_size == 1:
        return  # each is meant to be alone
    own = _OWN[mpi_family(mpi_library)]
    said = {kind: launcher for kind in KINDS if (launcher := launched_by(kind, environ)) is not None}
    order = [kind for kind in own if kind in said] + [kind for kind in said if kind not in own]
    sized = [said[kind] for kind in order if said[kind].size is not None]
    # A launcher of the library's own family knows best: `mpirun -n 1` from inside a larger job is a world of 1.
    if sized and (sized[0].size or 1) > 1:
        raise LaunchError(_mismatch(environ, sized[0], mpi_library or "", ALONE, script, listing))
    if not sized and asked_world_size > 1:
        line = _line(mpi_library, asked_world_size, environ, script, listing())
        raise LaunchError(
            f"init_process_group(world_size={asked_world_size}), but MPI sees a world of size 1 and no launcher "
            f"started this process. Start the job with {line}"
        )


def unused_allocation(
    environ: Mapping[str, str],
    world_size: int,
    mpi_library: str | None = None,
    *,
    script: str = "script.py",
    listing: Listing = _assumed,
) -> str | None:
    """Return a warning for ``python script.py`` in a batch script whose job has several tasks, or ``None``.

    One process may be meant, so it is no error.
    """
    tasks = allocated_tasks(environ)
    if world_size != 1 or tasks is None or tasks < 2 or read_launcher(environ).kind != "none":
        return None
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    return (
        f"Slurm job {job} was given {tasks} tasks, but this is one process alone, because nothing started the others. "
        f"Start the job with {_line(mpi_library, tasks, environ, script, listing())}. Where one process is meant, "
        "init_process_group(world_size=1) says so"
    )


def check_runner(environ: Mapping[str, str], given: int | None, script: str) -> None:
    """Refuse several copies of ``mpicoll run``, as ``srun mpicoll run script.py`` makes them.

    ``given`` is what was asked for by -n: with it, each copy may be meant to start a job of its own.

    Raises:
        LaunchError: a launcher has started several of this process, and no number of ranks is given.
    """
    launcher = read_launcher(environ)
    if given is not None or launcher.kind == "torchrun" or (launcher.size or 1) < 2:
        return
    what = _NAMES[launcher.kind]
    raise LaunchError(
        f"{what} started {launcher.size} copies of `mpicoll run`, which is a launcher itself: each would start "
        f"a job of its own. Start it once: `mpicoll run -n {launcher.size} {script}`"
    )


def _mismatch(
    environ: Mapping[str, str], launcher: Launcher, mpi_library: str, effect: str, script: str, listing: Listing
) -> str:
    """Say what is wrong: at length in the first process of the job, in the others with the line that would work."""
    number = "several processes" if launcher.size is None else f"{launcher.size} process{'es' * (launcher.size != 1)}"
    place = "" if launcher.rank is None else f" (this one as rank {launcher.rank})"
    size = launcher.size or "N"
    started = f"{_NAMES[launcher.kind]} started {number}{place}, but"
    if launcher.rank:
        line = _line(mpi_library, size, environ, script, PLUGINS, short=True)
        return f"{started} {_library(mpi_library)} does not understand it: {effect}. Use {line}; rank 0 says more"
    return (
        f"{started} the MPI that mpi4py loads here is {_library(mpi_library)}, which does not understand that launcher: "
        f"{effect}. Start the job with {_line(mpi_library, size, environ, script, listing())}; `mpicoll doctor` shows "
        "which mpiexec belongs to which library"
    )


def _line(
    mpi_library: str | None,
    size: int | str,
    environ: Mapping[str, str],
    script: str,
    listed: Sequence[str],
    *,
    short: bool = False,
) -> str:
    """Return the line that would work, in quotes; inside a Slurm job that of srun where it can start this MPI."""
    run = f"`mpicoll run -n {size} {script}`"
    if not ("SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ):
        return run
    from mpicoll.launch.slurm import how

    way = how(mpi_library or "Open MPI", listed, environ)
    if way.mpi is None:
        return run if short else f"{run} in the batch script, without srun ({way.reason})"
    srun = f"`srun --mpi={way.mpi} -n {size} {_python(script)} {script}`"
    return srun if short else f"{srun} or, without srun, {run}"


def _library(text: str) -> str:
    return " ".join(re.split(r"[,\n\0]", text, maxsplit=1)[0].split()) or "an unknown library"


def _major(text: str) -> int:
    """Return the major version of an Open MPI or MPICH, or 0."""
    found = re.match(r"(?:Open MPI v?|MPICH Version:\s*)(\d+)\.", text)
    return int(found.group(1)) if found else 0
