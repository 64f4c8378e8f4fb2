"""`mpicoll tune`: measure for which sizes shared memory is faster than MPI on this machine, and save the result."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll.cli.bench.command import join, progress, read_sizes, start_ranks
from mpicoll.cli.outputs import Output
from mpicoll.errors import LaunchError

if TYPE_CHECKING:
    from mpicoll.transports.selection import Ranges


SIZES = "1K:64M"
CLEARLY = 0.97
"""Ratio to MPI's time below which shared memory counts as faster."""
NOT_MUCH = 1.1
"""Ratio below which one size between two faster sizes counts as faster, too."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``mpicoll``."""
    parser = commands.add_parser(
        "tune",
        help="measure which engine is faster on this machine, for all later programs",
        description="Time every collective through MPI and through shared memory. Write the sizes for which shared memory "
        "is faster to a file, which init_process_group reads on rank 0. With -n the command starts a job on this machine; "
        "without it every rank of a job on one node runs the command.",
    )
    parser.add_argument("-n", "--nprocs", type=int, metavar="N", help="start N ranks on this machine")
    parser.add_argument(
        "--sizes", default=SIZES, help="bytes: 1K,64K,1M, or 1K:64M for powers of four (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default: %(default)s)")
    parser.add_argument(
        "--output", metavar="FILE", help="the file (default: MPICOLL_PROFILE, or ~/.config/mpicoll/profiles.json)"
    )
    parser.set_defaults(main=main)


def faster(sizes: Sequence[int], ratios: Sequence[float]) -> Ranges:
    """Return the ranges of bytes in which shared memory is faster; pure.

    Between two sizes the nearer size decides, on a logarithmic scale. The result of the last size holds for all larger sizes;
    below the first size shared memory never counts as faster.

    Args:
        sizes: bytes, in order.
        ratios: for each size the time through shared memory, divided by MPI's.
    """
    from mpicoll.transports.selection import NEVER

    wins = [ratio < CLEARLY for ratio in ratios]
    for at in range(1, len(wins) - 1):
        if wins[at - 1] and wins[at + 1] and ratios[at] < NOT_MUCH:
            wins[at] = True
    edges = [0, *(int((low * high) ** 0.5) for low, high in pairwise(sizes)), NEVER]
    found: list[tuple[int, int]] = []
    for at, win in enumerate(wins):
        if not win:
            continue
        first, last = (edges[at] + 1 if at else sizes[0]), edges[at + 1]
        if found and found[-1][1] == first - 1:
            first = found.pop()[0]
        found.append((first, last))
    return found


def main(options: argparse.Namespace) -> int:
    """Measure, and write the profile on rank 0; return the exit code."""
    if options.nprocs is not None:
        return start_ranks(options.nprocs, lambda: _open(options))
    job = join("tune", lambda: _open(options))
    from mpicoll.cli.bench.measure import OPS, Config, measure

    ways = (Config("MPI", "full", "mpi"), Config("shared memory", "full", "node"))
    ops = [op for op in OPS if op != "barrier"]
    with job.prepared or nullcontext() as output:
        show, done = progress(job.rank)
        sizes = read_sizes(options)
        try:
            results = measure(ops, sizes, options.rounds, configs=ways, torch=False, progress=show)
        finally:
            done()
        if output is not None:
            _write(results, sizes, output)
    return 0


def _open(options: argparse.Namespace) -> Output:
    """Open the file of profiles, whose content stays.

    Raises:
        LaunchError: an argument is wrong, the file cannot be written or is no file of profiles, or the job has several nodes.
    """
    from mpicoll.groups.registry import default, state
    from mpicoll.runtime.settings import read_settings
    from mpicoll.transports.selection import add_profile, path_of_profiles

    read_sizes(options)
    if default.world is not None and len(state().topology.hosts) > 1:
        raise LaunchError("tune measures one node: start the job on one node")
    path = Path(options.output) if options.output else path_of_profiles(read_settings().profile)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--output {path}: the folder cannot be made: {error.strerror}") from None
    output = Output("--output", str(path))
    try:
        add_profile(path.read_text(), "", 0, {}, {})
    except (OSError, ValueError, LookupError, TypeError):
        with output:
            raise LaunchError(f"--output {path}: the file is no file of profiles: move it away") from None
    return output


def _share(each: Any) -> float:
    """Return the time through shared memory divided by the time through MPI, each relative to raw MPI in its round."""
    rounds = zip(*(of[name] for name in ("shared memory", "MPI") for of in (each.ours, each.raw)), strict=True)
    return float(
        statistics.median(node / beside_node / (mpi / beside_mpi) for node, beside_node, mpi, beside_mpi in rounds)
    )


def _write(results: Any, sizes: Sequence[int], output: Output) -> None:
    from mpicoll.cli.bench.table import in_bytes
    from mpicoll.transports.base import Kind
    from mpicoll.transports.selection import NEVER, add_profile

    ranges = {}
    for kind in Kind:
        of = [each for each in results.measured if each.op == kind.value]
        if not of:
            continue
        ratios = [_share(each) for each in of]
        ranges[kind] = faster(sizes, ratios)
        words = ", ".join(
            f"{in_bytes(first)} and more" if last == NEVER else f"{in_bytes(first)} to {in_bytes(last)}"
            for first, last in ranges[kind]
        )
        at = ", ".join(f"{in_bytes(size)} {ratio:.2f}" for size, ratio in zip(sizes, ratios, strict=True))
        print(f"{kind.value}: shared memory for {words or 'nothing'}\n  its time divided by MPI's: {at}")
    before = Path(output.path).read_text()
    output.write(add_profile(before, results.about["MPI"], results.ranks, ranges, results.about).encode())
    print(f"written: {output.path}")
