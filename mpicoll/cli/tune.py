"""`mpicoll tune`: find out on this machine from which sizes on shared memory is faster than MPI, and write it down."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll.errors import LaunchError

if TYPE_CHECKING:
    from mpicoll.transports.selection import Ranges


SIZES = "1K:64M"
CLEARLY = 0.97
"""Share of MPI's time below which shared memory counts as faster."""
NOT_MUCH = 1.1
"""Share up to which one size between two at which it is faster is left with them."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``mpicoll``."""
    parser = commands.add_parser(
        "tune",
        help="measure which engine is faster on this machine, and use it from then on",
        description="Time every collective through MPI and through shared memory, and write for which sizes the latter is "
        "faster into a file that init_process_group reads on rank 0. With -n it starts a job on this machine; else every rank "
        "of a job on one node runs it.",
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

    Args:
        sizes: bytes, in order.
        ratios: its time as a share of MPI's, at each of them.

    Between two sizes the nearer one decides, on a logarithmic scale; the last one stands for all above it, and below the first
    nothing is faster.
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
    from mpicoll.cli.bench.command import ready, started, without_n
    from mpicoll.cli.bench.table import parse_sizes

    try:
        sizes = parse_sizes(options.sizes)
    except ValueError as error:
        raise LaunchError(f"--sizes {options.sizes}: {error}") from None
    if options.rounds < 1:
        raise LaunchError(f"--rounds {options.rounds}: at least 1")
    if options.nprocs is not None:
        return started(options.nprocs, without_n(sys.argv[1:]))
    rank = ready("tune")
    from mpicoll.cli.bench.command import progress
    from mpicoll.cli.bench.measure import OPS, Config, measure

    tell, done = progress() if rank == 0 else ((lambda text, share: None), (lambda: None))
    ways = (Config("MPI", "full", "mpi"), Config("shared memory", "full", "node"))
    ops = [op for op in OPS if op != "barrier"]
    results = measure(ops, sizes, options.rounds, configs=ways, torch=False, progress=tell)
    done()
    if results.nodes > 1:
        raise LaunchError("tune measures one node: start it on one")
    if rank == 0:
        _write(results, sizes, options.output)
    return 0


def _share(each: Any) -> float:
    """Return the time through shared memory as a share of that through MPI, each beside raw MPI in its round."""
    rounds = zip(*(of[name] for name in ("shared memory", "MPI") for of in (each.ours, each.raw)), strict=True)
    return float(
        statistics.median(node / beside_node / (mpi / beside_mpi) for node, beside_node, mpi, beside_mpi in rounds)
    )


def _write(results: Any, sizes: Sequence[int], output: str | None) -> None:
    from mpicoll.cli.bench.table import in_bytes
    from mpicoll.runtime.settings import read_settings
    from mpicoll.transports.base import Kind
    from mpicoll.transports.selection import NEVER, add_profile, path_of_profiles

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
        print(f"{kind.value}: shared memory for {words or 'nothing'}\n  its time as a share of MPI's: {at}")
    path = Path(output) if output else path_of_profiles(read_settings().profile)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else ""
    path.write_text(add_profile(before, results.about["MPI"], results.ranks, ranges, results.about))
    print(f"written: {path}")
