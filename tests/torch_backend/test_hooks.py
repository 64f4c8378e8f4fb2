"""Hooks of process groups, which torch has since 2.15: each call of a group with hooks calls them, and moves the same data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import mpicoll
import mpicoll.torch

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="torch has hooks since 2.15"),
    pytest.mark.usefixtures("job"),
]
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE


@pytest.fixture
def hooked(job: None) -> Iterator[tuple[Any, list[str]]]:
    """Give a group with hooks, and the list of the names of the calls for which the hooks are called."""
    group, seen = dist.new_group(list(range(SIZE))), []
    group.register_pre_hook(7, lambda given: seen.append(f"before {given.name.name}"))
    group.register_post_hook(8, lambda given: seen.append("after"))
    yield group, seen
    dist.destroy_process_group(group)


def own(count: int = 2) -> torch.Tensor:
    return torch.full((count,), float(RANK + 1))


def blocks() -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(SIZE)]


ALL = [torch.full((2,), float(rank + 1)) for rank in range(SIZE)]
SUM = float(sum(range(1, SIZE + 1)))


def _all_reduce(group: Any) -> Any:
    tensor = own()
    dist.all_reduce(tensor, group=group)
    return tensor, torch.full((2,), SUM)


def _asynchronous(group: Any) -> Any:
    tensor = own()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work.get_future().wait()[0] is tensor
    assert work.wait()
    assert work.is_completed()
    return tensor, torch.full((2,), SUM)


def _broadcast(group: Any) -> Any:
    tensor = own()
    dist.broadcast(tensor, 1, group=group)
    return tensor, ALL[1]


def _all_gather(group: Any) -> Any:
    found = blocks()
    dist.all_gather(found, own(), group=group)
    return torch.cat(found), torch.cat(ALL)


def _all_gather_into_tensor(group: Any) -> Any:
    found = torch.zeros(2 * SIZE)
    dist.all_gather_into_tensor(found, own(), group=group)
    return found, torch.cat(ALL)


def _gather(group: Any) -> Any:
    found = blocks()
    dist.gather(own(), found if RANK == 0 else None, 0, group=group)
    return torch.cat(found), torch.cat(ALL if RANK == 0 else blocks())


def _scatter(group: Any) -> Any:
    found = torch.zeros(2)
    dist.scatter(found, ALL if RANK == 0 else None, 0, group=group)
    return found, ALL[RANK]


def _reduce(group: Any) -> Any:
    tensor = own()
    dist.reduce(tensor, 0, group=group)
    return tensor, torch.full((2,), SUM) if RANK == 0 else own()


def _reduce_scatter(group: Any) -> Any:
    found = torch.zeros(2)
    dist.reduce_scatter(found, ALL, group=group)
    return found, ALL[RANK] * SIZE


def _reduce_scatter_tensor(group: Any) -> Any:
    found = torch.zeros(2)
    dist.reduce_scatter_tensor(found, torch.cat(ALL), group=group)
    return found, ALL[RANK] * SIZE


def _all_to_all(group: Any) -> Any:
    found = blocks()
    dist.all_to_all(found, [own() for _ in range(SIZE)], group=group)
    return torch.cat(found), torch.cat(ALL)


def _all_to_all_single(group: Any) -> Any:
    found = torch.zeros(2 * SIZE)
    dist.all_to_all_single(found, own(2 * SIZE), [2] * SIZE, [2] * SIZE, group=group)
    return found, torch.cat(ALL)


def _messages(group: Any) -> Any:
    found = torch.zeros(2)
    send = dist.isend(own(), RIGHT, group=group)
    work = dist.irecv(found, None, group=group)
    assert send is not None
    assert work is not None
    send.wait()
    work.wait()
    assert work.source_rank() == LEFT
    return found, ALL[LEFT]


def _barrier(group: Any) -> Any:
    dist.barrier(group=group)
    return torch.zeros(0), torch.zeros(0)


def _functional(group: Any) -> Any:
    return functional.all_reduce(own(), "sum", group) + 0, torch.full((2,), SUM)


CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "all_reduce": ("ALLREDUCE", _all_reduce),
    "asynchronous": ("ALLREDUCE", _asynchronous),
    "broadcast": ("BROADCAST", _broadcast),
    "all_gather": ("ALLGATHER", _all_gather),
    "all_gather_into_tensor": ("ALLGATHER_BASE", _all_gather_into_tensor),
    "gather": ("GATHER", _gather),
    "scatter": ("SCATTER", _scatter),
    "reduce": ("REDUCE", _reduce),
    "reduce_scatter": ("REDUCE_SCATTER", _reduce_scatter),
    "reduce_scatter_tensor": ("REDUCE_SCATTER_BASE", _reduce_scatter_tensor),
    "all_to_all": ("ALLTOALL", _all_to_all),
    "all_to_all_single": ("ALLTOALL_BASE", _all_to_all_single),
    "messages": ("SEND", _messages),
    "barrier": ("BARRIER", _barrier),
    "functional": ("ALLREDUCE", _functional),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_calls_the_hooks(name: str, hooked: tuple[Any, list[str]]) -> None:
    group, seen = hooked
    kind, call = CALLS[name]
    found, expected = call(group)
    assert torch.equal(found, expected)
    assert seen[:2] == [f"before {kind}", "after"]
    assert len(seen) == (4 if name == "messages" else 2)


def test_ddp_calls_the_hooks(hooked: tuple[Any, list[str]]) -> None:
    """The reducer in C++ calls the hooks, too, and the gradient is the mean of all ranks."""
    group, seen = hooked
    module = torch.nn.Linear(2, 1, bias=False)
    model = DistributedDataParallel(module, process_group=group)
    seen.clear()
    model(own()[None]).sum().backward()
    assert seen == ["before ALLREDUCE", "after"]
    grad = module.weight.grad
    assert grad is not None
    assert torch.allclose(grad, torch.full((1, 2), SUM / SIZE))


def test_a_mismatch_names_the_line_of_the_program(hooked: tuple[Any, list[str]]) -> None:
    group, _ = hooked
    with pytest.raises(mpicoll.CollectiveMismatchError, match=r"test_hooks.py:\d+"):
        dist.all_reduce(own(2 + RANK % 2), group=group)


def test_an_unregistered_hook_is_not_called(hooked: tuple[Any, list[str]]) -> None:
    group, seen = hooked
    group.unregister_pre_hook(7)
    group.unregister_post_hook(8)
    _all_reduce(group)
    assert seen == []


def test_the_flight_recorder_records_if_it_is_asked_for(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded() -> list[str]:
        told = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(backend="mpicoll"))
        return [each["profiling_name"] for each in told.get("entries", ())]

    _all_reduce(None)
    before = recorded()
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    group = dist.new_group(list(range(SIZE)))
    _all_reduce(group)
    assert [each.rpartition(":")[2] for each in recorded()[len(before) :]] == ["all_reduce"]
    dist.destroy_process_group(group)


def test_the_check_of_nans(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    group = dist.new_group(list(range(SIZE)))
    _all_reduce(group)
    with pytest.raises(RuntimeError, match=r"(?i)nan"):
        dist.all_reduce(torch.full((2,), float("nan")), group=group)
    dist.destroy_process_group(group)


def test_a_hook_has_the_work_of_each_call(hooked: tuple[Any, list[str]]) -> None:
    """A post hook gets a Work also of a call that is waited for, and may make calls of its own."""
    group, _ = hooked
    inner, works = dist.new_group(list(range(SIZE))), []

    def call_too(given: Any) -> None:
        works.append(given.work.get_future().wait())
        dist.barrier(group=inner)

    inner.register_pre_hook(1, lambda given: None)
    group.register_post_hook(9, call_too)
    _, expected = _all_reduce(group)
    assert torch.equal(works[0][0], expected)
    found, expected = _messages(group)  # source_rank() is that of a Work of this library
    assert torch.equal(found, expected)
    dist.destroy_process_group(inner)


def test_a_hook_that_raises_on_one_rank(hooked: tuple[Any, list[str]]) -> None:
    """The error of a hook is one of the call: all ranks raise."""
    group, _ = hooked

    def refuse(given: Any) -> None:
        if RANK == 0:
            raise KeyError("not today")

    group.register_pre_hook(9, refuse)
    with pytest.raises(KeyError if RANK == 0 else mpicoll.CollectiveMismatchError, match="not today"):
        _all_reduce(group)
    group.unregister_pre_hook(9)
    _all_reduce(group)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["meta", "nested"])
def test_a_tensor_that_only_one_rank_passes_wrongly(kind: str, hooked: tuple[Any, list[str]]) -> None:
    """A tensor that C++ leaves out or refuses is an error on all ranks."""
    group, _ = hooked
    wrong = torch.ones(2, device="meta") if kind == "meta" else torch.nested.nested_tensor([own(), own(3)])
    with pytest.raises((mpicoll.CollectiveMismatchError, TypeError, NotImplementedError)):
        dist.all_reduce(wrong if RANK == 0 else own(), group=group)
    _all_reduce(group)


def test_hooks_of_a_group_with_several_backends(job: None) -> None:
    """Tensors of another backend's device stay with that backend."""
    group, seen = dist.new_group(list(range(SIZE)), backend="cpu:gloo,cuda:mpicoll"), []
    before = group.group.calls
    group.register_pre_hook(1, lambda given: seen.append(given.name.name))
    tensor, expected = _all_reduce(group)
    assert torch.equal(tensor, expected)
    assert seen == ["ALLREDUCE"]
    assert group.group.calls == before
    dist.destroy_process_group(group)


def test_an_error_of_another_backend_is_that_of_the_backend(job: None) -> None:
    """With hooks, too, the other members need not know of a call that another backend refuses."""
    group = dist.new_group(list(range(SIZE)), backend="cpu:gloo,cuda:mpicoll")
    group.register_pre_hook(1, lambda given: None)
    if RANK == 0:
        with pytest.raises((RuntimeError, ValueError), match=r"(?i)split"):
            dist.all_to_all_single(own(SIZE), own(SIZE), [1] * SIZE, [9] * SIZE, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
