"""The API of ``torch.distributed`` over MPI: ``import mpicoll as dist``.

Importing it starts nothing: MPI is loaded by :func:`init_process_group`, and every name below by its first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from mpicoll._version import __version__

if TYPE_CHECKING:
    from mpicoll.api.allocation import empty
    from mpicoll.api.backends import (
        Backend,
        DebugLevel,
        get_backend_config,
        get_debug_level,
        get_default_backend_for_device,
        get_pg_count,
        is_backend_available,
        is_gloo_available,
        is_nccl_available,
        is_torchelastic_launched,
        is_ucc_available,
        is_xccl_available,
        set_debug_level,
        set_debug_level_from_env,
        supports_complex,
    )
    from mpicoll.api.coalesced import all_gather_coalesced, all_reduce_coalesced, average_gradients
    from mpicoll.api.collectives import (
        all_reduce,
        barrier,
        breakpoint,
        broadcast,
        monitored_barrier,
        reduce,
    )
    from mpicoll.api.gathering import (
        all_gather,
        all_gather_into_tensor,
        all_gather_single,
        gather,
    )
    from mpicoll.api.groups import (
        leaders_group,
        new_group,
        new_subgroups,
        new_subgroups_by_enumeration,
        node_group,
        split_group,
    )
    from mpicoll.api.job import (
        GroupMember,
        default_pg_timeout,
        destroy_process_group,
        get_backend,
        get_global_rank,
        get_group_rank,
        get_node_local_rank,
        get_process_group_ranks,
        get_rank,
        get_world_size,
        group,
        init_process_group,
        is_available,
        is_initialized,
        is_mpi_available,
    )
    from mpicoll.api.messages import P2POp, batch_isend_irecv, irecv, isend, recv, send
    from mpicoll.api.object_messages import recv_object_list, send_object_list
    from mpicoll.api.objects import all_gather_object, broadcast_object_list, gather_object, scatter_object_list
    from mpicoll.api.persistent import Plan, all_reduce_init
    from mpicoll.api.scattering import (
        all_to_all,
        all_to_all_single,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_tensor,
        scatter,
    )
    from mpicoll.device_mesh import DeviceMesh, init_device_mesh
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
        QueueEmptyError,
    )
    from mpicoll.groups.process_group import ProcessGroup
    from mpicoll.launch.spawn import ProcessExitedException, ProcessRaisedException, spawn
    from mpicoll.leader_blocks.entered_block import Turn
    from mpicoll.leader_blocks.functions import (
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
    from mpicoll.lifecycle.devices import select_device
    from mpicoll.memory.reduce_op import ReduceOp, reduce_op
    from mpicoll.operations.work import Work
    from mpicoll.stores.base import Store
    from mpicoll.stores.local import FileStore, HashStore, PrefixStore
    from mpicoll.stores.tcp_client import TCPStore
    from mpicoll.training import DistributedSampler, broadcast_parameters
    from mpicoll.training.stop_requests import on_signal, should_stop
    from mpicoll.training.time_limit import time_left

# Where each public name comes from: it is imported when it is first asked for.
_HOME = {
    "api.allocation": ("empty",),
    "api.backends": (
        "Backend",
        "DebugLevel",
        "get_backend_config",
        "get_debug_level",
        "get_default_backend_for_device",
        "get_pg_count",
        "is_backend_available",
        "is_gloo_available",
        "is_nccl_available",
        "is_torchelastic_launched",
        "is_ucc_available",
        "is_xccl_available",
        "set_debug_level",
        "set_debug_level_from_env",
        "supports_complex",
    ),
    "api.coalesced": (
        "all_gather_coalesced",
        "all_reduce_coalesced",
        "average_gradients",
    ),
    "api.collectives": (
        "all_reduce",
        "barrier",
        "breakpoint",
        "broadcast",
        "monitored_barrier",
        "reduce",
    ),
    "api.gathering": (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "gather",
    ),
    "api.scattering": (
        "all_to_all",
        "all_to_all_single",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
    ),
    "api.device_mesh": (
        "DeviceMesh",
        "init_device_mesh",
    ),
    "api.groups": (
        "leaders_group",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "node_group",
        "split_group",
    ),
    "api.messages": (
        "P2POp",
        "batch_isend_irecv",
        "irecv",
        "isend",
        "recv",
        "send",
    ),
    "api.object_messages": (
        "recv_object_list",
        "send_object_list",
    ),
    "api.objects": (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "scatter_object_list",
    ),
    "api.persistent": (
        "Plan",
        "all_reduce_init",
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
        "QueueEmptyError",
    ),
    "groups.process_group": ("ProcessGroup",),
    "launch.spawn": (
        "ProcessExitedException",
        "ProcessRaisedException",
        "spawn",
    ),
    "leader_blocks.entered_block": ("Turn",),
    "leader_blocks.functions": (
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
    "lifecycle.devices": ("select_device",),
    "api.job": (
        "GroupMember",
        "default_pg_timeout",
        "destroy_process_group",
        "get_backend",
        "get_global_rank",
        "get_group_rank",
        "get_node_local_rank",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "group",
        "init_process_group",
        "is_available",
        "is_initialized",
        "is_mpi_available",
    ),
    "memory.reduce_op": (
        "ReduceOp",
        "reduce_op",
    ),
    "operations.work": ("Work",),
    "stores.base": ("Store",),
    "stores.local": (
        "FileStore",
        "HashStore",
        "PrefixStore",
    ),
    "stores.tcp_client": ("TCPStore",),
    "training.data_parallel": (
        "DistributedSampler",
        "broadcast_parameters",
    ),
    "training.stop_requests": (
        "on_signal",
        "should_stop",
    ),
    "training.time_limit": ("time_left",),
}
_home_of = {name: (f"mpicoll.{module}", name) for module, names in _HOME.items() for name in names}
# Private names of torch.distributed that programs and libraries use all the same.
_home_of |= {
    "_all_gather_base": ("mpicoll.api.gathering", "all_gather_into_tensor"),
    "_get_default_group": ("mpicoll.api.job", "default_group"),
    "_make_nccl_premul_sum": ("mpicoll.memory.reduce_op", "premul_sum"),
    "_rank_not_in_group": ("mpicoll.api.job", "rank_not_in_group"),
    "_reduce_scatter_base": ("mpicoll.api.scattering", "reduce_scatter_tensor"),
}

__all__ = [
    "Backend",
    "BufferInUseError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "DebugLevel",
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistributedSampler",
    "FileStore",
    "FirstFailedError",
    "GroupBrokenError",
    "GroupMember",
    "HashStore",
    "LaunchError",
    "P2POp",
    "PeerExitedError",
    "PeerFailedError",
    "Plan",
    "PrefixStore",
    "ProcessExitedException",
    "ProcessGroup",
    "ProcessRaisedException",
    "QueueEmptyError",
    "ReduceOp",
    "Store",
    "TCPStore",
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
    "all_reduce_init",
    "all_to_all",
    "all_to_all_single",
    "average_gradients",
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_object_list",
    "broadcast_parameters",
    "default_pg_timeout",
    "destroy_process_group",
    "empty",
    "first",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "leaders_group",
    "local_zero_first",
    "main_process_first",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "node_group",
    "on_signal",
    "ordered",
    "rank_zero_only",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "run_first",
    "scatter",
    "scatter_object_list",
    "select_device",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "should_stop",
    "spawn",
    "split_group",
    "supports_complex",
    "time_left",
    "torch_distributed_zero_first",
    "wait_for_the_master",
    "zero_first",
]


def __getattr__(name: str) -> Any:
    home, own_name = _home_of.get(name, ("", ""))
    if name in ("device_mesh", "distributed_c10d"):
        return importlib.import_module(f"mpicoll.{name}")
    if not home:
        raise AttributeError(f"module 'mpicoll' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), own_name)
    globals()[name] = value
    if "torch" in sys.modules:
        importlib.import_module("mpicoll.runtime.torch_compile").exclude_from_compile()
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
