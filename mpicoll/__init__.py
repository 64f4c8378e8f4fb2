"""The API of ``torch.distributed`` over MPI: ``import mpicoll as dist``.

The import starts nothing: :func:`init_process_group` loads MPI, and the first use of a name loads the module of the name.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from mpicoll._version import __version__ as __version__
from mpicoll.runtime.child_process import leave_mpi_unstarted as _leave_mpi_unstarted

if TYPE_CHECKING:
    from mpicoll.api.allocation import empty as empty
    from mpicoll.api.backends import Backend as Backend
    from mpicoll.api.backends import DebugLevel as DebugLevel
    from mpicoll.api.backends import get_backend_config as get_backend_config
    from mpicoll.api.backends import get_backend_impl as get_backend_impl
    from mpicoll.api.backends import get_debug_level as get_debug_level
    from mpicoll.api.backends import get_default_backend_for_device as get_default_backend_for_device
    from mpicoll.api.backends import get_pg_count as get_pg_count
    from mpicoll.api.backends import is_backend_available as is_backend_available
    from mpicoll.api.backends import is_gloo_available as is_gloo_available
    from mpicoll.api.backends import is_nccl_available as is_nccl_available
    from mpicoll.api.backends import is_torchelastic_launched as is_torchelastic_launched
    from mpicoll.api.backends import is_ucc_available as is_ucc_available
    from mpicoll.api.backends import is_xccl_available as is_xccl_available
    from mpicoll.api.backends import set_debug_level as set_debug_level
    from mpicoll.api.backends import set_debug_level_from_env as set_debug_level_from_env
    from mpicoll.api.backends import supports_complex as supports_complex
    from mpicoll.api.coalesced import all_gather_coalesced as all_gather_coalesced
    from mpicoll.api.coalesced import all_reduce_coalesced as all_reduce_coalesced
    from mpicoll.api.coalesced import average_gradients as average_gradients
    from mpicoll.api.collectives import all_reduce as all_reduce
    from mpicoll.api.collectives import barrier as barrier
    from mpicoll.api.collectives import breakpoint as breakpoint
    from mpicoll.api.collectives import broadcast as broadcast
    from mpicoll.api.collectives import monitored_barrier as monitored_barrier
    from mpicoll.api.collectives import reduce as reduce
    from mpicoll.api.gathering import all_gather as all_gather
    from mpicoll.api.gathering import all_gather_into_tensor as all_gather_into_tensor
    from mpicoll.api.gathering import all_gather_single as all_gather_single
    from mpicoll.api.gathering import gather as gather
    from mpicoll.api.gathering import gather_into_tensor as gather_into_tensor
    from mpicoll.api.gathering import gather_single as gather_single
    from mpicoll.api.groups import leaders_group as leaders_group
    from mpicoll.api.groups import new_group as new_group
    from mpicoll.api.groups import new_subgroups as new_subgroups
    from mpicoll.api.groups import new_subgroups_by_enumeration as new_subgroups_by_enumeration
    from mpicoll.api.groups import node_group as node_group
    from mpicoll.api.groups import split_group as split_group
    from mpicoll.api.job import GroupMember as GroupMember
    from mpicoll.api.job import default_pg_timeout as default_pg_timeout
    from mpicoll.api.job import destroy_process_group as destroy_process_group
    from mpicoll.api.job import get_backend as get_backend
    from mpicoll.api.job import get_global_rank as get_global_rank
    from mpicoll.api.job import get_group_rank as get_group_rank
    from mpicoll.api.job import get_node_local_rank as get_node_local_rank
    from mpicoll.api.job import get_process_group_ranks as get_process_group_ranks
    from mpicoll.api.job import get_rank as get_rank
    from mpicoll.api.job import get_world_size as get_world_size
    from mpicoll.api.job import group as group
    from mpicoll.api.job import init_process_group as init_process_group
    from mpicoll.api.job import is_available as is_available
    from mpicoll.api.job import is_initialized as is_initialized
    from mpicoll.api.job import is_mpi_available as is_mpi_available
    from mpicoll.api.job import set_timeout as set_timeout
    from mpicoll.api.messages import P2POp as P2POp
    from mpicoll.api.messages import batch_isend_irecv as batch_isend_irecv
    from mpicoll.api.messages import irecv as irecv
    from mpicoll.api.messages import isend as isend
    from mpicoll.api.messages import recv as recv
    from mpicoll.api.messages import send as send
    from mpicoll.api.object_messages import recv_object_list as recv_object_list
    from mpicoll.api.object_messages import send_object_list as send_object_list
    from mpicoll.api.objects import all_gather_object as all_gather_object
    from mpicoll.api.objects import broadcast_object_list as broadcast_object_list
    from mpicoll.api.objects import gather_object as gather_object
    from mpicoll.api.objects import scatter_object_list as scatter_object_list
    from mpicoll.api.persistent import Plan as Plan
    from mpicoll.api.persistent import all_reduce_init as all_reduce_init
    from mpicoll.api.scattering import all_to_all as all_to_all
    from mpicoll.api.scattering import all_to_all_single as all_to_all_single
    from mpicoll.api.scattering import reduce_scatter as reduce_scatter
    from mpicoll.api.scattering import reduce_scatter_single as reduce_scatter_single
    from mpicoll.api.scattering import reduce_scatter_tensor as reduce_scatter_tensor
    from mpicoll.api.scattering import scatter as scatter
    from mpicoll.device_mesh import DeviceMesh as DeviceMesh
    from mpicoll.device_mesh import init_device_mesh as init_device_mesh
    from mpicoll.errors import BufferInUseError as BufferInUseError
    from mpicoll.errors import CollectiveMismatchError as CollectiveMismatchError
    from mpicoll.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from mpicoll.errors import DeadlockError as DeadlockError
    from mpicoll.errors import DistBackendError as DistBackendError
    from mpicoll.errors import DistError as DistError
    from mpicoll.errors import DistNetworkError as DistNetworkError
    from mpicoll.errors import DistStoreError as DistStoreError
    from mpicoll.errors import FirstFailedError as FirstFailedError
    from mpicoll.errors import GroupBrokenError as GroupBrokenError
    from mpicoll.errors import LaunchError as LaunchError
    from mpicoll.errors import PeerExitedError as PeerExitedError
    from mpicoll.errors import PeerFailedError as PeerFailedError
    from mpicoll.errors import QueueEmptyError as QueueEmptyError
    from mpicoll.groups.process_group import ProcessGroup as ProcessGroup
    from mpicoll.launch.spawn import ProcessExitedException as ProcessExitedException
    from mpicoll.launch.spawn import ProcessRaisedException as ProcessRaisedException
    from mpicoll.launch.spawn import spawn as spawn
    from mpicoll.leader_blocks.entered_block import Turn as Turn
    from mpicoll.leader_blocks.functions import first as first
    from mpicoll.leader_blocks.functions import local_zero_first as local_zero_first
    from mpicoll.leader_blocks.functions import main_process_first as main_process_first
    from mpicoll.leader_blocks.functions import ordered as ordered
    from mpicoll.leader_blocks.functions import rank_zero_only as rank_zero_only
    from mpicoll.leader_blocks.functions import run_first as run_first
    from mpicoll.leader_blocks.functions import torch_distributed_zero_first as torch_distributed_zero_first
    from mpicoll.leader_blocks.functions import wait_for_the_master as wait_for_the_master
    from mpicoll.leader_blocks.functions import zero_first as zero_first
    from mpicoll.lifecycle.devices import select_device as select_device
    from mpicoll.memory.reduce_op import ReduceOp as ReduceOp
    from mpicoll.memory.reduce_op import reduce_op as reduce_op
    from mpicoll.operations.work import Work as Work
    from mpicoll.stores.base import Store as Store
    from mpicoll.stores.file import FileStore as FileStore
    from mpicoll.stores.local import HashStore as HashStore
    from mpicoll.stores.local import PrefixStore as PrefixStore
    from mpicoll.stores.tcp_client import TCPStore as TCPStore
    from mpicoll.training import DistributedSampler as DistributedSampler
    from mpicoll.training import broadcast_parameters as broadcast_parameters
    from mpicoll.training.stop_requests import on_signal as on_signal
    from mpicoll.training.stop_requests import should_stop as should_stop
    from mpicoll.training.time_limit import time_left as time_left

# The module of each public name, imported at the first use of the name. The imports above are for type checkers.
_HOME = {
    "api.allocation": "empty",
    "api.backends": (
        "Backend DebugLevel get_backend_config get_backend_impl get_debug_level get_default_backend_for_device "
        "get_pg_count is_backend_available is_gloo_available is_nccl_available is_torchelastic_launched "
        "is_ucc_available is_xccl_available set_debug_level set_debug_level_from_env supports_complex"
    ),
    "api.coalesced": "all_gather_coalesced all_reduce_coalesced average_gradients",
    "api.collectives": "all_reduce barrier breakpoint broadcast monitored_barrier reduce",
    "api.gathering": "all_gather all_gather_into_tensor all_gather_single gather gather_into_tensor gather_single",
    "api.scattering": "all_to_all all_to_all_single reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter",
    "api.device_mesh": "DeviceMesh init_device_mesh",
    "api.groups": "leaders_group new_group new_subgroups new_subgroups_by_enumeration node_group split_group",
    "api.messages": "P2POp batch_isend_irecv irecv isend recv send",
    "api.object_messages": "recv_object_list send_object_list",
    "api.objects": "all_gather_object broadcast_object_list gather_object scatter_object_list",
    "api.persistent": "Plan all_reduce_init",
    "errors": (
        "BufferInUseError CollectiveMismatchError CollectiveTimeoutError DeadlockError DistBackendError DistError "
        "DistNetworkError DistStoreError FirstFailedError GroupBrokenError LaunchError PeerExitedError "
        "PeerFailedError QueueEmptyError"
    ),
    "groups.process_group": "ProcessGroup",
    "launch.spawn": "ProcessExitedException ProcessRaisedException spawn",
    "leader_blocks.entered_block": "Turn",
    "leader_blocks.functions": (
        "first local_zero_first main_process_first ordered rank_zero_only run_first torch_distributed_zero_first "
        "wait_for_the_master zero_first"
    ),
    "lifecycle.devices": "select_device",
    "api.job": (
        "GroupMember default_pg_timeout destroy_process_group get_backend get_global_rank get_group_rank "
        "get_node_local_rank get_process_group_ranks get_rank get_world_size group init_process_group is_available "
        "is_initialized is_mpi_available set_timeout"
    ),
    "memory.reduce_op": "ReduceOp reduce_op",
    "operations.work": "Work",
    "stores.base": "Store",
    "stores.file": "FileStore",
    "stores.local": "HashStore PrefixStore",
    "stores.tcp_client": "TCPStore",
    "training.data_parallel": "DistributedSampler broadcast_parameters",
    "training.stop_requests": "on_signal should_stop",
    "training.time_limit": "time_left",
}
_home_of = {name: (f"mpicoll.{module}", name) for module, names in _HOME.items() for name in names.split()}
__all__ = sorted(["__version__", *_home_of])
# Private names of torch.distributed that programs and libraries use nevertheless.
_home_of |= {
    "_all_gather_base": ("mpicoll.api.gathering", "all_gather_into_tensor"),
    "_get_default_group": ("mpicoll.api.job", "default_group"),
    "_make_nccl_premul_sum": ("mpicoll.memory.reduce_op", "premul_sum"),
    "_rank_not_in_group": ("mpicoll.api.job", "rank_not_in_group"),
    "_reduce_scatter_base": ("mpicoll.api.scattering", "reduce_scatter_tensor"),
}


def __getattr__(name: str) -> Any:
    home, own_name = _home_of.get(name, ("", ""))
    if name in ("device_mesh", "distributed_c10d"):
        return importlib.import_module(f"mpicoll.{name}")
    if not home:
        raise AttributeError(f"module 'mpicoll' has no attribute {name!r}")
    _leave_mpi_unstarted()
    value = getattr(importlib.import_module(home), own_name)
    globals()[name] = value
    if "torch" in sys.modules:
        importlib.import_module("mpicoll.runtime.torch_compile").exclude_from_compile()
    return value


_leave_mpi_unstarted()


def __dir__() -> list[str]:
    return list(__all__)
