"""Time what grows with the number of ranks and with size, beside raw mpi4py, and tell what memory a rank takes.

    mpicoll run -n 2 benchmarks/growth.py [--sizes] [--json FILE]
    mpicoll run -n 16 benchmarks/growth.py --json FILE

Times the barrier and all_reduce of 8 bytes, 8 KiB and 1 MiB at check level full, in alternating rounds: raw, as the library does
it here, and through MPI alone (``MPICOLL_ENGINE=mpi``), which is the way between nodes. Times besides how long one process takes
to look at the records of 2 to 64 members. With ``--sizes`` also all_reduce from 8 bytes to 1 GiB. Tells, too, what the library
adds to the memory of a process that has used raw mpi4py. ``--json`` appends all of it to a file, for ``growth_model.py``.
``BENCHMARK_SECONDS`` says how long to wait for undisturbed rounds, for each size (``quiet.py``).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import about
from quiet import middle, rounds

CALLS = {"barrier": 0, "all_reduce 8 B": 8, "all_reduce 8 KiB": 8 << 10, "all_reduce 1 MiB": 1 << 20}
WAYS = {"full": "auto", "through MPI": "mpi"}
SIZES = "8,64,512,4K,32K,256K,2M,16M,128M,1G"
LARGE = 16 << 20
MEMBERS = (2, 4, 8, 16, 32, 64)
AIM = 0.02
"""Seconds that one timing of one call takes about."""
MOST_REPEATS = 20_000

Times = dict[str, list[float]]
"""Of one call: how it was made ("raw/full" is raw, beside "full") -> microseconds in each round.

"others" is the largest share of the machine that other programs took in one of them.
"""


def status() -> dict[str, int]:
    """Return the resident memory of this process in KiB: all of it, and by kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    words = [line.replace(":", " ").split() for line in lines if line.startswith(("VmRSS", "Rss"))]
    return {name: int(value) for name, value, _ in words}


def files() -> dict[int, tuple[str, int]]:
    """Return the files of the library in shared memory that this process has mapped: their inodes, kinds and bytes."""
    found: dict[int, tuple[str, int]] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith("/dev/shm/mpicoll-"):
            first, _, last = words[0].partition("-")
            kind = words[5].split("-")[1]
            found[int(words[4])] = (kind, int(last, 16) - int(first, 16))
    return found


def memory(comm: Any) -> dict[str, Any]:
    """Return the median rank's resident KiB by kind, and the bytes of the job's files in shared memory by kind."""
    told = comm.allgather((status(), files()))
    by_kind: dict[str, int] = {}
    for kind, nbytes in {inode: file for _, mapped in told for inode, file in mapped.items()}.values():
        by_kind[kind] = by_kind.get(kind, 0) + nbytes
    resident = {name: int(np.median([each[name] for each, _ in told])) for name in told[0][0]}
    return {"resident": resident, "files": by_kind}


def measure_memory(comm: Any, groups: int) -> list[dict[str, Any]]:
    """Return the memory after each step of a program's beginning; all ranks call it."""
    from mpi4py import MPI

    array = np.ones((1 << 20) // 8)
    found = []

    def note(after: str) -> None:
        found.append({"after": after, **memory(comm)})

    def calls(of: Any = None) -> None:
        import mpicoll as dist

        dist.all_reduce(array, dist.ReduceOp.MAX, group=of)

    comm.Barrier()
    for nbytes in (8, 8 << 10, 1 << 20):
        comm.Allreduce(MPI.IN_PLACE, array[: nbytes // 8], MPI.MAX)
    note("raw calls of mpi4py")
    import mpicoll as dist

    dist.init_process_group()
    note("init_process_group")
    for _ in range(20):
        dist.barrier()
        dist.all_reduce(array[:1], dist.ReduceOp.MAX)
        dist.all_reduce(array[:1024], dist.ReduceOp.MAX)
    note("small calls")
    for _ in range(3):
        calls()
    note("1 MiB calls")
    everybody = list(range(dist.get_world_size()))
    for text in (f"{groups} groups more, 1 MiB calls on each", f"these destroyed, {groups} new ones, the same"):
        made = [dist.new_group(everybody) for _ in range(groups)]
        for group in made:
            calls(group)
        note(text)
        for group in made:
            dist.destroy_process_group(group)
    dist.destroy_process_group()
    return found


@contextmanager
def way(name: str) -> Iterator[Any]:
    """Have the library initialised, with one engine, at level full."""
    import mpicoll as dist

    before = os.environ.get("MPICOLL_ENGINE")
    os.environ["MPICOLL_ENGINE"] = WAYS[name]
    try:
        dist.init_process_group(check="full")
        yield dist
        dist.destroy_process_group()
    finally:
        os.environ.pop("MPICOLL_ENGINE")
        if before is not None:
            os.environ["MPICOLL_ENGINE"] = before


def time_of(comm: Any, call: Callable[[], object]) -> float:
    """Return microseconds a call, the mean over the ranks."""
    size = comm.Get_size()
    call()
    comm.Barrier()
    start = time.perf_counter()
    call()
    once = comm.allreduce(time.perf_counter() - start) / size
    repeats = int(max(1, min(MOST_REPEATS, AIM / max(once, 1e-7))))
    if repeats == 1:
        return float(once * 1e6)
    for _ in range(3):
        call()
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    taken = comm.allreduce(time.perf_counter() - start)
    return float(taken / size / repeats * 1e6)


def pair(comm: Any, dist: Any, array: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a call, raw and ours: a barrier where there is no array."""
    from mpi4py import MPI

    if array is None:
        return comm.Barrier, dist.barrier
    return lambda: comm.Allreduce(MPI.IN_PLACE, array, MPI.MAX), lambda: dist.all_reduce(array, dist.ReduceOp.MAX)


def measure_calls(comm: Any, wanted: int) -> dict[str, Times]:
    """Return the times of every call in every way; all ranks call it."""
    arrays = {call: np.ones(nbytes // 8) if nbytes else None for call, nbytes in CALLS.items()}

    def once() -> dict[tuple[str, str], float]:
        found = {}
        for name in WAYS:
            with way(name) as dist:
                for call, array in arrays.items():
                    raw, ours = pair(comm, dist, array)
                    found[call, f"raw/{name}"] = time_of(comm, raw)
                    found[call, name] = time_of(comm, ours)
        return found

    shares: list[float] = []
    told = rounds(comm, once, wanted, shares=shares)
    hows = [how for name in WAYS for how in (f"raw/{name}", name)]
    return {call: {**{how: [each[call, how] for each in told] for how in hows}, "others": shares} for call in CALLS}


def measure_sizes(comm: Any, sizes: list[int], wanted: int) -> dict[int, Times]:
    """Return the times of all_reduce by size; all ranks call it."""
    found: dict[int, Times] = {}
    for nbytes in sizes:
        array, shares = np.ones(nbytes // 8), list[float]()
        with way("full") as dist:
            raw, ours = pair(comm, dist, array)
            told = rounds(
                comm, partial(_both, comm, raw, ours), min(wanted, 3) if nbytes > LARGE else wanted, shares=shares
            )
        found[nbytes] = {"raw/full": [each[0] for each in told], "full": [each[1] for each in told], "others": shares}
        if comm.Get_rank() == 0:
            print(f"# {nbytes} bytes done", file=sys.stderr, flush=True)
    return found


def _both(comm: Any, raw: Callable[[], object], ours: Callable[[], object]) -> tuple[float, float]:
    return time_of(comm, raw), time_of(comm, ours)


def reading(size: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what one process of so many does in a barrier, and in an all_reduce of 8 bytes, when the others are there."""
    from mpicoll.runtime.native import found as extension
    from mpicoll.transports.control import make_words
    from mpicoll.transports.shm.control import MASK, PART

    memory, words, number = mmap.mmap(-1, size * PART), make_words(1, 8, eager=9), MASK + 1
    rings = [extension.Ring(memory, rank, size, PART) for rank in range(size)]
    x, out, ring = np.ones(1), np.zeros(1), rings[0]
    about = {
        "op": "all_reduce",
        "lock": threading.RLock(),
        "order": extension.CallOrder(),
        "words": words,
        "dtype": x.dtype,
        "itemsize": 8,
        "poll_ns": 0,
    }
    about |= {"send": (1,), "recv": (1,), "sends": 8, "offset": 0, "block": 8, "width": 8, "root": -1, "segment": None}
    about |= {"result": "reduced", "reduction": "MAX f8", "average": False, "in_place": False}
    operation = extension.SharedOperation(ring=ring, **about)
    for each in rings:
        extension.SharedOperation(ring=each, **about).write(number, x)
        each.write(number, words)
        each.post(number)

    def barrier() -> None:
        ring.write(number, words)
        ring.post(number)
        if not (ring.is_over(number) and ring.is_unanimous(number)):
            raise RuntimeError("the records are not what they were made")

    def all_reduce() -> None:
        barrier()
        operation.read(number, out)

    return barrier, all_reduce


def measure_reading(comm: Any, wanted: int) -> dict[int, dict[str, list[float]]]:
    """Return how long one process takes to look at the records of so many members; all ranks call it."""
    calls = {size: reading(size) for size in MEMBERS}
    told = rounds(comm, lambda: {size: [_alone(call) for call in both] for size, both in calls.items()}, wanted)
    return {
        size: {what: [each[size][i] for each in told] for i, what in enumerate(("barrier", "all_reduce"))}
        for size in MEMBERS
    }


def _alone(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    for _ in range(500):
        call()
    return (time.perf_counter() - start) / 500 * 1e6


def append(path: Path, run: dict[str, Any]) -> None:
    """Put a run behind those of a file."""
    runs = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*runs, run], indent=1) + "\n")


def report(run: dict[str, Any]) -> list[str]:
    """Return the lines that are printed."""
    ranks, machine = run["ranks"], run["about"]
    over = "" if ranks <= machine["cores"] else ": more ranks than cores, so they take turns"
    lines = [f"{ranks} ranks on {machine['cores']} cores, {machine['MPI']}{over}; us, median (quartiles)"]
    tables = {**run["calls"], **{f"all_reduce {size} bytes": times for size, times in run["sizes"].items()}}
    for call, times in tables.items():
        for how in WAYS:
            if how in times:
                ratio = [ours / raw for ours, raw in zip(times[how], times[f"raw/{how}"], strict=True)]
                said = f"raw {middle(times[f'raw/{how}'])}, {how} {middle(times[how])}, {middle(ratio)} times"
                lines.append(f"{call:>28}: {said}")
    for size, times in run["reading"].items():
        said = f"barrier {middle(times['barrier'])}, all_reduce of 8 bytes {middle(times['all_reduce'])}"
        lines.append(f"one process looks at {size:>2} members: {said}")
    for stage in run["memory"]:
        resident = ", ".join(f"{name} {value:,}" for name, value in stage["resident"].items())
        shared = ", ".join(f"{kind} {nbytes >> 10:,}" for kind, nbytes in stage["files"].items()) or "nothing"
        lines.append(f"KiB after {stage['after']}: {resident}; shared by all: {shared}")
    return lines


def main() -> None:
    """Measure and print."""
    from mpicoll.cli.bench.table import parse_sizes

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds, at least 3 (default: %(default)s)")
    parser.add_argument("--sizes", nargs="?", const=SIZES, default="", help=f"time sizes, too (default: {SIZES})")
    parser.add_argument("--groups", type=int, default=8, help="groups for the memory (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="append all that was measured")
    options = parser.parse_args()
    wanted = max(3, options.rounds)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    run: dict[str, Any] = {"ranks": comm.Get_size()}
    run["memory"] = measure_memory(comm, options.groups)
    run["calls"] = measure_calls(comm, wanted)
    run["reading"] = measure_reading(comm, wanted)
    run["sizes"] = measure_sizes(comm, parse_sizes(options.sizes) if options.sizes else [], wanted)
    run["about"] = about(comm)
    if comm.Get_rank() == 0:
        print("\n".join(report(run)), flush=True)
        if options.json:
            append(options.json, run)


if __name__ == "__main__":
    main()
