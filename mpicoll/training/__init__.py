"""Tools for training programs beside collectives: a sampler, and the broadcast of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpicoll.runtime.child_process import leave_mpi_unstarted

if TYPE_CHECKING:
    from mpicoll.training.data_parallel import DistributedSampler, broadcast_parameters

__all__ = ["DistributedSampler", "broadcast_parameters"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mpicoll.training' has no attribute {name!r}")
    leave_mpi_unstarted()
    from mpicoll.training import data_parallel

    return getattr(data_parallel, name)
