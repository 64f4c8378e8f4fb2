"""Compare how fast two trees of the library are, in one run: is a call slower than before?

    python benchmarks/compare.py TREE_A TREE_B                      # e.g. 6c61e9e HEAD, or HEAD .
    python benchmarks/compare.py TREE_A TREE_B --rows 'all_reduce*' --engine mpi --extension off --json FILE
    python benchmarks/compare.py TREE_A TREE_B --limit 1.05         # exit status 1 if a row's median ratio is above 1.05

A tree is a git revision or a folder. Each is installed into a temporary folder, with its C extension; all else (Python, MPI,
mpi4py, NumPy) is the environment of the interpreter that runs this script. A job of each tree is started. Only one of the two
jobs computes at a time: the ranks of the other one sleep in a system call.

A *window* is some milliseconds of one row's calls in one job. For every row windows of both trees alternate (A B B A, then
B A A B), and neighbours are a *pair*. A row's result is the median, with the quartiles, of the pairs' ratios, B to A. Near and
far windows (``handover.py``) are reported separately; both windows of a pair have the same label. ``--jobs`` pairs of jobs run
one after the other, because where the memory of a process lies differs from job to job.

The time of a window is the median of its slices on a rank, and of the ranks the largest: a root that only sends returns before
the call is complete on the other ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import math
import mmap
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.machinery import EXTENSION_SUFFIXES
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from handover import LABELS, Probe, boundary_of, label_of
from quiet import middle

ROOT = Path(__file__).resolve().parents[1]
FILES = ("mpicoll", "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
"""What an installation of a tree needs."""
SLICE, WINDOW, SLICES = 1e-3, 50e-3, 5
"""Seconds of a slice and, unless one call takes longer, of a window at most; slices of a window."""
LEAST = 5
"""Pairs with which near decides about ``--limit``; with fewer near pairs the label with more pairs decides."""

ONE, TWO, PARTS = "x = array({n})", "x, y = array({n}), array({n})", "x, y = array({n} // size), array({n})"
LISTS = "x, y = array({n} // size), [array({n} // size) for _ in range(size)]\nat_root = y if dist.get_rank() == 0 else None"
SPLITS = (  # rank i sends to rank j as much as rank j sends to rank i, and to each rank another number of elements
    "sizes = [max(1, {n} // 4 * (1 + (dist.get_rank() + j) % size) // (size * (size + 1))) for j in range(size)]\n"
    "x, y = array(8 * sum(sizes)), array(8 * sum(sizes))"
)
LARGE = "1 KiB, 64 KiB, 1 MiB, 64 MiB"
# Name; code that is run once on each rank; the statement that is timed; bytes of the largest array.
KINDS = (
    ("all_reduce", ONE, "dist.all_reduce(x)", "8 B, 1 KiB, 16 KiB, 64 KiB, 1 MiB, 16 MiB, 64 MiB"),
    ("all_reduce name=", ONE, "dist.all_reduce(x, name='loss')", "8 B"),
    ("all_reduce timeout=", ONE, "dist.all_reduce(x, timeout=limit)", "8 B"),
    ("all_reduce int32 MAX", "x = array({n}, 'i4')", "dist.all_reduce(x, dist.ReduceOp.MAX)", "64 KiB"),
    ("all_reduce float16", "x = array({n}, 'f2')", "dist.all_reduce(x)", "64 KiB"),
    ("all_reduce async", ONE, "dist.all_reduce(x, async_op=True).wait()", "8 B, 16 KiB, 128 KiB, 1 MiB, 16 MiB"),
    ("all_reduce_init", ONE + "\nplan = dist.all_reduce_init(x)", "plan.start(); plan.wait()", "8 B, 1 MiB"),
    ("coalesced two", TWO, "dist.all_reduce_coalesced([x, y])", "8 B"),
    ("coalesced async two", TWO, "dist.all_reduce_coalesced([x, y], async_op=True).wait()", "8 B"),
    ("broadcast async", ONE, "dist.broadcast(x, 0, async_op=True).wait()", "8 B"),
    ("all_gather async", PARTS, "dist.all_gather_into_tensor(y, x, async_op=True).wait()", "1 KiB, 1 MiB"),
    ("all_gather list async", LISTS, "dist.all_gather(y, x, async_op=True).wait()", "1 KiB, 64 KiB, 1 MiB"),
    ("barrier async", "", "dist.barrier(async_op=True).wait()", ""),
    ("reduce", ONE, "dist.reduce(x, 0)", "8 B, 1 MiB"),
    ("broadcast", ONE, "dist.broadcast(x, 0)", "8 B, 64 KiB, 1 MiB, 64 MiB"),
    ("all_gather", PARTS, "dist.all_gather_into_tensor(y, x)", LARGE),
    ("reduce_scatter", PARTS, "dist.reduce_scatter_tensor(x, y)", LARGE),
    ("all_to_all_single", TWO, "dist.all_to_all_single(y, x)", LARGE),
    ("all_to_all_single splits", SPLITS, "dist.all_to_all_single(y, x, sizes, sizes)", "8 B, 384 KiB, 6 MiB"),
    (
        "all_to_all_single splits async",
        SPLITS,
        "dist.all_to_all_single(y, x, sizes, sizes, async_op=True).wait()",
        "384 KiB",
    ),
    ("gather list", LISTS, "dist.gather(x, at_root, 0)", "8 B, 1 MiB, 64 MiB"),
    ("scatter list", LISTS, "dist.scatter(x, at_root, 0)", "8 B, 1 MiB, 64 MiB"),
    ("barrier", "", "dist.barrier()", ""),
    ("ping-pong", ONE + "\nfirst, second = ways", "first(x, peer); second(x, peer)", "8 B, 1 MiB, 64 MiB"),
    ("exchange", TWO, "a = dist.irecv(y, peer); b = dist.isend(x, peer); a.wait(); b.wait()", "8 B, 1 MiB"),
    (
        "exchange of columns",
        "grid = array({n} * 512).reshape(-1, 512); x, y = grid[:, 1], grid[:, 0]",
        "a = dist.irecv(y, peer); b = dist.isend(x, peer); a.wait(); b.wait()",
        "4 KiB",
    ),
    ("all_gather_object", "found = [None] * size", "dist.all_gather_object(found, {{'loss': 0.5, 'step': 3}})", ""),
    ("broadcast_object_list", "", "dist.broadcast_object_list([{{'loss': 0.5, 'step': 3}}], 0)", ""),
)
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def rows() -> dict[str, tuple[str, str]]:
    """Return each row's code to run once and statement, by name."""
    found = {}
    for name, setup, statement, sizes in KINDS:
        for size in sizes.split(", "):
            number, _, unit = size.partition(" ")
            nbytes = int(number) * UNITS[unit] if size else 0
            found[f"{name} {size}".strip()] = setup.format(n=nbytes), statement.format(n=nbytes)
    return found


def serve(address: str, shared: str, tree: str, extension: str) -> None:
    """Run the windows that the parent asks for, on one rank of a job."""
    import numpy as np
    from machine import about

    import mpicoll as dist

    def array(nbytes: int, dtype: str = "f8") -> Any:
        # Written: np.zeros maps one page of zeros many times.
        return np.full(max(1, nbytes // np.dtype(dtype).itemsize), 0, dtype)

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(array(8))
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "mpicoll"]
    files = [Path(file) for module in modules if (file := getattr(module, "__file__", None))]
    native = [file for file in files if file.suffix == ".so"]
    strange = [file for file in files if not file.resolve().is_relative_to(Path(tree).resolve())]
    if strange or bool(native) != (extension == "auto"):
        raise SystemExit(f"compare.py: not the library of {tree}, extension {extension}: {strange or native}")
    from mpi4py import MPI

    peer, probe, timers = rank ^ 1, Probe(shared, rank, size), {}
    ways = (dist.send, dist.recv) if rank < peer else (dist.recv, dist.send)
    given = {"dist": dist, "array": array, "size": size, "peer": peer, "ways": ways, "limit": timedelta(minutes=2)}
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(address)
        parent = Connection(end.detach())
    parent.send((rank, probe.crowded, about(MPI.COMM_WORLD)))
    while order := parent.recv():
        name, calls, slices = order
        if name not in timers:
            (setup, statement), names = rows()[name], dict(given)
            exec(setup, names)
            timers[name] = timeit.Timer("pass" if "peer" in statement and peer >= size else statement, globals=names)
        timers[name].timeit(calls)
        before = probe.latency()
        times = timers[name].repeat(slices, calls)
        parent.send((before, probe.latency(), statistics.median(times) / calls * 1e6))
    dist.destroy_process_group()


class Window(NamedTuple):
    """The result of one window: the latency before and after the window in ns, the time of a call in us."""

    before: float
    after: float
    time: float


class Measured(NamedTuple):
    """The results of all jobs: facts about the run, whether ranks share cores, each row's pairs of windows of A and B."""

    about: dict[str, Any]
    crowded: bool
    pairs: dict[str, list[tuple[Window, Window]]]


def run(*command: str) -> str:
    """Run a command and return its output; end with its words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"compare.py: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def install(tree: str, folder: Path, extension: str) -> str:
    """Install a tree into a folder and return its name and commit."""
    source, path = folder.with_suffix(".source"), Path(tree)
    source.mkdir()
    if is_folder := (path / "setup.py").is_file():
        for file in (path / name for name in FILES):
            if file.is_dir():
                shutil.copytree(file, source / file.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            else:
                shutil.copy(file, source)
    else:
        run("git", "-C", str(ROOT), "archive", "-o", f"{source}.tar", tree, *FILES)
        run("tar", "-x", "-f", f"{source}.tar", "-C", str(source))
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(source))
    built = {file for suffix in EXTENSION_SUFFIXES for file in folder.rglob(f"*{suffix}")}
    if extension == "auto" and not built:
        raise SystemExit(f"compare.py: the C extension of {tree} could not be built")
    for file in built if extension == "off" else ():
        # A missing module would be found in an editable installation of the environment.
        file.with_name(file.name.partition(".")[0] + ".py").write_text("raise ImportError('left out by compare.py')\n")
        file.unlink()
    if is_folder:
        command = ["git", "-C", tree, "describe", "--always", "--dirty"]
        known = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return f"{path.resolve().name} ({known or 'no git'})"
    return f"{tree} ({run('git', '-C', str(ROOT), 'rev-parse', '--short', f'{tree}^{{commit}}')})"


class Job:
    """A job of one tree, whose ranks wait for orders."""

    def __init__(self, tree: Path, folder: Path, options: argparse.Namespace) -> None:
        environment = {"MPICOLL_PROFILE": "none", "MPICOLL_TIMEOUT": "120", **os.environ, "PYTHONPATH": str(tree)}
        environment |= {"MPICOLL_ENGINE": options.engine, "MPICOLL_EXTENSION": options.extension}
        command = [
            sys.executable,
            "-m",
            "mpicoll",
            "run",
            "-n",
            str(options.ranks),
            str(Path(__file__).resolve()),
            "--rank",
        ]
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else folder
        with (
            tempfile.NamedTemporaryFile(dir=memory) as shared,
            tempfile.TemporaryDirectory(dir=folder) as own,
            socket.socket(socket.AF_UNIX) as server,
        ):
            shared.truncate(mmap.PAGESIZE)
            server.bind(f"{own}/parent")
            server.listen(options.ranks)
            server.settimeout(1.0)
            command += [f"{own}/parent", shared.name, str(tree), options.extension]
            self._process = subprocess.Popen(command, env=environment, cwd=folder)
            ends = [Connection(self._accept(server)) for _ in range(options.ranks)]
            hellos = {end: end.recv() for end in ends}
        self._ends = sorted(ends, key=lambda end: hellos[end][0])
        self.crowded, self.about = hellos[self._ends[0]][1:]

    def _accept(self, server: socket.socket) -> int:
        while self._process.poll() is None:
            try:
                return server.accept()[0].detach()
            except TimeoutError:
                pass
        raise SystemExit(f"compare.py: a job ended with status {self._process.returncode} before its first window")

    def window(self, name: str, calls: int, slices: int) -> Window:
        """Run slices of so many calls of a row on all ranks."""
        for end in self._ends:
            end.send((name, calls, slices))
        if not all(end.poll(150) for end in self._ends):
            raise SystemExit(f"compare.py: no answer of a window of {name}")
        answers = [end.recv() for end in self._ends]
        return Window(answers[0][0], answers[0][1], max(answer[2] for answer in answers))

    def end(self) -> None:
        """Let the ranks return, or end the job if they do not."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.send(None)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.terminate()


def measure(trees: Mapping[str, Path], folder: Path, names: Sequence[str], options: argparse.Namespace) -> Measured:
    """Run pairs of jobs, and in each pair windows of both trees alternately."""
    found = Measured({}, False, defaultdict(list))
    sizes: dict[str, tuple[int, int]] = {}
    for number in range(options.jobs):
        jobs: dict[str, Job] = {}
        try:
            for key in "AB" if number % 2 == 0 else "BA":
                jobs[key] = Job(trees[key], folder, options)
            found = found._replace(about=jobs["A"].about, crowded=jobs["A"].crowded)
            for name in names:
                seconds = max(job.window(name, 5, 3).time for job in jobs.values()) / 1e6  # the first calls prepare
                seconds = jobs["A"].window(name, max(1, min(100, int(SLICE / seconds))), 3).time / 1e6
                calls = max(1, round(SLICE / seconds))
                sizes.setdefault(name, (calls, max(1, min(SLICES, round(WINDOW / (seconds * calls))))))
            for number_of_round in range(options.rounds):
                for name in names:
                    order = "ABBA" if number_of_round % 2 == 0 else "BAAB"
                    windows = [(key, jobs[key].window(name, *sizes[name])) for key in order]
                    found.pairs[name] += [(pair["A"], pair["B"]) for pair in (dict(windows[:2]), dict(windows[2:]))]
        finally:
            for job in jobs.values():
                job.end()
        print(f"# pair of jobs {number + 1} of {options.jobs} is done", file=sys.stderr, flush=True)
    return found


def results(found: Measured, boundary: float) -> dict[str, dict[str, Any]]:
    """Return, for each row and label, the times in us of the windows of A and B and the ratios of their pairs."""
    by_row: dict[str, dict[str, Any]] = {}
    for name, pairs in found.pairs.items():
        by_row[name] = {label: {"A": [], "B": [], "ratios": []} for label in LABELS}
        for pair in pairs:
            labels = ["far" if found.crowded else label_of(each.before, each.after, boundary) for each in pair]
            for key, label, window in zip("AB", labels, pair, strict=True):
                if label:
                    by_row[name][label][key].append(window.time)
            if labels[0] and labels[0] == labels[1]:
                by_row[name][labels[0]]["ratios"].append(pair[1].time / pair[0].time)
    return by_row


def verdict(row: Mapping[str, Any]) -> float:
    """Return the median ratio that decides about a row; not a number for a row without pairs."""
    near, far = (row[label]["ratios"] for label in LABELS)
    return float(statistics.median((near if len(near) >= min(LEAST, len(far)) else far) or [math.nan]))


def table(by_row: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    head = f" | {'A us':>9} {'B us':>9}  {'B/A (quartiles)':<20} {'pairs':>5}"
    lines = [f"{'':<28} | {LABELS[0]:<{len(head) - 3}} | {LABELS[1]}", f"{'row':<28}{head * 2}"]
    for name, row in by_row.items():
        line = f"{name:<28}"
        for part in (row[label] for label in LABELS):
            a, b = (f"{statistics.median(part[key]):.2f}" if part[key] else "-" for key in "AB")
            ratio = middle(part["ratios"], 2) if part["ratios"] else "-"
            line += f" | {a:>9} {b:>9}  {ratio:<20} {len(part['ratios']):>5}"
        lines.append(line)
    return lines


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs=2, metavar="TREE", help="a git revision or a folder")
    parser.add_argument("--rows", action="append", metavar="PATTERN", help="rows whose names match; may be repeated")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=3, help="pairs of jobs, one after the other (3)")
    parser.add_argument("--rounds", type=int, default=8, help="of two pairs for each row in each pair of jobs (8)")
    parser.add_argument("--quick", action="store_true", help="one pair of jobs, two rounds")
    parser.add_argument("--engine", choices=("auto", "mpi"), default="auto", help="MPICOLL_ENGINE of both trees")
    parser.add_argument("--extension", choices=("auto", "off"), default="auto", help="with or without the extension")
    parser.add_argument("--limit", type=float, help="exit status 1 if the median ratio of a row is above")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times and ratios")
    options = parser.parse_args(words)
    if options.quick:
        options.jobs, options.rounds = 1, 2
    patterns = options.rows or ["*"]
    options.names = [name for name in rows() if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not options.names:
        parser.error(f"no such row; the rows are: {', '.join(rows())}")
    return options


def main(words: Sequence[str]) -> int:
    """Compare, print, and return the exit status."""
    options = parse(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the folder and ends the jobs
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        trees, commits = {key: Path(folder, key) for key in "AB"}, {}
        for key, tree in zip("AB", options.trees, strict=True):
            commits[key] = install(tree, trees[key], options.extension)
        found = measure(trees, Path(folder), options.names, options)
    windows = [window for pairs in found.pairs.values() for pair in pairs for window in pair]
    latencies = [latency for window in windows for latency in window[:2]]
    boundary = boundary_of(latencies)
    by_row = results(found, boundary)
    counts = {label: sum(len(row[label][key]) for row in by_row.values() for key in "AB") for label in LABELS}
    command = " ".join(["python benchmarks/compare.py", *(Path(word).name or word for word in words)])
    about = {**found.about, "command": command, **commits}
    del about["mpicoll"]
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    print(f"a handover takes {middle(latencies, 0)} ns; the boundary of near and far is {boundary:.0f} ns")
    if found.crowded:
        print("more ranks than cores: near and far are not distinguished, all windows count as far")
    dropped = len(windows) - sum(counts.values())
    print(f"windows: {counts['near']} near, {counts['far']} far, {dropped} dropped", "", *table(by_row), "", sep="\n")
    verdicts = {name: verdict(row) for name, row in by_row.items()}
    if medians := [ratio for ratio in verdicts.values() if not math.isnan(ratio)]:
        print(f"the rows' ratios: {middle(medians, 3)}")
    if options.json:
        record = {"about": about, "boundary_ns": boundary, "windows": counts, "latencies_ns": latencies, "rows": by_row}
        options.json.write_text(json.dumps(record) + "\n")
    if options.limit is None:
        return 0
    slow = [f"{name} ({ratio:.2f})" for name, ratio in verdicts.items() if not ratio <= options.limit]
    print(f"above {options.limit:g}, or without pairs: {', '.join(slow) or 'no row'}")
    return 1 if slow else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        serve(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
