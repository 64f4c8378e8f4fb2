"""Time collectives beside raw mpi4py, in alternating rounds on all ranks of a job; see :mod:`mpicoll.cli.bench.command`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import mpicoll as dist
from mpicoll._version import __version__
from mpicoll.runtime.mpi_library import library_name
from mpicoll.runtime.settings import Engine, Level


@dataclass(frozen=True)
class Config:
    """A way to make calls of mpicoll: check level and engine."""

    name: str
    check: Level
    engine: Engine


CONFIGS = (
    Config("off", "off", "auto"),
    Config("roll", "roll", "auto"),
    Config("full", "full", "auto"),
    Config("full, MPI", "full", "mpi"),
    Config("full, shared memory", "full", "node"),
)
GLOO = "torch gloo"

AIM = 0.02
"""Seconds that one timing of one call takes, approximately."""
MOST_REPEATS = 2000


@dataclass
class Measured:
    """The measurements of one operation with one size.

    Attributes:
        op: name of the operation.
        nbytes: bytes that each rank passes; if it passes a block to each rank, bytes of a block.
        raw: microseconds per call of raw mpi4py beside each of ``ours``, by the name of the configuration, in each round.
        ours: the same for mpicoll in each configuration, and for torch.
        copy: microseconds of one copy of as many bytes, made by all ranks at once: the limit that memory sets.
    """

    op: str
    nbytes: int
    raw: dict[str, list[float]] = field(default_factory=dict)
    ours: dict[str, list[float]] = field(default_factory=dict)
    copy: list[float] = field(default_factory=list)


@dataclass
class Results:
    """All measurements of a run, with the number of ranks and nodes, machine and versions."""

    ranks: int
    nodes: int
    about: dict[str, str]
    measured: list[Measured]


class _Calls:
    """The calls of one operation on arrays of one size, of mpi4py and of mpicoll, and the check of their results."""

    def __init__(self, op: str, nbytes: int, comm: Any) -> None:
        self.op, self.comm = op, comm
        self.count = max(1, nbytes // 8)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        many = self.count * self.size
        whole = op in ("all_gather", "gather")
        parted = op in ("reduce_scatter", "all_to_all", "scatter")
        self.mine = np.ones(many if parted else self.count)
        self.result = np.empty(many if whole or op == "all_to_all" else self.count)

    def raw(self) -> Callable[[], object]:
        """Return the call of mpi4py."""
        from mpi4py import MPI

        comm, mine, result, root = self.comm, self.mine, self.result, self.rank == 0
        made: dict[str, Callable[[], object]] = {
            "barrier": comm.Barrier,
            "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, mine, MPI.MAX),
            "broadcast": lambda: comm.Bcast(mine, 0),
            "reduce": lambda: comm.Reduce(MPI.IN_PLACE if root else mine, mine if root else None, MPI.MAX, 0),
            "all_gather": lambda: comm.Allgather(mine, result),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(mine, result, MPI.MAX),
            "all_to_all": lambda: comm.Alltoall(mine, result),
            "gather": lambda: comm.Gather(mine, result if root else None, 0),
            "scatter": lambda: comm.Scatter(mine if root else None, result, 0),
        }
        return made[self.op]

    def ours(self, library: Any, mine: Any, result: Any) -> Callable[[], object]:
        """Return the same call of mpicoll, or of torch.distributed on tensors of the same memory."""
        largest, root = library.ReduceOp.MAX, self.rank == 0
        blocks = list(result.reshape(self.size, -1)) if self.op == "gather" and root else None
        parts = list(mine.reshape(self.size, -1)) if self.op == "scatter" and root else None
        gather = getattr(library, "all_gather_single", None) or library.all_gather_into_tensor
        scatter = getattr(library, "reduce_scatter_single", None) or library.reduce_scatter_tensor
        made: dict[str, Callable[[], object]] = {
            "barrier": library.barrier,
            "all_reduce": lambda: library.all_reduce(mine, largest),
            "broadcast": lambda: library.broadcast(mine, 0),
            "reduce": lambda: library.reduce(mine, 0, largest),
            "all_gather": lambda: gather(result, mine),
            "reduce_scatter": lambda: scatter(result, mine, largest),
            "all_to_all": lambda: library.all_to_all_single(result, mine),
            "gather": lambda: library.gather(mine, blocks, 0),
            "scatter": lambda: library.scatter(result, parts, 0),
        }
        return made[self.op]

    def check(self, call: Callable[[], object], how: str) -> None:
        """Make the call once with numbers that differ between the ranks.

        Raises:
            AssertionError: the result is wrong.
        """
        self.mine[...] = self.rank + 1
        self.result[...] = -1
        call()
        ranks = np.arange(1, self.size + 1).repeat(self.count)
        wants: Any = {
            "all_reduce": self.size,
            "broadcast": 1,
            "reduce": self.size if self.rank == 0 else None,
            "all_gather": ranks,
            "reduce_scatter": self.size,
            "all_to_all": ranks,
            "gather": ranks if self.rank == 0 else None,
            "scatter": 1,
            "barrier": None,
        }[self.op]
        got = self.mine if self.op in ("all_reduce", "broadcast", "reduce") else self.result
        assert wants is None or bool((got == wants).all()), f"{how}: {self.op} of {self.count} numbers is wrong"
        self.mine[...] = 1


OPS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)


def measure(
    ops: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    *,
    torch: bool,
    configs: Sequence[Config] = CONFIGS,
    progress: Callable[[str, float], None] = lambda text, share: None,
) -> Results:
    """Time every operation and size in every configuration. All ranks of the job call the function, before any group is made.

    Each call of mpicoll is timed right after the same call of raw mpi4py, in every round, so that other load of the machine
    affects both. A time is the mean over the ranks.

    Args:
        ops: names out of ``OPS``.
        sizes: bytes.
        rounds: how often each measurement is made.
        torch: whether to time torch.distributed's gloo, too, if torch is installed.
        configs: configurations of mpicoll.
        progress: called with the name of the current measurement and the completed share of all.
    """
    dist.init_process_group()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    nodes = len(set(comm.allgather(socket.gethostname())))
    dist.destroy_process_group()
    found = [Measured(op, nbytes) for op in ops for nbytes in (sizes if op != "barrier" else (0,))]
    calls = [_Calls(each.op, each.nbytes, comm) for each in found]
    with_torch = torch and all(comm.allgather(importlib.util.find_spec("torch") is not None))
    ways = len(configs) + with_torch
    done = 0
    for number in range(rounds):
        for each in found:
            each.copy.append(_copy(each.nbytes, comm))
        for way, (name, library) in enumerate(_libraries(comm, configs, with_torch)):
            progress(f"round {number + 1} of {rounds}: {name}", done / (rounds * ways))
            for each, call in zip(found, calls, strict=True):
                mine, result = (library.from_numpy(a) if way >= len(configs) else a for a in (call.mine, call.result))
                ours = call.ours(library.distributed if way >= len(configs) else library, mine, result)
                if not number:
                    call.check(ours, name)
                    call.check(call.raw(), "raw")
                each.raw.setdefault(name, []).append(_time(call.raw(), comm))
                each.ours.setdefault(name, []).append(_time(ours, comm))
            done += 1
    return Results(comm.Get_size(), nodes, _about(), found)


def _libraries(comm: Any, configs: Sequence[Config], with_torch: bool) -> Iterator[tuple[str, Any]]:
    """Yield mpicoll in each configuration, and torch if asked, each initialised."""
    before = os.environ.get("MPICOLL_ENGINE")
    try:
        for config in configs:
            os.environ["MPICOLL_ENGINE"] = config.engine
            dist.init_process_group(check=config.check)
            yield config.name, dist
            dist.destroy_process_group()
    finally:
        os.environ.pop("MPICOLL_ENGINE", None)
        if before is not None:
            os.environ["MPICOLL_ENGINE"] = before
    if with_torch:
        torch: Any = importlib.import_module("torch")
        gloo = importlib.import_module("torch.distributed")
        with socket.socket() as free:
            free.bind(("", 0))
            where = comm.bcast((socket.gethostname() if comm.Get_size() > 1 else "localhost", free.getsockname()[1]), 0)
        url = f"tcp://{where[0]}:{where[1]}"
        gloo.init_process_group("gloo", url, rank=comm.Get_rank(), world_size=comm.Get_size())
        yield GLOO, torch
        gloo.destroy_process_group()


def _time(call: Callable[[], object], comm: Any) -> float:
    """Return microseconds per call, the mean over the ranks."""
    call()
    comm.Barrier()
    start = time.perf_counter()
    call()
    once = comm.allreduce(time.perf_counter() - start) / comm.Get_size()
    repeats = int(max(3, min(MOST_REPEATS, AIM / max(once, 1e-7))))
    call()
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    taken: float = comm.allreduce(time.perf_counter() - start)
    return taken / int(comm.Get_size()) / repeats * 1e6


def _copy(nbytes: int, comm: Any) -> float:
    one, other = np.ones(max(1, nbytes), np.uint8), np.ones(max(1, nbytes), np.uint8)
    return _time(lambda: np.copyto(one, other), comm)


def _about() -> dict[str, str]:
    """Return the facts that the figures depend on."""
    import mpi4py
    from mpi4py import MPI

    return {
        "command": " ".join(["mpicoll", *sys.argv[1:]]),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "MPI": library_name(MPI.Get_library_version()),
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "mpicoll": __version__,
        "Python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if not line.startswith("model name"):
                    continue
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
