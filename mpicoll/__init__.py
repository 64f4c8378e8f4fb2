"""The API of ``torch.distributed`` over MPI: ``import mpicoll as dist``.

Importing it starts nothing: MPI is loaded by :func:`init_process_group`, and every name below by its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpicoll._version import __version__

if TYPE_CHECKING:
    from mpicoll.allocation import empty
    from mpicoll.buffers.reduce_op import ReduceOp
    from mpicoll.collectives import (
        all_gather,
        all_gather_into_tensor,
        all_gather_single,
        all_reduce,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_tensor,
        scatter,
    )
    from mpicoll.errors import (
        BufferInUseError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        DeadlockError,
        DistBackendError,
        DistError,
        DistNetworkError,
        DistStoreError,
        FirstFailedError,
        GroupBrokenError,
        LaunchError,
        PeerExitedError,
        PeerFailedError,
    )
    from mpicoll.fused import all_gather_coalesced, all_reduce_coalesced, average_gradients
    from mpicoll.groups import (
        GroupMember,
        ProcessGroup,
        get_backend,
        get_global_rank,
        get_group_rank,
        get_process_group_ranks,
        get_rank,
        get_world_size,
        group,
        is_initialized,
    )
    from mpicoll.launch.spawn import ProcessExitedException, ProcessRaisedException, spawn
    from mpicoll.object_messages import recv_object_list, send_object_list
    from mpicoll.objects import (
        all_gather_object,
        broadcast_object_list,
        gather_object,
        scatter_object_list,
    )
    from mpicoll.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
    from mpicoll.runtime import (
        default_pg_timeout,
        destroy_process_group,
        get_node_local_rank,
        init_process_group,
        is_available,
        is_mpi_available,
    )
    from mpicoll.stopping import on_signal, should_stop
    from mpicoll.subgroups import leaders_group, new_group, node_group
    from mpicoll.timelimit import time_left
    from mpicoll.turns import (
        Turn,
        first,
        local_zero_first,
        main_process_first,
        ordered,
        rank_zero_only,
        run_first,
        torch_distributed_zero_first,
        wait_for_the_master,
        zero_first,
    )
    from mpicoll.work import Work

# Where each public name comes from: it is imported when it is first asked for.
_HOME = {
    "allocation": ("empty",),
    "buffers.reduce_op": ("ReduceOp",),
    "collectives": (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
    ),
    "errors": (
        "BufferInUseError",
        "CollectiveMismatchError",
        "CollectiveTimeoutError",
        "DeadlockError",
        "DistBackendError",
        "DistError",
        "DistNetworkError",
        "DistStoreError",
        "FirstFailedError",
        "GroupBrokenError",
        "LaunchError",
        "PeerExitedError",
        "PeerFailedError",
    ),
    "fused": ("all_gather_coalesced", "all_reduce_coalesced", "average_gradients"),
    "groups": (
        "GroupMember",
        "ProcessGroup",
        "get_backend",
        "get_global_rank",
        "get_group_rank",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "group",
        "is_initialized",
    ),
    "launch.spawn": ("ProcessExitedException", "ProcessRaisedException", "spawn"),
    "object_messages": ("recv_object_list", "send_object_list"),
    "objects": ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    "p2p": ("P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"),
    "runtime": (
        "default_pg_timeout",
        "destroy_process_group",
        "get_node_local_rank",
        "init_process_group",
        "is_available",
        "is_mpi_available",
    ),
    "stopping": ("on_signal", "should_stop"),
    "subgroups": ("leaders_group", "new_group", "node_group"),
    "timelimit": ("time_left",),
    "turns": (
        "Turn",
        "first",
        "local_zero_first",
        "main_process_first",
        "ordered",
        "rank_zero_only",
        "run_first",
        "torch_distributed_zero_first",
        "wait_for_the_master",
        "zero_first",
    ),
    "work": ("Work",),
}
_home_of = {name: f"mpicoll.{module}" for module, names in _HOME.items() for name in names}

__all__ = [
    "BufferInUseError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FirstFailedError",
    "GroupBrokenError",
    "GroupMember",
    "LaunchError",
    "P2POp",
    "PeerExitedError",
    "PeerFailedError",
    "ProcessExitedException",
    "ProcessGroup",
    "ProcessRaisedException",
    "ReduceOp",
    "Turn",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "average_gradients",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "default_pg_timeout",
    "destroy_process_group",
    "empty",
    "first",
    "gather",
    "gather_object",
    "get_backend",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "is_mpi_available",
    "isend",
    "leaders_group",
    "local_zero_first",
    "main_process_first",
    "new_group",
    "node_group",
    "on_signal",
    "ordered",
    "rank_zero_only",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "run_first",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "should_stop",
    "spawn",
    "time_left",
    "torch_distributed_zero_first",
    "wait_for_the_master",
    "zero_first",
]


def __getattr__(name: str) -> Any:
    home = _home_of.get(name)
    if home is None:
        raise AttributeError(f"module 'mpicoll' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
