"""Lists of large arrays that stand apart in memory: they are passed to MPI as they are, and nothing else is read or written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import collective_cases as cases
import numpy as np
import pytest
from collective_cases import Case

import mpicoll as dist
from mpicoll.memory import layouts
from mpicoll.operations import execution
from mpicoll.transports import large_counts
from mpicoll.transports.base import Kind
from mpicoll.transports.mpi.collectives import MpiTransport

pytestmark = pytest.mark.mpi

LISTS = [
    name
    for name in cases.ALL
    if "single" not in name and "tensor" not in name and name not in ("barrier", "all_reduce")
]
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes from which on arrays may stand apart, in these tests."""
    monkeypatch.setattr(MpiTransport, "apart_from", lambda self, kind: 24_000)
    return 24_000


@pytest.fixture
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A group of all ranks that has prepared no call; its calls go through MPI unless the parameter is "node"."""
    made: Any = dist.new_group()
    if getattr(request, "param", "mpi") == "mpi":
        monkeypatch.setattr(made.pair, "through", lambda kind, nbytes: None)
    yield made
    dist.destroy_process_group(made)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many arrays stood in each span that was made."""
    found: list[int] = []
    call = layouts.spanned

    def noted(arrays: Any, counts: bool = True) -> Any:
        made = call(arrays, counts)
        found.append(len(arrays) if made is not None else 0)
        return made

    monkeypatch.setattr(layouts, "spanned", noted)
    return found


def placed(count: int, size: int, seed: int, dtype: str = "d", offset: int = 0) -> tuple[Array, list[Array]]:
    """Return memory, and arrays in it in any order with gaps between them."""
    itemsize = np.dtype(dtype).itemsize
    room = count + 7
    memory = np.full((size + 1) * room * itemsize, 0xA5, np.uint8)
    order = np.random.default_rng(seed).permutation(size)
    starts = [(int(place) * room + 3) * itemsize + (offset if at else 0) for at, place in enumerate(order)]
    return memory, [memory[start : start + count * itemsize].view(dtype) for start in starts]


def gaps_are_untouched(memory: Array, arrays: list[Array]) -> bool:
    left = np.ones(memory.size, bool)
    start = memory.__array_interface__["data"][0]
    for each in arrays:
        at = each.__array_interface__["data"][0] - start
        left[at : at + each.nbytes] = False
    return bool((memory[left] == 0xA5).all())


@pytest.mark.parametrize("name", LISTS)
def test_every_list(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collective of lists has the same result as of small ones, for each dtype, made once and again, waited for or not."""
    size = dist.get_world_size()
    for turn in range(3):
        for dtype in "dFG?b":
            for async_op in (False, True):
                count = 24_000 // np.dtype(dtype).itemsize + 11
                cases.run(name, iter([Case(dtype, count, root=turn % size, async_op=async_op, seed=turn)]))
    monkeypatch.setattr(execution, "NATIVE_BYTES", 30_000)
    monkeypatch.setattr(execution, "BLOCKS", 1)
    monkeypatch.setattr(large_counts, "COUNT_LIMIT", 100_000)
    for turn in range(3):
        cases.run(name, iter([Case("d", 3001, root=turn % size, seed=turn)]))


@pytest.mark.parametrize("group", ["mpi", "node"], indirect=True)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [3001, 150_001])
def test_arrays_in_any_order(count: int, async_op: bool, group: Any, spans: list[int]) -> None:
    """Nothing is packed in calls that are made again; memory between the arrays is not touched.

    The arrays of the larger count do not go through the memory of a node in one step.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    turns = 5 if count < 100_000 else 3
    for turn in range(turns):
        given, inputs = placed(count, size, 10 * turn + rank)
        got, outputs = placed(count, size, 100 + 7 * turn + 3 * rank)
        before = given.copy()
        for to, each in enumerate(inputs):
            each[...] = 100 * rank + 10 * to + turn
        mine = np.full(count, rank + turn + 0.0)
        for call in ("all_gather", "all_to_all", "gather", "scatter"):
            root = turn % size
            for each in outputs:
                each.view(np.uint8)[...] = 0xA5
            work: Any
            if call == "all_gather":
                work = dist.all_gather(outputs, mine, group=group, async_op=async_op)
            elif call == "all_to_all":
                work = dist.all_to_all(outputs, inputs, group=group, async_op=async_op)
            elif call == "gather":
                work = dist.gather(mine, outputs if rank == root else None, root, group=group, async_op=async_op)
            else:
                work = dist.scatter(outputs[0], inputs if rank == root else None, root, group=group, async_op=async_op)
            if work is not None:
                work.wait()
            for source, each in enumerate(outputs):
                if call == "all_gather" or (call == "gather" and rank == root):
                    assert (each == source + turn).all(), (call, turn)
                elif call == "all_to_all":
                    assert (each == 100 * source + 10 * rank + turn).all(), turn
            if call == "scatter":
                assert (outputs[0] == 100 * root + 10 * rank + turn).all()
            assert gaps_are_untouched(got, outputs), (call, turn)
        assert gaps_are_untouched(given, inputs)
        for each in inputs:
            each.view(np.uint8)[...] = 0xA5
        assert (given == before).all()
    over_mpi = "through" in vars(group.pair)
    if size > 1 and over_mpi and not async_op:
        assert len(spans) >= turns * 3
        assert set(spans) == {size}
    elif size > 1 and async_op and count > 100_000 and group.pair.through(Kind.ALL_TO_ALL, count * 8) is not None:
        assert set(spans) == {size}  # of a call with a late member the arrays are packed


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["joined", "not aligned", "the input is in the list", "the same input", "small"])
def test_a_rank_whose_arrays_differ(how: str, group: Any, spans: list[int]) -> None:
    """A rank whose arrays cannot be passed as they are meets the other ranks in the same calls of MPI."""
    rank, size = dist.get_rank(), dist.get_world_size()
    odd = rank == size - 1
    count = 100 if how == "small" else 3001
    for turn in range(4):
        _, outputs = placed(count, size, turn + rank, offset=4 if odd and how == "not aligned" else 0)
        inputs = [np.full(count, 100.0 * rank + to + turn) for to in range(size)]
        mine = np.full(count, rank + turn + 0.0)
        if odd and how == "joined":
            outputs = list(np.zeros((size, count)))
        if odd and how == "the input is in the list":
            inputs = outputs
            for to, each in enumerate(inputs):
                each[...] = 100.0 * rank + to + turn
        if odd and how == "the same input":
            inputs = [inputs[0]] * size
        dist.all_to_all(outputs, inputs, group)
        for source, each in enumerate(outputs):
            to = 0 if how == "the same input" and source == size - 1 else rank
            assert (each == 100.0 * source + to + turn).all(), (turn, source)
        if odd and how == "the input is in the list":
            mine = outputs[rank]
            mine[...] = rank + turn
        dist.all_gather(outputs, mine, group)
        for source, each in enumerate(outputs):
            assert (each == source + turn).all(), (turn, source)
    # Of each turn: the outputs and inputs of all_to_all, and the outputs of all_gather. In calls that are made again only the
    # inputs are copied where memory is shared. A prepared call that waits for a late member makes its spans a second time.
    passed = {"joined": 4, "not aligned": 10, "the input is in the list": 6, "the same input": 7, "small": 0}
    least = passed[how] if odd or how == "small" else 12
    assert least <= spans.count(size) <= 2 * least


def test_unequal_blocks(group: Any, spans: list[int]) -> None:
    """Blocks of unequal lengths, some of them empty."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(size + 1):
        counts = [(0, 5001, 7)[(each + turn) % 3] for each in range(size)]
        outputs = [np.full(count, -1.0) for count in counts]
        dist.all_gather(outputs, np.full(counts[rank], rank + 0.5), group)
        for source, each in enumerate(outputs):
            assert (each == source + 0.5).all()
        sent = [(0, 5001, 7)[(rank + to + turn) % 3] for to in range(size)]
        outputs = [np.full(count, -1.0) for count in sent]
        dist.all_to_all(outputs, [np.full(count, 10.0 * rank + to) for to, count in enumerate(sent)], group)
        for source, each in enumerate(outputs):
            assert (each == 10.0 * source + rank).all()
    assert size == 1 or size in spans
