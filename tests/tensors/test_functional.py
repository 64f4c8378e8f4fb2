"""Differentiable collectives: values, and gradients against differences of the sum of all ranks' losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import mpicoll as dist
from mpicoll import ReduceOp
from mpicoll.nn import functional as F
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi

Tensor = torch.Tensor
ROWS = 6


def weights(like: Tensor) -> Tensor:
    """Return what a rank's loss weighs its results by."""
    return torch.linspace(1, 2 + dist.get_rank(), like.numel(), dtype=like.dtype).reshape(like.shape)


def splits(back: bool) -> list[int]:
    """Return how many rows this rank gets from, or gives to, each: rank i gives j rows to rank j, and one more."""
    size, rank = dist.get_world_size(), dist.get_rank()
    return [rank + 1] * size if back else [each + 1 for each in range(size)]


def uneven(x: Tensor) -> Tensor:
    size = dist.get_world_size()
    given = x[: sum(splits(False))]
    return (
        F.all_to_all_single(x.new_empty(sum(splits(True)), 2), given, splits(True), splits(False))
        if size < 4
        else x * 0
    )


def on(rank: int, x: Tensor) -> Tensor:
    """Return a result of the one rank that has it; on the others one whose values do not count."""
    return x if dist.get_rank() == rank else x * 0


CASES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": F.all_reduce,
    "all_reduce of averages": lambda x: F.all_reduce(x, dist.ReduceOp.AVG),
    "all_gather": lambda x: torch.stack(F.all_gather(x)),
    "all_gather of a part": lambda x: F.all_gather(x.t())[0] * 3,
    "reduce_scatter": lambda x: F.reduce_scatter(
        x.new_empty(2, 2), [x[each : each + 2] for each in range(dist.get_world_size())]
    ),
    "reduce_scatter of averages": lambda x: F.reduce_scatter(
        x.new_empty(1, 2), [x[each : each + 1] ** 2 for each in range(dist.get_world_size())], dist.ReduceOp.AVG
    ),
    "reduce_scatter, uneven": lambda x: F.reduce_scatter(
        x.new_empty(1 + dist.get_rank(), 2), [x[: each + 1] * 2 for each in range(dist.get_world_size())]
    ),
    "broadcast": lambda x: F.broadcast(x, dist.get_world_size() - 1),
    "all_to_all_single": lambda x: F.all_to_all_single(
        x.new_empty(dist.get_world_size(), 2), x[: dist.get_world_size()] * x[: dist.get_world_size()]
    ),
    "all_to_all_single, uneven": uneven,
    "reduce": lambda x: on(0, F.reduce(x * x, 0)),
    "reduce of averages": lambda x: on(dist.get_world_size() - 1, F.reduce(x, dist.get_world_size() - 1, ReduceOp.AVG)),
    "gather": lambda x: on(0, torch.stack(F.gather(x.t() * 2))),
    "gather on the last": lambda x: torch.stack(F.gather(x, dist.get_world_size() - 1)),
    "scatter": lambda x: F.scatter([x[each] ** 2 for each in range(dist.get_world_size())]),
    "scatter of the last": lambda x: F.scatter(
        [x[each : each + 2] * each for each in range(dist.get_world_size())], dist.get_world_size() - 1
    ),
    "all_to_all": lambda x: torch.stack(
        F.all_to_all([x.new_empty(2) for _ in range(dist.get_world_size())], list(x[: dist.get_world_size()] ** 2))
    ),
    "all_to_all, uneven": lambda x: torch.cat(
        F.all_to_all([x.new_empty(rows, 2) for rows in splits(True)], [x[:rows] * (rows + 1) for rows in splits(False)])
    ),
    "several": lambda x: F.all_reduce(F.all_gather(F.broadcast(x, 0) * x)[-1]).sum(0),
}


def loss(function: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    result = function(x)
    return (weights(result) * result).sum()


def slopes(value: Callable[[Tensor], Tensor], x: Tensor, step: float) -> list[float]:
    """Return what the sum of all ranks' values changes by with each element of this rank's ``x``."""
    mine = []
    for whose in range(dist.get_world_size()):
        for place in range(x.numel()):
            ends = []
            for sign in (1, -1):
                moved = x.detach().clone()
                if dist.get_rank() == whose:
                    moved.view(-1)[place] += sign * step
                total = value(moved.requires_grad_()).detach()
                dist.all_reduce(total)
                ends.append(float(total))
            if dist.get_rank() == whose:
                mine.append((ends[0] - ends[1]) / (2 * step))
    return mine


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    """The gradient of every rank's every element is what the sum of all losses changes by."""
    function, rank = CASES[name], dist.get_rank()
    x = torch.randn(ROWS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    loss(function, x).backward()
    assert x.grad is not None
    for found, right in zip(x.grad.view(-1), slopes(partial(loss, function), x, 1e-6), strict=True):
        assert abs(right - float(found)) < 1e-5


def test_gradcheck() -> None:
    """torch's own check, of a function in which all ranks play the same part; second derivatives, too."""
    x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: F.all_reduce(t**2), (x,))
    assert torch.autograd.gradgradcheck(lambda t: F.all_reduce(t**3), (x,))
    size = dist.get_world_size()
    for second, check in ((False, torch.autograd.gradcheck), (True, torch.autograd.gradgradcheck)):
        power = 3 if second else 2
        assert check(lambda t, power=power: sum(F.all_to_all([t] * size, [t**power] * size)), (x,))


def _blocks(t: Tensor, size: int) -> Tensor:
    """Give the same to each rank, and return the sum of what has come from them."""
    sent = (t**2).repeat(size, 1)
    return F.all_to_all_single(torch.empty_like(sent), sent).sum(0)


SYMMETRIC: dict[str, Callable[[Tensor, int], Tensor]] = {
    "all_gather": lambda t, size: sum(F.all_gather(t**2), torch.zeros_like(t)),
    "reduce_scatter": lambda t, size: F.reduce_scatter(torch.empty_like(t), [t**2] * size),
    "broadcast": lambda t, size: sum((F.broadcast(t**2, src) for src in range(size)), torch.zeros_like(t)),
    "all_to_all_single": _blocks,
}
"""Functions in which all ranks play the same part: gradcheck changes the same element on all of them at once."""


@pytest.mark.parametrize("name", SYMMETRIC)
def test_gradcheck_of_each(name: str) -> None:
    """torch's own check of first and second derivatives, of functions that are symmetric in the ranks."""
    size = dist.get_world_size()
    x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: SYMMETRIC[name](t, size), (x,))
    assert torch.autograd.gradgradcheck(lambda t: SYMMETRIC[name](t, size), (x,))


def test_second_derivatives_of_uneven_parts() -> None:
    """The gradient of a gradient's square, of parts of several sizes, is what differences of the sum of all ranks' ones give."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def square(x: Tensor) -> Tensor:
        parts = [x[: each + 1] ** 3 for each in range(size)]
        result = F.reduce_scatter(x.new_empty(1 + rank, 2), parts, ReduceOp.AVG if size == 2 else ReduceOp.SUM)
        value = (weights(result) * result**2).sum()
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        return (grad**2).sum()

    x = torch.rand(ROWS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    square(x).backward()
    assert x.grad is not None
    wrong = [
        (place, right)
        for place, right in enumerate(slopes(square, x, 1e-5))
        if abs(right - float(x.grad.view(-1)[place])) > 1e-4 * max(1, abs(right))
    ]
    assert not wrong


def test_outside_the_group() -> None:
    """A rank that is not a member is told so by every function, and nothing is waited for."""
    group = dist.new_group([0])
    x = torch.ones(1)
    calls: list[Callable[[], Any]] = [
        lambda: F.all_reduce(x, group=group),
        lambda: F.all_gather(x, group),
        lambda: F.reduce_scatter(x, [x], group=group),
        lambda: F.broadcast(x, 0, group),
        lambda: F.reduce(x, 0, group=group),
        lambda: F.gather(x, 0, group),
        lambda: F.scatter([x], 0, group),
        lambda: F.all_to_all([x.clone()], [x], group),
        lambda: F.all_to_all_single(x.clone(), x, group=group),
    ]
    for call in calls:
        if dist.get_rank():
            with pytest.raises(ValueError, match="is not in the group"):
                call()
        else:
            result = call()
            assert [float(each) for each in (result if isinstance(result, tuple) else (result,))] == [1]


@pytest.mark.mpi(min_size=2)
def test_the_line_of_a_call() -> None:
    """Reports have the program's line: that of the function, or that of its backward()."""
    for _ in range(3):
        y = F.all_reduce(torch.ones(2, requires_grad=True)).sum()
        y.backward()
    with collective_raises(dist.CollectiveMismatchError) as caught:
        F.all_reduce(torch.ones(2 + (dist.get_rank() == 1)))
    assert {each["site"].rpartition(":")[0] for each in caught.value.calls} == {__file__}
    y = F.all_reduce(torch.ones(2, requires_grad=True)).sum()
    with collective_raises(dist.CollectiveMismatchError) as caught:
        y.backward() if dist.get_rank() else dist.broadcast(torch.ones(2), 0)
    assert {each["site"].rpartition(":")[0] for each in caught.value.calls} == {__file__}


def test_values() -> None:
    """What comes out is what the collectives in place give; the input stays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((2,), float(rank))
    assert F.all_reduce(x).tolist() == [size * (size - 1) / 2] * 2
    assert [each.tolist() for each in F.all_gather(x)] == [[each, each] for each in range(size)]
    assert F.broadcast(x, size - 1).tolist() == [size - 1] * 2
    assert F.reduce(x, 0).tolist() == ([size * (size - 1) / 2] * 2 if rank == 0 else [rank, rank])
    gathered = [each.tolist() for each in F.gather(x, size - 1)]
    assert gathered == ([[each, each] for each in range(size)] if rank == size - 1 else [[0, 0]] * size)
    lists = [torch.full((2,), float(10 * rank + each)) for each in range(size)]
    assert F.scatter(lists).tolist() == [rank, rank]
    got = F.all_to_all([torch.empty(2) for _ in range(size)], lists)
    assert [each.tolist() for each in got] == [[10 * each + rank] * 2 for each in range(size)]
    with collective_raises(ValueError, match="all of one shape"):
        F.scatter([torch.ones(1 + each % 2) for each in range(max(size, 2))])
    assert x.tolist() == [rank, rank]
    group = dist.new_group([size - 1])
    if rank == size - 1:
        assert F.broadcast(x, rank, group).tolist() == [rank, rank]
        y = x.clone().requires_grad_()
        F.broadcast(y, rank, group).sum().backward()
        assert y.grad is not None
        assert y.grad.tolist() == [1, 1]


def test_gradients_on_a_group() -> None:
    """Roots are global ranks, and what a rank outside the group has gets no gradient."""
    size, rank = dist.get_world_size(), dist.get_rank()
    members = list(range(size))[::-1]
    group = dist.new_group(members, sort_ranks=False)
    x = torch.full((2,), float(rank + 1), requires_grad=True)
    for root in range(size):
        x.grad = None
        result = F.reduce(x, root, group=group).sum() * (rank + 1)
        (result + torch.stack(F.gather(x, root, group)).sum() * 10 * (rank + 1)).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [11.0 * (root + 1)] * 2
    dist.destroy_process_group(group)


def test_an_op_without_a_gradient() -> None:
    """The largest is reduced, and has no gradient."""
    x = torch.ones(2, requires_grad=True)
    result = F.all_reduce(x, dist.ReduceOp.MAX)
    assert result.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="only SUM and AVG have one"):
        result.sum().backward()
