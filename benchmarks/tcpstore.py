"""Time a TCPStore with 64 clients, beside torch's where that is installed, in alternating rounds of one run.

    python benchmarks/tcpstore.py [--clients 64] [--rounds 5] [--json FILE]

Each client is a process of its own, and none of them is a rank: MPI has no part in it. One more process has the server. In a
round all clients work at once, for each operation so often: ``set`` and ``get`` of 64 bytes under keys of their own, ``add`` to
one counter of all, ``wait`` for a key that is there. torch's ``set`` returns before the server has heard of it, so that it shows
only in the ``get`` behind it: "set and get" is both, as one call. Tells the median and the 99th percentile of what one call took
a client, and how many calls a second the server did for all of them; then the same of one client alone, whose calls nobody
delays; and how long all clients took to meet in a barrier of the store. Rounds of ours and of torch's alternate; the median of
the rounds counts.
``BENCHMARK_SECONDS`` is how long to go on beyond the rounds asked for (0: not at all), so that busy moments weigh less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module, metadata, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

VALUE = b"x" * 64
SECRET = "of the benchmark"
LIMIT = timedelta(seconds=120)
OPERATIONS = ("set", "get", "set and get", "add", "wait")
CALLS = 50
"""Calls of an operation that a client makes in a round; a client alone makes ten times as many."""
SECONDS = float(os.environ.get("BENCHMARK_SECONDS", "120"))


def connect(kind: str, port: int, serves: bool = False) -> Any:
    """Return a store: ``"mpicoll"`` or ``"torch"``."""
    if kind == "mpicoll":
        from mpicoll import TCPStore

        return TCPStore("127.0.0.1", port, None, serves, LIMIT, wait_for_workers=False, secret=SECRET)
    from torch.distributed import TCPStore as Theirs

    return Theirs("127.0.0.1", port, None, serves, LIMIT, wait_for_workers=False)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def serve(kind: str, port: int, pipe: Connection) -> None:
    """Have a server in this process until told to end."""
    store = connect(kind, port, serves=True)
    store.set("there", VALUE)
    pipe.send("ready")
    pipe.recv()


def call_of(store: Any, operation: str, name: str) -> Callable[[], object]:
    """Return one call of an operation."""
    return {
        "set": lambda: store.set(name, VALUE),
        "get": lambda: store.get(name),
        "set and get": lambda: (store.set(name, VALUE), store.get(name)),
        "add": lambda: store.add("counter", 1),
        "wait": lambda: store.wait(["there"]),
    }[operation]


def work(ports: dict[str, int], number: int, pipe: Connection) -> None:
    """Be a client of every store: do what is told, and tell when the first call began and the last ended, and what each took."""
    stores = {kind: connect(kind, port) for kind, port in ports.items()}
    pipe.send("ready")
    met = 0
    while (told := pipe.recv()) is not None:
        kind, operation, count = told
        store, taken = stores[kind], []
        if operation == "meet":
            met += 1
            began = time.perf_counter()
            if store.add(f"came {met}", 1) == count:
                store.set(f"all {met}", b"1")
            store.wait([f"all {met}"])
            pipe.send((began, time.perf_counter(), [time.perf_counter() - began]))
            continue
        call = call_of(store, operation, f"key {number}")
        call()
        began = last = time.perf_counter()
        for _ in range(count):
            call()
            now = time.perf_counter()
            taken.append(now - last)
            last = now
        pipe.send((began, last, taken))


def one_round(kind: str, operation: str, count: int, clients: list[Connection]) -> dict[str, float]:
    """Have these clients work at once; return the microseconds of a call, and calls a second."""
    for pipe in clients:
        pipe.send((kind, operation, count))
    told = [pipe.recv() for pipe in clients]
    taken = sorted(each for _, _, part in told for each in part)
    whole = max(end for _, end, _ in told) - min(begin for begin, _, _ in told)
    return {
        "median": statistics.median(taken) * 1e6,
        "p99": taken[int(0.99 * (len(taken) - 1))] * 1e6,
        "per second": len(taken) / whole,
    }


Figures = dict[str, dict[str, dict[str, float]]]
"""What was done -> whose store -> the figures."""


def measure(kinds: list[str], clients: list[Connection], rounds: int) -> Figures:
    """Return the medians of the rounds."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    end = time.monotonic() + SECONDS
    made = 0
    while made < rounds or time.monotonic() < end:
        for operation in OPERATIONS:
            for kind in kinds if made % 2 else kinds[::-1]:
                many = found.setdefault((f"{operation}, {len(clients)} clients", kind), [])
                many.append(one_round(kind, operation, CALLS, clients))
                alone = found.setdefault((f"{operation}, 1 client", kind), [])
                alone.append(one_round(kind, operation, 10 * CALLS, clients[:1]))
        for kind in kinds:
            met = found.setdefault((f"barrier, {len(clients)} clients", kind), [])
            met.append(one_round(kind, "meet", len(clients), clients))
        made += 1
    told: Figures = {}
    for (what, kind), each in found.items():
        figures = {name: statistics.median(one[name] for one in each) for name in each[0]}
        told.setdefault(what, {})[kind] = {**figures, "rounds": len(each)}
    return told


def table(told: Figures, kinds: list[str]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = ["| | " + " | ".join(f"{kind}: median, 99 % (µs) | calls/s" for kind in kinds) + " | ratio |"]
    lines.append("|---|" + "---:|" * (2 * len(kinds) + 1))
    for what, by_kind in told.items():
        cells = []
        for kind in kinds:
            figures = by_kind[kind]
            cells += [f"{figures['median']:,.0f}, {figures['p99']:,.0f}", f"{figures['per second']:,.0f}"]
        ratio = f"{by_kind['mpicoll']['median'] / by_kind['torch']['median']:.2f}" if "torch" in kinds else "-"
        lines.append(f"| {what} | " + " | ".join(cells) + f" | {ratio} |")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    kinds = ["mpicoll", *(["torch"] if util.find_spec("torch") is not None else [])]
    for kind in kinds:
        import_module(
            {"mpicoll": "mpicoll.stores.tcp_server", "torch": "torch.distributed"}[kind]
        )  # once, and not in every process
    context = multiprocessing.get_context("fork")
    ports = {kind: free_port() for kind in kinds}
    processes: list[Any] = []
    pipes: list[Connection] = []

    def start(target: Any, *args: Any) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(ours)

    for kind in kinds:
        start(serve, kind, ports[kind])
    for pipe in pipes:
        pipe.recv()
    for number in range(options.clients):
        start(work, ports, number)
    clients = pipes[len(kinds) :]
    for pipe in clients:
        pipe.recv()
    told = measure(kinds, clients, options.rounds)
    for pipe in clients:
        pipe.send(None)
    for pipe in pipes[: len(kinds)]:
        pipe.send("end")
    for process in processes:
        process.join(10)
    print("\n".join(table(told, kinds)), flush=True)
    if options.json is not None:
        versions = {"python": platform.python_version(), **{kind: metadata.version(kind) for kind in kinds[1:]}}
        about = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "value bytes": len(VALUE), "versions": versions}
        options.json.write_text(json.dumps({**about, "figures": told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
