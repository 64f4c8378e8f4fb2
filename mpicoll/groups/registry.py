"""The groups of this process: the default group, the state of the job, and the group of a ``group=`` argument."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from mpicoll.diagnosis import job_state
from mpicoll.diagnosis.job_state import JobState
from mpicoll.diagnosis.membership import OpenBlock
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.runtime.call_site import program_level
from mpicoll.runtime.settings import has_type, need_integer

if TYPE_CHECKING:
    from mpicoll.groups.communicators import Pool


NON_MEMBER = -100
"""The result of ``new_group`` on a rank that is not in the group (``GroupMember.NON_GROUP_MEMBER``)."""


@dataclass(kw_only=True)
class JobWithGroups(JobState):
    """The state of this process while there is a default group.

    Attributes:
        pool: communicators that groups use and have used.
        created: number of groups made so far, the same on all ranks.
        secret: bytes that only the ranks of the job know.
        node: group of the ranks of this node, after the first use.
        leaders: group of the first rank of each node, after the first use.
        blocks: open blocks of a leader, the innermost last.
    """

    world: ProcessGroup
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    pool: Pool
    created: int = 0
    secret: bytes = b""
    node: ProcessGroup | None = None
    leaders: ProcessGroup | None = None
    blocks: list[OpenBlock] = field(default_factory=list)


class _Default:
    """The default group, for code that reads it in every call."""

    __slots__ = ("world",)

    def __init__(self) -> None:
        self.world: ProcessGroup | None = None


default = _Default()


def set_state(new: JobWithGroups | None) -> None:
    """Install or remove the default group; for ``lifecycle`` only."""
    job_state.set_job(new)
    default.world = None if new is None else new.world


def state() -> JobWithGroups:
    """Return the state, or raise torch's ValueError if there is no default group."""
    return cast(JobWithGroups, job_state.job())


def current() -> JobWithGroups | None:
    """Return the state, or None if there is no default group."""
    return cast("JobWithGroups | None", job_state.current())


def resolve(group: Any) -> ProcessGroup | None:
    """Return the group of a ``group=`` argument, or None if this rank is not a member.

    Raises:
        ValueError: there is no default group, the group is destroyed or belongs to an earlier default group, or the argument
            is no group (as in torch).
    """
    known = state()
    if group is None:
        return known.world
    if has_type(group, ProcessGroup):
        if known.groups.get(group.group_name) is not group:
            where = f"was destroyed at {group.destroyed_at}" if group.destroyed else "is no group of this process"
            raise ValueError(f"Invalid process group specified: group {group.display} {where}")
        return group
    if has_type(group, int) and group == NON_MEMBER:
        return None
    raise ValueError(
        f"Invalid process group specified: group must be a ProcessGroup or None, not {type(group).__name__}"
    )


def member_or_warn(group: Any, operation: str, stacklevel: int | None = None) -> ProcessGroup | None:
    """Return the group, or warn as torch does and return None if this rank is not in the group.

    Args:
        stacklevel: as for ``warnings.warn``; None: the warning names the line of the program.
    """
    found = resolve(group)
    if found is None:
        warnings.warn(
            f"Running {operation} on global rank {state().world.rank()} which does not belong to the given group.",
            stacklevel=program_level() if stacklevel is None else stacklevel,
        )
    return found


def need_member(group: Any) -> ProcessGroup:
    """Return the group, or raise as torch's send does if this rank is not in the group."""
    found = resolve(group)
    if found is None:
        raise ValueError("Invalid process group specified: this rank is not in the group")
    return found


def peer_rank(
    group: ProcessGroup, global_rank: int | None, group_rank: int | None, name: str, default: int | None = None
) -> int:
    """Return the rank in the group of an argument ``src=`` or ``group_src=`` (or dst, peer).

    Raises:
        ValueError: both or neither are given, or the rank is not a member (texts of torch).
        TypeError: not an integer.
    """
    if global_rank is not None and group_rank is not None:
        raise ValueError(f"Can't specify both group_rank and global_rank ({name}= and group_{name}=)")
    if global_rank is None and group_rank is None:
        global_rank = default
        if default is None:
            raise ValueError(f"Must specify global_rank or group_rank ({name}= or group_{name}=)")
    if group_rank is not None:
        need_integer(group_rank, f"group_{name}")
        if not 0 <= group_rank < group.size():
            raise ValueError(
                f"group_{name}={group_rank} is not a rank of group {group.display} of {group.size()} ranks"
            )
        return group_rank
    assert global_rank is not None
    need_integer(global_rank, name)
    try:
        return group.ranks.index(global_rank)
    except ValueError:
        why = f"{name} is a rank of the world, and group_{name} a rank of the group"
        if global_rank < 0:  # constants of MPI, as MPI.PROC_NULL and MPI.ANY_SOURCE
            why = f"leave {name} out of a receive from any rank, and make no call if there is no other rank"
        raise ValueError(f"Global rank {global_rank} is not part of group {group.display}: {why}") from None
