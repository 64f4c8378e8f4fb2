"""Arrays of every layout and dtype through every collective and message, compared with NumPy on the inputs of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layout_cases import (
    HALVES,
    LARGE,
    MOVEMENTS,
    MOVING,
    REDUCING,
    REDUCTIONS,
    SMALL,
    WAYS,
    dtype_of,
    dtypes,
    make,
    ml_dtypes,
    operations,
    pairs,
)
from mpi4py import MPI

import mpicoll as dist
from mpicoll import ReduceOp
from mpicoll.pytest_plugin import collective_raises
from mpicoll.transports.mpi.collectives import MpiTransport

pytestmark = pytest.mark.mpi
needs_ml_dtypes = pytest.mark.skipif(ml_dtypes is None, reason="ml_dtypes is not installed")

Array = Any


@pytest.mark.parametrize("function", MOVEMENTS, ids=lambda f: f.__name__)
def test_every_layout_and_dtype_arrives_in_place(function: Any) -> None:
    """Views, byte orders and dtypes that MPI does not know move to where they belong, and nothing beside it is written."""
    for turn, dtype in enumerate(dtypes(MOVING)):
        way, other = WAYS[turn % len(WAYS)], WAYS[(7 * turn + 2) % len(WAYS)]
        shape = LARGE if turn % 5 == 4 else SMALL
        make(function, dtype, shape, [way, other], [other, way, WAYS[1]], None, turn, [turn % 2 == 1])


@pytest.mark.parametrize("function", REDUCTIONS, ids=lambda f: f.__name__)
def test_halves_and_layouts_are_reduced(function: Any) -> None:
    """Halves take every op of floats, and arrays of every layout are reduced in place."""
    for turn, dtype in enumerate(dtypes([*HALVES, "d"])):
        for number, op in enumerate(operations(dtype)):
            way = WAYS[(turn + 3 * number) % len(WAYS)]
            shape = SMALL if number % 4 else LARGE
            make(function, dtype, shape, [way], [way, WAYS[number]], op, turn, [(turn + number) % 2 == 1])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("function", [*MOVEMENTS, *REDUCTIONS], ids=lambda f: f.__name__)
def test_everything_with_everything(function: Any, shape: tuple[int, int]) -> None:
    """Every collective with every dtype, op, layout and byte order, sync and async."""
    if dist.get_world_size() != 3:
        pytest.skip("made on 3 ranks, as it takes a minute: what packs the arrays knows nothing of the number of ranks")
    reduces = function in REDUCTIONS
    for dtype in dtypes(REDUCING if reduces else MOVING):
        for op in operations(dtype) if reduces else [None]:
            for turn, way, other in pairs():
                if shape == SMALL:
                    make(function, dtype, shape, [way], [other], op, turn)
                make(function, dtype, shape, [way, other], [other, way], op, turn, [turn % 2 == 1])


def ulps(got: Array, exact: Array) -> Array:
    """Return how far halves are from float64, in units of the last place at that size."""
    info = np.finfo(np.float16) if got.dtype.name == "float16" else ml_dtypes.finfo(got.dtype)
    exponent = np.maximum(np.frexp(exact)[1] - 1, int(info.minexp))
    return np.abs(got.astype(np.float64) - exact) / np.ldexp(1.0, exponent - int(info.nmant))


def worst_of_4096(dtype: np.dtype[Any]) -> float:
    """Return the largest error of all reductions that add 4,096 values of the ranks."""
    me, size = dist.get_rank(), dist.get_world_size()
    inputs = [np.random.default_rng(r).standard_normal(4096).astype(dtype) for r in range(size)]
    exact = np.sum([each.astype(np.float64) for each in inputs], axis=0)
    results = []
    for op, expected in ((ReduceOp.SUM, exact), (ReduceOp.AVG, exact / size), (ReduceOp.PREMUL_SUM(0.5), exact / 2)):
        x = inputs[me].copy()
        dist.all_reduce(x, op)
        results.append((x, expected))
        x = inputs[me].copy()
        dist.reduce(x, 0, op)
        results.append((x, expected) if me == 0 else (x, inputs[me].astype(np.float64)))
        part, mine = np.empty(4096 // size, dtype), slice(me * (4096 // size), (me + 1) * (4096 // size))
        dist.reduce_scatter_single(part, inputs[me][: part.size * size], op)
        results.append((part, expected[mine]))
    return max(float(ulps(got, expected).max()) for got, expected in results)


@pytest.mark.parametrize("name", ["e", pytest.param("bfloat16", marks=needs_ml_dtypes)])
def test_sums_of_halves_are_right_to_the_last_place(name: str) -> None:
    """The sum of 4,096 values of all ranks is within one unit of the last place of float64's, in every reduction."""
    dtype = dtype_of(name)
    assert dtype is not None
    assert worst_of_4096(dtype) <= 1.0


@pytest.mark.usefixtures("rounds_of_mpi")
@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("name", ["e", pytest.param("bfloat16", marks=needs_ml_dtypes)])
def test_a_sum_formed_in_halves_would_be_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an operation that rounds to the half type after each addition, the same values are further off."""
    dtype = dtype_of(name)
    assert dtype is not None

    def add_halves(left: Any, right: Any, _: Any) -> None:
        a, b = np.frombuffer(left, np.float32), np.frombuffer(right, np.float32)
        b[...] = (a.astype(dtype) + b.astype(dtype)).astype(dtype).astype(np.float32)

    planted = MPI.Op.Create(add_halves, commute=True)
    monkeypatch.setattr(MpiTransport, "_op", staticmethod(lambda move: planted))
    group = dist.new_group()  # with no plans of the right operation
    try:
        x = np.random.default_rng(dist.get_rank()).standard_normal(4096).astype(dtype)
        exact = np.sum(
            [np.random.default_rng(r).standard_normal(4096).astype(dtype).astype("d") for r in range(group.size())],
            axis=0,
        )
        dist.all_reduce(x, group=group)
        worst = float(ulps(x, exact).max())
    finally:
        dist.destroy_process_group(group)
        planted.Free()
    assert worst > 1.0, f"{worst} units with additions in {dtype}"


@pytest.mark.mpi(min_size=2)
def test_dtypes_that_travel_alike_do_not_meet() -> None:
    """float16 against float32, uint16 or bfloat16, dates against integers: all ranks raise, and name both."""
    me = dist.get_rank()
    cases = [("e", "f", "float16"), ("e", "u2", "uint16"), ("M8[s]", "i8", r"datetime64\[s\]")]
    cases += [("M8[s]", "M8[ms]", r"datetime64\[ms\]"), ("i4,f8", "i4,i8", "i8"), ("S8", "U2", "U2")]
    if ml_dtypes is not None:
        cases += [("e", "bfloat16", "bfloat16"), ("float8_e5m2", "float8_e4m3fn", "float8_e4m3fn")]
    for mine, other, named in cases:
        dtype = dtype_of(other if me else mine)
        with collective_raises(dist.CollectiveMismatchError, match=named):
            dist.broadcast(np.zeros(4, dtype), 0)
        if mine == "e":
            with collective_raises(dist.CollectiveMismatchError, match=named):
                dist.all_reduce(np.zeros(4, dtype))
    x = np.ones(4, ">f8" if me else "f8")  # one dtype, in two byte orders
    dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()


@pytest.mark.mpi(min_size=2)
def test_messages_of_other_dtypes_are_refused_and_kept() -> None:
    """A receive of another dtype says what was sent, and the message goes to a receive that fits."""
    me = dist.get_rank()
    for count in (4, 4000):
        for sent, wrong, text in (
            ("e", "u2", "rank 0 sent float16, .* of uint16"),
            ("M8[s]", "i8", r"sent datetime64\[s\], {count} elements .* of int64"),
            ("i4,f8", "f4,f8", r"sent \[\('f0', '<i4'\), .*, {count} elements .* of \[\('f0', '<f4'\)"),
            ("f8,i4", "i4,f8", r"sent \[\('f0', '<f8'\), .*, {count} elements .* of \[\('f0', '<i4'\)"),
            ("U3", "i4,f8", r"sent <U3, {count} elements .* of \[\('f0', '<i4'\)"),
            ("i4,f8", "f8", r"sent \[\('f0', '<i4'\), .*, {count} elements .* of float64"),
            ("i8", "i4,i4", "rank 0 sent int64"),
            ("i4,f8", "i4,f8", rf"rank 0 sent \[\('f0', .*, {count} elements .*, {count + 1} elements"),
        ):
            if me == 0:
                dist.send(np.ones(count, sent), 1)
            elif me == 1:
                with pytest.raises(dist.CollectiveMismatchError, match=text.format(count=count)) as caught:
                    dist.recv(np.zeros(count if wrong != sent else count + 1, wrong), 0)
                there, here = (call["arguments"] for call in caught.value.calls)
                assert there["elements"] == str(count)
                assert (there["dtype"] == here["dtype"]) == (wrong == sent), there
                x = np.zeros((count, 2), sent)[:, 0]
                dist.recv(x, 0)
                assert (x == np.ones(count, sent)).all()


def test_calls_made_again_with_other_arrays_of_the_same_size() -> None:
    """What is kept of a call for the next time does not take halves, views or other byte orders for plain arrays."""
    size, me = dist.get_world_size(), dist.get_rank()
    for _ in range(2):
        for dtype in ("f", "e", ">f4", "u2", ">u2", ">e"):
            for make_one in (
                lambda d: np.ones((4, 6), d),
                lambda d: np.ones((6, 4), d).T,
                lambda d: np.ones((4, 12), d)[:, ::2],
            ):
                x = make_one(dtype)
                dist.all_reduce(x)
                assert (x == size).all(), (dtype, x)
                x[...] = me
                dist.broadcast(x, size - 1)
                assert (x == size - 1).all(), (dtype, x)
                if size > 1 and me < 2:
                    if me:
                        dist.recv(x, 0)
                        assert (x == 7).all(), (dtype, x)
                    else:
                        dist.send(np.full_like(x, 7), 1)
                x[...] = 1
                if dtype not in ("u2", ">u2"):
                    dist.all_reduce(x, ReduceOp.AVG)
                    assert (x == 1).all(), (dtype, x)


def test_the_other_fields_of_records_are_left_alone() -> None:
    """A call on some fields of records writes these and no others."""
    me, size = dist.get_rank(), dist.get_world_size()
    for async_op in (False, True):
        records = np.zeros(5, "i4,f8,i2")
        records["f0"], records["f1"], records["f2"] = me, 10 + me, 20 + me
        work = dist.broadcast(records[["f0", "f2"]], size - 1, async_op=async_op)
        if work is not None:
            work.wait()
        assert (records["f0"] == size - 1).all()
        assert (records["f2"] == 19 + size).all()
        assert (records["f1"] == 10 + me).all()
        total = records["f1"]
        dist.all_reduce(total)
        assert (records["f1"] == sum(10 + r for r in range(size))).all()


def test_broadcast_views_are_inputs() -> None:
    """An array of equal elements that share memory is sent as if they were apart."""
    me, size = dist.get_rank(), dist.get_world_size()
    out = np.zeros((size, 3, 4))
    dist.all_gather_into_tensor(out, np.broadcast_to(np.float64(me + 1), (3, 4)))
    assert (out == np.arange(1, size + 1)[:, None, None]).all()
    with collective_raises(ValueError, match="`tensor` has elements that share memory"):
        dist.all_reduce(np.lib.stride_tricks.as_strided(np.ones(1), (4,), (0,)))


def test_views_of_memory_under_way() -> None:
    """Views that overlap what an operation writes are refused; those that lie beside it are not, and no write goes unseen."""
    me, size = dist.get_rank(), dist.get_world_size()
    x = np.ones((4, 6))
    first = dist.all_reduce(x[:, ::2], async_op=True)
    second = dist.all_reduce(x[:, 1::2], async_op=True)  # no byte in common
    with collective_raises(dist.BufferInUseError, match="bytes in common"):
        dist.all_reduce(x.T)
    for work in (first, second):
        assert work is not None
        work.wait()
    assert (x == size).all()
    half = np.ones((4, 6), np.float16)
    dist.barrier()
    work = dist.all_gather_into_tensor(np.zeros((size, 4, 6), np.float16), half.T, async_op=True)
    assert work is not None
    half[0, 0] = 5
    with pytest.raises(dist.BufferInUseError, match="was written before"):
        work.wait()
    dist.barrier()
    if size > 1 and me < 2:
        y = np.zeros((4, 6), ">f4").T
        if me:
            work = dist.irecv(y, 0)
            assert work is not None
            work.wait()
            assert (y == 3).all()
        else:
            work = dist.isend(np.full((6, 4), 3.0, "f"), 1)
            assert work is not None
            work.wait()


@pytest.mark.parametrize("level", ["roll", "off"])
def test_halves_and_layouts_without_comparison(level: str) -> None:
    """At the levels that compare less the results are the same."""
    dist.destroy_process_group()
    dist.init_process_group(check=level)
    try:
        for turn, function in enumerate((*MOVEMENTS, *REDUCTIONS)):
            for dtype in dtypes(HALVES):
                op = ReduceOp.SUM if function in REDUCTIONS else None
                make(function, dtype, SMALL, [WAYS[turn % len(WAYS)]], [WAYS[3]], op, turn)
        if dist.get_world_size() > 1 and dist.get_rank() < 2:
            if dist.get_rank():
                y = np.full((4, 6), 8.0)
                dist.recv(y[:, ::2], 0)  # a shorter message
                assert y[:, ::2].reshape(-1).tolist() == [3.0] * 5 + [8.0] * 7
                assert (y[:, 1::2] == 8).all()
            else:
                dist.send(np.full(5, 3.0), 1)
    finally:
        dist.destroy_process_group()
