"""`mpicoll slurm-script`: print a batch script for this site and the MPI that this Python loads."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from dataclasses import dataclass, field

from mpicoll.cli.run import rank_command
from mpicoll.errors import LaunchError
from mpicoll.launch import mpi_library, mpiexec, slurm
from mpicoll.launch.mpi_library import MpiLibrary
from mpicoll.launch.slurm import Way

# Slurm's forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, d-hours:minutes:seconds.
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)


@dataclass(frozen=True)
class Wanted:
    """The resources that the job asks Slurm for, and the command of each rank."""

    command: tuple[str, ...]
    nodes: int = 1
    ntasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    job_name: str = "mpicoll"
    modules: tuple[str, ...] = ()
    folder: str = ""  # the working directory of the job; "": the folder of the submission


@dataclass(frozen=True)
class Plan:
    """How the ranks are started: by ``srun --mpi=mpi`` (``None``: its default), or by the program ``mpirun``."""

    mpi: str | None = None
    mpirun: str | None = None
    family: str = "unknown"
    remarks: tuple[str, ...] = field(default=())  # whole sentences, for the head of the script


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``mpicoll``."""
    parser = commands.add_parser(
        "slurm-script",
        help="print a batch script for this Slurm cluster",
        description="Print an sbatch script that starts a Python script with this interpreter, as this Slurm "
        "(srun --mpi=list) can start the MPI that mpi4py loads here.",
        epilog="Submit the script with: sbatch FILE. The exit code is 1 if no way is known to start this MPI here; the script "
        "is printed in this case, too. slurm/ in the repository has commented templates for more kinds of jobs.",
        usage="mpicoll slurm-script [options] script.py [args ...]\n"
        "       mpicoll slurm-script [options] -m module [args ...]\n"
        "       mpicoll slurm-script --mpi-type | --mpirun",
    )
    parser.add_argument("-N", "--nodes", type=_count, default=1, metavar="N", help="number of nodes (default 1)")
    parser.add_argument("--ntasks-per-node", type=_count, default=1, metavar="N", help="ranks on each node (default 1)")
    parser.add_argument(
        "-c", "--cpus-per-task", type=_count, default=1, metavar="N", help="CPUs of each rank, for threads"
    )
    parser.add_argument("--gpus-per-node", type=_count, default=0, metavar="N", help="GPUs on each node")
    parser.add_argument("-t", "--time", type=_time, metavar="TIME", help="limit, in Slurm's forms: 30, 2:00:00, 1-12")
    parser.add_argument("-p", "--partition", type=_word, metavar="NAME", help="the cluster's partition (queue)")
    parser.add_argument("-A", "--account", type=_word, metavar="NAME", help="the account to charge")
    parser.add_argument("-J", "--job-name", type=_word, metavar="NAME", help="default: the name of the script")
    parser.add_argument(
        "--module", type=_word, action="append", metavar="NAME", help="environment module to load first"
    )
    parser.add_argument(
        "--launcher", choices=("srun", "mpirun"), help="start the ranks with this launcher, not the found one"
    )
    parser.add_argument("--mpi", type=_word, metavar="TYPE", help="use srun's --mpi=TYPE, not the found type")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the script to this file, not to stdout")
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--mpi-type", action="store_true", help="only print the value for srun --mpi=")
    asked.add_argument("--mpirun", action="store_true", help="only print the path of this MPI's mpirun")
    parser.add_argument("script", metavar="script.py", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(main=main)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number, at least 1")
    return int(text)


def _time(text: str) -> str:
    if not _TIME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text}: must be minutes, or hours:minutes:seconds, or days-hours")
    return text


def _word(text: str) -> str:
    if not re.fullmatch(r"[^\s\"'\\#$`;]+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be one word without quotes and blanks")
    return text


def main(options: argparse.Namespace) -> int:
    """Print the script, the MPI type or the path of mpirun, and return the exit code."""

    if options.mpi_type:
        print(_mpi_type(mpi_library.find_library()))
        return 0
    if options.mpirun:
        print(mpiexec.find_mpiexec(mpi_library.find_library()).path)
        return 0
    if options.script is None:
        raise LaunchError("the script is missing: mpicoll slurm-script --nodes 2 --ntasks-per-node 4 script.py")
    if options.mpi is not None and options.launcher == "mpirun":
        raise LaunchError("--mpi is for srun: leave out --mpi or --launcher mpirun")
    command = rank_command(options.script, options.args, module=options.is_module, python=sys.executable)
    wanted = Wanted(
        command=tuple(command),
        nodes=options.nodes,
        ntasks_per_node=options.ntasks_per_node,
        cpus_per_task=options.cpus_per_task,
        gpus_per_node=options.gpus_per_node,
        time=options.time,
        partition=options.partition,
        account=options.account,
        job_name=options.job_name or _job_name(options.script),
        modules=tuple(options.module or ()),
        folder=os.getcwd(),
    )
    library = mpi_library.find_library()
    plan, warning = _plan(library, options.launcher, options.mpi)
    text = script(wanted, plan)
    if options.output is None:
        sys.stdout.write(text)
    else:
        _write(options.output, text)
    if warning:
        print(f"mpicoll: {warning}", file=sys.stderr)
    return int(bool(warning))


def _job_name(target: str) -> str:
    return re.sub(r"[^\w.-]", "_", os.path.basename(target).removesuffix(".py")) or "mpicoll"


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise LaunchError(f"--output {path}: {error.strerror}") from None


def _mpi_type(library: MpiLibrary) -> str:
    way = _way(library)
    if way.mpi is None:
        raise LaunchError(
            f"srun cannot start {library.name} {library.version} here: {way.reason}. Use mpirun in the job: "
            "slurm/cpu-mpirun.sbatch"
        )
    return way.mpi


def _way(library: MpiLibrary) -> Way:

    return slurm.how(library.text, slurm.find_plugins(), os.environ)


def _plan(library: MpiLibrary, launcher: str | None, mpi: str | None) -> tuple[Plan, str]:
    """Return the plan to start this library's ranks here, and a warning if no way is known to work."""

    name = f"{library.name} {library.version}".strip()
    if mpi is not None:
        return Plan(mpi, None, library.family, (f"{name}; --mpi={mpi} was asked for.",)), ""
    if launcher != "mpirun":
        way = _way(library)
        if way.mpi is not None:
            return Plan(way.mpi, None, library.family, (f"{name}: {way.reason}.",)), ""
        if launcher == "srun":
            return Plan(remarks=(f"{name}: {way.reason}.",)), f"srun is not known to start {name} here: {way.reason}"
        reason = f"srun cannot start this MPI: {way.reason}"
    else:
        reason = "mpirun was asked for"
    try:
        path = mpiexec.find_mpiexec(library).path
    except LaunchError as error:
        warning = f"no way is known to start {name} here: {reason}; {error}"
        return Plan(remarks=(f"No way is known to start {name} here: {reason}.", "Ask your site.")), warning
    return Plan(None, path, library.family, (f"{name}; {reason}.",)), ""


def script(wanted: Wanted, plan: Plan) -> str:
    """Return the batch script; pure."""
    lines = ["#!/bin/bash", *(f"# {remark}" for remark in ("Made by mpicoll slurm-script.", *plan.remarks))]
    asked = [
        ("job-name", wanted.job_name),
        ("nodes", wanted.nodes),
        ("ntasks-per-node", wanted.ntasks_per_node),
        ("cpus-per-task", wanted.cpus_per_task),
        ("gpus-per-node", wanted.gpus_per_node or None),
        ("time", wanted.time),
        ("partition", wanted.partition),
        ("account", wanted.account),
        ("chdir", shlex.quote(wanted.folder) if wanted.folder else None),
        ("output", "%x-%j.out"),
    ]
    lines += [f"#SBATCH --{option}={value}" for option, value in asked if value is not None]
    lines += ["", "set -eo pipefail"]
    if wanted.modules:
        # Before `set -u`: the shell functions of `module` use variables that may not be set.
        lines.append("module load " + shlex.join(wanted.modules))
    lines.append("set -u")
    lines.append(f"export OMP_NUM_THREADS={wanted.cpus_per_task}  # threads of each rank")
    lines += _start(wanted, plan)
    return "\n".join(lines) + "\n"


def _start(wanted: Wanted, plan: Plan) -> list[str]:
    command = shlex.join(wanted.command)
    if plan.mpirun is None:
        # The variable prevents pages of warnings from Open MPI builds without PMIx's munge component; see cpu-srun.sbatch.
        lines = ["export PMIX_MCA_psec=native"] if plan.family == "openmpi" else []
        words = ["exec srun", "--kill-on-bad-exit=1", *([f"--mpi={plan.mpi}"] if plan.mpi else [])]
        words.append(
            f"--cpus-per-task={wanted.cpus_per_task}"
        )  # since Slurm 22.05 srun does not inherit it from the job
        words += ["--gpu-bind=none"] * bool(wanted.gpus_per_node)  # each rank sees all GPUs of its node
        return [*lines, " ".join([*words, command])]
    # mpirun starts its own daemons by srun, which must not set up MPI for them: otherwise MPICH's ranks abort in MPI_Init.
    lines = ["export SLURM_MPI_TYPE=none"]
    words = ["exec", shlex.quote(plan.mpirun)]
    if plan.family == "openmpi":
        words += ["--allow-run-as-root"] * (os.geteuid() == 0)
        words += ["-n", '"$SLURM_NTASKS"', *(["--bind-to", "none"] if wanted.cpus_per_task > 1 else [])]
    else:
        words += ["-n", '"$SLURM_NTASKS"', "-ppn", str(wanted.ntasks_per_node)]
    return [*lines, " ".join([*words, command])]
