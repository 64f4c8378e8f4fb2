"""Functions compiled by torch.compile call the package and do not compile it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import mpicoll as dist
from mpicoll.nn import functional as F
from mpicoll.runtime import torch_compile

pytestmark = pytest.mark.mpi

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Compile anew, and take what the compiler complains of for an error."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The .grad attribute")  # that the compiler itself looks at
        yield
    torch._dynamo.reset()


def breaks() -> set[str]:
    """Return the functions at which compiled ones were interrupted; all else that was compiled is the test's."""
    reasons = [reason for reason in counters["graph_break"] if f"reason: {torch_compile.REASON}" not in reason]
    assert not reasons
    assert not [name for name in counters["resumes"] if not name.startswith("torch_dynamo_resume_in_step_at_")]
    return {reason.split("<function ")[1].split()[0] for reason in counters["graph_break"]}


def test_collectives() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()

    @torch.compile(backend="eager")
    def step(x: Tensor) -> tuple[Tensor, list[Any]]:
        y = x * 2
        dist.all_reduce(y)
        work = dist.all_reduce(x, async_op=True)
        z = y + 1
        work.wait()
        told: list[Any] = [None] * size
        dist.all_gather_object(told, dist.get_rank())
        return (z + x).sin(), told

    for _ in range(3):
        x = torch.full((5,), float(rank))
        result, told = step(x)
        total = float(sum(range(size)))
        assert torch.equal(result, torch.full((5,), 3 * total + 1).sin())
        assert told == list(range(size))
    assert breaks() >= {"all_reduce", "Work.wait", "all_gather_object"}


def test_one_after_the_other() -> None:
    """The context managers run Python between their two ends, and a memory that ranks share."""

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        with dist.zero_first():
            x = x + 1
        dist.barrier()
        return x * 2

    for _ in range(2):
        assert torch.equal(step(torch.zeros(3)), torch.full((3,), 2.0))
    assert "zero_first" in breaks()


def test_gradients() -> None:
    size = dist.get_world_size()

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        return F.all_reduce(x * 3).sum()

    x = torch.ones(4, requires_grad=True)
    step(x).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4,), 3.0 * size))


def test_torch_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are marked as soon as there is a torch, each once."""
    monkeypatch.setattr(torch_compile, "_left", set())
    torch_ = sys.modules.pop("torch")
    torch_compile.exclude_from_compile()
    assert not torch_compile._left
    sys.modules["torch"] = torch_
    torch_compile.exclude_from_compile()
    assert "mpicoll.api.collectives" in torch_compile._left
    assert dist.all_reduce._torchdynamo_disable  # type: ignore[attr-defined]
