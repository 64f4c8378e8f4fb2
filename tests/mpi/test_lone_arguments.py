"""Arguments that raise on one rank only, before its arrays are looked at: the other ranks raise, too, and the group goes on."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from bad_values import Shy, Untrue

import mpicoll as dist
from mpicoll.groups.registry import state
from mpicoll.operations.prepare import refusal
from mpicoll.pytest_plugin import collective_raises
from mpicoll.training import broadcast_parameters

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.mpi_timeout(30)]

Call = Callable[[], Any]


def on_one(wrong: Call, right: Call, error: type[Exception], match: str, wrong_rank: int = 1) -> str:
    """Let one rank make the wrong call, and the others the right call: each raises its error, and the world goes on.

    Returns:
        This rank's message.
    """
    is_wrong = dist.get_rank() == wrong_rank
    told = f"arguments are wrong on rank {wrong_rank}"
    with collective_raises(
        error if is_wrong else dist.CollectiveMismatchError, match=match if is_wrong else told
    ) as caught:
        (wrong if is_wrong else right)()
    x = np.ones(3)
    dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()
    return str(caught.value)


def collectives(**more: Any) -> dict[str, Call]:
    """Return calls of collectives on the world with one more argument."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, y, many = np.ones(4), np.zeros(4), np.ones(4 * size)
    rows, lists = [np.ones(4) for _ in range(size)], [np.ones(4) for _ in range(size)]
    return {
        "all_reduce": lambda: dist.all_reduce(x, **more),
        "broadcast": lambda: dist.broadcast(x, 0, **more),
        "reduce": lambda: dist.reduce(x, 0, **more),
        "all_gather": lambda: dist.all_gather(lists, y, **more),
        "all_gather_single": lambda: dist.all_gather_single(many, y, **more),
        "gather": lambda: dist.gather(x, rows if rank == 0 else None, 0, **more),
        "gather_single": lambda: dist.gather_single(x, many if rank == 0 else None, 0, **more),
        "scatter": lambda: dist.scatter(x, rows if rank == 0 else None, 0, **more),
        "reduce_scatter": lambda: dist.reduce_scatter(x, rows, **more),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(x, many, **more),
        "all_to_all": lambda: dist.all_to_all(lists, rows, **more),
        "all_to_all_single": lambda: dist.all_to_all_single(np.zeros(4 * size), many, **more),
        "barrier": lambda: dist.barrier(**more),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([x, y], **more),
        "average_gradients": lambda: dist.average_gradients([x, y], **more),
    }


@pytest.mark.parametrize("made_before", [False, True], ids=["first", "again"])
def test_async_op_without_a_truth_value(made_before: bool) -> None:
    """``async_op=`` is looked at where all members raise, also if the call was made before."""
    for name, right in collectives().items():
        for value in (Untrue(), np.ones(2)):
            for _ in range(3 * made_before):
                right()
            wrong = collectives(async_op=value)[name]
            on_one(wrong, right, ValueError, "async_op: (neither true nor false|The truth value)")


def test_numbers_are_truth_values() -> None:
    """1, 0 and NumPy's bools are as good as True and False."""
    for value in (0, None, np.bool_(False), 1, np.bool_(True)):
        for name, call in collectives(async_op=value).items():
            for _ in range(2):
                made = call()
                assert (made is not None) == bool(value), (name, value)
                if made is not None:
                    made.wait()


def test_a_group_that_is_none() -> None:
    """``group=`` of another type: nobody knows the group that was meant, so the world is told."""
    for value in (5, "world", [0, 1], object()):
        wrong = collectives(group=value)
        for name, right in collectives().items():
            on_one(wrong[name], right, ValueError, "Invalid process group specified: group must be")
    out = [None] * dist.get_world_size()
    x = np.ones(2)
    calls: list[tuple[Call, Call]] = [
        (lambda: dist.all_gather_object(out, 1, group=5), lambda: dist.all_gather_object(out, 1)),
        (lambda: dist.broadcast_object_list([1], 0, group=5), lambda: dist.broadcast_object_list([1], 0)),
        (lambda: dist.monitored_barrier(5), dist.monitored_barrier),
        (lambda: dist.all_reduce_init(x, group=5), lambda: dist.all_reduce_init(x)),
        (lambda: dist.split_group(5, [[0]]), lambda: dist.split_group(None, [[0]])),
        (lambda: dist.should_stop(5), dist.should_stop),
        (lambda: broadcast_parameters([x], group=5), lambda: broadcast_parameters([x])),
    ]
    for wrong_call, right in calls:
        on_one(wrong_call, right, ValueError, "Invalid process group specified: group must be")


def test_a_group_that_is_none_on_all_ranks() -> None:
    """All ranks raise at once, and the world goes on."""
    began = time.monotonic()
    with collective_raises(ValueError, match="Invalid process group specified"):
        dist.all_reduce(np.ones(3), group=5)
    assert time.monotonic() - began < 5
    dist.barrier()


def test_a_group_that_is_none_while_no_other_rank_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank raises its error after a while, and the world goes on."""
    monkeypatch.setattr(refusal, "GUESS_SECONDS", 0.5)
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="Invalid process group specified"):
            dist.all_reduce(np.ones(3), group=5)
    else:
        time.sleep(1.5)
    x = np.ones(3)
    dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()


def test_a_group_that_is_none_while_a_call_is_pending() -> None:
    """The wait for a call of the other ranks is a wait as any other: the pending call, for which they wait, goes on."""
    group = dist.new_group()
    x = np.ones(1 << 20)
    dist.barrier()
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None

    def right() -> None:
        work.wait()
        dist.all_reduce(np.ones(3))

    on_one(lambda: dist.all_reduce(np.ones(3), group=5), right, ValueError, "Invalid process group specified")
    work.wait()
    assert (x == dist.get_world_size()).all()
    dist.destroy_process_group(group)


def test_questions_about_a_group_that_is_none_are_local() -> None:
    """Functions that do not communicate raise by themselves."""
    for ask in (dist.get_rank, dist.get_world_size, dist.get_backend, dist.get_process_group_ranks):
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="Invalid process group specified"):
                ask(5)
    dist.barrier()


def test_parameters_that_are_none() -> None:
    """What cannot be iterated over, and an iterator that raises at its second array."""

    def stops() -> Iterator[Any]:
        yield np.ones(2)
        raise KeyError("no second array")

    def right() -> None:
        broadcast_parameters([np.ones(2), np.ones(3)])

    for wrong_rank in (0, 1):
        on_one(
            lambda: broadcast_parameters(5),  # type: ignore[arg-type]
            right,
            TypeError,
            "parameters must be a mapping or an iterable of arrays, not int",
            wrong_rank,
        )
        on_one(lambda: broadcast_parameters(stops()), right, KeyError, "no second array", wrong_rank)


def test_blocks_with_arguments_that_raise() -> None:
    """``rejoin=``, ``publish=``, ``scope=``, ``local=``: read when the block is entered, by all ranks."""

    def stops() -> Iterator[str]:
        yield "a"
        raise KeyError("no second path")

    def enter(block: Any) -> None:
        with block:
            pass

    def group_of(value: Any) -> Call:
        return lambda: enter(dist.zero_first(scope=value))

    def right() -> None:
        enter(dist.zero_first())

    for wrong_rank in (0, 1):
        for wrong, error, match in (
            (lambda: enter(dist.zero_first(rejoin=Untrue())), ValueError, "rejoin: neither true nor false"),  # type: ignore[arg-type]
            (lambda: enter(dist.zero_first(publish=stops())), KeyError, "no second path"),
            (group_of("wrld"), ValueError, 'scope must be "world", "node" or a ProcessGroup'),
            (group_of(5), ValueError, "Invalid process group specified"),
        ):
            on_one(wrong, right, error, match, wrong_rank)
        on_one(
            lambda: enter(dist.main_process_first(Untrue())),  # type: ignore[arg-type]
            lambda: enter(dist.main_process_first(False)),
            ValueError,
            "local: neither true nor false",
            wrong_rank,
        )
        on_one(lambda: enter(dist.ordered(5)), lambda: enter(dist.ordered()), ValueError, "Invalid process", wrong_rank)


def test_run_first_of_an_object_that_raises_when_looked_at() -> None:
    """Whether or not the rank is the leader, its error is that of a wrong argument."""
    for wrong_rank in (0, 1):
        on_one(
            lambda: dist.run_first(Shy()),
            lambda: dist.run_first(lambda: 1),
            RuntimeError,
            "do not look at __qualname__",
            wrong_rank,
        )


WRONG_MESHES: dict[str, tuple[Callable[[int], Call], type[Exception], str]] = {
    "shape": (lambda n: lambda: dist.init_device_mesh("cpu", n), TypeError, "mesh_shape must be a tuple of integers"),  # type: ignore[arg-type]
    "length": (
        lambda n: lambda: dist.init_device_mesh("cpu", (1.5,)),
        TypeError,
        r"mesh_shape\[0\] must be an integer",
    ),  # type: ignore[arg-type]
    "negative": (lambda n: lambda: dist.init_device_mesh("cpu", (-1,)), RuntimeError, "must be positive"),
    "size": (lambda n: lambda: dist.init_device_mesh("cpu", (n + 1,)), RuntimeError, "bigger than default world size"),
    "names": (
        lambda n: lambda: dist.init_device_mesh("cpu", (n,), mesh_dim_names=5),  # type: ignore[arg-type]
        TypeError,
        "mesh_dim_names must be a tuple of strings, not int",
    ),
    "name": (
        lambda n: lambda: dist.init_device_mesh("cpu", (n,), mesh_dim_names=(5,)),  # type: ignore[arg-type]
        TypeError,
        r"mesh_dim_names\[0\] must be a string, not int",
    ),
    "one string": (
        lambda n: lambda: dist.init_device_mesh("cpu", (n,), mesh_dim_names="x"),  # type: ignore[arg-type]
        TypeError,
        "mesh_dim_names must be a tuple of strings, not str",
    ),
    "number of names": (
        lambda n: lambda: dist.init_device_mesh("cpu", (n,), mesh_dim_names=("x", "y")),
        RuntimeError,
        "should have same length, got 1 and 2",
    ),
    "device": (lambda n: lambda: dist.init_device_mesh(5, (n,)), TypeError, "device_type must be a string, not int"),  # type: ignore[arg-type]
    "override": (
        lambda n: lambda: dist.init_device_mesh("cpu", (n,), backend_override={3: "mpi"}),
        RuntimeError,
        r"backend_override has the keys \[3\]",
    ),
    "backend": (
        lambda n: lambda: dist.init_device_mesh("cpu", (n,), backend_override={0: 5}),
        TypeError,
        r"backend_override\[0\] must be the name of a backend, options of a process group, or a tuple of both, not int",
    ),
}


@pytest.mark.parametrize("name", WRONG_MESHES)
def test_wrong_meshes(name: str) -> None:
    """Arguments of ``init_device_mesh`` are checked in a call of this name that all ranks make."""
    make, error, match = WRONG_MESHES[name]
    n = dist.get_world_size()
    said = on_one(make(n), lambda: dist.init_device_mesh("cpu", (n,)), error, match)
    assert dist.get_rank() == 1 or "init_device_mesh" in said
    assert dist.init_device_mesh("cpu", (n,)).size() == n


def test_meshes_that_differ() -> None:
    """Shapes and names are compared also if the groups are the same; so are the ranks of a ``DeviceMesh``."""
    n, first = dist.get_world_size(), dist.get_rank() == 0
    with collective_raises(dist.CollectiveMismatchError, match="init_device_mesh"):
        dist.init_device_mesh("cpu", (n, 1) if first else (1, n))
    with collective_raises(dist.CollectiveMismatchError, match="init_device_mesh"):
        dist.init_device_mesh("cpu", (n,), mesh_dim_names=("dp",) if first else ("tp",))
    with collective_raises(dist.CollectiveMismatchError, match="DeviceMesh"):
        dist.DeviceMesh("cpu", list(range(n)) if first else list(range(n))[::-1])
    on_one(lambda: dist.DeviceMesh("cpu", [0, 0]), lambda: dist.DeviceMesh("cpu", [0, 1]), RuntimeError, "at one place")
    with pytest.raises(TypeError, match="backend must be a string, not int"):
        dist.is_backend_available(5)  # type: ignore[arg-type]


def test_arguments_of_functions_that_are_made_of_others() -> None:
    """Groups and methods of groups: the rank with the wrong argument gets its own error, the others a mismatch."""
    size = dist.get_world_size()
    x, world = np.ones(4), dist.group.WORLD
    many = [np.ones(4) for _ in range(size)]
    everybody = list(range(size))
    calls: list[tuple[Call, Call, type[Exception], str]] = [
        (
            lambda: dist.new_group(everybody, use_local_synchronization=Untrue()),
            lambda: dist.new_group(everybody),
            ValueError,
            "use_local_synchronization: neither",
        ),
        (lambda: dist.new_subgroups(1, group=5), lambda: dist.new_subgroups(1), ValueError, "group must be"),
        (lambda: world.allreduce([x, x]), lambda: world.allreduce([x]).wait(), ValueError, "must hold one tensor"),
        (lambda: world.broadcast([], 0), lambda: world.broadcast([x], 0).wait(), ValueError, "must hold one tensor"),
        (
            lambda: world.allgather([many, many], [x]),
            lambda: world.allgather([many], [x]).wait(),
            ValueError,
            "must hold one tensor",
        ),
        (
            lambda: world.reduce_scatter([x, x], [many]),
            lambda: world.reduce_scatter([x], [many]).wait(),
            ValueError,
            "must hold one tensor",
        ),
        *(
            (
                lambda seconds=seconds: dist.monitored_barrier(timeout=seconds),
                dist.monitored_barrier,
                ValueError,
                "timeout must be finite",
            )
            for seconds in (float("inf"), float("nan"))
        ),
    ]
    for wrong, right, error, match in calls:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a limit in seconds
            on_one(wrong, right, error, match)


def test_a_local_rank_that_is_no_integer() -> None:
    """The last rank of each node has the wrong argument: the other ranks of its node get a mismatch."""
    local_ranks = state().topology.local_ranks
    is_wrong = dist.get_rank() == local_ranks[-1]
    told = "must be an integer" if is_wrong else f"arguments are wrong on rank {local_ranks[-1]}"
    with collective_raises(TypeError if is_wrong else dist.CollectiveMismatchError, match=told):
        local_rank: Any = np.array([1, 1]) if is_wrong else dist.get_node_local_rank()
        with dist.torch_distributed_zero_first(local_rank) as turn:
            assert turn.is_leader
    dist.barrier()


def test_the_name_of_a_flattened_mesh() -> None:
    """The name of the first flattened mesh is looked at where all ranks raise."""
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    on_one(lambda: mesh._flatten(5), lambda: mesh._flatten("c"), TypeError, "mesh_dim_name must be a string")
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    on_one(lambda: mesh._flatten("a"), lambda: mesh._flatten("c"), ValueError, "is a dimension of")
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="is a dimension of"):
        mesh._flatten("a")
    assert mesh._flatten("c").size() == size
