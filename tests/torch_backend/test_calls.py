"""Calls of torch.distributed beyond PyTorch's suite: coalesced, sparse, differentiable, functional, point to point."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import mpicoll
from mpicoll.pytest_plugin import collective_raises
from mpicoll.torch import process_group, sites

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("job"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's own, of names that give way to others
]


def of(rank: int, *shape: int) -> Any:
    """Return the tensor of a rank."""
    return torch.arange(float(torch.Size(shape or (6,)).numel())).reshape(shape or (6,)) + 10 * rank


def ranks() -> range:
    return range(dist.get_world_size())


def test_batches() -> None:
    """batch_isend_irecv exchanges tensors around the ring, also with tags, and with itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    received = [torch.empty(6) for _ in range(3)]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received[0], before, tag=1),
            dist.P2POp(dist.irecv, received[1], before, tag=2),
            dist.P2POp(dist.isend, of(rank) + 1, after, tag=2),
            dist.P2POp(dist.isend, of(rank), after, tag=1),
        ]
    )
    for work in works:
        work.wait()
    assert torch.equal(received[0], of(before))
    assert torch.equal(received[1], of(before) + 1)


def test_messages() -> None:
    """send, recv from any rank, and the rank of the sender."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(of(rank), 0)
    else:
        senders = set()
        for _ in range(1, size):
            tensor = torch.empty(6)
            sender = dist.recv(tensor)
            assert torch.equal(tensor, of(sender))
            senders.add(sender)
        assert senders == {*range(1, size)}
    objects: list[Any] = [{"from": rank}, None] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(objects, 1)
    elif rank == 1:
        dist.recv_object_list(objects, 0)
        assert objects[0] == {"from": 0}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_coalescing_manager(asynchronous: bool) -> None:
    """The calls inside a block of the coalescing manager are complete at its end, or at wait()."""
    tensors = [of(dist.get_rank(), 3, each + 1) for each in range(3)]
    with _coalescing_manager(async_ops=asynchronous) as manager:
        for each in tensors:
            dist.all_reduce(each)
    if asynchronous:
        manager.wait()
    for each, tensor in enumerate(tensors):
        assert torch.equal(tensor, sum(of(rank, 3, each + 1) for rank in ranks()))
    gathered = [torch.empty(len(ranks()), 4) for _ in range(3)]
    with _coalescing_manager(async_ops=asynchronous) as manager:
        for each in gathered:
            dist.all_gather_single(each, of(dist.get_rank(), 4))
    if asynchronous:
        manager.wait()
    assert all(torch.equal(each[rank], of(rank, 4)) for each in gathered for rank in ranks())
    scattered = [torch.empty(4) for _ in range(3)]
    with _coalescing_manager(async_ops=asynchronous) as manager:
        for each in scattered:
            dist.reduce_scatter_single(each, of(dist.get_rank(), len(ranks()), 4))
    if asynchronous:
        manager.wait()
    whole = sum(of(rank, len(ranks()), 4) for rank in ranks())
    assert all(torch.equal(each, whole[dist.get_rank()]) for each in scattered)


def test_coalesced_lists() -> None:
    """allreduce_coalesced of a process group takes tensors of several dtypes."""
    tensors = [of(dist.get_rank()), of(dist.get_rank()).double(), of(dist.get_rank(), 2, 2)]
    dist.group.WORLD.allreduce_coalesced(tensors).wait()
    assert torch.equal(tensors[0], sum(of(rank) for rank in ranks()))
    assert torch.equal(tensors[1], sum(of(rank).double() for rank in ranks()))
    assert torch.equal(tensors[2], sum(of(rank, 2, 2) for rank in ranks()))


@pytest.mark.parametrize("root", [-1, "size"])
def test_ranks_that_are_in_no_group(root: Any) -> None:
    """A root or a peer below 0, or beyond the group, is refused on all members: it does not count from the end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    root = size if root == "size" else root
    x = torch.ones(2)
    opts = dist.ScatterOptions()
    opts.rootRank = root
    calls = (
        lambda root: dist.broadcast(x, group_src=root),
        lambda root: dist.reduce(x, group_dst=root),
        lambda root: dist.group.WORLD.scatter([x], [], opts) if root else dist.broadcast(x, 0),
        lambda root: dist.group.WORLD.broadcast([x], root).wait(),
    )
    for make in calls:
        with pytest.raises(ValueError, match="is not part of group"):
            make(root)
        with collective_raises((ValueError, mpicoll.CollectiveMismatchError)):
            make(root if rank == 0 else 0)
    for start in (dist.group.WORLD.send, dist.group.WORLD.recv):
        with pytest.raises(ValueError, match="is not part of group"):
            start([x], root, 0)
    assert x.tolist() == [1, 1]


def test_a_tensor_that_is_twice_in_a_coalesced_list() -> None:
    """The tensor is reduced once, as with gloo."""
    size = dist.get_world_size()
    x, y = torch.ones(2), torch.ones(3, dtype=torch.int32)
    made = dist.group.WORLD.allreduce_coalesced([x, y, x])
    if made is not None:
        made.wait()
    assert x.tolist() == [size] * 2
    assert y.tolist() == [size] * 3


@pytest.mark.parametrize("dense", [0, 1])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_sparse(dense: int, asynchronous: bool) -> None:
    """A sparse tensor is summed over the ranks, whose elements differ in number and place."""

    def sparse(rank: int) -> Any:
        at = torch.tensor([[each % 5 for each in range(rank, 2 * rank + 1)], [rank % 3] * (rank + 1)])
        values = torch.ones((rank + 1, *(4,) * dense)) * (rank + 1)
        return torch.sparse_coo_tensor(at, values, (5, 3, *(4,) * dense), check_invariants=True)

    tensor = sparse(dist.get_rank())
    work = dist.all_reduce(tensor, async_op=asynchronous)
    if asynchronous:
        work.wait()
    torch.testing.assert_close(tensor.to_dense(), sum(sparse(rank).to_dense() for rank in ranks()))
    with collective_raises(ValueError, match="SUM"):
        dist.all_reduce(sparse(dist.get_rank()), dist.ReduceOp.MAX)


@pytest.mark.parametrize("count", [1, 2, 3000, 100_000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_average_of_integers(dtype: torch.dtype, count: int) -> None:
    """It is rounded toward zero, as with NCCL, in every call that reduces; an average of bools is refused."""
    rank, size = dist.get_rank(), dist.get_world_size()
    base = (torch.arange(count * size) % 23 - (11 if dtype.is_signed else 0)).to(dtype)
    total = base.long() * size + size * (size - 1) // 2
    want = torch.div(total, size, rounding_mode="trunc").to(dtype)
    for asynchronous in (False, True, False):
        for turn in range(2):
            tensor = base + rank
            work = dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=asynchronous)
            if work is not None:
                assert torch.equal(work.get_future().wait()[0], want) if turn else work.wait()
            assert torch.equal(tensor, want)
    tensor = base + rank
    dist.reduce(tensor, 0, dist.ReduceOp.AVG)
    assert rank or torch.equal(tensor, want)
    part = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(part, base + rank, dist.ReduceOp.AVG)
    assert torch.equal(part, want.chunk(size)[rank])
    dist.reduce_scatter(part, list((base + rank).chunk(size)), dist.ReduceOp.AVG)
    assert torch.equal(part, want.chunk(size)[rank])
    tensors = [base + rank, base + rank, torch.full((2,), float(rank))]
    with dist._coalescing_manager():
        for each in tensors:
            dist.all_reduce(each, dist.ReduceOp.AVG)
    assert torch.equal(tensors[0], want)
    assert torch.equal(tensors[1], want)
    assert (tensors[2] == (size - 1) / 2).all()
    with pytest.raises(RuntimeError, match="AVG"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)


def test_reductions() -> None:
    """Every reduction of torch on integers; AVG and PREMUL_SUM on floats; half types."""
    own = [torch.tensor([rank + 1, 5 - rank, 3]) for rank in ranks()]
    expected = {
        "SUM": sum(own),
        "PRODUCT": torch.stack(own).prod(0),
        "MIN": torch.stack(own).amin(0),
        "MAX": torch.stack(own).amax(0),
    }
    for name, want in expected.items():
        tensor = own[dist.get_rank()].clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        assert torch.equal(tensor, want), name
    for name, call in {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}.items():
        tensor, want = own[dist.get_rank()].clone(), own[0]
        for each in own[1:]:
            want = call(want, each)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        assert torch.equal(tensor, want), name
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.full((5,), float(dist.get_rank()), dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        torch.testing.assert_close(tensor, torch.full((5,), (len(ranks()) - 1) / 2, dtype=dtype))
    tensor = torch.ones(3)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0))
    assert (tensor == 2 * len(ranks())).all()


def test_differentiable_calls() -> None:
    """torch.distributed.nn: the gradients are those of one process that computes what all ranks compute."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = of(rank, 4).requires_grad_()
    (differentiable.all_reduce(x * (rank + 1)) * (rank + 2)).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), float((rank + 1) * sum(each + 2 for each in ranks()))))
    x = of(rank, 4).requires_grad_()
    sum((each * (rank + 1)).sum() for each in differentiable.all_gather(x)).backward()
    assert torch.equal(x.grad, torch.full((4,), float(sum(each + 1 for each in ranks()))))
    x = of(rank, 4).requires_grad_()
    (differentiable.broadcast(x, 0) * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), float(sum(each + 1 for each in ranks())) if rank == 0 else 0.0))
    xs = [of(rank, 3).requires_grad_() for _ in ranks()]
    (differentiable.reduce_scatter(torch.empty(3), xs) * (rank + 1)).sum().backward()
    assert all(torch.equal(each.grad, torch.full((3,), to + 1.0)) for to, each in enumerate(xs))
    x = of(rank, size, 2).requires_grad_()
    (differentiable.all_to_all_single(torch.empty(size, 2), x) * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.arange(1.0, size + 1).view(-1, 1).expand(size, 2))
    x = of(rank, 4).requires_grad_()
    (torch.cat(differentiable.gather(x, 0)) * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.ones(4))


def collectives(x: Any, group: Any) -> Any:
    """Return results of all functional collectives of one tensor of as many rows as there are ranks."""
    size = dist.get_world_size(group)
    return (
        functional.all_reduce(x + 1, "sum", group),
        functional.all_reduce(x, "avg", group),
        functional.all_gather_tensor(x, 0, group),
        functional.all_gather_tensor(x, 1, group),
        functional.reduce_scatter_tensor(x * 2, "sum", 0, group),
        functional.all_to_all_single(x, None, None, group),
        functional.broadcast(x, size - 1, group),
        *functional.all_reduce_coalesced([x, x * 3], "max", group),
        *functional.all_gather_into_tensor_coalesced([x, x + 1], group),
        *functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group),
    )


def expected_of(rank: int, size: int) -> Any:
    """Return what one process computes for a rank."""
    xs = [of(each, size, 3) for each in range(size)]
    total = sum(xs)
    return (
        total + size,
        total / size,
        torch.cat(xs),
        torch.cat(xs, 1),
        total[rank : rank + 1] * 2,
        torch.stack([each[rank] for each in xs]),
        xs[-1],
        xs[-1],
        xs[-1] * 3,
        torch.cat(xs),
        torch.cat(xs) + 1,
        total[rank : rank + 1],
        total[rank : rank + 1] + size,
    )


@pytest.mark.parametrize("how", ["plain", "eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")
def test_functional_collectives(how: str) -> None:
    """Functional collectives, also of a compiled function, give what one process computes."""
    call = collectives if how == "plain" else torch.compile(collectives, backend=how, fullgraph=True)
    size, rank = dist.get_world_size(), dist.get_rank()
    for _ in range(2):
        results = call(of(rank, size, 3), dist.group.WORLD)
        for number, (got, want) in enumerate(zip(results, expected_of(rank, size), strict=True)):
            assert torch.equal(functional.wait_tensor(got), want), f"result {number}"


@pytest.mark.filterwarnings("ignore")
def test_results_of_functional_collectives_are_arguments() -> None:
    """A result that no code has waited for, as a tensor parallel module returns it, is waited for by the call that gets it."""
    me, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2

    def made() -> Any:
        result = functional.all_reduce(torch.full((4,), me + 1.0), "sum", dist.group.WORLD)
        assert type(result).__name__ == "AsyncCollectiveTensor"
        return result

    given = made()
    dist.all_reduce(given)
    assert (given == total * size).all()
    gathered = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(gathered, made())
    assert all((each == total).all() for each in gathered)
    into, sent = torch.zeros(4), made()
    after, before = (me + 1) % size, (me - 1) % size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, into, before)]):
        work.wait()
    assert (into == total).all()


@pytest.mark.parametrize("how", ["plain", "eager", "aot_eager"])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_calls_under_way_that_a_graph_waits_for(how: str, keeps: bool) -> None:
    """A function, compiled or not, waits by a tensor for a call that was started outside of it, also if its Work was dropped."""
    size = torch._C._distributed_c10d._get_work_registry_size

    def after(x: Any) -> Any:
        torch.ops._c10d_functional.wait_tensor(x)
        return x + 0

    call = after if how == "plain" else torch.compile(after, backend=how, fullgraph=True)
    total, before = sum(of(rank, 1000) for rank in ranks()), size()
    for _ in range(4):
        with functional.allow_inflight_collective_as_graph_input_ctx():
            x, kept = of(dist.get_rank(), 1000), []
            if dist.get_rank() == 0:
                time.sleep(0.01)
            work = dist.all_reduce(x, async_op=True)
            kept += [work] if keeps else []
            del work
            assert size() == before + 1
            assert torch.equal(call(x), total)
            assert size() == before
            for each in kept:
                each.wait()
    with functional.allow_inflight_collective_as_graph_input_ctx():
        outputs = [torch.zeros_like(of(rank)) for rank in ranks()]
        work = dist.all_gather(outputs, of(dist.get_rank()), async_op=True)
        assert size() == before + len(outputs)
        work.wait()
        assert size() == before
        assert all(torch.equal(each, of(rank)) for rank, each in enumerate(outputs))
        failing = dist.all_reduce(torch.zeros(3 if dist.get_rank() == 0 else 4), async_op=True)
        with collective_raises(mpicoll.errors.CollectiveMismatchError, match="made different calls"):
            failing.wait()
        assert size() == before


def test_the_error_of_a_result_that_is_an_argument() -> None:
    """The error of a functional collective is raised by the call that waits for its result."""
    me = dist.get_rank()
    given = functional.all_reduce(torch.ones(3 if me == 0 else 4), "sum", dist.group.WORLD)
    with collective_raises(mpicoll.errors.CollectiveMismatchError, match="made different calls"):
        dist.all_reduce(given)


def test_compiled_calls() -> None:
    """Calls in place inside a compiled function, and a gradient through a functional collective."""

    @torch.compile(backend="eager")
    def called(x: Any) -> Any:
        dist.all_reduce(x)
        return x * 2

    assert torch.equal(called(of(dist.get_rank())), sum(of(rank) for rank in ranks()) * 2)
    x = of(dist.get_rank(), 4).requires_grad_()
    (functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD) * (dist.get_rank() + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), float(sum(rank + 1 for rank in ranks()))))


def test_uneven_shapes() -> None:
    """all_to_all and reduce_scatter of tensors of different shapes, as one process would compute them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty(sender + 1 + rank) for sender in ranks()]
    dist.all_to_all(received, [of(rank, rank + 1 + to) for to in ranks()])
    assert all(torch.equal(each, of(sender, sender + 1 + rank)) for sender, each in enumerate(received))
    whole = torch.empty(sum(sender + 1 for sender in ranks()), 2)
    given = torch.cat([of(rank, rank + 1, 2) for _ in ranks()])
    dist.all_to_all_single(whole, given, [sender + 1 for sender in ranks()], [rank + 1] * size)
    assert torch.equal(whole, torch.cat([of(sender, sender + 1, 2) for sender in ranks()]))


def test_objects() -> None:
    """The calls of objects, of torch's own pickling."""
    rank, size = dist.get_rank(), dist.get_world_size()
    objects: list[Any] = [{"rank": 0}, "text", None] if rank == 0 else [None] * 3
    dist.broadcast_object_list(objects)
    assert objects == [{"rank": 0}, "text", None]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, "x" * rank)
    assert gathered == ["x" * each for each in ranks()]
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [each * 2 for each in ranks()] if rank == 0 else None)
    assert scattered == [rank * 2]


def test_devices() -> None:
    """A tensor on a device that no rank serves is an error on all ranks."""
    with collective_raises((mpicoll.DistError, TypeError, ValueError, RuntimeError), match="meta"):
        dist.all_reduce(torch.ones(2, device="meta"))


def test_reports_name_the_part_of_torch() -> None:
    """A report names the part of torch that made a call for the program: DistributedDataParallel, FSDP and its module."""
    own = torch.nn.Sequential(torch.nn.Linear(4, 4))
    models = {
        "by DDP": torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)),
        r"by FSDP\(0\)": fully_shard(torch.nn.Sequential(*map(fully_shard, own))),
    }
    for named, model in models.items():
        with collective_raises((mpicoll.CollectiveMismatchError, RuntimeError), match=named):
            if dist.get_rank():
                model(torch.ones(2, 4)).sum().backward()
            else:
                dist.all_reduce(torch.ones(3))


def test_a_call_in_a_context_manager_of_torch() -> None:
    """The place of a call that a context manager of torch makes is the line of the program's ``with``."""
    model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    with collective_raises(mpicoll.CollectiveMismatchError) as caught:
        if dist.get_rank():
            dist.all_reduce(torch.ones(3))
        else:
            with FullyShardedDataParallel.summon_full_params(model):
                pass
    sites = {row["op"]: row["site"] for row in caught.value.calls}
    assert "all_reduce" in sites
    assert all("test_calls.py" in site for site in sites.values()), sites


@pytest.mark.filterwarnings("error")
def test_dropped_works() -> None:
    """DistributedDataParallel does not wait for what it turns out not to need: no warning, and the group can end."""
    group = dist.new_group()
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(3, 3), find_unused_parameters=True, process_group=group
    )
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
    del model
    gc.collect()
    dist.destroy_process_group(group)


def test_the_method_that_gathers_into_one_tensor() -> None:
    """``torch.distributed.gather_single`` of torch 2.15 calls this method."""
    rank, size = dist.get_rank(), dist.get_world_size()
    options = dist.GatherOptions()
    options.rootRank = size - 1
    out = torch.zeros(size, 2)
    dist.group.WORLD.gather_single(out, torch.full((2,), float(rank)), options).wait()
    assert out.tolist() == [[float(each if rank == size - 1 else 0)] * 2 for each in range(size)]


def test_futures_have_the_tensors_of_the_result() -> None:
    """One after the other, also of a call with one output or with lists of lists, as on gloo."""
    size = dist.get_world_size()
    whole, each = torch.zeros(2 * size), [torch.zeros(2) for _ in range(size)]
    made = dist.all_gather_single(whole, torch.ones(2), async_op=True)
    assert [tensor.shape for tensor in made.get_future().wait()] == [whole.shape]
    assert made.result()[0] is whole
    assert [tensor.tolist() for tensor in dist.all_gather(each, torch.ones(2), async_op=True).get_future().wait()] == [
        [1, 1]
    ] * size
    made = dist.reduce_scatter_single(torch.zeros(2), whole, async_op=True)
    assert [tensor.shape for tensor in made.get_future().wait()] == [(2,)]


@pytest.mark.parametrize("wrong", ["shape", "dtype", "op"])
def test_sparse_tensors_that_differ(wrong: str) -> None:
    """All ranks raise the same class, and the group can be used."""
    odd = dist.get_rank() == 1
    dtype = torch.float64 if odd and wrong == "dtype" else torch.float32
    shape = (6,) if odd and wrong == "shape" else (4,)
    tensor = torch.sparse_coo_tensor([[1]], torch.ones(1, dtype=dtype), shape, check_invariants=True)
    with pytest.raises(ValueError, match="sparse tensors"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX if odd and wrong == "op" else dist.ReduceOp.SUM)
    dist.barrier()


def test_the_line_of_a_call_by_a_deprecated_name() -> None:
    with collective_raises(mpicoll.CollectiveMismatchError, match=r"at test_calls\.py"):
        dist.reduce_scatter_tensor(
            torch.zeros(2 + dist.get_rank()), torch.zeros(dist.get_world_size() * (2 + dist.get_rank()))
        )


def test_a_backward_pass_without_ddp() -> None:
    """torch.distributed.nn calls in a backward pass, and is not taken for DistributedDataParallel."""
    x = torch.ones(2 + dist.get_rank(), requires_grad=True)
    with collective_raises(mpicoll.CollectiveMismatchError) as raised:
        differentiable._AllReduce.apply(dist.ReduceOp.SUM, dist.group.WORLD, x.detach()[:2].clone().requires_grad_())
        functional_backward(x)
    assert "by DDP" not in str(raised.value)


def functional_backward(x: torch.Tensor) -> None:
    """Make a call of other sizes on each rank in a backward pass of torch.distributed.nn."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.sum()

        @staticmethod
        def backward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = differentiable.all_reduce(x.detach().clone())
            return made

    Own.apply(x).backward()


def test_a_call_of_the_program_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What made a call is found by the extension, not frame by frame in Python, if the program itself made the call."""
    dist.barrier()
    monkeypatch.setattr(sites, "sys", None)
    dist.barrier()


def test_a_work_that_a_part_of_torch_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of torch that drops the Work of its call does not wait for the call: it is made all the same."""
    monkeypatch.setattr(process_group, "maker", lambda: "torch.distributed.optim")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, async_op=True)
    end = time.monotonic() + 10
    while (tensor == 1).all() and time.monotonic() < end:
        time.sleep(0.01)
    assert (tensor == dist.get_world_size()).all()
    monkeypatch.undo()
    dist.barrier()
