"""`mpicoll bench`: time mpicoll's collectives beside raw mpi4py in one run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from mpicoll.errors import LaunchError

SIZES = "8,1K,16K,64K,256K,1M,4M,16M"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``mpicoll``."""
    parser = commands.add_parser(
        "bench",
        help="time the collectives beside raw mpi4py",
        description="Time collectives beside raw mpi4py, at every check level and with each engine, all in one run and in "
        "alternating rounds. With -n the command starts a job on this machine; without it every rank of a job runs the "
        "command: srun --mpi=pmix python -m mpicoll bench.",
    )
    parser.add_argument("-n", "--nprocs", type=int, metavar="N", help="start N ranks on this machine")
    parser.add_argument("--ops", default="all", help="operations, with commas (default: all)")
    parser.add_argument(
        "--sizes",
        default=SIZES,
        help="bytes that a rank passes: 8,64K,1M, or 8:64M for powers of four (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds (default: %(default)s)")
    parser.add_argument("--no-torch", action="store_true", help="do not time torch's gloo, if torch is installed")
    parser.add_argument("--json", metavar="FILE", help="write all measurements, with machine and versions")
    parser.add_argument("--plot", metavar="FILE", help="draw the measurements (PNG, SVG or PDF; needs the extra plot)")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    """Measure, and print on rank 0; return the exit code."""
    sizes = read_sizes(options)
    if options.plot:
        need_matplotlib()
    if options.nprocs is not None:
        return start_ranks(options.nprocs)
    from mpicoll.cli.bench.measure import OPS, measure

    ops = OPS if options.ops == "all" else tuple(options.ops.split(","))
    unknown = set(ops) - set(OPS)
    if unknown:
        raise LaunchError(f"--ops: unknown {', '.join(sorted(unknown))}; known are {', '.join(OPS)}")
    rank = rank_of_job("bench")
    show, done = progress(rank)
    results = measure(ops, sizes, options.rounds, torch=not options.no_torch, progress=show)
    done()
    if rank == 0:
        _print(results, options)
    return 0


def read_sizes(options: argparse.Namespace) -> list[int]:
    """Return the sizes of ``--sizes`` in bytes; check ``--rounds``, too.

    Raises:
        LaunchError: an option is wrong.
    """
    from mpicoll.cli.bench.table import parse_sizes

    try:
        sizes = parse_sizes(options.sizes)
    except ValueError as error:
        raise LaunchError(f"--sizes {options.sizes}: {error}") from None
    if options.rounds < 1:
        raise LaunchError(f"--rounds {options.rounds}: must be at least 1")
    return sizes


def start_ranks(nprocs: int) -> int:
    """Run this command line, without its ``-n``, on ranks of this machine; return the exit code."""
    from mpicoll.launch.job import Options, run_job

    if nprocs < 2:
        raise LaunchError("-n: collectives need two ranks at least")
    return run_job(Options(nprocs=nprocs), [sys.executable, "-m", "mpicoll", *without_n(sys.argv[1:])])


def rank_of_job(command: str) -> int:
    """Return this process's rank in the job that runs a command.

    Raises:
        LaunchError: the job has one rank only.
    """
    import mpicoll as dist

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    if size < 2:
        raise LaunchError(
            f"collectives need two ranks at least: mpicoll {command} -n 2, or srun/mpirun python -m mpicoll {command}"
        )
    return rank


def without_n(words: list[str]) -> list[str]:
    """Return the command line without ``-n N`` in any of its forms."""
    rest: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("-n", "--nprocs"):
            skip = True
        elif not (word.startswith("--nprocs=") or (word.startswith("-n") and word[2:].isdigit())):
            rest.append(word)
    return rest


def need_matplotlib() -> None:
    """Raise a LaunchError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise LaunchError('--plot needs matplotlib: pip install "mpicoll[plot]"')


def progress(rank: int) -> tuple[Callable[[str, float], None], Callable[[], None]]:
    """Return a function that shows the progress on stderr, if stderr is a terminal, and a function that ends it.

    Both do nothing on ranks other than 0.
    """
    if rank != 0:
        return (lambda text, share: None), (lambda: None)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    shown.start()
    task = shown.add_task("measuring", total=1.0)

    def show(text: str, share: float) -> None:
        shown.update(task, description=text, completed=share, refresh=True)

    return show, shown.stop


def _print(results: Any, options: argparse.Namespace) -> None:
    from rich.console import Console

    from mpicoll.cli.bench.table import summary, table, to_json

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(results))
    lines = summary(results)
    for line in lines:
        console.print(f"- {line}", highlight=False)
    if options.json:
        with open(options.json, "w") as file:
            file.write(to_json(results, lines))
    if options.plot:
        from mpicoll.cli.bench.plot import draw

        draw(results, options.plot)
