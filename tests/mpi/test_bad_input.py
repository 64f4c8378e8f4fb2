"""Wrong arguments and calls that do not fit together: every rank raises, at once, and the group goes on."""

from __future__ import annotations

import enum
import inspect
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import collective_cases as cases
import numpy as np
import pytest

import mpicoll as dist
from mpicoll import ReduceOp
from mpicoll.pytest_plugin import collective_raises

pytestmark = pytest.mark.mpi

Call = Callable[[], Any]


def still_works(where: str) -> None:
    """Assert that the group is good, with small data and with large."""
    for count in (1, 5000):
        x = np.ones(count)
        dist.all_reduce(x)
        assert (x == dist.get_world_size()).all(), f"after {where}"


def right(name: str, async_op: bool = False) -> Any:
    """Make a call of this name that is as it should be, on arrays of four float64."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, y = np.ones(4), np.zeros(4)
    many = [np.ones(4) for _ in range(size)]
    large = np.ones(4 * size)
    calls: dict[str, Call] = {
        "broadcast": lambda: dist.broadcast(x, 0, async_op=async_op),
        "all_reduce": lambda: dist.all_reduce(x, async_op=async_op),
        "reduce": lambda: dist.reduce(x, 0, async_op=async_op),
        "all_gather": lambda: dist.all_gather(many, x, async_op=async_op),
        "all_gather_single": lambda: dist.all_gather_single(large, x, async_op=async_op),
        "gather": lambda: dist.gather(x, many if rank == 0 else None, 0, async_op=async_op),
        "gather_single": lambda: dist.gather_single(x, large if rank == 0 else None, 0, async_op=async_op),
        "scatter": lambda: dist.scatter(x, many if rank == 0 else None, 0, async_op=async_op),
        "reduce_scatter": lambda: dist.reduce_scatter(y, many, async_op=async_op),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(y, large, async_op=async_op),
        "all_to_all": lambda: dist.all_to_all([np.zeros(4) for _ in many], many, async_op=async_op),
        "all_to_all_single": lambda: dist.all_to_all_single(np.zeros(4 * size), large, async_op=async_op),
        "barrier": lambda: dist.barrier(async_op=async_op),
        "all_gather_object": lambda: dist.all_gather_object([None] * size, rank),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank], 0),
        "gather_object": lambda: dist.gather_object(rank, [None] * size if rank == 0 else None, 0),
        "scatter_object_list": lambda: dist.scatter_object_list([None], list(range(size)) if rank == 0 else None, 0),
    }
    return calls[name]()


def read_only(count: int = 4) -> Any:
    x = np.ones(count)
    x.flags.writeable = False
    return x


class OnDevice:
    """An array that another package keeps on a device."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("nobody should ask for it")

    __array__ = __dlpack__


class Copied:
    """An array that gives NumPy no more than a copy."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.ones(4)


def wrong_calls(async_op: bool) -> list[tuple[str, str, type[Exception], Call]]:
    """Return (function, what is wrong, the exception, a call that is wrong on whichever rank makes it)."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, large = np.ones(4), np.ones(4 * size)
    many = [np.ones(4) for _ in range(size)]
    own = [1] * size if rank == 0 else None
    room = large if rank == 0 else None
    more: dict[str, Any] = {"async_op": async_op}
    bad: list[tuple[str, str, type[Exception], Call]] = []
    arrays = {
        "a list": [1.0] * 4,
        "None": None,
        "a number": 4.0,
        "objects": np.array([None] * 4),
        "records with objects": np.zeros(4, "i4,O"),
        "elements of no bytes": np.zeros(4, np.dtype([])),
        "a masked array": np.ma.masked_array(np.ones(4)),
    }
    for what, value in arrays.items():
        bad += [
            ("broadcast", what, TypeError, lambda v=value: dist.broadcast(v, 0, **more)),
            ("all_reduce", what, TypeError, lambda v=value: dist.all_reduce(v, **more)),
            ("reduce", what, TypeError, lambda v=value: dist.reduce(v, 0, **more)),
            ("all_gather", what, TypeError, lambda v=value: dist.all_gather(many, v, **more)),
            ("all_gather", f"{what} in the list", TypeError, lambda v=value: dist.all_gather([v] * size, x, **more)),
            ("all_gather_single", what, TypeError, lambda v=value: dist.all_gather_single(v, x, **more)),
            ("gather", what, TypeError, lambda v=value: dist.gather(v, many if rank == 0 else None, **more)),
            ("gather_single", what, TypeError, lambda v=value: dist.gather_single(v, room, **more)),
            ("scatter", what, TypeError, lambda v=value: dist.scatter(v, many if rank == 0 else None, **more)),
            ("reduce_scatter", what, TypeError, lambda v=value: dist.reduce_scatter(v, many, **more)),
            (
                "reduce_scatter",
                f"{what} in the list",
                TypeError,
                lambda v=value: dist.reduce_scatter(x, [v] * size, **more),
            ),
            ("reduce_scatter_single", what, TypeError, lambda v=value: dist.reduce_scatter_single(x, v, **more)),
            ("all_to_all", f"{what} in the list", TypeError, lambda v=value: dist.all_to_all(many, [v] * size, **more)),
            ("all_to_all_single", what, TypeError, lambda v=value: dist.all_to_all_single(v, large, **more)),
        ]
    ro, shared = read_only(), np.lib.stride_tricks.as_strided(np.ones(1), (4,), (0,))
    bad += [
        ("all_reduce", "read-only", ValueError, lambda: dist.all_reduce(ro, **more)),
        ("all_gather", "read-only", ValueError, lambda: dist.all_gather([ro] * size, x, **more)),
        ("all_gather_single", "read-only", ValueError, lambda: dist.all_gather_single(read_only(4 * size), x, **more)),
        ("scatter", "read-only", ValueError, lambda: dist.scatter(ro, many if rank == 0 else None, **more)),
        ("reduce_scatter", "read-only", ValueError, lambda: dist.reduce_scatter(ro, many, **more)),
        ("reduce_scatter_single", "read-only", ValueError, lambda: dist.reduce_scatter_single(ro, large, **more)),
        ("all_to_all", "read-only", ValueError, lambda: dist.all_to_all([ro] * size, many, **more)),
        (
            "all_to_all_single",
            "read-only",
            ValueError,
            lambda: dist.all_to_all_single(read_only(4 * size), large, **more),
        ),
        # elements that share memory, where the call writes
        ("all_reduce", "a broadcast view", ValueError, lambda: dist.all_reduce(shared, **more)),
        ("all_gather", "broadcast views", ValueError, lambda: dist.all_gather([shared] * size, x, **more)),
        ("reduce_scatter", "a broadcast view", ValueError, lambda: dist.reduce_scatter(shared, many, **more)),
        # lists that hold an array twice, where the call writes
        ("all_gather", "an array twice", ValueError, lambda: dist.all_gather([*many[:-2], x, x], x.copy(), **more)),
        ("all_to_all", "an array twice", ValueError, lambda: dist.all_to_all([*many[:-2], x, x], many, **more)),
        # arrays of other packages
        ("all_reduce", "bytes", ValueError, lambda: dist.all_reduce(b"1234", **more)),
        ("all_gather", "bytes", ValueError, lambda: dist.all_gather([b"1234"] * size, np.ones(4, "B"), **more)),
        ("all_reduce", "an array on a device", TypeError, lambda: dist.all_reduce(OnDevice(), **more)),
        ("gather", "an array on a device", TypeError, lambda: dist.gather(OnDevice(), **more)),
        ("scatter", "what gives a copy", TypeError, lambda: dist.scatter(Copied(), many, **more)),
        # lists
        ("all_gather", "a tuple", TypeError, lambda: dist.all_gather(tuple(many), x, **more)),
        ("reduce_scatter", "a tuple", TypeError, lambda: dist.reduce_scatter(x, tuple(many), **more)),
        ("all_to_all", "a tuple", TypeError, lambda: dist.all_to_all(tuple(many), many, **more)),
        ("all_to_all", "a tuple of inputs", TypeError, lambda: dist.all_to_all(many, tuple(many), **more)),
        ("all_gather", "an array as list", TypeError, lambda: dist.all_gather(np.ones((size, 4)), x, **more)),
        ("all_gather", "no list", TypeError, lambda: dist.all_gather(None, x, **more)),
        ("all_gather", "too long", ValueError, lambda: dist.all_gather([*many, x], x, **more)),
        ("all_gather", "an empty list", ValueError, lambda: dist.all_gather([], x, **more)),
        ("all_gather", "another size", ValueError, lambda: dist.all_gather([np.ones(5)] * size, x, **more)),
        ("all_gather", "another dtype", ValueError, lambda: dist.all_gather(many, x.astype("f"), **more)),
        (
            "all_gather_single",
            "another size",
            ValueError,
            lambda: dist.all_gather_single(np.ones(4 * size + 1), x, **more),
        ),
        (
            "all_gather_single",
            "another dtype",
            ValueError,
            lambda: dist.all_gather_single(large, x.astype("f"), **more),
        ),
        ("reduce_scatter", "too short", ValueError, lambda: dist.reduce_scatter(x, many[1:], **more)),
        ("reduce_scatter", "another size", ValueError, lambda: dist.reduce_scatter(np.ones(5), many, **more)),
        ("reduce_scatter", "another dtype", ValueError, lambda: dist.reduce_scatter(np.ones(4, "f"), many, **more)),
        (
            "reduce_scatter_single",
            "another size",
            ValueError,
            lambda: dist.reduce_scatter_single(np.ones(3), large, **more),
        ),
        ("all_to_all", "too long", ValueError, lambda: dist.all_to_all([*many, x], many, **more)),
        ("all_to_all", "another dtype", ValueError, lambda: dist.all_to_all(many, [np.ones(4, "f")] * size, **more)),
        # roots
        ("broadcast", "no root", ValueError, lambda: dist.broadcast(x, **more)),
        ("reduce", "no root", ValueError, lambda: dist.reduce(x, **more)),
        ("broadcast", "two roots", ValueError, lambda: dist.broadcast(x, 0, group_src=0, **more)),
        ("broadcast", "a root out of range", ValueError, lambda: dist.broadcast(x, size, **more)),
        ("reduce", "a root out of range", ValueError, lambda: dist.reduce(x, -1, **more)),
        ("gather", "a group root out of range", ValueError, lambda: dist.gather(x, many, group_dst=size, **more)),
        ("scatter", "a root that is no number", TypeError, lambda: dist.scatter(x, many, src="0", **more)),
        # the lists of gather and scatter, wrong on the root and elsewhere
        (
            "gather",
            "a list missing or forbidden",
            ValueError,
            lambda: dist.gather(x, None if rank == 0 else many, **more),
        ),
        (
            "scatter",
            "a list missing or forbidden",
            ValueError,
            lambda: dist.scatter(x, None if rank == 0 else many, **more),
        ),
        ("gather", "a tuple", TypeError, lambda: dist.gather(x, tuple(many), **more)),
        ("scatter", "a tuple", TypeError, lambda: dist.scatter(x, tuple(many), **more)),
        (
            "gather_single",
            "an output missing or forbidden",
            ValueError,
            lambda: dist.gather_single(x, None if rank == 0 else large, **more),
        ),
        (
            "gather_single",
            "a list",
            TypeError,
            lambda: dist.gather_single(x, many if rank == 0 else 5, dst=0.0, **more),
        ),
        ("gather_single", "a root out of range", ValueError, lambda: dist.gather_single(x, room, size, **more)),
        ("gather_single", "two roots", ValueError, lambda: dist.gather_single(x, room, 0, group_dst=0, **more)),
        # ops
        ("all_reduce", "an op that is none", TypeError, lambda: dist.all_reduce(x, "sum", **more)),
        ("all_reduce", "BAND on floats", RuntimeError, lambda: dist.all_reduce(x, ReduceOp.BAND, **more)),
        ("reduce", "BXOR on floats", RuntimeError, lambda: dist.reduce(x, 0, ReduceOp.BXOR, **more)),
        ("reduce_scatter", "BOR on floats", RuntimeError, lambda: dist.reduce_scatter(x, many, ReduceOp.BOR, **more)),
        ("all_reduce", "AVG on integers", RuntimeError, lambda: dist.all_reduce(np.ones(4, "i"), ReduceOp.AVG, **more)),
        ("all_reduce", "AVG on bool", RuntimeError, lambda: dist.all_reduce(np.ones(4, "?"), ReduceOp.AVG, **more)),
        ("all_reduce", "MAX on complex", ValueError, lambda: dist.all_reduce(np.ones(4, "D"), ReduceOp.MAX, **more)),
        ("all_reduce", "MIN on complex", ValueError, lambda: dist.all_reduce(np.ones(4, "F"), ReduceOp.MIN, **more)),
        ("reduce", "PRODUCT on complex", ValueError, lambda: dist.reduce(np.ones(4, "D"), 0, ReduceOp.PRODUCT, **more)),
        ("all_reduce", "no factor", ValueError, lambda: dist.all_reduce(x, ReduceOp.PREMUL_SUM, **more)),
        ("all_reduce", "two factors", ValueError, lambda: dist.all_reduce(x, ReduceOp.PREMUL_SUM(np.ones(2)), **more)),
        ("all_reduce", "a factor of text", ValueError, lambda: dist.all_reduce(x, ReduceOp.PREMUL_SUM("2"), **more)),
        ("all_reduce", "a complex factor", ValueError, lambda: dist.all_reduce(x, ReduceOp.PREMUL_SUM(1j), **more)),
        (
            "all_reduce",
            "BAND on float16",
            RuntimeError,
            lambda: dist.all_reduce(np.ones(4, "e"), ReduceOp.BAND, **more),
        ),
        ("all_reduce", "SUM on dates", RuntimeError, lambda: dist.all_reduce(np.zeros(4, "M8[s]"), **more)),
        ("reduce", "MAX on text", RuntimeError, lambda: dist.reduce(np.zeros(4, "U3"), 0, ReduceOp.MAX, **more)),
        ("all_reduce", "SUM on records", RuntimeError, lambda: dist.all_reduce(np.zeros(4, "i4,f8"), **more)),
        (
            "reduce_scatter",
            "PREMUL_SUM on records",
            RuntimeError,
            lambda: dist.reduce_scatter(
                np.zeros(4, "i4,f8"), [np.zeros(4, "i4,f8")] * size, ReduceOp.PREMUL_SUM(2), **more
            ),
        ),
        (
            "all_reduce",
            "a factor that does not fit",
            ValueError,
            lambda: dist.all_reduce(np.ones(4, "B"), ReduceOp.PREMUL_SUM(300), **more),
        ),
        # splits
        *(
            (
                "all_to_all_single",
                what,
                kind,
                lambda o=o, i=i: dist.all_to_all_single(np.ones(4 * size), large, o, i, **more),
            )
            for what, kind, o, i in (
                ("splits that do not add up", RuntimeError, [4] * (size - 1) + [5], None),
                ("input splits that do not add up", RuntimeError, None, [4] * (size - 1) + [3]),
                ("too many splits", RuntimeError, [4] * size + [0], None),
                ("too few splits", RuntimeError, None, [4 * size] if size > 1 else [1, 3]),
                ("negative splits", RuntimeError, [-1, *[4] * (size - 1), 5][: max(size, 1)], None),
                ("a text of splits", TypeError, "4" * size, None),
                ("splits that are no numbers", TypeError, ["4"] * size, None),
                ("fractions of rows", TypeError, [4.0] * size, None),
            )
        ),
        # the rest
        ("all_reduce", "a limit that is none", TypeError, lambda: dist.all_reduce(x, timeout=3, **more)),
        ("barrier", "a limit that is none", TypeError, lambda: dist.barrier(timeout=3, **more)),
        (
            "all_reduce",
            "a limit that has passed",
            ValueError,
            lambda: dist.all_reduce(x, timeout=-timedelta(1), **more),
        ),
        ("barrier", "a limit that has passed", ValueError, lambda: dist.barrier(timeout=-timedelta(1), **more)),
        ("barrier", "devices that are no list", TypeError, lambda: dist.barrier(device_ids=0, **more)),
        ("all_gather_object", "a tuple", TypeError, lambda: dist.all_gather_object((None,) * size, 1)),
        ("all_gather_object", "too short", ValueError, lambda: dist.all_gather_object([], 1)),
        (
            "all_gather_object",
            "what pickle refuses",
            Exception,
            lambda: dist.all_gather_object([None] * size, lambda: 1),
        ),
        ("broadcast_object_list", "a tuple", TypeError, lambda: dist.broadcast_object_list((1,), 0)),
        ("broadcast_object_list", "a root out of range", ValueError, lambda: dist.broadcast_object_list([1], size)),
        ("gather_object", "a tuple", TypeError, lambda: dist.gather_object(1, (1,) * size)),
        ("gather_object", "a list that is too short", ValueError, lambda: dist.gather_object(1, [1] * (size - 1))),
        ("gather_object", "a root out of range", ValueError, lambda: dist.gather_object(1, group_dst=size)),
        ("gather_object", "what pickle refuses", Exception, lambda: dist.gather_object(lambda: 1, own)),
        ("scatter_object_list", "no place", ValueError, lambda: dist.scatter_object_list([], own)),
        ("scatter_object_list", "a tuple to write", ValueError, lambda: dist.scatter_object_list((1,), own)),
        ("scatter_object_list", "two sources", ValueError, lambda: dist.scatter_object_list([1], own, 0, group_src=0)),
    ]
    if size > 1:
        mixed = [np.ones(4, "f"), *many[1:]]
        bad += [
            ("all_gather", "mixed dtypes", ValueError, lambda: dist.all_gather(mixed, x, **more)),
            ("reduce_scatter", "mixed dtypes", ValueError, lambda: dist.reduce_scatter(x, mixed, **more)),
            ("all_to_all", "mixed dtypes", ValueError, lambda: dist.all_to_all(many, mixed, **more)),
        ]
        bad.append(
            (
                "all_to_all_single",
                "rows that do not divide",
                RuntimeError,
                lambda: dist.all_to_all_single(np.ones(size + 1), np.ones(size + 1), **more),
            )
        )
    return bad


def wait_for(work: Any) -> None:
    if work is not None:
        work.wait()


def raised(call: Call) -> Exception | None:
    """Return what a call, or the wait for it, ends with."""
    try:
        wait_for(call())
    except Exception as error:
        return error
    return None


def test_arguments_wrong_on_all_ranks() -> None:
    """What is wrong everywhere raises the same on all ranks, sync or async, before anything moves."""
    for async_op in (False, True):
        for turn, (name, what, kind, call) in enumerate(wrong_calls(async_op)):
            where = f"{name} with {what}, async_op={async_op}"
            problem = raised(call)
            assert isinstance(problem, kind), f"{where} raised {problem!r}"
            assert not isinstance(problem, dist.DistError), f"{where} raised {problem!r}"
            if turn % 8 == 0:
                still_works(where)
    still_works("all of them")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("async_op", [False, True])
def test_the_output_of_gather_single(async_op: bool) -> None:
    """Only the destination has an output: all members are told of one of another size or dtype, or one that is read-only."""
    size, last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    for output, text in (
        (np.ones(4 * size + 1), f"gather_tensor must have {size} x 4 elements, got {4 * size + 1}"),
        (np.ones(4 * size, "f"), "float32"),
        (read_only(4 * size), "read-only"),
        ([np.ones(4)] * size, "list"),
    ):
        kind = TypeError if type(output) is list else ValueError
        with collective_raises(kind if last else dist.CollectiveMismatchError, match=text):
            wait_for(dist.gather_single(np.ones(4), output if last else None, size - 1, async_op=async_op))
        still_works(text)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("async_op", [False, True])
def test_arguments_wrong_on_one_rank(async_op: bool) -> None:
    """The rank at fault raises what is wrong, the others CollectiveMismatchError with its words, and the group goes on."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for turn, (name, what, kind, call) in enumerate(wrong_calls(async_op)):
        odd = turn % size
        where = f"{name} with {what} on rank {odd}, async_op={async_op}"
        if rank == odd:
            problem = raised(call)
            assert isinstance(problem, kind), f"{where} raised {problem!r}"
            assert not isinstance(problem, dist.DistError), f"{where} raised {problem!r}"
        else:
            problem = raised(lambda name=name: right(name, async_op))
            assert isinstance(problem, dist.CollectiveMismatchError), f"{where} raised {problem!r} here"
            for words in (f"rank {odd}: {name}", "test_bad_input.py:", "raised "):
                assert words in str(problem), f"{where} says {problem}"
        if turn % 8 == 0:
            still_works(where)
    still_works("all of them")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("lists", [False, True])
def test_wrong_splits_of_a_call_that_is_made_again(lists: bool) -> None:
    """Each time those that get too much or too little raise, the others CollectiveMismatchError, and the group goes on."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def call(more: int) -> None:
        if lists:
            dist.all_to_all([np.empty(1) for _ in range(size)], [np.ones(1 + more) for _ in range(size)])
        else:
            dist.all_to_all_single(np.empty(size), np.ones(size * (1 + more)))

    for good in (2, 0, 0, 3):
        for _ in range(good):
            call(0)
        problem = raised(lambda: call(int(rank == size - 1)))
        assert isinstance(problem, (ValueError, dist.CollectiveMismatchError)), repr(problem)
        still_works("splits that do not fit")


@pytest.mark.parametrize("size", [1, 5000])
def test_whether_to_wait_is_any_truth(size: int) -> None:
    """``async_op`` may be what a comparison of NumPy gives, and what is neither true nor false raises on all."""
    x = np.ones(size)
    work = dist.all_reduce(x, async_op=x.sum() > 0)
    assert work is not None
    work.wait()
    assert dist.all_reduce(x, async_op=x.sum() < 0) is None
    with collective_raises((ValueError, dist.CollectiveMismatchError), match="truth value"):
        dist.all_gather([np.empty(size) for _ in range(dist.get_world_size())], x, async_op=np.ones(2))
    still_works("async_op")


@pytest.mark.mpi(min_size=2)
def test_missing_and_forbidden_lists_say_so_in_torchs_words() -> None:
    """gather_list and scatter_list belong on the root alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, many = np.ones(2), [np.ones(2) for _ in range(size)]
    for function, word, role in ((dist.gather, "gather_list", "destination"), (dist.scatter, "scatter_list", "source")):
        text = f"must be specified on {role}" if rank == 0 else f"must NOT be specified on non-{role} ranks"
        with collective_raises(ValueError, match=rf"Argument ``{word}`` {text}"):
            function(x, None if rank == 0 else many)
        function(x, many if rank == 0 else [])
    objects, into = list(range(size)), [None]
    with collective_raises(
        ValueError, match=rf"must {'' if rank == 0 else 'NOT '}be specified on (non-)?destination rank"
    ):
        dist.gather_object(1, None if rank == 0 else objects)
    dist.gather_object(1, objects if rank == 0 else [])
    assert objects == ([1] * size if rank == 0 else list(range(size)))
    with collective_raises((ValueError, dist.CollectiveMismatchError), match="scatter_object_input_list"):
        dist.scatter_object_list(into, None)
    dist.scatter_object_list(into, [5] * size)
    assert into == [5]


@pytest.mark.mpi(min_size=2)
def test_a_root_outside_the_group() -> None:
    """A global rank that is not in the group is refused by all members."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(list(range(1, size)))
    if rank:
        x = np.ones(2)
        for call in (
            lambda: dist.broadcast(x, 0, group),
            lambda: dist.reduce(x, 0, group=group),
            lambda: dist.gather(x, [x], group=group),
            lambda: dist.scatter(x, [x], group=group),
            lambda: dist.broadcast_object_list([1], group=group),
            lambda: dist.gather_object(1, [1], group=group),
            lambda: dist.scatter_object_list([1], [1], group=group),
        ):
            with collective_raises(ValueError, match="Global rank 0 is not part of group", group=group):
                call()
        dist.all_reduce(x, group=group)
        assert (x == size - 1).all()
        dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_calls_that_do_not_fit_together() -> None:
    """Another function, op, root, dtype or size on one rank raises on all, naming both calls, their lines and ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, i = np.ones(4), np.ones(4, np.int64)
    pairs: list[tuple[str, str, str, Any, Any]] = [
        (
            "another function",
            "all_reduce",
            "broadcast",
            lambda **k: dist.all_reduce(x, **k),
            lambda **k: dist.broadcast(x, 0, **k),
        ),
        ("a barrier", "all_reduce", "barrier", lambda **k: dist.all_reduce(x, **k), lambda **k: dist.barrier(**k)),
        (
            "another op",
            "float64[4] SUM",
            "float64[4] MAX",
            lambda **k: dist.all_reduce(x, **k),
            lambda **k: dist.all_reduce(x, ReduceOp.MAX, **k),
        ),
        (
            "another root",
            "root 0",
            "root 1",
            lambda **k: dist.broadcast(x, 0, **k),
            lambda **k: dist.broadcast(x, 1, **k),
        ),
        (
            "another destination",
            "root 0",
            "root 1",
            lambda **k: dist.reduce(x, 0, **k),
            lambda **k: dist.reduce(x, 1, **k),
        ),
        ("another dtype", "float64", "int64", lambda **k: dist.all_reduce(x, **k), lambda **k: dist.all_reduce(i, **k)),
        (
            "another size",
            "float64[4]",
            "float64[3]",
            lambda **k: dist.all_reduce(x, **k),
            lambda **k: dist.all_reduce(np.ones(3), **k),
        ),
        (
            "a large and a small one",
            "float64[4]",
            "float64[40000]",
            lambda **k: dist.all_reduce(x, **k),
            lambda **k: dist.all_reduce(np.ones(40000), **k),
        ),
        (
            "other blocks",
            "all_gather",
            "all_gather",
            lambda **k: dist.all_gather([np.ones(4) for _ in range(size)], x, **k),
            lambda **k: dist.all_gather([np.ones(4 + (r == rank)) for r in range(size)], np.ones(5), **k),
        ),
    ]
    for turn, (what, here, there, usual, unusual) in enumerate(pairs):
        odd = turn % size
        for async_op in (False, True):
            where = f"{what} on rank {odd}, async_op={async_op}"
            with collective_raises(dist.CollectiveMismatchError) as caught:
                wait_for((unusual if rank == odd else usual)(async_op=async_op))
            assert ">" in str(caught.value), f"{where}: nothing is marked in {caught.value}"
            text = str(caught.value).replace(">", "").replace("<", "")
            lines = {
                text_of: line
                for line in text.splitlines()
                for text_of in ("here", "there")
                if line.strip().startswith("rank")
            }
            assert lines, f"{where} says {text}"
            others = [r for r in range(size) if r != odd]
            names = [f"rank {odd}: ", f"rank{'s' if len(others) > 1 else ''} {others[0]}"]
            for part in (*names, "test_bad_input.py:", here, there, "WORLD"):
                assert part in text, f"{where}: no {part!r} in {text}"
            error = caught.value
            assert error.group == "WORLD", where
            assert error.ranks == ([odd] if size > 2 else [0, 1]), f"{where}: {error.ranks}"
            assert sorted(r for call in error.calls for r in call["ranks"]) == list(range(size)), (
                f"{where}: {error.calls}"
            )
            assert all("test_bad_input.py:" in call["site"] for call in error.calls), f"{where}: {error.calls}"
            still_works(where)


@pytest.mark.mpi(min_size=2)
def test_every_member_calls_something_else() -> None:
    """All members hear of all calls in one report that is the same on all of them, but for the mark of this rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    with collective_raises(dist.CollectiveMismatchError) as caught:
        dist.all_reduce(np.ones(1 + rank))
    text = str(caught.value)
    assert "compared with what rank 0 called: all_reduce" in text, text
    assert text.count("<- this rank") == 1, text
    for r in range(1, size):
        assert f"float64[>{1 + r}<]" in text, text
    texts = {said.replace(" <- this rank", "") for said in caught.per_rank.values()}
    assert len(texts) == 1, texts


@pytest.mark.mpi(min_size=2)
def test_the_report_names_the_lines_of_the_calls() -> None:
    """Each line of a report ends with the file and line of the call that it tells of."""
    frame = inspect.currentframe()
    assert frame is not None
    rank = dist.get_rank()
    with collective_raises(dist.CollectiveMismatchError) as caught:
        if rank == 0:
            dist.barrier()
        else:
            dist.all_reduce(np.ones(3))
    base = test_the_report_names_the_lines_of_the_calls.__code__.co_firstlineno
    lines = str(caught.value).splitlines()
    source = inspect.getsource(test_the_report_names_the_lines_of_the_calls).splitlines()
    for words in ("barrier()", "all_reduce("):
        number = next(n for n, text in enumerate(source) if f"dist.{words}" in text)
        assert any(line.removesuffix(" <- this rank").endswith(f":{base + number}") for line in lines[1:]), (
            words,
            base + number,
            lines,
        )


@pytest.mark.mpi(min_size=2)
def test_all_to_all_notices_sizes_that_nobody_expects() -> None:
    """If a rank sends another number of elements than is expected, all ranks see both ends, and neither is blamed."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for async_op in (False, True):
        for scale in (1, 5000):
            for wrong in (0, size - 1):  # the receiver, the sender
                received, sent = [scale] * size, [scale] * size
                if rank == 0 == wrong:
                    received[size - 1] += scale
                elif rank == wrong:
                    sent[0] += scale
                n, m = (1, 2) if wrong == 0 else (2, 1)
                out, x = np.zeros(sum(received)), np.zeros(sum(sent))
                lists = [np.zeros(n) for n in received], [np.zeros(n) for n in sent]
                for call in (
                    partial(dist.all_to_all_single, out, x, received, sent, async_op=async_op),
                    partial(dist.all_to_all, *lists, async_op=async_op),
                ):
                    with pytest.raises(dist.CollectiveMismatchError) as caught:
                        wait_for(call())
                    error: Any = caught.value
                    assert list(error.ranks) == [0, size - 1]
                    ends = {each["ranks"][0]: each["problem"] for each in error.calls if each["problem"]}
                    assert ends == {
                        0: f"expects {m * scale} element{'s' * (m * scale > 1)} from rank {size - 1}, which sends {n * scale}",
                        size
                        - 1: f"sends {n * scale} element{'s' * (n * scale > 1)} to rank 0, which expects {m * scale}",
                    }
                    text = " ".join(str(error).split())
                    assert all(words in text for words in ends.values()), text
                    assert "either may be wrong" in text
                    assert "arguments are wrong" not in text
                    assert "nothing is wrong" not in text
                still_works(f"async_op={async_op}, {scale}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_mismatch_with_calls_under_way(reverse: bool) -> None:
    """The calls before are good. The calls behind could be taken for one another, so the group is broken, and they raise."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group()
    works = []
    for turn in range(6):
        x = np.full(3 + rank if turn in (2, 4) else 3, float(turn))
        works.append((turn, dist.all_reduce(x, group=group, async_op=True), x))
    for turn, work, x in reversed(works) if reverse else works:
        if turn < 2:
            work.wait()
            assert (x == size * turn).all(), turn
        elif turn == 2:
            with collective_raises(
                dist.CollectiveMismatchError, match=rf"\[>?3<?\](.|\n)*broken now: ranks 0-{size - 1} had .* pending"
            ):
                work.wait()
        else:
            with pytest.raises(dist.GroupBrokenError, match="asynchronous calls of it were pending when the calls"):
                work.wait()
            assert (x == turn).all(), turn
    with pytest.raises(dist.GroupBrokenError, match="asynchronous calls of it were pending when the calls"):
        dist.barrier(group)
    still_works("calls under way")


@pytest.mark.mpi(min_size=2)
def test_mismatches_in_a_row_without_other_calls() -> None:
    """Each call whose mismatch is caught leaves the group good, also if the call is asynchronous."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for turn in range(20):
        odd = turn % 3 == 1
        x = np.full(3 + rank if odd else 3, float(turn))
        if odd:
            with collective_raises(dist.CollectiveMismatchError, match=r"\[>?3<?\](.|\n)*can still be used"):
                wait_for(dist.all_reduce(x, async_op=turn % 2 == 0))
        else:
            wait_for(dist.all_reduce(x, async_op=turn % 2 == 0))
            assert (x == size * turn).all(), turn
    still_works("twenty calls")


def test_every_collective_after_all_that() -> None:
    """The world still makes every collective."""
    cases.every_collective(None)


def test_ctrl_c_while_a_wrong_group_is_looked_at() -> None:
    """Is raised: only errors of the wrong group are replaced by the ValueError of a wrong group."""

    class Wrong:
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    x = np.ones(4)
    for _ in range(3):
        dist.all_reduce(x)
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(x, group=Wrong())  # type: ignore[arg-type]
    dist.barrier()


@pytest.mark.parametrize("kind", ["function", "method", "partial", "object", "once"])
def test_a_signal_handler_raises_while_arguments_are_read(kind: str) -> None:
    """The error says nothing about the arguments: the call is not made, and the rank can make it again."""

    class Stop(ValueError):  # which the library raises again as an error of the argument
        pass

    def stop(*_: Any) -> None:
        raise Stop

    def once(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Stop

    class Handler:
        def method(self, *_: Any) -> None:
            raise Stop

        __call__ = method

    handlers: dict[str, Any] = {
        "function": stop,
        "method": Handler().method,
        "partial": partial(stop, 1),
        "object": Handler(),
        "once": once,
    }

    class Signalling:
        @property
        def __array_interface__(self) -> Any:
            signal.raise_signal(signal.SIGUSR2)
            raise AssertionError("not reached")

    before = signal.signal(signal.SIGUSR2, handlers[kind])
    try:
        if dist.get_rank() == 0:
            with pytest.raises(Stop):
                dist.all_reduce(Signalling())  # type: ignore[arg-type]
        x = np.ones(3)
        dist.all_reduce(x)
        assert (x == dist.get_world_size()).all()
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.mpi(min_size=2)
def test_an_enumeration_raises_while_arguments_are_read() -> None:
    """The error of an enumeration that refuses a value is one of the argument, and not of a signal handler."""

    class Root(enum.Enum):
        FIRST = 0

    class Rank:
        def __index__(self) -> int:
            return int(Root(5).value)

    x = np.ones(3)
    with collective_raises((ValueError, TypeError, dist.CollectiveMismatchError)):
        dist.broadcast(x, Rank() if dist.get_rank() == 0 else 0)  # type: ignore[arg-type]
    still_works("an error of an enumeration")
