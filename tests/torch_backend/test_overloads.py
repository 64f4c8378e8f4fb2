"""Methods of process groups called as torch declares their overloads without options; and calls under torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("job")]
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LIMIT = timedelta(seconds=9)
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def _own() -> torch.Tensor:
    return torch.full((2,), float(RANK + 1))


def _blocks() -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(SIZE)]


FORMS: dict[str, Callable[[Any], Any]] = {
    "allreduce(t, op, timeout)": lambda group: group.allreduce(_own(), SUM, LIMIT),
    "allreduce(ts, op=)": lambda group: group.allreduce([_own()], op=SUM),
    "allreduce(t, timeout=)": lambda group: group.allreduce(_own(), timeout=LIMIT),
    "broadcast(ts)": lambda group: group.broadcast([_own()]),
    "broadcast(t, root=)": lambda group: group.broadcast(_own(), root=1),
    "broadcast(t, root, timeout)": lambda group: group.broadcast(_own(), 1, LIMIT),
    "reduce(ts)": lambda group: group.reduce([_own()]),
    "reduce(t, root, op)": lambda group: group.reduce(_own(), 1, MAX),
    "reduce(t, root=, op=)": lambda group: group.reduce(_own(), root=1, op=MAX),
    "allgather(o, t, timeout=)": lambda group: group.allgather(_blocks(), _own(), timeout=LIMIT),
    "allgather(o, t, timeout)": lambda group: group.allgather(_blocks(), _own(), LIMIT),
    "gather(o, t, root=)": lambda group: group.gather(_blocks() if RANK == 1 else [], _own(), root=1),
    "gather(os, ts)": lambda group: group.gather([_blocks()] if RANK == 0 else [], [_own()]),
    "scatter(t, i, root=)": lambda group: group.scatter(_own(), _blocks() if RANK == 1 else [], root=1),
    "scatter(ts, is)": lambda group: group.scatter([_own()], [_blocks()] if RANK == 0 else []),
    "reduce_scatter(t, i, op=)": lambda group: group.reduce_scatter(_own(), _blocks(), op=SUM),
    "reduce_scatter(t, i, op, timeout)": lambda group: group.reduce_scatter(_own(), _blocks(), SUM, LIMIT),
    "alltoall(o, i, timeout=)": lambda group: group.alltoall(_blocks(), _blocks(), timeout=LIMIT),
    "alltoall_base(.., timeout=)": lambda group: group.alltoall_base(
        output_tensor=torch.zeros(2 * SIZE),
        input_tensor=torch.zeros(2 * SIZE),
        output_split_sizes=[],
        input_split_sizes=[],
        timeout=LIMIT,
    ),
    "_reduce_scatter_base(outputTensor=)": lambda group: group._reduce_scatter_base(
        outputTensor=torch.zeros(2), inputTensor=torch.zeros(2 * SIZE)
    ),
    "barrier(timeout=)": lambda group: group.barrier(timeout=LIMIT),
    "barrier(timeout)": lambda group: group.barrier(LIMIT),
    "send(ts, dstRank=, tag=)": lambda group: (
        group.send([_own()], dstRank=(RANK + 1) % SIZE, tag=3),
        group.recv([_own()], srcRank=(RANK - 1) % SIZE, tag=3),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_overloads(form: str) -> None:
    """The overloads of torch's methods without options: each returns a Work, whose limit is the one given."""
    made = FORMS[form](dist.group.WORLD)
    for work in made if isinstance(made, tuple) else (made,):
        assert work.wait()
        if "timeout" in form:
            assert work._work._request.limit == LIMIT.total_seconds()


def test_overloads_of_torch() -> None:
    """Root and op of an overload count."""
    group: Any = dist.group.WORLD
    tensor = _own()
    group.broadcast(tensor, root=1).wait()
    assert (tensor == 2).all()
    tensor = _own()
    group.reduce(tensor, 1, MAX).wait()
    assert (tensor == (SIZE if RANK == 1 else RANK + 1)).all()


def test_profiler() -> None:
    """A call is an event of torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(_own())
    assert "mpicoll:all_reduce" in {event.key for event in profile.key_averages()}
