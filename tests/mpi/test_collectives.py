"""Every collective on every dtype against NumPy, on the world: ops, roots, sizes, and both ways of calling."""

from __future__ import annotations

import collective_cases as cases
import numpy as np
import pytest

import mpicoll as dist

pytestmark = pytest.mark.mpi


def counts(dtype: str) -> tuple[int, ...]:
    return (*cases.SMALL, cases.large(dtype), 5)


@pytest.mark.parametrize("name", [*cases.ROOTED, *cases.ROOTLESS])
def test_data_arrives_unchanged(name: str) -> None:
    """Collectives that only move data deliver every element of every dtype."""
    for dtype in cases.DTYPES:
        cases.run(name, cases.taste(name, dtype, counts(dtype)))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_reductions_give_what_numpy_gives(dtype: str) -> None:
    """Every collective that reduces agrees with NumPy for every op that a dtype has."""
    for name in cases.REDUCING:
        cases.run(name, cases.taste(name, dtype, counts(dtype)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", [*cases.ALL])
def test_everything_with_everything(name: str, dtype: str) -> None:
    """Every collective, dtype, op and number of elements, sync and async, agrees with NumPy, from every root."""
    cases.run(name, cases.sweep(name, dtype, counts(dtype)))


def test_all_ranks_hold_the_same_bits_after_all_reduce() -> None:
    """A sum that rounds is rounded alike on all ranks."""
    for count in (5, 5000):
        x = np.random.default_rng(dist.get_rank()).standard_normal(count).astype(np.float32)
        dist.all_reduce(x)
        copies = [np.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, x)
        for rank, copy in enumerate(copies):
            assert copy.tobytes() == x.tobytes(), f"rank {rank} has other bits than this one, {count} elements"


def test_integer_sums_wrap_around_as_in_numpy() -> None:
    """A sum that does not fit its integer dtype wraps around."""
    size = dist.get_world_size()
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
        x = np.full(3, np.iinfo(dtype).max, dtype)
        dist.all_reduce(x)
        assert (x == np.add.reduce(np.full(size, np.iinfo(dtype).max, dtype), dtype=dtype)).all(), dtype


def test_bool_reductions_are_logical() -> None:
    """On bool SUM, MAX and BOR are or, PRODUCT, MIN and BAND are and, BXOR is exclusive or."""
    size, rank = dist.get_world_size(), dist.get_rank()
    columns = np.array([[False, True, r == 0, r != 0] for r in range(size)])
    table = {np.any: ("SUM", "MAX", "BOR"), np.all: ("PRODUCT", "MIN", "BAND"), np.logical_xor.reduce: ("BXOR",)}
    for function, ops in table.items():
        for op in ops:
            x = columns[rank].copy()
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            assert (x == function(columns, axis=0)).all(), f"{op}: {x}"


def test_barrier_holds_everybody_until_the_last_has_come() -> None:
    """Nobody is through a barrier before all have entered it."""
    import time

    last = dist.get_world_size() - 1
    for async_op in (False, True):
        if dist.get_rank() == last:
            time.sleep(0.15)
        entered = np.array([time.monotonic()])
        work = dist.barrier(async_op=async_op)
        if work is not None:
            work.wait()
        left = np.array([time.monotonic()])
        dist.all_reduce(entered, dist.ReduceOp.MAX)
        dist.all_reduce(left, dist.ReduceOp.MIN)
        # One host: CLOCK_MONOTONIC is one clock.
        assert left[0] >= entered[0], f"async_op={async_op}: somebody left {entered[0] - left[0]} s early"
    dist.barrier(device_ids=[0])
    dist.barrier(dist.group.WORLD)


@pytest.mark.parametrize(
    "name", ["gather", "scatter", "all_gather", "all_gather_uneven", "all_gather_single", "reduce_scatter"]
)
def test_blocks_that_other_calls_of_mpi_move(name: str) -> None:
    """Blocks beyond the sizes from which Gatherv, Scatterv, Iallgatherv and Ireduce_scatter are used, for each root."""
    for root in range(dist.get_world_size() if name in ("gather", "scatter") else 1):
        for count in (20_000, 70_001, 600_001):  # from 64 KiB, 512 KiB in all, and 2 MiB on
            for async_op in (False, True):
                cases.run(name, iter((cases.Case("f", count, root=root, async_op=async_op),)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*cases.ALL])
def test_blocks_above_the_limit_of_one_native_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of more than one native call's bytes move in pieces, and arrive whole."""
    from mpicoll.operations import execution

    monkeypatch.setattr(execution, "BLOCKS", 1)
    blocks = 1 if name in ("broadcast", "all_reduce", "reduce") else dist.get_world_size()
    # The uneven forms multiply the number by up to six.
    count = (2 * execution.NATIVE_BYTES + 12345) // (4 * blocks * (4 if "uneven" in name or "splits" in name else 1))
    for async_op in (False, True):
        cases.run(name, iter((cases.Case("f", count, root=dist.get_world_size() - 1, async_op=async_op),)))
