"""Does data move while the program computes? OSU's overlap of an asynchronous all_reduce, without and with a progress thread.

    mpicoll run -n 2 benchmarks/overlap.py [--sizes 64K,1M] [--rounds 7] [--json FILE]
    python benchmarks/overlap.py --page docs/performance.md benchmarks/results/overlap-*.json

As osu_iallreduce does it: the time of the call alone, issued and waited for; work that takes about as long; and both, the work
between the call and its wait. overlap = 100 * (1 - (both - work) / call alone), in percent. The work is one of three: NumPy's,
which gives the interpreter's lock away; Python's, which keeps it; and sleep, as a program does that waits for a disk or a GPU.
Each is measured without anything and with ``MPICOLL_PROGRESS=thread``, in alternating rounds. "work takes" is how many times as
long the work took between the call and its wait as it takes alone.

Then the same of a training step: the gradients of four layers, averaged in one call after all work, or layer by layer while the
next one is worked at. The matrices are so small that BLAS takes one thread. Times are the mean over the ranks, and the fastest of
some repeats in each round. Shown is what the fastest of all rounds give, which other programs disturb least, and in brackets the
quartiles of the rounds; "work takes" is their median; "others" is the largest share of the machine that other programs took in a
round. ``BENCHMARK_SECONDS`` says how long to wait for undisturbed rounds, for each size (``quiet.py``). ``--page`` writes the
tables of files into a page, as ``bench_page.py`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import about
from quiet import middle, rounds

WAYS = ("none", "thread")
SIZES = "64K,256K,1M,4M,16M,64M"
LAYERS, ARRAYS, ARRAY_BYTES = 4, 16, 256 << 10
AIM = 0.03
"""Seconds that one kind of timing takes about in a round."""
MOST_REPEATS = 20
LARGE = 16 << 20
"""Bytes above which three rounds have to do."""

_MATRIX = np.random.default_rng(0).random((48, 48))
_PRODUCT = np.empty_like(_MATRIX)


def numpy_work(units: int) -> None:
    """Multiply matrices of 48 by 48."""
    for _ in range(units):
        np.matmul(_MATRIX, _MATRIX, out=_PRODUCT)


def python_work(units: int) -> None:
    """Add numbers up."""
    total = 0
    for number in range(units * 100):
        total += number


def sleep(units: int) -> None:
    """Sleep for so many microseconds."""
    time.sleep(units * 1e-6)


WORKS: dict[str, Callable[[int], None]] = {"NumPy": numpy_work, "Python": python_work, "sleep": sleep}


@contextmanager
def way(progress: str) -> Iterator[Any]:
    """Have the library initialised, with a progress thread or without."""
    import mpicoll as dist

    before = os.environ.get("MPICOLL_PROGRESS")
    os.environ["MPICOLL_PROGRESS"] = progress
    try:
        dist.init_process_group()
        yield dist
        dist.destroy_process_group()
    finally:
        os.environ.pop("MPICOLL_PROGRESS")
        if before is not None:
            os.environ["MPICOLL_PROGRESS"] = before


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Timer:
    """Times calls on all ranks, the mean over the ranks."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def mean(self, value: float) -> float:
        """Return the mean over the ranks."""
        return float(self.comm.allreduce(value) / self.comm.Get_size())

    def of(self, call: Callable[[], object], repeats: int) -> float:
        """Return the seconds of the fastest call."""
        found = []
        for _ in range(repeats):
            self.comm.Barrier()
            found.append(seconds(call))
        return self.fastest(found)

    def fastest(self, found: Sequence[float]) -> float:
        """Return the least of several seconds, which each are the mean over the ranks."""
        return float(min(self.comm.allreduce(np.array(found))) / self.comm.Get_size())

    def fitting(self, call: Callable[[], object]) -> int:
        """Return how often to repeat a call."""
        call()
        return max(3, min(MOST_REPEATS, int(AIM / max(1e-6, self.of(call, 3)))))

    def units(self, work: Callable[[int], None], aim: float) -> int:
        """Return how many units of work take so many seconds."""
        most = 100
        while (taken := min(seconds(partial(work, most)) for _ in range(3))) < min(aim, 0.01):
            most *= 2
        return max(1, round(self.mean(most * aim / taken)))


def issue(dist: Any, array: Any) -> Any:
    """Start the call that is measured."""
    return dist.all_reduce(array, dist.ReduceOp.MAX, async_op=True)


def measure_size(comm: Any, nbytes: int, wanted: int) -> dict[str, Any]:
    """Return what was measured of all_reduces of so many bytes; all ranks call it."""
    timer, array = Timer(comm), np.ones(nbytes // 8)
    with way("none") as dist:
        alone = lambda: issue(dist, array).wait()  # noqa: E731
        repeats = timer.fitting(alone)
        aim = timer.of(alone, repeats)
        units = {name: timer.units(work, aim) for name, work in WORKS.items()}

    def once() -> dict[str, dict[str, list[float]]]:
        found = {}
        for name in WAYS:
            with way(name) as dist:
                found[name] = {
                    kind: _one(timer, dist, array, repeats, partial(WORKS[kind], units[kind])) for kind in WORKS
                }
        return found

    shares: list[float] = []
    told = rounds(comm, once, 3 if nbytes > LARGE else wanted, shares=shares)
    return {
        "bytes": nbytes,
        "others": shares[0],
        **{name: {kind: [each[name][kind] for each in told] for kind in WORKS} for name in WAYS},
    }


def _one(timer: Timer, dist: Any, array: Any, repeats: int, work: Callable[[], None]) -> list[float]:
    """Return the seconds of the call alone, of the work alone, of both, and of the work within both."""
    within: list[float] = []

    def both() -> None:
        call = issue(dist, array)
        within.append(seconds(work))
        call.wait()

    call = timer.of(lambda: issue(dist, array).wait(), repeats)
    alone = timer.of(work, repeats)
    whole = timer.of(both, repeats)
    return [call, alone, whole, timer.fastest(within)]


def measure_step(comm: Any, wanted: int) -> dict[str, Any]:
    """Return what was measured of a training step; all ranks call it."""
    timer = Timer(comm)
    layers = [[np.ones(ARRAY_BYTES // 4, np.float32) for _ in range(ARRAYS)] for _ in range(LAYERS)]
    everything = [array for layer in layers for array in layer]
    with way("none") as dist:
        repeats = timer.fitting(lambda: dist.average_gradients(everything))
        aim = timer.of(lambda: dist.average_gradients(everything), repeats)
        work = partial(numpy_work, timer.units(numpy_work, aim / LAYERS))

    def once() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for name in WAYS:
            with way(name) as dist:
                steps = _steps(dist, layers, everything, work)
                found[name] = [timer.of(step, repeats) for step in steps.values()]
        return found

    shares: list[float] = []
    told = rounds(comm, once, wanted, shares=shares)
    return {"others": shares[0], **{name: [each[name] for each in told] for name in WAYS}}


STEPS = (
    "the work alone",
    "the work, then one call",
    "the work, then one call, asynchronous",
    "layer by layer, each call while the next layer is worked at",
)


def _steps(
    dist: Any, layers: list[list[Any]], everything: list[Any], work: Callable[[], None]
) -> dict[str, Callable[[], None]]:
    def all_work() -> None:
        for _ in layers:
            work()

    def then() -> None:
        all_work()
        dist.average_gradients(everything)

    def then_asynchronous() -> None:
        all_work()
        dist.average_gradients(everything, async_op=True).wait()

    def by_layers() -> None:
        calls = []
        for layer in layers:
            work()
            calls.append(dist.average_gradients(layer, async_op=True))
        for call in calls:
            call.wait()

    return dict(zip(STEPS, (all_work, then, then_asynchronous, by_layers), strict=True))


def overlap(times: Sequence[float]) -> float:
    """Return the percentage of a call that the work hides, between 0 and 100."""
    call, work, both, _ = times
    return min(100.0, max(0.0, 100 * (1 - (both - work) / call)))


def best(values: Sequence[float], least: float, digits: int = 2) -> str:
    """Return what the fastest of all rounds give and, in brackets, the quartiles of the rounds."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{least:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def report(run: dict[str, Any]) -> list[str]:
    """Return the table that is printed, and that stands in the page."""
    from mpicoll.cli.bench.table import in_bytes

    lines = [
        f"| size | progress | call alone, ms | {' | '.join(f'{kind}: overlap, % | work takes' for kind in WORKS)} | others |"
    ]
    lines.append("|" + "---|" * (4 + 2 * len(WORKS)))
    for each in run["sizes"]:
        for name in WAYS:
            rows = each[name]
            alone = [times[0] * 1e3 for kind in WORKS for times in rows[kind]]
            cells = [in_bytes(each["bytes"]), name, best(alone, min(alone))]
            for kind in WORKS:
                fastest = [min(column) for column in zip(*rows[kind], strict=True)]
                cells += [
                    best([overlap(times) for times in rows[kind]], overlap(fastest), 0),
                    middle([times[3] / times[1] for times in rows[kind]]),
                ]
            lines.append(f"| {' | '.join(cells)} | {each['others']:.0%} |")
    size = in_bytes(LAYERS * ARRAYS * ARRAY_BYTES)
    lines += ["", f"| a step with {size} of gradients, ms | progress none | progress thread |", "|---|---|---|"]
    for place, step in enumerate(STEPS):
        times = [[found[place] * 1e3 for found in run["step"][name]] for name in WAYS]
        lines.append(f"| {step} | {' | '.join(best(found, min(found)) for found in times)} |")
    others = [f"{run['step']['others']:.0%}"] * len(WAYS)
    return [*lines, f"| others | {' | '.join(others)} |"]


def markdown(run: dict[str, Any]) -> str:
    """Return the part of a page."""
    told = run["about"]
    head = (
        f"{told['MPI']}, mpi4py {told['mpi4py']}, NumPy {told['numpy']}, Python {told['Python']}; "
        f"{run['ranks']} ranks on {told['cores']} cores; {told['date']}:"
    )
    return "\n".join([head, "", f"    {told['command']}", "", *report(run), ""])


def write_page(page: Path, files: Sequence[Path]) -> None:
    """Put the tables of files into a page, between the marks of each."""
    from bench_page import update

    text = page.read_text()
    for path in files:
        text = update(text, path.stem, markdown(json.loads(path.read_text())))
    page.write_text(text)


def main() -> None:
    """Measure and print, or write a page."""
    from mpicoll.cli.bench.table import parse_sizes

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds, at least 3 (default: %(default)s)")
    parser.add_argument("--sizes", default=SIZES, help="of the arrays (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all that was measured")
    parser.add_argument(
        "--page", metavar="PAGE", type=Path, help="write the tables of FILES into a page, and measure nothing"
    )
    parser.add_argument("files", metavar="FILES", type=Path, nargs="*")
    options = parser.parse_args()
    if options.page:
        write_page(options.page, options.files)
        return
    wanted = max(3, options.rounds)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    run: dict[str, Any] = {"ranks": comm.Get_size(), "about": about(comm), "sizes": []}
    for nbytes in parse_sizes(options.sizes):
        run["sizes"].append(measure_size(comm, nbytes, wanted))
        if comm.Get_rank() == 0:
            print(f"# {nbytes} bytes done", file=sys.stderr, flush=True)
    run["step"] = measure_step(comm, wanted)
    if comm.Get_rank() == 0:
        print("\n".join(report(run)), flush=True)
        if options.json:
            options.json.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
