"""Calls drawn by hypothesis: any op, dtype, layout, shape, root, group, kind of array, waited for or not."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import hypothesis.strategies as st
import layout_cases as cases
import numpy as np
import pytest
from array_kinds import Exported, Interface, Through
from mpi4py import MPI

import mpicoll as dist

pytestmark = pytest.mark.mpi

CASES = 2000
FUNCTIONS = [*cases.MOVEMENTS, *cases.REDUCTIONS]


KINDS: dict[str, tuple[Callable[[Any], Any] | None, str]] = {
    "NumPy": (None, ""),
    "memoryview": (memoryview, "?bBhHiIlLqQfdFD"),
    "the array interface": (Interface, "?bBhHiIlLqQfdgFDG"),
    "DLPack": (Exported, "?bBhHiIlLfdFD"),
}
"""By name: what makes such an array of a NumPy array, and of which dtypes."""


@dataclass(frozen=True)
class Drawn:
    """What one call is; its repr is what a failure shows."""

    function: Any
    dtype: np.dtype[Any]
    op: Any
    shape: tuple[int, int]
    root: int
    group: int
    async_op: bool
    inputs: tuple[tuple[str, bool], ...]
    outputs: tuple[tuple[str, bool], ...]
    kind: str


WAYS = st.lists(st.sampled_from(cases.WAYS), min_size=1, max_size=3).map(tuple)
SHAPES = st.one_of(
    st.tuples(st.integers(0, 6), st.integers(0, 9)),
    st.tuples(st.integers(1, 90), st.integers(1, 130)),
    st.just(cases.LARGE),
)


@st.composite
def drawn(draw: Any) -> Drawn:
    """Draw one call, whatever the number of ranks is."""
    function = draw(st.sampled_from(FUNCTIONS))
    reduces = function in cases.REDUCTIONS
    dtype = draw(
        st.sampled_from(cases.dtypes([*cases.REDUCING, *"?bBhHIlLqQ"] if reduces else [*cases.MOVING, *"bBhHlQfD"]))
    )
    if reduces and dtype.kind == "b":
        dtype = np.dtype("i")
    op = draw(st.sampled_from(cases.operations(dtype))) if reduces else None
    kind = draw(st.sampled_from([name for name, (_, chars) in KINDS.items() if not chars or dtype.char in chars]))
    inputs, outputs = draw(WAYS), draw(WAYS)
    if kind != "NumPy":
        inputs, outputs = (tuple((layout, False) for layout, _ in ways) for ways in (inputs, outputs))
    return Drawn(
        function=function,
        dtype=dtype,
        op=op,
        shape=draw(SHAPES),
        root=draw(st.integers(0, 59)),
        group=draw(st.integers(0, 3)),
        async_op=draw(st.booleans()),
        inputs=inputs,
        outputs=outputs,
        kind=kind,
    )


def draw_cases(number: int, seed: int) -> list[Drawn]:
    """Return different calls, the same on all ranks.

    They are made outside of hypothesis: it would go other ways on a rank where one fails than on the others.
    """
    found: list[Drawn] = []

    @hypothesis.settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.seed(seed)
    @hypothesis.given(drawn())
    def keep(case: Drawn) -> None:
        found.append(case)

    keep()
    return found


def groups() -> list[Any]:
    """Return groups, of which this rank is a member or not: the world, the even ranks, all but the first, the last alone."""
    size = dist.get_world_size()
    ranks = [range(0, size, 2), range(min(1, size - 1), size), [size - 1]]
    return [None, *(dist.new_group(list(each)) for each in ranks)]


def make(case: Drawn, group: Any) -> None:
    convert, _ = KINDS[case.kind]
    api = None if convert is None else Through(convert)
    more: dict[str, Any] = {"async_op": case.async_op}
    if group is not None:
        more["group"] = group
    call = cases.Call(case.dtype, case.shape, case.inputs, case.outputs, api=api, **more)
    call.finish(case.function(call, case.op, case.root % call.size), repr(case))


# To draw so many cases takes a busy machine more than a minute, before any call is made.
MANY = pytest.param(CASES, marks=[pytest.mark.slow, pytest.mark.mpi_timeout(300)])


@pytest.mark.parametrize("number", [60, MANY])
def test_calls_of_any_kind(number: int) -> None:
    """Whatever is drawn gives what NumPy gives on the inputs of all members, in place, and writes nothing beside it."""
    seed = MPI.COMM_WORLD.bcast(int(os.environ.get("MPICOLL_TEST_SEED", "20")), 0)
    found = draw_cases(number, seed)
    assert len(found) == number
    made = groups()
    for case in found:
        group = made[case.group]
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            make(case, group)
    for group in made[1:]:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    if number == CASES:
        for what in ("function", "dtype", "kind", "group", "async_op"):
            counts = collections.Counter(getattr(case, what) for case in found)
            assert min(counts.values()) >= number // 200, (what, counts)
