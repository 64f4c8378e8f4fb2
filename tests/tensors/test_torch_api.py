"""What torch 2.13 itself says of its API, and tensors where they are other than arrays of NumPy."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from scripts import load

import mpicoll as dist
from mpicoll import ReduceOp
from mpicoll.launch.environment import without_launcher
from mpicoll.nn import functional
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).resolve().parent.parent.parent
Tensor = torch.Tensor


def test_every_public_name_of_torch_is_in_the_table() -> None:
    """docs/torch-2.13.txt has the names of the installed torch, and the table says of each what it is here."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"torch is {torch.__version__}, and the table of 2.13")
    generate = load(ROOT / "docs" / "generate.py", "generate_for_tensors")
    rows = {row.name: row for row in generate.rows()}
    c10d = torch.distributed.distributed_c10d
    public = {name for name in c10d.__all__ if hasattr(torch.distributed, name)}
    # Which backends besides gloo torch was built with differs; what is said of that one holds for all.
    assert public - set(rows) - {f"ProcessGroup{backend}" for backend in ("MPI", "NCCL", "UCC", "XCCL")} == set()
    for row in rows.values():
        if generate.newer(row.name) == "of torch 2.15":
            continue  # this test is of 2.13
        assert hasattr(torch.distributed, row.name) or row.name in c10d.__all__, f"torch has no {row.name}"
        assert row.status in ("same", "extended", "not applicable"), row
        assert (row.status == "not applicable") == (row.name not in dist.__all__), row
        assert row.note or row.status == "same", row


TUTORIAL = """
import os, sys
import torch.multiprocessing as mp
import mpicoll as dist

def run(rank, size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size)
    except dist.LaunchError as error:
        sys.stdout.write(f"{error}\\n")
        sys.stdout.flush()

if __name__ == "__main__":
    mp.spawn(run, args=(2,), nprocs=2)
"""


@pytest.mark.mpi_timeout(120)
def test_torch_multiprocessing_is_refused(tmp_path: Path) -> None:
    """Children of torch.multiprocessing.spawn, as in torch's tutorials, are told of dist.spawn, with or without a launcher."""
    script = tmp_path / f"tutorial{dist.get_rank()}.py"
    script.write_text(TUTORIAL)
    environ = dict(os.environ) if dist.get_rank() else without_launcher(os.environ)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done
    assert done.stdout.count("call `dist.spawn(run, args, nprocs)` in place of `mp.spawn`") == 2, done
    assert done.stdout.count(f"mpicoll run -n 2 {script}`") == 2, done


NEWER = ("enable_reconfigure", "weights_only")
"""Parameters that torch has from 2.15 on."""


def test_parameters_are_those_of_the_installed_torch() -> None:
    """Every function has torch's parameters in torch's order, and then its own by keyword alone; also those of torch 2.15."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functional_of_torch = importlib.import_module("torch.distributed.nn.functional")
    for ours, theirs in ((dist, torch.distributed), (functional, functional_of_torch)):
        both = [name for name in ours.__all__ if inspect.isfunction(getattr(ours, name)) and hasattr(theirs, name)]
        names = [name for name in both if not inspect.isbuiltin(getattr(theirs, name))]
        assert len(names) > 8
        for name in names:
            asked = inspect.signature(getattr(ours, name)).parameters
            all_given = inspect.signature(getattr(theirs, name)).parameters
            given = {each.name: each for each in all_given.values() if not each.name.startswith("_")}
            kept = [each for each in asked.values() if each.name in given]
            assert [each.name for each in kept] == list(given), name
            assert [each.kind for each in kept] == [each.kind for each in given.values()], name
            rest = [each for each in asked.values() if each.name not in given and each.name not in NEWER]
            assert all(each.kind is each.KEYWORD_ONLY for each in rest), name


def test_a_module_is_made_the_same_on_all_ranks() -> None:
    """Parameters and buffers are broadcast as they are, gradients averaged in place, and training goes on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor, src=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        module(torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))).sum().backward()
        works = [dist.all_reduce(p.grad, async_op=True) for p in module.parameters()]
        for work in works:
            assert work is not None
            work.wait()
        for p in module.parameters():
            assert p.grad is not None
            p.grad /= size
        optimizer.step()
    for p in module.parameters():
        every = [torch.empty_like(p) for _ in range(size)]
        dist.all_gather(every, p)
        assert all(torch.equal(each, p) for each in every)
        assert p.requires_grad
        assert p.is_leaf


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_tensors(dtype: torch.dtype) -> None:
    """They are moved and summed by every call, also by reduce, gather and reduce_scatter, where torch's gloo refuses them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((2,), complex(rank, 1), dtype=dtype)
    total = complex(sum(range(size)), size)

    def blocks() -> list[Tensor]:
        return [torch.zeros(2, dtype=dtype) for _ in range(size)]

    y = x.clone()
    dist.all_reduce(y)
    assert y.tolist() == [total] * 2
    y = x.clone()
    dist.reduce(y, 0)
    assert y.tolist() == ([total] * 2 if rank == 0 else x.tolist())
    every = blocks()
    dist.gather(x, every if rank == 0 else None)
    if rank == 0:
        assert [each[0].item() for each in every] == [complex(r, 1) for r in range(size)]
    dist.all_gather(every, x)
    assert [each[0].item() for each in every] == [complex(r, 1) for r in range(size)]
    out = torch.zeros(2, dtype=dtype)
    dist.reduce_scatter(out, [x * (r + 1) for r in range(size)])
    assert out.tolist() == [total * (rank + 1)] * 2
    dist.scatter(out, every if rank == 0 else None)
    assert out.tolist() == x.tolist()
    dist.broadcast(out, 0)
    assert out.tolist() == [1j] * 2
    for op in (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        assert not dist.supports_complex(op)
        assert torch.distributed.supports_complex(getattr(torch.distributed.ReduceOp, op.name)) is False
        with collective_raises(ValueError, match=f"all_reduce does not support .*{op.name} on complex tensors"):
            dist.all_reduce(y, op)
    pair = [torch.ones(2, dtype=out.real.dtype), x.clone()]
    dist.all_reduce_coalesced(pair)
    assert pair[0].tolist() == [size] * 2
    assert pair[1].tolist() == [total] * 2


def test_ops_on_dtypes() -> None:
    """bool sums are a logical or; averages are of floats; bitwise ops of integers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    flags = torch.tensor([True, False, rank == 0])
    dist.all_reduce(flags)
    assert flags.tolist() == [True, False, True]
    x = torch.full((2,), float(rank))
    dist.all_reduce(x, ReduceOp.AVG)
    assert x.tolist() == [(size - 1) / 2] * 2
    numbers = torch.tensor([1 << rank])
    dist.all_reduce(numbers, ReduceOp.BOR)
    assert numbers.tolist() == [(1 << size) - 1]
    for op, tensor, text in (
        (ReduceOp.AVG, numbers, "AVG"),
        (ReduceOp.AVG, flags, "AVG"),
        (ReduceOp.BAND, x, "Cannot use ReduceOp.BAND with non-integral dtype"),
    ):
        with collective_raises(RuntimeError, match=text):
            dist.all_reduce(tensor, op)
    scaled = torch.full((2,), float(rank))
    dist.all_reduce(scaled, ReduceOp.PREMUL_SUM(torch.tensor([2.0])))  # type: ignore[operator]
    assert scaled.tolist() == [size * (size - 1)] * 2


def test_futures_of_tensors() -> None:
    """They are chained as torch's are."""
    size = dist.get_world_size()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    future: Any = work.get_future()
    doubled = future.then(lambda done: [each * 2 for each in done.wait()]).then(lambda done: done.value()[0] + 1)
    assert doubled.wait().tolist() == [2 * size + 1] * 2


def test_split_sizes_of_torch() -> None:
    """A torch.Size is a tuple; a tensor is refused, as by torch."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, out = torch.arange(2.0 * size) + 10 * rank, torch.zeros(2 * size)
    dist.all_to_all_single(out, x, torch.Size([2] * size), torch.Size([2] * size))  # type: ignore[arg-type]
    assert out.tolist() == [v for r in range(size) for v in (2 * rank + 10.0 * r, 2 * rank + 1 + 10.0 * r)]
    with collective_raises(TypeError, match="must be a list of integers, not Tensor"):
        dist.all_to_all_single(out, x, torch.tensor([2] * size))  # type: ignore[arg-type]


def test_devices_and_layouts() -> None:
    """A device of torch may be named where torch takes one; tensors of another layout are refused with what to pass instead."""
    told: list[Any] = [dist.get_rank()]
    dist.broadcast_object_list(told, device=torch.device("cpu"))
    assert told == [0]
    assert dist.get_default_backend_for_device(torch.device("cuda:1")) == "mpi"
    with collective_raises(TypeError, match=r"x\.to_dense\(\)"):
        dist.all_reduce(torch.eye(2).to_sparse())


class Settings:
    """A class that holds data of a program."""

    def __init__(self, rate: float) -> None:
        self.rate = rate


def test_weights_only_loads_tensors() -> None:
    """Tensors of any kind, parameters, sizes, dtypes and devices, as in a state dict; and classes that the program added."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).bfloat16()
    values: dict[str, Any] = {
        **module.state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "columns": torch.arange(12).reshape(3, 4).t(),
        "sparse": torch.eye(3).to_sparse(),
        "large": torch.ones(50_000),
        "none": torch.ones(0, 2),
    }
    state = torch.optim.SGD(module.parameters(), momentum=0.5).state_dict()
    others = [torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("cuda:1")]
    got: list[Any] = [None] * size
    dist.all_gather_object(got, [rank, values, others, state, module.state_dict()], weights_only=True)
    for other, (sender, came, rest, optimizer, weights) in enumerate(got):
        assert (sender, rest, optimizer) == (other, others, state)
        assert weights._metadata == module.state_dict()._metadata
        assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
        for name in values.keys() - module.state_dict().keys():
            assert came[name].stride() == values[name].stride() if name != "sparse" else came[name].is_sparse
            assert torch.equal(came[name].to_dense().double(), values[name].to_dense().double())
        assert isinstance(came["parameter"], torch.nn.Parameter)
        assert module.load_state_dict({name: came[name] for name in module.state_dict()}).missing_keys == []
    with pytest.raises(
        pickle.UnpicklingError, match=r"weights_only=True: the object needs [\w.]*test_torch_api\.Settings"
    ):
        dist.all_gather_object(got, Settings(0.5), weights_only=True)
    with pytest.raises(pickle.UnpicklingError, match=r"needs torch\._utils\._rebuild_tensor_v3"):
        dist.all_gather_object(got, torch.ones(3).to(torch.float8_e4m3fn), weights_only=True)
    with torch.serialization.safe_globals([Settings]):
        dist.all_gather_object(got, Settings(0.5), weights_only=True)
    assert [each.rate for each in got] == [0.5] * size


def test_wrong_arguments() -> None:
    """What is no tensor, or no list of tensors, raises TypeError in torch's first words, and dtypes that differ ValueError."""
    size = dist.get_world_size()
    x, many = torch.ones(2), [torch.ones(2) for _ in range(size)]
    own: Any = many if dist.get_rank() == 0 else None
    wrong: Any = "x"
    calls = (
        lambda: dist.broadcast(wrong, 0),
        lambda: dist.all_reduce(wrong),
        lambda: dist.all_reduce([x]),
        lambda: dist.all_reduce_coalesced(wrong),
        lambda: dist.all_reduce_coalesced((x,)),
        lambda: dist.all_reduce_coalesced([x, wrong]),
        lambda: dist.reduce(wrong, 0),
        lambda: dist.all_gather(wrong, x),
        lambda: dist.all_gather(tuple(many), x),
        lambda: dist.all_gather(many, wrong),
        lambda: dist.all_gather_single(wrong, x),
        lambda: dist.all_gather_coalesced(wrong, [x]),
        lambda: dist.gather(wrong, own),
        lambda: dist.scatter(wrong, own),
        lambda: dist.reduce_scatter(wrong, many),
        lambda: dist.reduce_scatter(x, wrong),
        lambda: dist.reduce_scatter_single(x, wrong),
        lambda: dist.all_to_all(wrong, many),
        lambda: dist.all_to_all_single(x, wrong),
        lambda: dist.isend(wrong, 0),
        lambda: dist.irecv(wrong, 0),
    )
    for call in calls:
        with collective_raises(TypeError, match="Invalid function argument"):
            call()
    for call in (
        lambda: dist.all_gather([torch.ones(2, dtype=torch.int64) for _ in many], x),
        lambda: dist.reduce_scatter(torch.ones(2, dtype=torch.int64), many),
        lambda: dist.all_to_all(many, [torch.ones(2, dtype=torch.int64) for _ in many]),
        lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size, dtype=torch.int64)),
    ):
        with collective_raises(ValueError, match="Invalid usage of tensors with different dtypes"):
            call()


def test_meshes_of_tensors() -> None:
    """The ranks of a mesh may come as a tensor, without a warning."""
    size = dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = dist.DeviceMesh("cpu", torch.arange(size).reshape(1, size), mesh_dim_names=("dp", "tp"))
        assert mesh.get_coordinate() == (0, dist.get_rank())
        known = dist.DeviceMesh.from_group(dist.group.WORLD, "cpu", torch.arange(size))
        assert known.mesh.tolist() == list(range(size))
        both = dist.DeviceMesh.from_group(
            mesh.get_all_groups(), "cpu", torch.arange(size)[None], mesh_dim_names=("a", "b")
        )
        assert both.shape == (1, size)
