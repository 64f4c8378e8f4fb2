"""Time torch.distributed on mpicoll beside torch.distributed on gloo, in one run of the same processes.

    python benchmarks/torch_backend.py                                   # 2, 4 and 8 ranks; half an hour on a quiet machine
    python benchmarks/torch_backend.py --quick --ranks 2                 # a minute, to see that it works
    python benchmarks/torch_backend.py --json FILE --plot FILE.png
    python benchmarks/torch_backend.py --page docs/torch.md benchmarks/results/torch-backend.json

A job is started for each number of ranks. In it the default group of torch.distributed is of the backend mpicoll, and a second
group is of gloo, with LOCAL_WORLD_SIZE set as torchrun sets it. Three *kinds* of a call are timed on the same tensor: torch's
call on mpicoll, torch's call on gloo, and mpicoll's own call. A *window* is some milliseconds of calls of one kind; its time is
the median of its slices on a rank, and of the ranks the largest. In a round the kinds take turns, in another order in each
round. A row's ratio is the median, with the quartiles, of the ratios within rounds.

The last but one row is what communication adds to a step of DistributedDataParallel: the step less the same step in
``no_sync()``, for a model of 100 parameter tensors of 64 x 64 and 64. It contains what torch's reducer takes to copy the
gradients, with any backend. So the step is timed on a third group, too, whose ``allreduce`` does nothing. The last row is less
that time; its ratio is that of the medians.

Rounds in which others used the machine are repeated (``quiet.py``; BENCHMARK_SECONDS, default 20 for each row). Rounds with
near and with far cores are kept apart (``handover.py``); with more ranks than cores all rounds count as far.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

SIZES = {
    "4 B": 4,
    "64 B": 64,
    "1 KiB": 1 << 10,
    "4 KiB": 4 << 10,
    "64 KiB": 64 << 10,
    "256 KiB": 256 << 10,
    "1 MiB": 1 << 20,
    "16 MiB": 16 << 20,
    "64 MiB": 64 << 20,
    "100 MB": 100_000_000,
}
QUICK = ("4 B", "64 KiB", "1 MiB")
OPS = ("all_reduce", "broadcast")
KINDS = ("mpicoll", "gloo", "own")
GROUPS = ("mpicoll", "gloo", "nothing")
STEPS = (*GROUPS, *(f"{group}, no_sync" for group in GROUPS))
STEP = "DistributedDataParallel: communication of a step"
LESS_REDUCER = f"{STEP}, less the reducer"
SLICE, WINDOW, SLICES = 1e-3, 20e-3, 5
"""Seconds of a slice and, unless one call takes longer, of a window at most; slices of a window."""
LEAST = 5
"""Rounds with which near decides; with fewer near rounds the label with more rounds decides."""
TARGETS = ((64 << 10, 10.0), (1 << 20, 5.0), (16 << 20, 2.5), (1 << 62, 1.5))
"""How many times as fast as gloo an all_reduce of up to so many bytes has to be, on 2 and 4 ranks."""
MORE_US = 15.0
"""Microseconds that torch's call may take more than mpicoll's own."""

Round = dict[str, Any]
"""Microseconds of each kind, and under "latencies" those before and after the round."""


class Rank:
    """One rank of a job."""

    def __init__(self, shared: str, wanted: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as c10d
        from handover import Probe
        from mpi4py import MPI

        import mpicoll.torch

        torch.set_num_threads(1)
        c10d.init_process_group("mpicoll", init_method="mpi://")
        self.rank, self.size = c10d.get_rank(), c10d.get_world_size()
        os.environ["LOCAL_WORLD_SIZE"] = str(self.size)
        self.torch, self.c10d, self.own = torch, c10d, mpicoll
        self.gloo = c10d.new_group(backend="gloo")
        self.comm = MPI.COMM_WORLD.Dup()
        self.probe, self._wanted, self._made = Probe(shared, self.rank, self.size), wanted, 0

    def calls(self, op: str, nbytes: int) -> dict[str, Callable[[], object]]:
        """Return the call of each kind."""
        torch_call, own_call = getattr(self.c10d, op), getattr(self.own, op)
        arguments: tuple[Any, ...] = ()
        if op != "barrier":
            arguments = (self.torch.full((nbytes // 4,), 0.0), *((0,) if op == "broadcast" else ()))
        made = (
            partial(torch_call, *arguments),
            partial(torch_call, *arguments, group=self.gloo),
            partial(own_call, *arguments),
        )
        return dict(zip(KINDS, made, strict=True))

    def steps(self) -> dict[str, Callable[[], object]]:
        """Return the steps of DistributedDataParallel."""
        torch, wrap = self.torch, self.torch.nn.parallel.DistributedDataParallel
        layers = [[torch.nn.Linear(64, 64) for _ in range(50)] for _ in GROUPS]
        models = [
            wrap(torch.nn.Sequential(*each), process_group=group)
            for each, group in zip(layers, (None, self.gloo, self._group_of_nothing()), strict=True)
        ]
        batch = torch.randn(16, 64)

        def step(model: Any) -> None:
            model.zero_grad()
            model(batch).sum().backward()

        def step_alone(model: Any) -> None:
            with model.no_sync():
                step(model)

        return dict(zip(STEPS, [partial(do, model) for do in (step, step_alone) for model in models], strict=True))

    def _group_of_nothing(self) -> Any:
        """Return a group whose ``allreduce`` leaves the tensors as they are."""
        from mpicoll.torch.process_group import ProcessGroup
        from mpicoll.torch.work import Joint
        from mpicoll.torch.world import add_to_world

        class Nothing(ProcessGroup):
            def allreduce(self, tensors: Any, opts: Any = None) -> Any:
                return Joint((), list(tensors))

        made = Nothing(self.own.new_group(range(self.size)), owns=True)
        add_to_world(made, "nothing", made.group.ranks, "mpicoll")
        return made

    def measure(self, calls: Mapping[str, Callable[[], object]]) -> list[Round]:
        """Return the rounds that others disturbed least."""
        from quiet import few, rounds

        timers = {kind: timeit.Timer(call) for kind, call in calls.items()}
        counts = {}
        for kind, timer in timers.items():
            timer.timeit(1)
            number = few(max(2, min(100, int(SLICE / self._largest(timer.timeit(2) / 2)))))
            once = self._largest(timer.timeit(number) / number)
            number = few(max(1, round(SLICE / once)))
            counts[kind] = number, max(1, min(SLICES, round(WINDOW / (once * number))))

        def window(kind: str) -> float:
            number, slices = counts[kind]
            self.own.barrier()
            return self._largest(statistics.median(timers[kind].repeat(slices, number)) / number) * 1e6

        def one_round() -> Round:
            kinds = list(calls)
            shift = self._made % len(kinds)
            self._made += 1
            before = self._largest(self.probe.latency())
            times = {kind: window(kind) for kind in kinds[shift:] + kinds[:shift]}
            return {**times, "latencies": [before, self._largest(self.probe.latency())]}

        return rounds(self.comm, one_round, self._wanted)

    def _largest(self, value: float) -> float:
        from mpi4py import MPI

        return float(self.comm.allreduce(value, MPI.MAX))


def serve(shared: str, wanted: str, sizes: str, file: str) -> None:
    """Measure on one rank of a job; rank 0 writes all rounds into a file."""
    job = Rank(shared, int(wanted))
    from machine import about

    found: dict[str, list[Round]] = {}
    for op in OPS:
        for size in sizes.split(","):
            found[f"{op} {size}"] = job.measure(job.calls(op, SIZES[size]))
            if job.rank == 0:
                print(f"# {op} {size} on {job.size} ranks is done", file=sys.stderr, flush=True)
    found["barrier"] = job.measure(job.calls("barrier", 4))
    found[STEP] = job.measure(job.steps())
    if job.rank == 0:
        told = {**about(job.comm), "torch": job.torch.__version__}
        Path(file).write_text(json.dumps({"about": told, "crowded": job.probe.crowded, "rows": found}))
    job.c10d.destroy_process_group()


def run(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start a job, and return what it has measured."""
    environment = {"MPICOLL_PROFILE": "none", "BENCHMARK_SECONDS": "20", **os.environ, "OMP_NUM_THREADS": "1"}
    if options.quick:
        environment["BENCHMARK_SECONDS"] = "0"
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(dir=memory) as shared, tempfile.NamedTemporaryFile() as told:
        shared.truncate(mmap.PAGESIZE)
        command = [sys.executable, "-m", "mpicoll", "run", "-n", str(ranks), str(Path(__file__).resolve()), "--rank"]
        command += [shared.name, str(options.rounds), ",".join(QUICK if options.quick else SIZES), told.name]
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"torch_backend.py: the job of {ranks} ranks ended with status {done.returncode}")
        return {"ranks": ranks, **json.loads(Path(told.name).read_text())}


def kept(rows: Mapping[str, Sequence[Round]], crowded: bool) -> dict[str, tuple[str, list[Round]]]:
    """Return the label that decides about each row, and its rounds."""
    from handover import LABELS, boundary_of, label_of

    boundary = boundary_of([latency for row in rows.values() for each in row for latency in each["latencies"]])
    found = {}
    for name, row in rows.items():
        by_label: dict[str, list[Round]] = {label: [] for label in LABELS}
        for each in row:
            if label := "far" if crowded else label_of(*each["latencies"], boundary):
                by_label[label].append(each)
        near, far = (by_label[label] for label in LABELS)
        label = "near" if len(near) >= min(LEAST, len(far)) else "far"
        if by_label[label]:
            found[name] = label, by_label[label]
    return found


def added(each: Round, backend: str) -> float:
    """Return what communication adds to a step; not less than 1 us, so that there is a ratio."""
    return max(1.0, float(each[backend] - each[f"{backend}, no_sync"]))


def figures(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of each row: times in us and ratios of the rounds."""
    found = []

    def add(op: str, size: str, label: str, ours: list[float], gloo: list[float], more: list[float]) -> None:
        ratios = [there / (here or 1.0) for here, there in zip(ours, gloo, strict=True)]
        row = {"op": op, "size": size, "label": label, "mpicoll": ours, "gloo": gloo, "ratios": ratios, "more": more}
        found.append(row)

    for name, (label, row) in kept(run["rows"], run["crowded"]).items():
        if name == STEP:
            ours, gloo, reducer = ([added(each, group) for each in row] for group in GROUPS)
            add(STEP, "", label, ours, gloo, [])
            ours, gloo = ([one - own for one, own in zip(each, reducer, strict=True)] for each in (ours, gloo))
            add(LESS_REDUCER, "", label, ours, gloo, [])
            middle_of_ours = statistics.median(ours)
            found[-1]["ratios"] = [statistics.median(gloo) / middle_of_ours] if middle_of_ours >= 1.0 else []
        else:
            op, _, size = name.partition(" ")
            ours, gloo, own = ([each[kind] for each in row] for kind in KINDS)
            add(op, size, label, ours, gloo, [one - alone for one, alone in zip(ours, own, strict=True)])
    return found


def time_of(values: Sequence[float]) -> str:
    """Return the median of microseconds, with its unit."""
    value = statistics.median(values)
    return f"{value:.1f} us" if value < 1000 else f"{value / 1000:.2f} ms"


def verdicts(run: Mapping[str, Any]) -> list[str]:
    """Return for each target whether the run meets it."""
    lines = []
    for each in figures(run):
        name = f"{each['op']} {each['size']}".strip()
        least = 3.0 if each["op"] == STEP else None
        if each["op"] == "all_reduce":
            least = next(times for most, times in TARGETS if SIZES[each["size"]] <= most)
        if least is not None and run["ranks"] <= 4:
            ratio = statistics.median(each["ratios"])
            met = "met" if ratio >= least else "missed"
            lines.append(f"{run['ranks']} ranks, {name}: {least:g} times as fast as gloo: {met} ({ratio:.1f})")
        if each["more"] and run["ranks"] <= 4:
            more = statistics.median(each["more"])
            if more > MORE_US:
                lines.append(
                    f"{run['ranks']} ranks, {name}: at most {MORE_US:g} us above the own call: missed ({more:.1f})"
                )
    return lines


def markdown(told: Mapping[str, Any]) -> str:
    """Return the part of a page."""
    from quiet import middle

    about = told["runs"][0]["about"]
    lines = [
        f"{about['MPI'].replace(' Version:', '')}, torch {about['torch']}, mpi4py {about['mpi4py']}, Python {about['Python']}; "
        f"{about['processor']}, {about['cores']} cores; {about['date']}:",
        "",
        f"    {told['command']}",
        "",
        "| ranks | call | size | mpicoll | gloo | gloo / mpicoll | mpicoll less its own call, us | cores |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each_run in told["runs"]:
        for each in figures(each_run):
            more = middle(each["more"], 1) if each["more"] else ""
            cells = [str(each_run["ranks"]), each["op"], each["size"], time_of(each["mpicoll"]), time_of(each["gloo"])]
            label = "shared" if each_run["crowded"] else each["label"]
            if each["op"] == LESS_REDUCER:  # the ratio of the medians; none if ours is below 1 us
                ratio = f"{each['ratios'][0]:.1f}" if each["ratios"] else ""
            else:
                ratio = middle(each["ratios"], 1)
            lines.append(f"| {' | '.join([*cells, ratio, more, label])} |")
    return "\n".join([*lines, ""])


def draw(told: Mapping[str, Any], path: Path) -> None:
    """Draw the times by size, and below how many times as fast as gloo they are, for each call and number of ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = told["runs"]
    figure = Figure(figsize=(max(3.8 * len(runs) + 0.6, 6.0), 4.6 * len(OPS) + 1.0), layout="constrained")
    FigureCanvasAgg(figure)
    heights = {"height_ratios": [3, 2] * len(OPS)}
    axes: Any = figure.subplots(2 * len(OPS), len(runs), squeeze=False, gridspec_kw=heights, sharey="row")
    for line, column in ((line, column) for line in range(len(OPS)) for column in range(len(runs))):
        op, each_run, above, below = OPS[line], runs[column], axes[2 * line][column], axes[2 * line + 1][column]
        rows = [each for each in figures(each_run) if each["op"] == op]
        sizes = [SIZES[each["size"]] for each in rows]
        for kind, colour in (("gloo", "#3b82c4"), ("mpicoll", "#d64541")):
            times = [statistics.median(each[kind]) for each in rows]
            above.plot(sizes, times, color=colour, lw=1.8, marker="o", ms=3, label=kind)
        own = [statistics.median(each["mpicoll"]) - statistics.median(each["more"]) for each in rows]
        above.plot(sizes, own, color="#20252b", lw=1, ls=":", label="mpicoll's own call")
        above.set(yscale="log", title=f"{op}, {each_run['ranks']} ranks")
        quarters = [statistics.quantiles(each["ratios"] * (1 + (len(each["ratios"]) < 2)), n=4) for each in rows]
        below.axhline(1, color="#20252b", lw=1)
        below.plot(sizes, [half for _, half, _ in quarters], color="#d64541", lw=1.8, marker="o", ms=3)
        low, high = [low for low, _, _ in quarters], [high for _, _, high in quarters]
        below.fill_between(sizes, low, high, color="#d64541", alpha=0.15)
        below.set(yscale="log")
        shown = [each for at, each in enumerate(rows) if at % max(1, len(rows) // 4) == 0]
        for axis, labels in ((above, [""] * len(shown)), (below, [each["size"] for each in shown])):
            axis.set(xscale="log")
            axis.set_xticks([SIZES[each["size"]] for each in shown], labels, fontsize=7.5)
            axis.minorticks_off()
            axis.grid(alpha=0.25, lw=0.6)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
    for line in range(len(OPS)):
        axes[2 * line][0].set_ylabel("us a call")
        axes[2 * line + 1][0].set_ylabel("gloo / mpicoll")
        axes[2 * line + 1][0].yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    about = runs[0]["about"]
    figure.suptitle(
        f"torch {about['torch']} on {about['MPI'].replace(' Version:', '')}\n{about['processor']}, {about['cores']} cores",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks, a job for each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="rounds of each row (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help=f"{', '.join(QUICK)} only, three rounds of few calls: figures mean little"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all rounds; benchmarks/results/torch-backend.json"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw (needs matplotlib)")
    parser.add_argument(
        "--page", type=Path, metavar="PAGE", help="put the table of FILE into a page, and measure nothing"
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="with --page or --plot: what --json wrote")
    options = parser.parse_args(words)
    if options.page and not options.file:
        parser.error("--page needs the FILE that --json wrote")
    return options


def main(words: Sequence[str]) -> None:
    """Measure and print, or write a page or a picture of what was measured."""
    options = parse(words)
    if options.file:
        told = json.loads(options.file.read_text())
        if options.page:
            from bench_page import update

            options.page.write_text(update(options.page.read_text(), options.file.stem, markdown(told)))
    else:
        seconds = os.environ.get("BENCHMARK_SECONDS")
        command = ["python benchmarks/torch_backend.py", *(Path(word).name or word for word in words)]
        command += [f"(BENCHMARK_SECONDS={seconds})"] if seconds is not None else []
        told = {"command": " ".join(command), "runs": [run(int(each), options) for each in options.ranks.split(",")]}
        print(markdown(told), *(line for each in told["runs"] for line in verdicts(each)), sep="\n", flush=True)
        if options.json:
            options.json.write_text(json.dumps(told) + "\n")
    if options.plot:
        draw(told, options.plot)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        serve(*sys.argv[2:])
    else:
        main(sys.argv[1:])
