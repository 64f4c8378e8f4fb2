"""Find starts that cannot work, and name the command that works. Pure functions of the environment.

All cases were tried with Slurm 22.05, Open MPI 5.0 and 4.1 and MPICH 5.0. SLURM_* variables do not count if another
launcher has set its own: under mpirun inside a job they describe the launch daemons. ``docs/messages.md`` lists the messages
of this file.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpicoll.errors import LaunchError, Message
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
"""The MPI plugins that srun is assumed to offer if it is not asked."""

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

ALONE = "each of them is a world of size 1"
_ABORT = "MPI_Init would abort"

INHERITED = Message(
    "this process inherited the launch environment of rank {rank} (process {owner}), which started it as a child: MPI_Init "
    "here {effect}, because that rank has already joined the job. Do not initialise MPI in child processes of a "
    "rank. If multiprocessing, a process pool or a data loader starts this script anew in its workers, put the script's calls "
    'under `if __name__ == "__main__":`. To run a separate job from inside a rank, start the job with '
    "`mpicoll run -n N {script}`, which cleans the environment, or with the site's mpiexec",
    "A child process of a rank calls `init_process_group`, or initialises MPI through this package.",
    "initialise MPI in the ranks only; start other jobs with `mpicoll run`",
)
CHILD = Message(
    "this process is {name}, which multiprocessing started in process {parent}, and it cannot be a rank: {why}. Let mpicoll "
    "start the ranks: call `dist.spawn(run, args, nprocs)` in place of `mp.spawn` or `Process(target=run)`, and start the "
    "script as `{python} {script}`. Or start no processes in the script, and start it as `mpicoll run -n {size} {script}`",
    "A script starts processes by multiprocessing (`mp.spawn`, `Process`, a pool), as torch's tutorials do, and these call "
    "`init_process_group`.",
    "call `dist.spawn(run, args, nprocs)` in place of `mp.spawn`, and start the script with `python`",
)
SRUN_PMIX = Message(
    "mpiexec started this process through srun, whose default here is --mpi=pmix, and {library} would abort in MPI_Init: it "
    "finds both PMI_SIZE (mpiexec's) and PMIX_NAMESPACE (srun's). Start the job with "
    "`SLURM_MPI_TYPE=none mpiexec -n {size} {python} {script}`, or with {run}, which sets it",
    "mpiexec of MPICH 5 inside a Slurm job whose srun uses PMIx by default.",
    "set `SLURM_MPI_TYPE=none` for mpiexec, or use `mpicoll run`",
)
OUTER_PMIX = Message(
    "mpiexec was started inside a job of another launcher, which left PMIX_NAMESPACE in the environment, and {library} would "
    "abort in MPI_Init. Start the job with {run}, which cleans the environment",
    "mpiexec of MPICH 5 inside a job of a launcher that uses PMIx.",
    "use `mpicoll run`, which cleans the environment",
)
OTHER_MPI = Message(
    "{launcher} started {number}, but the MPI that mpi4py loads here is {library}, which does not understand that launcher: "
    "{effect}. Start the job with {line}; `mpicoll doctor` shows which mpiexec belongs to which library",
    "The launcher belongs to another MPI than the library that mpi4py loads. Printed by the first process of the job.",
    "start the job with the command in the message",
)
OTHER_MPI_SHORT = Message(
    "{launcher} started {number}, but {library} does not understand it: {effect}. Use {line}; rank 0 prints the full message",
    "The message above in short, printed by the other processes of the job.",
    "start the job with the command in the message",
)
CONTRADICTION = Message(
    "init_process_group({asked}) contradicts {source}, where this process is rank {rank} of {size}. Leave rank= and "
    "world_size= out: they come from the launcher",
    "The program passes `rank=` or `world_size=`, and MPI has other values. Raised as ValueError.",
    "leave `rank=` and `world_size=` out",
)
NO_LAUNCHER = Message(
    "init_process_group(world_size={asked}), but MPI sees a world of size 1 and no launcher started this process. Start the "
    "job with {line}",
    "The program asks for several ranks, and was started without a launcher.",
    "start the job with the command in the message",
)
UNUSED_TASKS = Message(
    "Slurm job {job} was given {tasks} tasks, but only this process was started. Start the job with {line}. If one process is "
    "meant, call init_process_group(world_size=1)",
    "A batch script runs `python script.py` without srun or mpiexec. A warning.",
    "start the job with the command in the message, or pass `world_size=1`",
)
COPIES_OF_RUN = Message(
    "{launcher} started {number} copies of `mpicoll run`, which is a launcher itself: each would start a job of its own. Start "
    "it once: `mpicoll run -n {number} {script}`",
    "`srun mpicoll run script.py`, or `mpirun mpicoll run script.py`.",
    "start `mpicoll run` once, in the batch script itself",
)

GREEN_THREADS = Message(
    "gevent has replaced the threads of Python (monkey.patch_all), and the threads of this library would wait in C functions, "
    "which stops all greenlets. Leave the threads as they are: monkey.patch_all(thread=False)",
    "A program, or a library that the program imports, has called `gevent.monkey.patch_all()` or `patch_thread()`.",
    "call `gevent.monkey.patch_all(thread=False)`",
)

Listing = Callable[[], Sequence[str]]


def _assumed() -> Sequence[str]:
    return PLUGINS


def check_threads(modules: Mapping[str, Any]) -> None:
    """Raise LaunchError if gevent has replaced the threads of Python.

    Args:
        modules: the modules that are loaded, by name.
    """
    gevent = modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        raise LaunchError(GREEN_THREADS.text)


def ask_srun() -> Sequence[str]:
    """Return the MPI plugins that this site's srun lists (srun is run once), or `PLUGINS` if it lists none."""
    from mpicoll.launch.slurm import find_plugins

    try:
        return find_plugins()
    except LaunchError:
        return PLUGINS


class Script(str):
    """The arguments of ``python`` in a command line.

    Attributes:
        python: the word that started Python, so that a command works from the same folder.
    """

    python = "python"


def _python(script: str) -> str:
    return script.python if isinstance(script, Script) else "python"


def script_of(arguments: Sequence[str], argv: Sequence[str] = ()) -> Script:
    """Return the arguments of ``python`` in a command line (``sys.orig_argv``), for a command that the user can copy.

    Args:
        argv: ``sys.argv``, whose script counts if ``arguments`` name another file or none: options of Python with values, a
            child of multiprocessing, a rank of `spawn`.

    Example:
        >>> script_of(["/usr/bin/python3", "-u", "train.py", "--lr", "0.1"])
        'train.py --lr 0.1'
        >>> script_of(["python", "-m", "my.training"])
        '-m my.training'
    """
    rest = list(arguments[1:])
    while rest and re.fullmatch(r"-[bBdEiIOPqsSuvx]+", rest[0]):
        rest.pop(0)
    if argv and os.path.isfile(argv[0]) and rest[:1] not in (["-m"], [argv[0]]):
        rest = list(argv)
    count = 2 if rest[:1] == ["-m"] else 1
    text = shlex.join(rest)
    if len(text) > 200 or "\n" in text:
        text = f"{shlex.join(rest[:count])} ..."
    # "script.py" stands for python -c and for an interactive session.
    script = Script(text if rest and (count == 2 or not rest[0].startswith("-")) else "script.py")
    if arguments and arguments[0] and "\n" not in arguments[0]:
        word = arguments[0]
        name = os.path.basename(word)
        # srun replaces the name of a program by the whole path that it has found.
        script.python = name if name and shutil.which(name) == word else shlex.quote(word)
    return script


# --- a child of multiprocessing -------------------------------------------------------------------------------------


def check_child(
    environ: Mapping[str, str],
    child: tuple[str, int] | None,
    asked_world_size: int = -1,
    *,
    joined: bool = False,
    script: str = "script.py",
) -> None:
    """Refuse to make a rank of a child that multiprocessing started. Called before MPI is started.

    Outside of a job a child may be a world of size 1.

    Args:
        environ: the environment of this process.
        child: the result of `runtime.child_process.multiprocessing_child`.
        asked_world_size: the program's ``world_size=``, or -1.
        joined: whether this process is a copy (by fork) of a process that has joined the job.
        script: the script that runs.

    Raises:
        LaunchError: the child would take the place of the rank whose environment it has, or be a world of size 1 by mistake.
    """
    if child is None:
        return
    launcher = read_launcher(environ)
    size = asked_world_size if asked_world_size > 1 else launcher.size
    if joined:
        why = f"it is a copy of process {child[1]}, in which MPI runs"
    elif launcher.kind not in ("none", "slurm", "torchrun"):
        rank = "another rank" if launcher.rank is None else f"rank {launcher.rank}"
        why = f"MPI_Init here would take the place of {rank}, and crash, hang or abort the job"
    elif asked_world_size > 1 or ((launcher.size or 1) > 1 and asked_world_size != 1):
        why = "MPI_Init here would make a world of size 1"
    else:
        return
    name, parent = child
    raise LaunchError(CHILD(name=name, parent=parent, why=why, script=script, python=_python(script), size=size or "N"))


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
    """Raise LaunchError if initialising MPI would hang, abort or make many worlds of one process.

    Called right before ``MPI.Init_thread``.

    Args:
        environ: the environment of this process.
        pid: its process id.
        which_mpi: ``MPI.Get_library_version()`` (allowed before MPI is initialised), or ``None``.
        script: the script that the command in the message starts.
        listing: asks srun for its MPI plugins; called by one process of the job, and only if something is wrong.
        fd_target: returns what a file descriptor points to; for tests.
        asked_world_size: the program's ``world_size=``, or -1; 1: a world of size 1 is meant.

    Raises:
        LaunchError: this process inherited the launch environment of a rank that started it, or the library cannot talk to
            the launcher. A new mpirun from inside a rank sets a new environment and is no error.
    """
    family = mpi_family(which_mpi)
    text = which_mpi or ""
    owner = inherited(environ, pid) if fd_target is None else inherited(environ, pid, fd_target=fd_target)
    if owner is not None:
        raise LaunchError(_inherited(environ, owner, family, script))
    launcher = read_launcher(environ)
    # The configure line of an MPICH that was built for PMIx names PMIx; vendor builds (Cray) print no such line.
    plain_mpich = family == "mpich" and "configure" in text.lower() and "pmix" not in text.lower()
    if plain_mpich and launcher.kind in ("openmpi", "slurm-pmix", "pmix") and "PMI_FD" not in environ:
        # MPICH 5.0: "Runtime environment uses unsupported PMI version PMIx. Aborting."
        raise LaunchError(_mismatch(environ, launcher, text, _ABORT, script, listing))
    chosen = {"MPIR_CVAR_PMI_VERSION", "MPIR_CVAR_PMI_DISABLE"} & environ.keys()
    if plain_mpich and _major(text) >= 5 and {"PMI_SIZE", "PMIX_NAMESPACE"} <= environ.keys() and not chosen:
        raise LaunchError(_two_interfaces(environ, launcher, text, script))
    if family == "openmpi" and "PMIX_NAMESPACE" not in environ:
        # Open MPI 5 learns of other ranks from a PMIx server only. Version 4 may use PMI-2 as well, if it was built for PMI-2.
        # Debian's is not: it aborts under srun, also as a single task ("OMPI was not built with SLURM's PMI support").
        if "Debian" in text and launcher.kind in ("slurm", "slurm-pmi2"):
            raise LaunchError(_mismatch(environ, launcher, text, _ABORT, script, listing))
        if _major(text) >= 5 or "Debian" in text:
            _check_lonely(environ, asked_world_size, text, script, listing)


def _inherited(environ: Mapping[str, str], owner: str, family: Family, script: str) -> str:
    launcher = read_launcher(environ)
    effect = {"openmpi": "would wait without end", "mpich": "would abort the job"}.get(family, "would hang or abort")
    return INHERITED(rank=launcher.rank, owner=owner, effect=effect, script=script)


def _two_interfaces(environ: Mapping[str, str], launcher: Launcher, text: str, script: str) -> str:
    """Return the message for an mpiexec of MPICH whose daemons were started by an srun that gave them PMIx.

    MPICH 5.0: "Auto-detection of PMI version failed. Found both env vars PMI_SIZE and PMIX_NAMESPACE. Aborting."
    """
    size = launcher.size or "N"
    run = f"`mpicoll run -n {size} {script}`"
    if environ["PMIX_NAMESPACE"].startswith("slurm."):
        return SRUN_PMIX(library=_library(text), size=size, python=_python(script), script=script, run=run)
    return OUTER_PMIX(library=_library(text), run=run)


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
    """Compare MPI's rank and size with the launcher's and the caller's. Called when MPI is initialised.

    Args:
        environ: the environment of this process.
        world_size, rank: of COMM_WORLD, or of the caller's communicator if ``guest``.
        asked_rank, asked_world_size: ``init_process_group``'s arguments, -1 if not given.
        mpi_library: ``MPI.Get_library_version()``.
        guest: whether the caller passed a communicator (``comm=``), whose size says nothing about the launch.
        script, listing: as for `check_before_mpi`.

    Raises:
        LaunchError: this process is one of several worlds of size 1, since the launcher does not belong to the MPI library.
            Or the program asked for several ranks, and no launcher was used.
        ValueError: ``asked_rank`` or ``asked_world_size`` contradicts MPI.
    """
    if world_size == 1 and not guest:
        _check_lonely(environ, asked_world_size, mpi_library, script, listing)
    if asked_world_size not in (-1, world_size) or asked_rank not in (-1, rank):
        asked = [f"rank={asked_rank}"] * (asked_rank != -1) + [f"world_size={asked_world_size}"] * (
            asked_world_size != -1
        )
        source = "the communicator passed as comm=" if guest else "MPI"
        raise ValueError(CONTRADICTION(asked=", ".join(asked), source=source, rank=rank, size=world_size))


def _check_lonely(
    environ: Mapping[str, str], asked_world_size: int, mpi_library: str | None, script: str, listing: Listing
) -> None:
    if asked_world_size == 1:
        return  # a world of size 1 is meant
    own = _OWN[mpi_family(mpi_library)]
    found = {kind: launcher for kind in KINDS if (launcher := launched_by(kind, environ)) is not None}
    order = [kind for kind in own if kind in found] + [kind for kind in found if kind not in own]
    sized = [found[kind] for kind in order if found[kind].size is not None]
    # A launcher of the library's own family counts first: `mpirun -n 1` from inside a larger job is a world of 1.
    if sized and (sized[0].size or 1) > 1:
        raise LaunchError(_mismatch(environ, sized[0], mpi_library or "", ALONE, script, listing))
    if not sized and asked_world_size > 1:
        line = _line(mpi_library, asked_world_size, environ, script, listing())
        raise LaunchError(NO_LAUNCHER(asked=asked_world_size, line=line))


def unused_allocation(
    environ: Mapping[str, str],
    world_size: int,
    mpi_library: str | None = None,
    *,
    script: str = "script.py",
    listing: Listing = _assumed,
) -> str | None:
    """Return a warning for ``python script.py`` in a batch script whose job has several tasks, or ``None``.

    The start is no error, as one process may be meant.
    """
    tasks = allocated_tasks(environ)
    if world_size != 1 or tasks is None or tasks < 2 or read_launcher(environ).kind != "none":
        return None
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    return UNUSED_TASKS(job=job, tasks=tasks, line=_line(mpi_library, tasks, environ, script, listing()))


def check_runner(environ: Mapping[str, str], given: int | None, script: str) -> None:
    """Refuse several copies of ``mpicoll run``, which ``srun mpicoll run script.py`` starts.

    Args:
        given: the number of ranks from -n, or None. With a number, each copy may be meant to start a job of its own.

    Raises:
        LaunchError: a launcher has started several of this process, and no number of ranks is given.
    """
    launcher = read_launcher(environ)
    if given is not None or launcher.kind == "torchrun" or (launcher.size or 1) < 2:
        return
    raise LaunchError(COPIES_OF_RUN(launcher=_NAMES[launcher.kind], number=launcher.size, script=script))


def _mismatch(
    environ: Mapping[str, str], launcher: Launcher, mpi_library: str, effect: str, script: str, listing: Listing
) -> str:
    """Return the message for a launcher of another MPI: full for the first process of the job, short for the other processes."""
    number = "several processes" if launcher.size is None else f"{launcher.size} process{'es' * (launcher.size != 1)}"
    place = "" if launcher.rank is None else f" (this one as rank {launcher.rank})"
    short = bool(launcher.rank)
    return (OTHER_MPI_SHORT if short else OTHER_MPI)(
        launcher=_NAMES[launcher.kind],
        number=number + place,
        library=_library(mpi_library),
        effect=effect,
        line=_line(mpi_library, launcher.size or "N", environ, script, PLUGINS if short else listing(), short=short),
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
    """Return the command that works, in quotes; inside a Slurm job an srun command if srun can start this MPI."""
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
