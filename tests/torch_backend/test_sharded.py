"""FSDP2, DTensor, tensor parallelism and checkpoints: what ranks compute on shards equals what one process computes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from mpi4py import MPI
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("job"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module", "ignore:torch.distributed is disabled"),  # torch's own
]
ROWS, WIDTH, STEPS = 4, 12, 4


class Mlp(torch.nn.Module):
    """Two layers with a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(Mlp(), Mlp(), torch.nn.Linear(WIDTH, 5))  # 5 rows: unequal shards


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    for block in model.children():
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(models: list[Any], optimizers: list[Any], steps: int = STEPS) -> None:
    """Train the first model on this rank's rows, the others on all rows."""
    random = torch.Generator().manual_seed(2)
    for _ in range(steps):
        rows = torch.randn(dist.get_world_size() * ROWS, WIDTH, generator=random)
        for model, optimizer in zip(models, optimizers, strict=True):
            own = rows[dist.get_rank() * ROWS :][:ROWS] if model is models[0] else rows
            optimizer.zero_grad()
            model(own).square().mean().backward()
            optimizer.step()


def same(model: Any, expected: Any, **tolerances: float) -> None:
    """Assert that the whole parameters of a model of DTensors are those of another model."""
    for got, want in zip(model.parameters(), expected.parameters(), strict=True):
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(whole, want, **tolerances)


def test_memory_of_the_group() -> None:
    """FSDP2 asks the group whether it has memory for tensors: it has none, and training goes on."""
    alone = net()
    model: Any = sharded(copy.deepcopy(alone))
    for block in model:
        block.set_allocate_memory_from_process_group_for_comm(True)
    models = [model, alone]
    train(models, [torch.optim.SGD(each.parameters(), 0.1) for each in models])
    same(model, alone)


@pytest.mark.parametrize("reshard", [True, False])
def test_fully_shard(reshard: bool) -> None:
    """Training with parameters sharded between the ranks is training in one process."""
    alone = net()
    model = sharded(copy.deepcopy(alone), reshard_after_forward=reshard)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    train([model, alone], [torch.optim.Adam(each.parameters(), 0.01) for each in (model, alone)])
    same(model, alone, rtol=1e-4, atol=1e-5)


def test_sharded_gradient_norm() -> None:
    """The norm of sharded gradients is that of one process, and clipping makes the same gradients."""
    alone = net()
    model = sharded(copy.deepcopy(alone))
    train([model, alone], [torch.optim.SGD(each.parameters(), 0.0) for each in (model, alone)], 1)
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (model, alone)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


def test_hybrid_shard() -> None:
    """A mesh of two dimensions: parameters are sharded along one and replicated along the other."""
    size = dist.get_world_size()
    shape = (2, size // 2) if size % 2 == 0 else (1, size)
    alone = net()
    model = sharded(copy.deepcopy(alone), mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    train([model, alone], [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)])
    same(model, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_precision(reduced: torch.dtype) -> None:
    """Parameters of float32 are gathered as bfloat16; the training is near that of one process in float32."""
    alone = net()
    model = sharded(copy.deepcopy(alone), mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduced))
    train([model, alone], [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)])
    assert all(each.dtype is torch.float32 for each in model.parameters())
    same(model, alone, rtol=0.05, atol=0.02)


def test_state_dict() -> None:
    """The state of a sharded model is that of one process, whole and in shards, and loads into another model."""
    model, whole = sharded(net()), net().state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), whole[name])
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train([model], [optimizer], 2)
    options = StateDictOptions(full_state_dict=True)
    state, of_optimizer = get_state_dict(model, optimizer, options=options)
    other = sharded(net())
    new = torch.optim.Adam(other.parameters(), 0.01)
    given = {"model_state_dict": copy.deepcopy(state), "optim_state_dict": copy.deepcopy(of_optimizer)}
    set_state_dict(other, new, **given, options=options)
    train([model], [optimizer], 1)
    train([other], [new], 1)
    for got, want in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(got.full_tensor(), want.full_tensor())


@pytest.fixture
def shared_path(tmp_path: Path) -> Path:
    return Path(MPI.COMM_WORLD.bcast(str(tmp_path)))


def test_checkpoint(shared_path: Path) -> None:
    """torch.distributed.checkpoint saves the shards of all ranks, and loads them into a model and into one process."""
    model = sharded(net())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train([model], [optimizer], 2)
    state, of_optimizer = get_state_dict(model, optimizer)
    checkpoint.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=shared_path)
    dist.barrier()
    other = sharded(net())
    new = torch.optim.Adam(other.parameters(), 0.01)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, new), strict=True))
    checkpoint.load(loaded, checkpoint_id=shared_path)
    set_state_dict(other, new, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for got, want in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(got.to_local(), want.to_local())
    alone = {"model": net().state_dict()}
    checkpoint.load(alone, checkpoint_id=shared_path, no_dist=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), alone["model"][name])
    dist.barrier()


def test_asynchronous_checkpoint(shared_path: Path) -> None:
    """async_save writes while the ranks compute on, with a group of its own."""
    beside = dist.new_group()
    model = sharded(net())
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    saved = checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=shared_path, process_group=beside)
    train([model], [torch.optim.SGD(model.parameters(), 0.1)], 2)
    saved.result()
    dist.barrier()
    alone = {"model": net().state_dict()}
    checkpoint.load(alone, checkpoint_id=shared_path, no_dist=True)
    for name, value in before.items():
        assert torch.equal(value, alone["model"][name])
    dist.barrier()
    dist.destroy_process_group(beside)


@pytest.mark.parametrize("rows", [12, 7])
def test_redistribute(rows: int) -> None:
    """A DTensor changes between shards, whole tensors and partial sums without a change of its value."""
    whole = torch.arange(rows * 5, dtype=torch.float64).view(rows, 5)
    over = mesh()
    for before in (Shard(0), Shard(1), Replicate()):
        for after in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(whole, over, [before]).redistribute(placements=[after])
            assert torch.equal(tensor.full_tensor(), whole), f"{before} to {after}"
    for after in (Shard(0), Shard(1), Replicate()):
        tensor = DTensor.from_local(whole, over, [Partial()]).redistribute(placements=[after])
        assert torch.equal(tensor.full_tensor(), whole * dist.get_world_size()), f"partial to {after}"


def test_matmul() -> None:
    """The product of two DTensors is that of the whole matrices, for all placements, and so are its gradients."""
    random = torch.Generator().manual_seed(4)
    left, right = (torch.randn(*shape, generator=random) for shape in ((12, 24), (24, 12)))
    expected = [each.clone().requires_grad_() for each in (left, right)]
    torch.mm(*expected).square().sum().backward()
    over = mesh()
    for first in (Shard(0), Shard(1), Replicate()):
        for second in (Shard(0), Shard(1), Replicate()):
            given = [
                distribute_tensor(each, over, [place]).requires_grad_()
                for each, place in ((left, first), (right, second))
            ]
            product = torch.mm(*given)
            torch.testing.assert_close(product.full_tensor(), left @ right)
            product.square().sum().backward()
            for got, want in zip(given, expected, strict=True):
                torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-4, atol=1e-4)


def test_tensor_parallel() -> None:
    """A layer split by columns and one split by rows train as in one process."""
    alone = Mlp()
    model = parallelize_module(copy.deepcopy(alone), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
    random = torch.Generator().manual_seed(9)
    for _ in range(STEPS):
        rows = torch.randn(ROWS, WIDTH, generator=random)
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            optimizer.zero_grad()
            each(rows).square().mean().backward()
            optimizer.step()
    same(model, alone, rtol=1e-4, atol=1e-5)


def test_two_dimensions() -> None:
    """Tensor parallelism along one dimension of a mesh, sharded data parallelism along the other."""
    size = dist.get_world_size()
    shape = (2, size // 2) if size % 2 == 0 else (size, 1)
    over = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    alone = Mlp()
    model = parallelize_module(
        copy.deepcopy(alone), over["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    fully_shard(model, mesh=over["data"])
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
    random = torch.Generator().manual_seed(9)
    for _ in range(STEPS):
        rows = torch.randn(shape[0] * ROWS, WIDTH, generator=random)
        at = over["data"].get_local_rank()
        for each, optimizer, own in zip((model, alone), optimizers, (rows[at * ROWS :][:ROWS], rows), strict=True):
            optimizer.zero_grad()
            each(own).square().mean().backward()
            optimizer.step()
    same(model, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`isinstance")  # torch's own
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_a_traced_pipeline(schedule: Any) -> None:
    """The first messages of a stage in the middle are received into one tensor. The result is that of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(size)))
    x = torch.randn(8 * ROWS, WIDTH)
    splits = {str(place): SplitPoint.BEGINNING for place in range(1, size)}
    stages = pipeline(model, mb_args=(x.chunk(8)[0],), split_spec=splits)
    run = schedule(stages.build_stage(rank, torch.device("cpu")), n_microbatches=8, loss_fn=torch.nn.MSELoss())
    target = torch.ones(8 * ROWS, WIDTH)
    got = run.step(*[x] * (rank == 0), **{"target": target} if rank == size - 1 else {})
    if rank == size - 1:
        torch.testing.assert_close(got, model(x))
