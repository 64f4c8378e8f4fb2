"""Each argument of each function that all ranks call gets wrong values on one rank: no rank waits for its time limit."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bad_values import Shy, Untrue
from mpi4py import MPI

import mpicoll as dist
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import state

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.mpi_timeout(20), pytest.mark.slow]

WRONG_RANK = 1


WRONG = [Shy(), object(), Untrue(), 5, -3, 10**30, "x", b"x", float("nan"), np.array([1, 1]), [5]]


def _array(blocks: int = 1) -> Any:
    return np.ones(4 * blocks)


def _list() -> list[Any]:
    return [_array() for _ in range(dist.get_world_size())]


def _at_root(given: Any) -> Any:
    return given if dist.get_rank() == 0 else None


def _arguments() -> dict[str, Callable[[], dict[str, Any]]]:
    """Return, for each function, a function that returns valid arguments."""
    n = dist.get_world_size()
    return {
        "all_gather": lambda: {"tensor_list": _list(), "tensor": _array()},
        "all_gather_coalesced": lambda: {
            "output_tensor_lists": [[_array()] for _ in range(n)],
            "input_tensor_list": [_array()],
        },
        "all_gather_into_tensor": lambda: {"output_tensor": _array(n), "input_tensor": _array()},
        "all_gather_single": lambda: {"output_tensor": _array(n), "input_tensor": _array()},
        "all_gather_object": lambda: {"object_list": [None] * n, "obj": 1},
        "all_reduce": lambda: {"tensor": _array()},
        "all_reduce_coalesced": lambda: {"tensors": [_array()]},
        "all_reduce_init": lambda: {"tensor": _array()},
        "all_to_all": lambda: {"output_tensor_list": _list(), "input_tensor_list": _list()},
        "all_to_all_single": lambda: {"output": _array(n), "input": _array(n)},
        "average_gradients": lambda: {"arrays": [_array()]},
        "barrier": dict,
        "broadcast": lambda: {"tensor": _array(), "src": 0},
        "broadcast_object_list": lambda: {"object_list": [1], "src": 0},
        "broadcast_parameters": lambda: {"parameters": [_array()], "src": 0},
        "empty": lambda: {"shape": 4},
        "gather": lambda: {"tensor": _array(), "gather_list": _at_root(_list()), "dst": 0},
        "gather_into_tensor": lambda: {"tensor": _array(), "gather_tensor": _at_root(_array(n)), "dst": 0},
        "gather_single": lambda: {"tensor": _array(), "gather_tensor": _at_root(_array(n)), "dst": 0},
        "gather_object": lambda: {"obj": 1, "object_gather_list": _at_root([None] * n), "dst": 0},
        "init_device_mesh": lambda: {"device_type": "cpu", "mesh_shape": (n,)},
        "leaders_group": dict,
        "local_zero_first": dict,
        "main_process_first": dict,
        "monitored_barrier": dict,
        "new_group": dict,
        "new_subgroups": lambda: {"group_size": 1},
        "new_subgroups_by_enumeration": lambda: {"ranks_per_subgroup_list": [[rank] for rank in range(n)]},
        "node_group": dict,
        "on_signal": lambda: {"handler": lambda number: None},
        "ordered": dict,
        "reduce": lambda: {"tensor": _array(), "dst": 0},
        "reduce_scatter": lambda: {"output": _array(), "input_list": _list()},
        "reduce_scatter_single": lambda: {"output": _array(), "input": _array(n)},
        "reduce_scatter_tensor": lambda: {"output": _array(), "input": _array(n)},
        "run_first": lambda: {"fn": _one},
        "scatter": lambda: {"tensor": _array(), "scatter_list": _at_root(_list()), "src": 0},
        "scatter_object_list": lambda: {
            "scatter_object_output_list": [None],
            "scatter_object_input_list": _at_root([1] * n),
            "src": 0,
        },
        "should_stop": dict,
        "split_group": lambda: {"split_ranks": [list(range(n))]},
        "torch_distributed_zero_first": lambda: {"local_rank": dist.get_node_local_rank()},
        "wait_for_the_master": dict,
        "zero_first": dict,
    }


# These values choose another function: another group makes the call, or only its members.
CHOOSES = {("main_process_first", "local"), ("new_group", "use_local_synchronization")}
# Only the ranks of a node make these calls together.
OF_NODE = {"local_zero_first", "main_process_first", "torch_distributed_zero_first", "wait_for_the_master"}
# No collectives of their own: functions that talk to one rank, that start and end the library, or that ask.
OTHERS = {
    *("batch_isend_irecv", "irecv", "isend", "recv", "recv_object_list", "send", "send_object_list"),
    *("breakpoint", "destroy_process_group", "first", "init_process_group", "rank_zero_only", "select_device", "spawn"),
    *("set_debug_level", "set_debug_level_from_env", "set_timeout", "supports_complex", "time_left"),
}


# These calls are cached by the shapes of their arrays, before the value of another parameter is known.
PREPARED = {
    "all_reduce",
    "all_gather",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce_scatter",
    "scatter",
}


def _one() -> int:
    return 1


def _names() -> list[str]:
    functions = [name for name in dist.__all__ if inspect.isfunction(getattr(dist, name))]
    return sorted(name for name in functions if name not in OTHERS and not name.startswith(("get_", "is_")))


def _make(name: str, given: dict[str, Any]) -> None:
    """Make the call; wait for its work, enter its block, destroy its groups."""
    function: Any = getattr(dist, name)
    made = function(given.pop("fn"), **given) if name == "run_first" else function(**given)
    if isinstance(made, dist.Work):
        made.wait()
    elif hasattr(made, "__enter__"):
        with made:
            pass
    groups = made.get_all_groups() if isinstance(made, dist.DeviceMesh) else made if isinstance(made, tuple) else [made]
    for group in groups:
        own = isinstance(group, ProcessGroup) and group is not dist.group.WORLD
        if own and name.startswith(("new_", "split_", "init_")):
            dist.destroy_process_group(group)


def test_all_functions_are_tried() -> None:
    """A new function needs valid arguments here, or stands among the functions that are no collectives."""
    assert _names() == sorted(_arguments())


@pytest.mark.parametrize("name", _names())
@pytest.mark.filterwarnings("ignore")
def test_wrong_values_on_one_rank(name: str) -> None:
    """The rank raises and the others raise CollectiveMismatchError; or all ranks are through; and the world goes on."""
    comm, valid = MPI.COMM_WORLD.Dup(), _arguments()[name]
    node_of = state().topology.node_of
    members = [rank for rank in range(comm.size) if name not in OF_NODE or node_of[rank] == node_of[WRONG_RANK]]
    names = list(inspect.signature(getattr(dist, name)).parameters)
    found = []
    for parameter in ["fn", "scope", "share"] if name == "run_first" else names:
        for value in WRONG:
            if (name, parameter) in CHOOSES:
                continue
            given, error = valid(), None
            if name in PREPARED:
                for _ in range(3):
                    _make(name, valid())
            if dist.get_rank() == WRONG_RANK:
                given[parameter] = value
            began = time.monotonic()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    _make(name, given)
            except Exception as raised:
                error = raised
            own = error is not None and not isinstance(error, dist.DistError)
            kinds = comm.allgather((type(error).__name__ if error else "", own, time.monotonic() - began))
            kind, own, _ = kinds[WRONG_RANK]
            others = {kinds[rank][0] for rank in members if rank != WRONG_RANK}
            # FirstFailedError: the wrong rank goes first in the block of its node, and the value is looked at after its block.
            well = others in ({"CollectiveMismatchError"}, {"FirstFailedError"}) if own else others == {kind}
            if not (well and (own or kind in ("", "CollectiveMismatchError"))):
                found.append(f"{parameter}={type(value).__name__}: {kinds} {error}")
            x = np.ones(2)
            dist.all_reduce(x)
            assert (x == dist.get_world_size()).all(), (found, x)
    comm.Free()
    assert not found, "\n".join(found)
