"""DistributedDataParallel: the training of all ranks equals that of one process on the rows of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("job")]
ROWS, WIDTH, STEPS = 4, 6, 5


class Net(torch.nn.Module):
    """Three layers, of which the middle one is used only if the program says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.middle, self.last = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Any, with_middle: bool = True) -> Any:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.middle(x)) if with_middle else x)


def batches(steps: int = STEPS) -> Iterator[tuple[Any, Any]]:
    """Yield the rows of all ranks, and those of this rank."""
    random = torch.Generator().manual_seed(3)
    for _ in range(steps):
        rows = torch.randn(dist.get_world_size() * ROWS, WIDTH, generator=random)
        yield rows, rows[dist.get_rank() * ROWS :][:ROWS]


def same(model: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Assert that the parameters of two models are equal."""
    for (name, got), want in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def step(model: Any, optimizer: Any, rows: Any, *given: Any) -> None:
    optimizer.zero_grad()
    model(rows, *given).square().mean().backward()
    optimizer.step()


def train(given: Callable[[int], tuple[Any, ...]] = lambda _: (), hook: Any = None, **options: Any) -> tuple[Any, Any]:
    """Train a model on all ranks and its copy in this process; return both."""
    alone = Net()
    model = DistributedDataParallel(copy.deepcopy(alone), **options)
    if hook is not None:
        model.register_comm_hook(*hook)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
    for number, (rows, own) in enumerate(batches()):
        step(model, optimizers[0], own, *given(number))
        step(alone, optimizers[1], rows, *given(number))
    return model.module, alone


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.0001}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_training(options: dict[str, Any]) -> None:
    """The parameters after some steps are those of one process."""
    same(*train(**options))


def test_unused_parameters() -> None:
    """find_unused_parameters: a layer that a step does not use gets no gradient."""
    same(*train(lambda number: (number % 2 == 0,), find_unused_parameters=True))


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"])
def test_hooks(name: str) -> None:
    """Communication hooks reduce the gradients, compressed or not."""
    exact = name == "allreduce_hook"
    hook = getattr(default_hooks, name)
    hooked = lambda state, bucket: hook(state, bucket)  # noqa: E731  (torch refuses the name of bf16's without CUDA)
    same(*train(hook=(None, hooked)), **({} if exact else {"rtol": 0.05, "atol": 0.02}))


def test_power_sgd() -> None:
    """PowerSGD: its ranks compute the same parameters; before its start the gradients are those of one process."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=WIDTH, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    model, alone = train(hook=(state, powerSGD_hook.powerSGD_hook))
    same(model, alone, rtol=0.05, atol=0.02)  # matrices of full rank
    for each in model.parameters():
        gathered = [torch.empty_like(each) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, each.detach())
        assert all(torch.equal(gathered[0], other) for other in gathered)


def test_no_sync() -> None:
    """Gradients that accumulate under no_sync are reduced by the next backward pass."""
    alone = Net()
    model = DistributedDataParallel(copy.deepcopy(alone))
    for number, (rows, own) in enumerate(batches(3)):
        with model.no_sync() if number < 2 else nullcontext():
            model(own).square().mean().backward()
        alone(rows).square().mean().backward()
        if number == 0:
            before = model.module.first.weight.grad.clone()
            assert not torch.allclose(before, alone.first.weight.grad)
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_join() -> None:
    """Ranks with more rows go on with join(): each step averages over the ranks that still have rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = Net()
    model = DistributedDataParallel(copy.deepcopy(alone))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
    with model.join(divide_by_initial_world_size=False):
        for _, own in list(batches(2 + size))[: 2 + rank]:
            step(model, optimizers[0], own)
    for number, (rows, _) in enumerate(batches(2 + size - 1)):
        first = max(0, number - 1)  # rank r has 2 + r batches
        step(alone, optimizers[1], rows[first * ROWS :])
    same(model.module, alone)


def test_zero_redundancy_optimizer() -> None:
    """An optimizer whose state is shared out between the ranks gives the parameters of one process, also with join()."""
    alone = Net()
    model = DistributedDataParallel(copy.deepcopy(alone))
    optimizers = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01),
        torch.optim.Adam(alone.parameters(), lr=0.01),
    )
    with Join([model, optimizers[0]]):
        for rows, own in batches():
            step(model, optimizers[0], own)
            step(alone, optimizers[1], rows)
    same(model.module, alone, rtol=1e-4, atol=1e-4)


def test_sync_batch_norm_buffers() -> None:
    """The buffers of rank 0 are those of all ranks at the start of each step."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH)))
    for _, own in batches():
        model(own).sum().backward()
    model(torch.zeros(ROWS, WIDTH))
    for each in model.buffers():
        mean = each.detach().clone().double()
        dist.broadcast(mean, 0)
    alone = torch.nn.BatchNorm1d(WIDTH)
    assert alone.num_batches_tracked == 0
    assert model.module[1].num_batches_tracked == STEPS + 1


def test_distributed_sampler() -> None:
    """The rows of DistributedSampler on all ranks are all rows, and training on them is that of one process."""
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = torch.utils.data.TensorDataset(torch.arange(size * ROWS * 3, dtype=torch.float32).view(-1, 1))
    sampler = torch.utils.data.distributed.DistributedSampler(rows, shuffle=True, seed=5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        own = torch.cat([batch for (batch,) in torch.utils.data.DataLoader(rows, ROWS, sampler=sampler)])
        assert len(own) == ROWS * 3
        gathered = torch.empty(size * ROWS * 3, 1)
        dist.all_gather_single(gathered, own)
        assert torch.equal(gathered.flatten().sort().values, rows.tensors[0].flatten())
        assert torch.equal(gathered.view(size, -1)[rank], own.flatten())
