"""End the groups of torch.distributed and of this library, whatever state a test has left them in."""

from __future__ import annotations

import contextlib

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

import mpicoll
from mpicoll.groups import registry


def end_groups() -> None:
    """Destroy all groups, also those that a failed test has left broken or at work; all ranks call the function."""
    if mpicoll.is_initialized():
        for group in registry.state().groups.values():
            group.unwaited.clear()  # a rank that keeps its groups would leave the others to their limit
    for group in tuple(_world.pg_names):
        with contextlib.suppress(mpicoll.DistError, RuntimeError):
            group.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    _world.group_count = (
        0  # an init_process_group that failed has counted on some ranks; the names of groups are these numbers
    )
    if mpicoll.is_initialized():
        with contextlib.suppress(mpicoll.DistError):
            mpicoll.destroy_process_group()
