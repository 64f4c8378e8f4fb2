"""`mpicoll doctor --gpu`: try which operations of this MPI accept GPU memory, each in a separate job, as it may crash."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpicoll.cli.two_ranks import run_two_ranks
from mpicoll.errors import LaunchError
from mpicoll.transports.device.capability import OPERATIONS, path_of_probes

LIMIT = 60.0

# The program of two ranks: one operation by mpi4py, with equal blocks and with counts, on arrays of the GPU or, for tests of
# the probe, of the host.
_PROBE = """\
import sys
import numpy as np
from mpi4py import MPI
operation, blocking, where, count = sys.argv[1], sys.argv[2] == "blocking", sys.argv[3], 100_000
comm = MPI.COMM_WORLD
me, other = comm.rank, 1 - comm.rank
if where == "cuda":
    import cupy as xp
    xp.cuda.Device(me % xp.cuda.runtime.getDeviceCount()).use()
    synchronize = xp.cuda.runtime.deviceSynchronize
else:
    xp, synchronize = np, lambda: None
counts, starts = [count, count // 2], [0, count]
mine, between = counts[me], counts if me == 0 else counts[::-1]
host = np.full(count, me + 1.0)
both = np.repeat([1.0, 2.0], count)
crossed = np.repeat([me, 10.0 + me], count)
part = np.arange(2 * count) % count < np.repeat(between, count)
def blocks(array, counts=counts):
    return [array, (counts, starts), MPI.DOUBLE]
tries = {
    "all_reduce": [lambda: ("Allreduce", (MPI.IN_PLACE, x), x, 3)],
    "reduce": [
        lambda: ("Reduce", (MPI.IN_PLACE, x, MPI.SUM, 0) if me == 0 else (x, None, MPI.SUM, 0), x, 3 - me)
    ],
    "reduce_scatter": [
        lambda: ("Reduce_scatter_block", (z, x), x, 10 + 2 * me),
        lambda: ("Reduce_scatter", (z[:sum(counts)], x[:mine], counts), x[:mine], 10 + 2 * me),
    ],
    "broadcast": [lambda: ("Bcast", (x, 0), x, 1)],
    "all_gather": [
        lambda: ("Allgather", (x, y), y, both),
        lambda: ("Allgatherv", (x[:mine], blocks(y)), y[:sum(counts)], both[:sum(counts)]),
    ],
    "gather": [
        lambda: ("Gather", (x, y if me == 0 else None, 0), y, both * (1 - me)),
        lambda: (
            "Gatherv", (x[:mine], blocks(y) if me == 0 else None, 0), y[:sum(counts)], both[:sum(counts)] * (1 - me)
        ),
    ],
    "scatter": [
        lambda: ("Scatter", (z if me == 0 else None, x, 0), x, me),
        lambda: ("Scatterv", (blocks(z) if me == 0 else None, x[:mine], 0), x[:mine], me),
    ],
    "all_to_all": [
        lambda: ("Alltoall", (z, y), y, crossed),
        lambda: ("Alltoallv", (blocks(z, between), blocks(y, between)), y, crossed * part),
    ],
    "send": [lambda: ("Send", (x, other), x, me + 1) if me == 0 else ("Recv", (host, other), host, 1)],
    "recv": [lambda: ("Send", (host, other), host, me + 1) if me == 0 else ("Recv", (x, other), x, 1)],
}[operation]
right = True
for each in tries:
    x, y = xp.full(count, me + 1.0), xp.zeros(2 * count)
    z = xp.repeat(xp.arange(2.0) + 10 * me, count)
    name, arguments, result, expected = each()
    synchronize()
    made = getattr(comm, name if blocking else "I" + name.lower())(*arguments)
    if made is not None:
        made.Wait()
    found = result if isinstance(result, np.ndarray) else result.get()
    right = comm.allreduce(bool((found == expected).all()), MPI.LAND) and right
if me == 0:
    print("probe:", "right" if right else "wrong", flush=True)
"""


# The program of two ranks: one all_reduce of this library on one GPU, or, for tests of the probe, on a stand-in for a GPU.
_SHARING = """\
import sys
import mpicoll as dist
if sys.argv[1] == "cuda":
    import cupy
    cupy.cuda.Device(0).use()
    x = cupy.ones(1 << 20)
else:
    import numpy, standin_gpu
    from mpicoll.memory.device import runtime as device_runtime
    device_runtime._runtime = standin_gpu.Gpu()
    device_runtime._runtime.refuses.update(sys.argv[2:])
    x = device_runtime._runtime.array_of(numpy.ones(1 << 20))
dist.init_process_group()
dist.all_reduce(x)
window = dist.group.WORLD.opened.get("device_ipc")
found = "not tried: MPICOLL_CUDA_IPC=off" if window is None else "yes" if window.usable else f"no: {window.why}"
if dist.get_rank() == 0:
    print("probe:", found, flush=True)
dist.destroy_process_group()
"""


def probe(operation: str, nonblocking: bool, where: str = "cuda") -> str:
    """Try one operation on two ranks; return "right", "wrong", or how the job ended."""
    return _run([_PROBE, operation, "nonblocking" if nonblocking else "blocking", where])


def probe_sharing(where: str = "cuda", *refused: str) -> str:
    """Try whether two ranks can reduce on one GPU (CUDA IPC); return "yes", "no" and why, or how the job ended."""
    return _run([_SHARING, where, *refused])


def _run(arguments: list[str]) -> str:
    return judge(*run_two_ranks(arguments, LIMIT))


def judge(code: int, printed: str, problem: str) -> str:
    """Return the result of a probe from its exit code and its output on stdout and stderr."""
    if code == 0:
        found = [line.partition(":")[2].strip() for line in printed.splitlines() if line.startswith("probe:")]
        return found[0] if found else "no result printed"
    if code == 124:
        return f"did not end within {LIMIT:.0f} s"
    if code > 128:
        try:
            return f"crashed: {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    last = [line for line in problem.splitlines() if "Error" in line or "error" in line]
    return f"failed with exit code {code}" + (f": {last[0].strip()[:120]}" if last else "")


def probe_all(
    report: Callable[[str, str], None], where: str = "cuda", probing: Callable[[str, bool, str], str] = probe
) -> set[tuple[str, bool]]:
    """Try every operation, blocking and nonblocking; return the operations with the right result.

    Args:
        report: called with the name and the result of each operation.
    """
    right = set()
    for operation in OPERATIONS:
        for nonblocking in (False, True):
            found = probing(operation, nonblocking, where)
            report(f"{operation}, {'nonblocking' if nonblocking else 'blocking'}", found)
            if found == "right":
                right.add((operation, nonblocking))
    return right


def save(right: set[tuple[str, bool]], library: str, path: Path | None = None) -> Path:
    """Save the results for one MPI library, beside the results for other libraries; return the file."""
    path = path_of_probes() if path is None else path
    known: dict[str, Any] = {}
    try:
        known = json.loads(path.read_text())
        if not isinstance(known, dict):
            raise ValueError("not a file of mpicoll doctor --gpu --save; remove the file")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path}: {error}") from error
    known[library] = sorted(f"{operation} {'nonblocking' if form else 'blocking'}" for operation, form in right)
    path.write_text(json.dumps(known, indent=1) + "\n")
    return path
