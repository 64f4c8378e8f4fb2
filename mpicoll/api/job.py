"""Start and end the default process group, and query the ranks and groups of a job, with torch.distributed's names."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mpicoll.groups.process_group import ProcessGroup, register_methods
from mpicoll.groups.registry import NON_MEMBER, current, peer_rank, resolve, state
from mpicoll.lifecycle.destroy import destroy_process_group
from mpicoll.lifecycle.init import (
    at_start,
    default_pg_timeout,
    get_node_local_rank,
    init_process_group,
    is_available,
    is_mpi_available,
)

__all__ = [
    "GroupMember",
    "default_group",
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
    "rank_not_in_group",
    "set_timeout",
]


def is_initialized() -> bool:
    """Return whether the default process group has been initialised (torch.distributed.is_initialized)."""
    return current() is not None


def rank_not_in_group(group: Any) -> bool:
    """Return whether this rank is no member of a group (torch.distributed._rank_not_in_group)."""
    return group is not None and resolve(group) is None


def default_group() -> ProcessGroup:
    """Return the default group, or raise ValueError (torch.distributed.distributed_c10d._get_default_group)."""
    return state().world


def get_rank(group: Any = None) -> int:
    """Return this process's rank in ``group`` (default: the world), or -1 if this process is not a member.

    Raises:
        ValueError: there is no default group.

    Source: torch.distributed.get_rank.
    """
    found = resolve(group)
    return -1 if found is None else found.rank()


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks in ``group`` (default: the world), or -1 if this rank is not a member.

    Raises:
        ValueError: there is no default group.

    Source: torch.distributed.get_world_size.
    """
    found = resolve(group)
    return -1 if found is None else found.size()


def get_backend(group: Any = None) -> str:
    """Return ``"mpi"``.

    Raises:
        ValueError: there is no default group, or this rank is not a member.

    Source: torch.distributed.get_backend.
    """
    if resolve(group) is None:
        raise ValueError("Invalid process group specified")
    return "mpi"


def get_process_group_ranks(group: Any) -> list[int]:
    """Return the global ranks of ``group`` (None: the world), by rank in the group.

    Raises:
        KeyError: this rank is not a member (as in torch).
        ValueError: there is no default group.

    Source: torch.distributed.get_process_group_ranks.
    """
    found = resolve(group)
    if found is None:
        raise KeyError(group)
    return list(found.ranks)


def set_timeout(timeout: timedelta, group: Any = None) -> None:
    """Set the limit of every later call of ``group`` (default: the world) on this rank.

    Calls with ``timeout=`` and calls that were started keep their limit. Later groups without a limit of their own get the limit
    of the default group.

    Raises:
        TypeError: ``timeout`` is not a timedelta.
        ValueError: ``timeout`` is not positive, this rank is not a member, or there is no default group.

    Source: torch.distributed.set_timeout of torch 2.15.
    """
    _registered(group).set_timeout(timeout)


def _registered(group: Any) -> ProcessGroup:
    found = resolve(group)
    if found is None:
        raise ValueError(f"Group {group} is not registered, please create group with new_group API")
    return found


def get_group_rank(group: Any, global_rank: int) -> int:
    """Return the rank in ``group`` of a global rank (on the world: the rank itself).

    Raises:
        TypeError: the rank is not an integer.
        ValueError: the rank is not in the group, this rank is not a member, or there is no default group.

    Source: torch.distributed.get_group_rank.
    """
    found = _registered(group)
    if found is state().world:
        return global_rank
    return peer_rank(found, global_rank, None, "global_rank")


def get_global_rank(group: Any, group_rank: int) -> int:
    """Return the global rank of a rank in ``group`` (on the world: the rank itself).

    Raises:
        ValueError: the group has no such rank, this rank is not a member, or there is no default group.

    Source: torch.distributed.get_global_rank.
    """
    found = _registered(group)
    if found is state().world:
        return group_rank
    if not 0 <= group_rank < found.size():
        raise ValueError(f"Group rank {group_rank} is not part of group {found.display}")
    return found.ranks[group_rank]


class _WorldMeta(type):
    """Metaclass by which ``group.WORLD`` is always the current default group."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, or None before ``init_process_group``."""
        known = current()
        return None if known is None else known.world

    @WORLD.setter
    def WORLD(cls, to: ProcessGroup | None) -> None:
        """Raise AttributeError unless ``to`` is the default group, on which all ranks agree about the job as a whole."""
        if to is not cls.WORLD:
            raise AttributeError(
                "group.WORLD can only be set by init_process_group, as it holds all ranks of the job: pass group= to calls, or "
                "pass init_process_group a communicator of other ranks as comm="
            )


class group(metaclass=_WorldMeta):
    """``group.WORLD``: the default group (torch.distributed.group)."""


class GroupMember(metaclass=_WorldMeta):
    """``GroupMember.WORLD`` and ``GroupMember.NON_GROUP_MEMBER`` (torch.distributed.GroupMember)."""

    NON_GROUP_MEMBER = NON_MEMBER


def _find_method(name: str) -> Callable[..., Any] | None:
    """Return the method of groups of a name that makes a public call; None if there is none."""
    from mpicoll.api.group_methods import METHODS  # at the first use, as few programs use these methods

    return METHODS.get(name)


def _load_calls() -> None:
    """Import the modules of the most frequent calls: at one time on all ranks, as each import takes milliseconds."""
    from mpicoll.api import collectives, gathering, messages, objects, scattering  # noqa: F401


register_methods(_find_method)
at_start.append(_load_calls)
