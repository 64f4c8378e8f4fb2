"""Functions that torch.distributed has from 2.15 on, on this backend."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import mpicoll.torch

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("job")]


@pytest.mark.parametrize("name", ["gather_single", "gather_into_tensor"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_gather_single(name: str, asynchronous: bool) -> None:
    """Each rank in turn gets the tensors of all ranks, as a stack and as a concatenation."""
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = torch.arange(float(size)).repeat_interleave(3)
    for root in range(size):
        for shape in ((size, 3), (3 * size,)):
            out = torch.zeros(shape) if rank == root else None
            work = getattr(dist, name)(torch.full((3,), float(rank)), out, root, async_op=asynchronous)
            if asynchronous:
                work.wait()
            assert out is None or torch.equal(out.flatten(), expected)


def test_set_timeout() -> None:
    """It is the limit of the group of this library."""
    group = mpicoll.torch.group_of(dist.group.WORLD)
    before = timedelta(seconds=group.timeout)
    dist.set_timeout(timedelta(seconds=33))
    assert group.timeout == 33
    dist.set_timeout(before)


def test_objects_that_hold_data() -> None:
    """With ``weights_only=True`` torch loads its own tensors, and refuses other objects."""
    rank, size = dist.get_rank(), dist.get_world_size()
    got: list[object] = [None] * size
    dist.all_gather_object(got, {"rank": rank, "weights": torch.ones(2)}, weights_only=True)
    assert [each["rank"] for each in got] == list(range(size))  # type: ignore[index]
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        dist.all_gather_object(got, timedelta(seconds=1), weights_only=True)
