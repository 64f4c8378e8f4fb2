"""torch's tensors in every call: written in place, with the bits that NumPy's arrays get."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import collective_cases as cases
import ml_dtypes
import numpy as np
import pytest
import torch
from array_kinds import Through
from ranks import neighbours

import mpicoll as dist
from mpicoll import ReduceOp
from mpicoll.api import messages as api
from mpicoll.memory.adapt import adapt
from mpicoll.operations.prepare import run
from mpicoll.pytest_plugin import collective_raises
from mpicoll.runtime import native

pytestmark = pytest.mark.mpi

DTYPES = "?bBhHiIlLfdFD"  # those of collective_cases that torch has
# Moved by their bits, which collective_cases does not reduce.
BITS = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.complex32)
MET = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex32",
)  # some of ml_dtypes' types; its older versions lack the last
FLOATS = (torch.float32, torch.float64, torch.complex64, torch.complex128)
Tensor = torch.Tensor


def random(dtype: torch.dtype, count: int, rank: int) -> Tensor:
    """Return numbers whose sums depend on how they are formed."""
    return torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(rank))


# torch says once in a process that complex32 is an experiment.
@pytest.fixture(scope="module", autouse=True)
def _warned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ones(1).to(torch.complex32)


def bits(dtype: torch.dtype, count: int, rank: int) -> Tensor:
    """Return every pattern of bits that a dtype has, infinities and all kinds of NaN among them."""
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(rank))
    return raw.to(torch.uint8).view(dtype)


def same(got: Tensor, expected: Tensor, what: str = "") -> None:
    """Assert that two tensors hold the same bits, NaNs included."""
    assert got.dtype == expected.dtype, what
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)}, not {tuple(expected.shape)}"
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), f"{what}: {got}"


@pytest.mark.parametrize("name", cases.ALL)
def test_every_collective_on_every_dtype(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every collective, op and dtype, sync and async, gives what NumPy gives, in the tensors that were passed."""
    monkeypatch.setattr(cases, "dist", Through(torch.from_numpy))
    for dtype in DTYPES:
        cases.run(name, cases.taste(name, dtype, (*cases.SMALL, cases.large(dtype))))


def reducing(x: Any, out: Any, op: Any, async_op: bool) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Yield (name, call, its output); ``x`` has as many blocks of the size of ``out`` as there are ranks."""
    size = dist.get_world_size()
    blocks = list(x.reshape(size, -1))
    yield "all_reduce", lambda: dist.all_reduce(x, op, async_op=async_op), x
    yield "reduce", lambda: dist.reduce(x, size - 1, op, async_op=async_op), x
    yield "reduce_scatter", lambda: dist.reduce_scatter(out, blocks, op, async_op=async_op), out
    yield "reduce_scatter_single", lambda: dist.reduce_scatter_single(out, x, op, async_op=async_op), out


def test_reductions_have_the_bits_of_numpy() -> None:
    """The same numbers as a NumPy array and as a tensor give the same bits, whatever the rounding."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ops = {"c": (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM(0.3))}
    ops["f"] = (*ops["c"], ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
    for dtype in FLOATS:
        for count in (5, 5001):
            for op in ops["c" if dtype.is_complex else "f"]:
                for async_op in (False, True):
                    mine = random(dtype, count * size, rank)
                    plain, plain_out = mine.numpy().copy(), np.zeros(count, mine.numpy().dtype)
                    tensor, tensor_out = mine.clone(), torch.zeros(count, dtype=dtype)
                    for (name, with_numpy, expected), (_, with_torch, got) in zip(
                        reducing(plain, plain_out, op, async_op),
                        reducing(tensor, tensor_out, op, async_op),
                        strict=True,
                    ):
                        for call, output in ((with_numpy, expected), (with_torch, got)):
                            work = call()
                            if work is not None:
                                work.wait()
                                assert work.result()[0] is output, name
                        same(got, torch.from_numpy(expected), f"{name} {dtype} x {count} {op} async_op={async_op}")


Results = Iterator[tuple[str, Any, list[tuple[Tensor, Tensor]]]]


def moving(x: Tensor, place: Callable[[Tensor], Tensor], async_op: bool) -> Results:
    """Make every collective that moves data; yield its name, its Work, and what came with what should have come.

    Args:
        x: ``shifted(x, r)`` is the input of rank r.
        place: returns a new tensor of the values of another, in the layout to be tested.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    mine, all_ = place(shifted(x, rank)), [shifted(x, r) for r in range(size)]
    row = [shifted(x, rank + r) for r in range(size)]  # equal to what all ranks together send to this one
    empty = torch.zeros_like(x)

    def rooms() -> list[Tensor]:
        return [place(empty) for _ in range(size)]

    for root in range(size):
        into = mine if rank == root else place(empty)
        yield "broadcast", dist.broadcast(into, root, async_op=async_op), [(into, all_[root])]
        outs = rooms() if rank == root else []
        work = dist.gather(mine, outs if rank == root else None, root, async_op=async_op)
        yield "gather", work, list(zip(outs, all_, strict=False))
        whole = place(torch.stack([empty] * size)) if rank == root else None
        work = dist.gather_single(mine, whole, root, async_op=async_op)
        yield "gather_single", work, [] if whole is None else [(whole, torch.stack(all_))]
        into = place(empty)
        inputs = [place(each) for each in all_] if rank == root else None
        yield "scatter", dist.scatter(into, inputs, root, async_op=async_op), [(into, all_[rank])]
    outs = rooms()
    yield "all_gather", dist.all_gather(outs, mine, async_op=async_op), list(zip(outs, all_, strict=True))
    outs = rooms()
    work = dist.all_to_all(outs, [place(each) for each in row], async_op=async_op)
    yield "all_to_all", work, list(zip(outs, row, strict=True))
    into = place(torch.stack([empty] * size))
    yield "all_gather_single", dist.all_gather_single(into, mine, async_op=async_op), [(into, torch.stack(all_))]
    into, source = place(torch.stack([empty] * size)), place(torch.stack(row))
    yield "all_to_all_single", dist.all_to_all_single(into, source, async_op=async_op), [(into, torch.stack(row))]


def shifted(x: Tensor, by: int) -> Tensor:
    """Return the elements of a tensor, moved round by some places; as bytes, which torch moves of every dtype."""
    if not x.numel():
        return x
    return x.reshape(-1).view(torch.uint8).roll(by * x.dtype.itemsize).view(x.dtype).reshape(x.shape)


def messages(x: Tensor, place: Callable[[Tensor], Tensor]) -> Results:
    """Send this rank's tensor round the ring by every function for messages; yields as :func:`moving`."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    before, after = neighbours()
    mine, expected, empty = place(shifted(x, rank)), shifted(x, before), torch.zeros_like(x)
    for _ in range(3):  # the third is made again in short, where that is done
        into = place(empty)
        work = dist.isend(mine, after)
        assert dist.recv(into, before) == before
        yield "recv", work, [(into, expected)]
    into = place(empty)
    receiving = dist.irecv(into, before)
    if rank:
        dist.send(mine, after)
    else:
        dist.isend(mine, after).wait()
    receiving.wait()
    assert receiving.result()[0] is into
    yield "irecv", None, [(into, expected)]
    into = place(empty)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, into, before)]):
        work.wait()
    yield "batch_isend_irecv", None, [(into, expected)]


def check(calls: Results, what: str) -> None:
    """Wait for each call, and compare what it was to bring."""
    for name, work, pairs in calls:
        if work is not None:
            work.wait()
        for got, expected in pairs:
            same(got, expected, f"{name}, {what}")


@pytest.mark.parametrize("dtype", [*BITS, torch.bool, torch.float16], ids=str)
def test_bits_move_unchanged(dtype: torch.dtype) -> None:
    """Types that NumPy has not arrive bit by bit, by every call that moves data."""
    for count in (0, 1, 7, 9001):
        x = bits(dtype, count, 0) if dtype != torch.bool else bits(torch.uint8, count, 0) > 127
        for async_op in (False, True):
            check(moving(x, torch.clone, async_op), f"{dtype} x {count}, async_op={async_op}")
        check(messages(x, torch.clone), f"{dtype} x {count}")


def test_messages_on_every_dtype() -> None:
    """Messages carry every dtype."""
    for char in DTYPES:
        for count in (1, 5001):
            x = torch.from_numpy(cases.values(char, count, 3))
            check(messages(x, torch.clone), f"{x.dtype} x {count}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_reduced_in_float32(dtype: torch.dtype) -> None:
    """They are summed as float32 and rounded once, and bitwise ops are refused."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for count in (5, 9001):
        inputs = [random(torch.float32, count, r).to(dtype) for r in range(size)]
        x = inputs[rank].clone()
        work = dist.all_reduce(x, async_op=count > 5)
        if work is not None:
            work.wait()
        exact = torch.stack(inputs).double().sum(0)
        error = (x.double() - exact).abs() / exact.abs().clamp(min=torch.finfo(dtype).tiny)
        assert error.max() <= torch.finfo(dtype).eps * (0.5 + 1e-3), f"{dtype} x {count}: {error.max()}"
        y = inputs[rank].clone()
        dist.all_reduce(y, ReduceOp.MAX)
        same(y, torch.stack(inputs).amax(0), f"{dtype} x {count}")
    with collective_raises(RuntimeError, match="Cannot use"):
        dist.all_reduce(torch.ones(2, dtype=dtype), ReduceOp.BAND)
    with collective_raises(RuntimeError, match="float8_e5m2"):
        dist.all_reduce(torch.ones(2).to(torch.float8_e5m2))


def layouts(dtype: torch.dtype) -> dict[str, Callable[[Any], Tensor]]:
    """Return what makes a tensor of the values of another that is not contiguous."""

    def transposed(x: Tensor) -> Tensor:
        return torch.zeros(*reversed(x.shape), dtype=dtype).permute(*reversed(range(x.dim()))).copy_(x)

    def every_other(x: Tensor) -> Tensor:
        return torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=dtype)[..., ::2].copy_(x)

    def inner(x: Tensor) -> Tensor:
        return torch.zeros(*(length + 2 for length in x.shape), dtype=dtype)[(slice(1, -1),) * x.dim()].copy_(x)

    return {"transposed": transposed, "every other": every_other, "a block": inner}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.bfloat16, torch.complex64], ids=str)
def test_tensors_that_are_not_contiguous(dtype: torch.dtype) -> None:
    """They are read and written in place, as inputs and as results, and what lies between stays as it is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(12).reshape(3, 4).to(dtype) if dtype != torch.bool else torch.arange(12).reshape(3, 4) % 3 == 0
    for name, place in layouts(dtype).items():
        assert not place(x).is_contiguous()
        for async_op in (False, True):
            check(moving(x, place, async_op), f"{dtype}, {name}, async_op={async_op}")
        check(messages(x, place), f"{dtype}, {name}")
        out = place(x)
        dist.all_reduce(out)
        expected = x if dtype == torch.bool else x * size
        same(out, expected, f"all_reduce {dtype}, {name}")
    whole = torch.zeros(4, 6)
    dist.broadcast(whole[1:3, ::2], 0) if rank else dist.broadcast(torch.ones(2, 3), 0)
    if rank:
        assert whole.sum() == 6
        assert whole[1:3, ::2].sum() == 6


def test_leaves_that_require_grad() -> None:
    """Parameters are inputs and results as they are, as in torch, and their version stays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    outs = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(outs, weight)
    assert [out.tolist() for out in outs] == [[float(r)] * 3 for r in range(size)]
    before = weight._version
    dist.broadcast(weight, size - 1)
    assert weight.tolist() == [size - 1.0] * 3
    dist.all_reduce(weight[1:])
    assert weight.tolist() == [size - 1.0, *[size * (size - 1.0)] * 2]
    weight.data.fill_(rank)
    with torch.no_grad():
        dist.all_reduce(weight)
    assert weight.tolist() == [float(sum(range(size)))] * 3
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight._version == before
    loss = (weight * 2).sum()  # not a leaf: written, and its gradient knows nothing of the call, as in torch
    dist.all_reduce(loss)
    loss.backward()
    assert float(loss.detach()) == 6 * sum(range(size)) * size
    assert weight.grad is not None
    dist.all_reduce(weight.grad, ReduceOp.AVG)
    assert weight.grad.tolist() == [2.0] * 3


def test_lazy_conjugates_and_negatives() -> None:
    """Their values are sent, not what stands in their memory; as results they are refused."""
    rank, size = dist.get_rank(), dist.get_world_size()
    z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64) * (rank + 1)
    for lazy in (z.conj(), z.conj().imag):
        assert lazy.is_conj() or lazy.is_neg()
        outs = [torch.zeros(2, dtype=lazy.dtype) for _ in range(size)]
        dist.all_gather(outs, lazy)
        for r, out in enumerate(outs):
            same(out, (lazy / (rank + 1) * (r + 1)).resolve_neg().resolve_conj())
        with collective_raises(ValueError, match=r"`tensor` is a tensor whose memory holds the .*resolve_"):
            dist.all_reduce(lazy)


class Wrapper(torch.Tensor):
    """A tensor whose elements are elsewhere: all that is done with it goes to a function."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function: Any, *args: Any, **options: Any) -> Any:
        raise AssertionError(f"{function} should not be asked for")


def refused() -> dict[str, tuple[Tensor, str]]:
    """Return tensors that have no memory for a call, and words of the error."""
    ones = torch.ones(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "in prototype stage"
        nested = torch.nested.nested_tensor([ones, ones])
    return {
        "meta": (torch.ones(4, device="meta"), "meta device has no elements"),
        "sparse": (ones.to_sparse(), r"layout torch.sparse_coo is not supported.*to_dense"),
        "a wrapper, as DTensor is one": (Wrapper(), r"Wrapper has no memory of its own.*to_local"),
        "zeros of autograd": (torch._efficientzerotensor(4), "has no memory of its own"),
        "nested": (nested, "nested tensors are not supported"),
        "lazy": (torch.nn.UninitializedParameter(), "lazy module has no shape yet"),
        "bits": (torch.ones(4, dtype=torch.uint8).view(torch.bits8), r"dtype torch.bits8 is not supported"),
    }


def test_tensors_without_memory_of_their_own() -> None:
    """Sparse, fake, nested and meta tensors are refused on all ranks alike, as inputs and as results."""
    size = dist.get_world_size()
    for what, (tensor, words) in refused().items():
        with collective_raises(TypeError, match=f"parameter `tensor`: .*{words}"):
            dist.all_reduce(tensor)
        with collective_raises(TypeError, match=f"parameter `input_tensor`: .*{words}"):
            dist.all_gather_single(torch.zeros(4 * size), tensor)
        with pytest.raises(TypeError, match=words):
            dist.isend(tensor, neighbours()[1])
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [size] * 2, what
    with collective_raises((TypeError, ValueError), match="parameter `tensor`"):
        dist.all_reduce(torch.ones(1).expand(4))


def test_inside_transforms_of_torch() -> None:
    """A tensor that vmap, grad or functionalize has wrapped has no memory, and says so."""

    def call(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x.sum()

    for transform in (torch.vmap, torch.func.grad, torch.func.functionalize):
        with collective_raises(TypeError, match="parameter `tensor`: this tensor has no memory of its own"):
            transform(call)(torch.ones(3))


@pytest.mark.mpi(min_size=2)
def test_one_rank_at_fault() -> None:
    """The others hear of a tensor that one rank may not pass, and the group goes on."""
    rank = dist.get_rank()
    x = torch.ones(3).conj() if rank != 1 else torch.ones(3, dtype=torch.complex64).conj()
    with collective_raises(ValueError if rank == 1 else dist.CollectiveMismatchError, match="holds the conjugate"):
        dist.all_reduce(x)
    with collective_raises(dist.CollectiveMismatchError, match="float"):
        dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32))
    y = torch.ones(3)
    dist.all_reduce(y)
    assert y.tolist() == [dist.get_world_size()] * 3


@pytest.mark.mpi(min_size=2)
def test_kinds_meet_in_one_call() -> None:
    """One rank has a tensor, another a NumPy array: what counts is the dtype."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x: Any = torch.arange(4.0) if rank % 2 else np.arange(4, dtype=np.float32)
    dist.all_reduce(x)
    assert x.tolist() == [size * i for i in range(4)]
    mixed: list[Any] = [torch.zeros(4) if r % 2 else np.zeros(4, "f") for r in range(size)]
    dist.all_gather(mixed, x)
    assert [each.tolist() for each in mixed] == [x.tolist()] * size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", [each for each in MET if hasattr(ml_dtypes, each)])
def test_types_of_ml_dtypes_meet_those_of_torch(name: str) -> None:
    """A type of the same name is the same in an array of ml_dtypes, in collectives, in messages, and in one list."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = neighbours()
    dtype, other = getattr(torch, name), np.dtype(getattr(ml_dtypes, name))
    for count in (5, 20_001):
        inputs = [bits(dtype, count, r) for r in range(size)]
        arrays = [each.view(torch.uint8).numpy().view(other) for each in inputs]
        mine: Any = inputs[rank] if rank % 2 else arrays[rank]
        outs: list[Any] = [torch.zeros_like(inputs[0]) if r % 2 else np.zeros(count, other) for r in range(size)]
        dist.all_gather(outs, mine)
        works = [dist.isend(mine, after), dist.irecv(into := torch.zeros_like(inputs[0]), before)]
        for work in works:
            work.wait()
        for what, got, expected in [("isend", into, inputs[before]), *zip(range(size), outs, inputs, strict=True)]:
            raw = got.view(torch.uint8).numpy() if isinstance(got, Tensor) else got.view(np.uint8)
            assert (raw == expected.view(torch.uint8).numpy()).all(), f"{name} x {count}, {what}"
    with collective_raises(dist.CollectiveMismatchError, match=name):  # no unsigned integers of their size
        dist.broadcast(bits(dtype, 2, 0) if rank else np.ones(2, f"u{dtype.itemsize}"), 0)


@pytest.mark.mpi(min_size=2)
def test_tensors_under_way_are_guarded() -> None:
    """Two tensors of one storage are known to share it, and a write before wait() is noticed."""
    x = torch.zeros(8)
    work = dist.all_reduce(x[:6], async_op=True)
    with pytest.raises(dist.BufferInUseError, match=r"\(8 bytes in common\)"):
        dist.isend(x[4:], neighbours()[1])
    work.wait()
    dist.barrier()
    work = dist.all_reduce(x, async_op=True)
    x[0] = 5
    with pytest.raises(dist.BufferInUseError, match="was written before its wait"):
        work.wait()


def test_fused_calls() -> None:
    """Lists of tensors, one tensor, and the gradients of a module are reduced in one call, halves as float32."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = [
            [random(torch.float32, n, 10 * r + n).to(dtype).reshape(-1, 1) for n in (3, 9000)] for r in range(size)
        ]
        sums = [torch.stack([row[k] for row in inputs]) for k in range(2)]
        for async_op in (False, True, False, True):  # the first call is prepared, and the next calls use that
            mine = [x.clone() for x in inputs[rank]]
            work = dist.all_reduce_coalesced(mine, ReduceOp.MAX, async_op=async_op)
            if work is not None:
                work.wait()
                assert [id(x) for x in work.result()] == [id(x) for x in mine]
            for got, each in zip(mine, sums, strict=True):
                same(got, each.amax(0), f"{dtype}, async_op={async_op}")
        outs = [[torch.zeros_like(x).mT for x in row] for row in inputs]
        dist.all_gather_coalesced([[x.mT for x in row] for row in outs], inputs[rank])
        for row, expected in zip(outs, inputs, strict=True):
            for got, each in zip(row, expected, strict=True):
                same(got.mT, each, f"all_gather_coalesced of {dtype}")
    one = torch.full((2, 2), float(rank))
    dist.all_reduce_coalesced(one)
    assert one.tolist() == [[float(sum(range(size)))] * 2] * 2
    with collective_raises(TypeError, match="meta device"):
        dist.all_reduce_coalesced([torch.ones(2, device="meta")])
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1).to(torch.bfloat16))
    for place, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, float(rank + place))
    dist.average_gradients(module)
    for place, parameter in enumerate(module.parameters()):
        expected = torch.tensor(sum(range(size)) / size + place).to(parameter.dtype)
        assert parameter.grad is not None
        assert (parameter.grad == expected).all(), f"parameter {place}: {parameter.grad}, not {expected}"


def test_a_tensor_can_be_resized_afterwards() -> None:
    """A call leaves no trace on the tensor's storage (``tensor.numpy()`` would forbid to resize it)."""
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.untyped_storage().resizable()
    x.resize_(3000)
    y = torch.ones(2)
    y.share_memory_()
    address = y.data_ptr()
    dist.all_reduce(y)
    assert y.data_ptr() == address


def test_a_tensor_can_be_given_another_storage_meanwhile() -> None:
    """A call under way keeps the memory that it was given."""
    for count in (4, 100_000):
        x = torch.ones(count)
        kept = x.detach()
        work = dist.all_reduce(x, async_op=True)
        x.data = torch.zeros(3)
        work.wait()
        assert (kept == dist.get_world_size()).all()
        assert x.tolist() == [0, 0, 0]
    memory = adapt(x, "x", writable=True)
    x.data = torch.ones(2)
    filled = [torch.full((3,), 7.0) for _ in range(10)]
    assert memory.flat.tolist() == [0, 0, 0], filled


def test_a_plan_of_a_tensor() -> None:
    """A plan reduces a tensor in its own memory, bfloat16 too."""
    me, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.empty(4, dtype=dtype)
        plan = dist.all_reduce_init(x)
        assert plan is not None
        for turn in range(3):
            x.fill_(float(me + turn))
            plan.start()
            plan.wait()
            assert (x == size * turn + size * (size - 1) / 2).all()


def test_parameters_of_a_model() -> None:
    """A module's state is that of rank 0 afterwards, and its parameters can be trained on."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    dist.broadcast_parameters(model.state_dict())
    dist.broadcast_parameters(model.named_parameters())
    dist.broadcast_parameters(model.parameters())
    torch.manual_seed(0)
    expected = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.requires_grad
    model(torch.ones(2, 3)).sum().backward()


def test_a_sampler_of_a_loader() -> None:
    """torch's DataLoader takes the sampler."""
    data = torch.arange(20)
    sampler = dist.DistributedSampler(data, shuffle=False)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4, sampler=sampler)
    got = torch.cat([batch for (batch,) in loader])
    assert got.tolist() == list(sampler)
    assert len(loader) == -(-len(sampler) // 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_repeated_calls(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of tensors and of lists of tensors, contiguous or not, are prepared when they are made again."""
    me, size = dist.get_rank(), dist.get_world_size()
    for strided in (False, True):

        def of(value: float, strided: bool = strided) -> Tensor:
            full = torch.full((4, 6), float(value), dtype=dtype)
            return full[:, ::2] if strided else full

        for turn in range(2 * size + 3):
            root = turn % size
            x, parts, got = of(me + turn), [of(10 * me + to) for to in range(size)], [of(0) for _ in range(size)]
            given = parts if me == root else None
            with monkeypatch.context() as patched:
                if turn > 2 * size:
                    patched.setattr(run, "run_prepared", None)
                dist.all_gather(got, x)
                assert all((each == rank + turn).all() for rank, each in enumerate(got))
                dist.all_to_all(got, parts)
                assert all((each == 10 * rank + me).all() for rank, each in enumerate(got))
                dist.gather(x, got if me == root else None, root)
                if me == root:
                    assert all((each == rank + turn).all() for rank, each in enumerate(got))
                dist.scatter(x, given, root)
                assert (x == 10 * root + me).all()
                dist.reduce_scatter(x, parts)
                assert (x == sum(10 * rank + me for rank in range(size))).all()
                work = dist.all_gather(got, x, async_op=True)
                assert work is not None
                work.wait()
                assert work.result()[0] is got[0]
                assert (got[me] == x).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [3, 2000])
def test_repeated_messages(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of tensors, contiguous or not, use persistent requests when they are made again."""
    me, (before, after) = dist.get_rank(), neighbours()
    group = dist.new_group()  # whose table of persistent requests is empty
    for columns in (slice(None), slice(None, None, 2)):
        x = torch.zeros((rows, 6), dtype=dtype)[:, columns]
        y = torch.zeros((rows, 6), dtype=dtype)[:, columns]
        for turn in range(6):
            x[...] = me + turn
            dist.barrier(group)  # no message of this turn is there before, which a general receive would find and hold
            with monkeypatch.context() as patched:
                if turn > 2 and native.found is not None:
                    patched.setattr(api, "start_send", None)
                    patched.setattr(api, "start_receive", None)
                sent = dist.isend(x, after, group)
                dist.recv(y, before, group)
                assert sent is not None
                sent.wait()
                assert (y == before + turn).all()
                received = dist.irecv(y, before, group)
                dist.send(x, after, group)
                assert received is not None
                received.wait()
                assert received.result()[0] is y
                assert (y == before + turn).all()
    dist.destroy_process_group(group)
