"""Make groups, with torch.distributed's names and arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from mpicoll.api.objects import all_gather_object
from mpicoll.diagnosis.call import CallDescription
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import NON_MEMBER, resolve, state
from mpicoll.operations import composed, execution
from mpicoll.operations.group_creation import (
    check_arguments,
    check_members,
    create_by_members,
    create_group,
    group_of_node,
    lists_of_ranks,
)
from mpicoll.operations.prepare.refusal import is_group, member
from mpicoll.runtime import signals
from mpicoll.runtime.call_site import call_site
from mpicoll.runtime.settings import need_bool, need_integer


def new_group(
    ranks: list[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> Any:
    """Make a group of some ranks of the world.

    All ranks of the world call this function in the same order, members or not; with ``use_local_synchronization`` only the
    members call the function.

    Args:
        ranks: global ranks of the members; None: all.
        timeout: time limit of each call on the group; default the limit of the world.
        backend: None or "mpi"; other names as in :func:`init_process_group`.
        pg_options, device_id: accepted and ignored.
        use_local_synchronization: only the members call. The call is possible also if the world is broken, so that the remaining
            ranks can go on.
        group_desc: name of the group in messages.
        sort_ranks: number the members in the order of their global ranks; False: in the order of ``ranks``.

    Returns:
        The ProcessGroup; ``GroupMember.NON_GROUP_MEMBER`` (-100) on ranks that are not members, or None there with
        ``use_local_synchronization`` (as in torch).

    Raises:
        TypeError, ValueError: wrong arguments, such as ranks repeated or out of range; other ranks raise
            CollectiveMismatchError. With ``use_local_synchronization`` wrong ``ranks`` raise on this rank only.
        CollectiveMismatchError: the ranks asked for different groups; at check level ``roll`` also: their calls on a
            destroyed group of the same ranks differed.
        CollectiveTimeoutError: a rank did not call this function within the limit of the world.
        PeerFailedError, PeerExitedError, DeadlockError, GroupBrokenError: as :func:`mpicoll.broadcast`, on the world.
        DistBackendError: MPI has no communicator left.

    Source: torch.distributed.new_group; MPI_Comm_create_group (MPI-4.1 section 7.4.2).
    """
    site = call_site()
    known = state()
    problem: Exception | None = None
    members: tuple[int, ...] = ()
    alone = False
    try:
        alone = need_bool(use_local_synchronization, "use_local_synchronization")
    except Exception as error:
        problem = error
    execution.enter(known.world, "new_group", apart=alone)
    try:
        members = check_members(ranks, known.world.size(), sort_ranks)
        check_arguments(timeout, backend, group_desc)
        if known.world.rank() in members:
            known.pool.check_room(members)
    except Exception as error:
        problem = problem or error
    with signals.shield:
        return create_group(known, members, problem, site, timeout, alone, group_desc)


def new_subgroups(
    group_size: int | None = None,
    group: Any = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Divide a group into groups of equal size, each of consecutive ranks.

    All ranks of the world call this function in the same order, as :func:`new_group`.

    Args:
        group_size: number of ranks in each new group, a divisor of the size of ``group``. None: the number of GPUs that this
            rank sees.
        group: the group to divide; default the world. Each rank of the world passes a group that this rank is in. If ranks
            pass different groups, all these groups are divided.
        timeout, backend, pg_options, group_desc: of each new group, as for :func:`new_group`.

    Returns:
        The new group that this rank is in, and the list of all new groups of ``group``, in order
        (``GroupMember.NON_GROUP_MEMBER`` for each group that this rank is not in).

    Raises:
        TypeError: ``group_size`` is not an integer.
        ValueError: ``group_size`` is not positive, too large, or no divisor of the size of the group, or is None without a GPU;
            this rank is not in ``group``. Other ranks raise CollectiveMismatchError.
        Others as :func:`new_group`.

    Source: torch.distributed.new_subgroups.
    """
    known = state()
    execution.enter(known.world, "new_subgroups")
    problem: Exception | None = None
    lists: list[list[int]] = []
    try:
        found = resolve(group)
        if found is None:
            raise ValueError("Invalid process group specified: this rank is not in the group")
        size = _gpus() if group_size is None else group_size
        lists = _divided(found, size)
    except Exception as error:
        problem = error
    if group is None or group is known.world or not is_group(group):
        return _subgroups("new_subgroups", lists, problem, timeout, backend, pg_options, group_desc)
    told: list[Any] = [None] * known.world.size()
    all_gather_object(told, None if problem else lists)
    every = list(dict.fromkeys(tuple(ranks) for each in told for ranks in each or ()))
    _, made = _subgroups(
        "new_subgroups", [list(ranks) for ranks in every], problem, timeout, backend, pg_options, group_desc
    )
    parts = [made[every.index(tuple(ranks))] for ranks in lists]
    return next(part for part in parts if part is not NON_MEMBER), parts


def _gpus() -> int:
    from mpicoll.lifecycle.devices import count  # join() looks whether it was imported

    try:
        return count()
    except ImportError as error:
        raise ValueError(
            f"Default group size only takes effect when CUDA is available: pass group_size ({error})"
        ) from error


def _divided(group: ProcessGroup, size: Any) -> list[list[int]]:
    whole = group.size()
    need_integer(size, "group_size")
    size = int(size)
    if size <= 0:
        raise ValueError(f"The arg 'group_size' ({size}) must be positive")
    if size > whole:
        raise ValueError(f"The arg 'group_size' ({size}) must not exceed the world size ({whole})")
    if whole % size:
        raise ValueError(f"The world size ({whole}) must be divisible by 'group_size={size}'")
    return [list(group.ranks[at : at + size]) for at in range(0, whole, size)]


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: list[list[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Make several groups that have no rank in common.

    All ranks of the world call this function with the same lists in the same order, as :func:`new_group`.

    Args:
        ranks_per_subgroup_list: the global ranks of each group.
        timeout, backend, pg_options, group_desc: of each group, as for :func:`new_group`.

    Returns:
        The group that this rank is in, or None; and the list of all groups, in order (``GroupMember.NON_GROUP_MEMBER`` for each
        group that this rank is not in).

    Raises:
        TypeError: ``ranks_per_subgroup_list`` is no list of lists of integers.
        ValueError: the list is empty, or a rank is in two groups; no group is made (torch makes the groups before the error).
        Others as :func:`new_group`.

    Source: torch.distributed.new_subgroups_by_enumeration.
    """
    execution.enter(state().world, "new_subgroups_by_enumeration")
    problem: Exception | None = None
    lists: list[list[int]] = []
    try:
        given = lists_of_ranks(ranks_per_subgroup_list, "ranks_per_subgroup_list")
        if not given:
            raise ValueError("The arg 'ranks_per_subgroup_list' cannot be empty")
        lists = [list(check_members(ranks, state().world.size(), False)) for ranks in given]
        _apart(lists, "subgroup")
    except Exception as error:
        problem = error
    return _subgroups("new_subgroups_by_enumeration", lists, problem, timeout, backend, pg_options, group_desc)


def _apart(lists: list[list[int]], word: str) -> None:
    """Raise ValueError if a rank is in two of the lists."""
    seen: dict[int, list[int]] = {}
    for ranks in lists:
        for rank in ranks:
            if rank in seen:
                raise ValueError(f"Rank {rank} has appeared in both {word} {seen[rank]} and {ranks}")
        seen.update(dict.fromkeys(ranks, ranks))


def _subgroups(
    op: str,
    lists: list[list[int]],
    problem: Exception | None,
    timeout: timedelta | None,
    backend: str | None,
    pg_options: Any,
    group_desc: str | None,
) -> tuple[Any, list[Any]]:
    """Agree on all groups in one round, so that an error in one group raises on all ranks before a group is made."""
    known = state()
    if problem is None:
        try:
            lists = [list(check_members(ranks, known.world.size(), False)) for ranks in lists]
            check_arguments(timeout, backend, group_desc)
        except Exception as error:
            problem = error
    key = () if problem else (("groups", len(lists)), ("ranks", tuple(map(tuple, lists))))
    composed.agree(known.world, CallDescription(op, key, call_site(), error=problem))
    made = [new_group(ranks, timeout, backend, pg_options, group_desc=group_desc) for ranks in lists]
    mine = [group for group in made if group is not NON_MEMBER]
    return mine[0] if mine else None, made


def split_group(
    parent_pg: Any = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Make groups of the ranks of a group; each rank is in one new group at most.

    All members of the parent call this function with the same ``split_ranks``.

    Args:
        parent_pg: the group to split; default the world. A rank that is not in the group gets None, and a warning.
        split_ranks: the ranks of each new group, as ranks in the parent.
        timeout: time limit of each call on a new group; default the limit of the parent.
        group_desc, backend: as for :func:`new_group`.
        pg_options: accepted and ignored.

    Returns:
        The new group that this rank is in; None if this rank is in no new group.

    Raises:
        TypeError: ``split_ranks`` is no list of lists of integers.
        ValueError: no ranks, a rank that is not in the parent, or a rank in two groups. After these errors other members raise
            CollectiveMismatchError.
        Others as :func:`new_group`, on the parent.

    Source: torch.distributed.split_group (in torch on a GPU only); MPI_Comm_split (MPI-4.1 section 7.4.2).
    """
    parent = member(parent_pg, "split_group")
    if parent is None:
        return None
    execution.enter(parent, "split_group")
    problem: Exception | None = None
    lists: list[list[int]] = []
    try:
        given = lists_of_ranks(split_ranks, "split_ranks")
        if not given or not all(given):
            raise ValueError("split_ranks cannot be None or empty")
        lists = [list(check_members(ranks, parent.size(), True)) for ranks in given]
        _apart(lists, "split")
        check_arguments(timeout, backend, group_desc)
    except Exception as error:
        problem = error
    key = () if problem else (("ranks", tuple(map(tuple, lists))),)
    composed.agree(parent, CallDescription("split_group", key, call_site(), error=problem))
    for ranks in lists:
        if parent.rank() in ranks:
            members = [parent.ranks[rank] for rank in ranks]
            limit = timedelta(seconds=parent.timeout) if timeout is None else timeout
            made: ProcessGroup = new_group(
                members, limit, use_local_synchronization=True, group_desc=group_desc, sort_ranks=False
            )
            return made
    return None


def node_group() -> ProcessGroup:
    """Return the group of the ranks of this node, in the order of their global ranks.

    All ranks of the node call this function; other nodes are not waited for. The group is made once: later calls return the
    same group without communication, until the group is destroyed. Blocks of ``zero_first(scope="node")`` use the same group.

    Raises:
        CollectiveTimeoutError: a rank of the node did not call this function within the limit of the world.
        Others as :func:`new_group`.

    Source: MPI_Comm_split_type with MPI_COMM_TYPE_SHARED (MPI-4.1 section 7.4.2).
    """
    known = state()
    execution.enter(known.world, "node_group")
    return group_of_node(known, "node_group", call_site())


def leaders_group() -> Any:
    """Return the group of the lowest rank of each node, in the order of these ranks.

    The lowest rank of each node calls this function; other ranks may call, and get ``GroupMember.NON_GROUP_MEMBER`` at once.
    The group is made once: later calls return the same group without communication, until the group is destroyed.

    Raises:
        CollectiveTimeoutError: the lowest rank of a node did not call this function within the limit of the world.
        Others as :func:`new_group`.
    """
    known = state()
    execution.enter(known.world, "leaders_group")
    node_of = known.topology.node_of
    members = tuple(node_of.index(node) for node in range(max(node_of) + 1))
    if known.world.rank() not in members:
        return NON_MEMBER
    if known.leaders is None:
        known.leaders = create_by_members(known, members, "the first rank of each node", "leaders_group", call_site())
    return known.leaders
