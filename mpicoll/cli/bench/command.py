"""`mpicoll bench`: time mpicoll's collectives beside raw mpi4py in one run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpicoll.cli.outputs import Output, picture_format
from mpicoll.errors import LaunchError

if TYPE_CHECKING:
    from mpicoll.cli.bench.measure import Results

T = TypeVar("T", bound=AbstractContextManager[object])

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
    if options.nprocs is not None:
        return start_ranks(options.nprocs, lambda: _Task(options))
    job = join("bench", lambda: _Task(options))
    from mpicoll.cli.bench.measure import measure

    with job.prepared or nullcontext():
        show, done = progress(job.rank)
        try:
            results = measure(
                read_ops(options.ops),
                read_sizes(options),
                options.rounds,
                torch=not options.no_torch,
                progress=show,
            )
        finally:
            done()
        if job.prepared is not None:
            job.prepared.finish(results)
    return 0


class _Task:
    """The outputs of one run: checked and opened before the measurement, and written after it.

    Raises:
        LaunchError: an argument is wrong, or a file cannot be opened.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        read_sizes(options)
        ops = read_ops(options.ops)
        self.format = ""
        if options.plot:
            self.format = picture_format("--plot", options.plot)
            if set(ops) == {"barrier"}:
                raise LaunchError("--plot draws times by size, which barrier has not: name other operations in --ops")
        with ExitStack() as opened:
            self.json = opened.enter_context(Output("--json", options.json)) if options.json else None
            self.plot = opened.enter_context(Output("--plot", options.plot)) if options.plot else None
            self._opened = opened.pop_all()

    def __enter__(self) -> _Task:
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def finish(self, results: Results) -> None:
        """Print the results, and write the files."""
        from rich.console import Console

        from mpicoll.cli.bench.table import summary, table, to_json

        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(table(results))
        lines = summary(results)
        for line in lines:
            console.print(f"- {line}", highlight=False)
        if self.json is not None:
            self.json.write(to_json(results, lines).encode())
        if self.plot is not None:
            from mpicoll.cli.bench.plot import draw

            self.plot.write(draw(results, self.format))


def read_ops(text: str) -> tuple[str, ...]:
    """Return the operations of ``--ops``.

    Raises:
        LaunchError: an operation is unknown.
    """
    from mpicoll.cli.bench.measure import OPS

    ops = OPS if text == "all" else tuple(word.strip() for word in text.split(","))
    if unknown := sorted(set(ops) - set(OPS)):
        names = ", ".join(word or "an empty name" for word in unknown)
        raise LaunchError(f"--ops: unknown {names}; known are {', '.join(OPS)}")
    return ops


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


def start_ranks(nprocs: int, prepare: Callable[[], AbstractContextManager[object]]) -> int:
    """Run this command line, without its ``-n``, on ranks of this machine; return the exit code.

    Args:
        nprocs: number of ranks.
        prepare: checks the command line before any rank starts.

    Raises:
        LaunchError: the command line is wrong.
    """
    from mpicoll.launch.job import Options, run_job

    if nprocs < 2:
        raise LaunchError("-n: collectives need two ranks at least")
    with prepare():
        pass
    return run_job(Options(nprocs=nprocs), [sys.executable, "-m", "mpicoll", *without_n(sys.argv[1:])])


@dataclass(frozen=True)
class Joined(Generic[T]):
    """This process's rank in the job that runs a command, and on rank 0 the outputs."""

    rank: int
    prepared: T | None


def join(command: str, prepare: Callable[[], T]) -> Joined[T]:
    """Prepare the outputs of a command on rank 0 of its job. All ranks of the job call the function.

    Args:
        command: the name of the command.
        prepare: checks the command line and opens the outputs, while there is a default group.

    Raises:
        LaunchError: on rank 0: the command line is wrong, or the job has one rank only.
        SystemExit: on other ranks, with exit code 0: rank 0 prints the error, and its exit code is the job's.
    """
    import mpicoll as dist

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    prepared, problem = None, None
    if rank == 0:
        try:
            prepared = prepare()
            if size < 2:
                with prepared:
                    raise LaunchError(
                        f"collectives need two ranks at least: mpicoll {command} -n 2, "
                        f"or srun/mpirun python -m mpicoll {command}"
                    )
        except LaunchError as error:
            problem = error
    is_wrong = [problem is not None]
    dist.broadcast_object_list(is_wrong)
    dist.destroy_process_group()
    if problem is not None:
        raise problem
    if is_wrong[0]:
        raise SystemExit(0)
    return Joined(rank, prepared)


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
