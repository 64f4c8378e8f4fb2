"""`mpicoll run`: start a script on several ranks of this interpreter's MPI."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from mpicoll.errors import LaunchError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``mpicoll``."""
    parser = commands.add_parser(
        "run",
        help="start a script on several ranks",
        description="Start a Python script on N ranks, with the mpiexec that belongs to the MPI that mpi4py loads. "
        "Inside a Slurm allocation the job uses all nodes, and without -n as many ranks as there are tasks.",
        epilog="The exit code is that of the rank that failed first; 128+n after signal n, 124 after --timeout, 141 if the "
        "reader of the output has ended, 74 if output could not be written and all ranks ended well.",
        usage="mpicoll run -n N [options] script.py [args ...]\n       mpicoll run -n N [options] -m module [args ...]\n"
        "       mpicoll run -n N [options] python [options of Python] script.py [args ...]",
    )
    parser.add_argument("-n", "-np", "--nprocs", type=int, default=None, metavar="N", help="number of ranks")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("--tag-output", action="store_true", help="print the rank before every line: [2] ...")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end the job after this time (exit code 124)")
    parser.add_argument("--mpiexec", metavar="PATH", help="use this mpiexec instead of the one found")
    parser.add_argument(
        "--mpiexec-args", metavar="ARGS", default="", help="more arguments for the launcher, in one string"
    )
    parser.add_argument(
        "--launcher",
        choices=("auto", "mpiexec", "srun"),
        default="auto",
        help="start with mpiexec, or in Slurm with srun; auto uses srun only if there is no mpiexec",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command that would start the job, and start nothing"
    )
    parser.add_argument("--host", metavar="HOSTS", help="the hosts to run on, in mpiexec's syntax (a:2,b:2)")
    parser.add_argument("--hostfile", metavar="FILE", help="a file with the hosts to run on, in mpiexec's syntax")
    parser.add_argument("script", metavar="script.py", help=argparse.SUPPRESS)
    parser.add_argument("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(main=main, unknown=refuse_options)


def rank_command(target: str, args: Sequence[str], *, module: bool, python: str) -> list[str]:
    """Return the command of one rank.

    Args:
        target: a script, a module, or the name ``python`` or ``python3``: what follows are then arguments of Python.

    Raises:
        LaunchError: there is no such script or module.
    """
    if not module:
        own = ("python", "python3", f"python3.{sys.version_info.minor}")
        is_folder = os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py"))
        if os.path.exists(target) and not (is_folder and target in own):
            return [python, target, *args]
        if target not in own:
            is_other = os.path.basename(target).startswith("python")
            hint = f": `mpicoll run` starts this Python, {own[-1]} (mpicoll run -n 4 python ...)" if is_other else ""
            raise LaunchError(f"there is no file {target}{hint}")
        if not args:
            raise LaunchError(f"{target} is given no script: mpicoll run -n 4 {target} script.py")
        return [python, *args]
    top = target.split(".")[0]
    sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        from importlib.util import find_spec

        if find_spec(top) is None:
            raise LaunchError(f"there is no module {top}")
    finally:
        sys.path.pop(0)
    return [python, "-m", target, *args]


def refuse_options(unknown: Sequence[str]) -> None:
    """Say where options go that are not of `mpicoll run`.

    Raises:
        LaunchError: always.
    """
    raise LaunchError(
        f"mpicoll run has no option {unknown[0]}. Options of mpiexec go into one string: "
        f"--mpiexec-args={shlex.quote(unknown[0] + ' ...')}; options of the script stand after the script, options of Python "
        f"after `python` (mpicoll run -n 4 python {unknown[0]} script.py)"
    )


def main(options: argparse.Namespace) -> int:
    """Run the job and return its exit code."""
    from mpicoll.launch.environment import allocated_tasks
    from mpicoll.launch.job import Options, planned_line, run_job
    from mpicoll.launch.wrong_starts import check_runner

    script = shlex.join(["-m"] * options.module + [options.script, *options.args])
    check_runner(os.environ, options.nprocs, script)
    nprocs = allocated_tasks(os.environ) if options.nprocs is None else options.nprocs
    if nprocs is None:
        raise LaunchError(f"the number of ranks is missing: mpicoll run -n 4 {script}")
    if nprocs < 1:
        raise LaunchError(f"-n {nprocs}: a job has at least one rank")
    if options.timeout is not None and not options.timeout > 0:
        raise LaunchError(f"--timeout {options.timeout:g}: the time must be more than 0 seconds")
    command = rank_command(options.script, options.args, module=options.module, python=sys.executable)
    wanted = Options(
        nprocs=nprocs,
        launcher=options.launcher,
        tag_output=options.tag_output,
        timeout=options.timeout,
        mpiexec=options.mpiexec,
        host=options.host,
        hostfile=options.hostfile,
        extra=tuple(shlex.split(options.mpiexec_args)),
    )
    if options.dry_run:
        print(planned_line(wanted, command))
        return 0
    return run_job(wanted, command)
