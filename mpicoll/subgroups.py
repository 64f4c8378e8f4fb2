"""Making groups: new_group, agreed upon before anything could block."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Protocol

from mpicoll import execution, waiting
from mpicoll.buffers import staging
from mpicoll.checks.call import NOTHING, Call, Site, call_site, compress_ranks, name_ranks
from mpicoll.checks.deadlock import Wait
from mpicoll.checks.entries import Entry, entry_of
from mpicoll.checks.report import with_calls
from mpicoll.communicators import Pair, make_pair
from mpicoll.errors import CollectiveMismatchError, GroupBrokenError, PeerFailedError, in_one_line
from mpicoll.groups import NON_MEMBER, ProcessGroup, State, member_or_warn, resolve, state
from mpicoll.objects import all_gather_object
from mpicoll.patience import CallWait, joined, local_wait, search
from mpicoll.runtime import check_backend

__all__ = [
    "Watch",
    "group_of_node",
    "leaders_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "node_group",
    "split_group",
]

MOST_JOINED = 256
_TAGS = 32000  # MPI guarantees tags up to 32767


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

    Called by all ranks of the world in the same order, members or not; with ``use_local_synchronization`` by the members
    alone.

    Args:
        ranks: global ranks of the members; None: all.
        timeout: limit of every wait on the group; default that of the world.
        backend: None or "mpi"; others as in :func:`init_process_group`.
        pg_options, device_id: taken and ignored.
        use_local_synchronization: only the members call, also where the world was given up: those that are left can go on so.
        group_desc: a name for messages.
        sort_ranks: number the members by their global ranks; False: in the order given.

    Returns:
        The ProcessGroup; ``GroupMember.NON_GROUP_MEMBER`` (-100) on ranks that are not members, and None on those with
        ``use_local_synchronization`` (as torch).

    Raises:
        TypeError, ValueError: wrong arguments (ranks repeated, out of range), on all ranks alike; with
            ``use_local_synchronization`` wrong ``ranks`` raise on this rank alone, as they do not say who else is meant.
        CollectiveMismatchError: the ranks asked for different groups; at check level ``roll`` also where their calls on a
            destroyed group of the same ranks had differed.
        CollectiveTimeoutError: a rank that has to call it did not, within the limit of the world.
        PeerFailedError, PeerExitedError, DeadlockError, GroupBrokenError: as :func:`mpicoll.broadcast`, on the world.
        DistBackendError: MPI has no communicator left.

    Source: torch.distributed.new_group; MPI_Comm_create_group (MPI-4.1 section 7.4.2).
    """
    site = call_site()
    known = state()
    execution.enter(known.world, "new_group", apart=bool(use_local_synchronization))
    problem: Exception | None = None
    members: tuple[int, ...] = ()
    try:
        members = _members(ranks, known.world.size(), sort_ranks)
        _check(timeout, backend, group_desc)
        if known.world.rank() in members:
            known.pool.check_room(members)
    except Exception as error:
        problem = error
    with waiting.shield:
        return _create(known, members, problem, site, timeout, use_local_synchronization, group_desc)


def _create(
    known: State,
    members: tuple[int, ...],
    problem: Exception | None,
    site: Site,
    timeout: timedelta | None,
    use_local_synchronization: bool,
    group_desc: str | None,
) -> Any:
    me = known.world.rank()
    if use_local_synchronization:
        if problem is not None and me not in members:
            raise problem  # nobody can know who else was meant
        if me not in members:
            return None
        name, pair = _make_locally(known, members, site, problem)
    else:
        candidate = known.pool.candidate(members) if me in members else NOTHING
        call = Call(
            "new_group",
            () if problem else (("ranks", members),),
            site,
            error=problem,
            uneven=True,
            detail=candidate,
        )
        flags = execution.agree(known.world, call, known.world.timeout)
        known.created += 1
        name = f"{known.world.group_name}.{known.created}"
        tag = known.created % _TAGS
        made = flags.detail == NOTHING or flags.detail < 0
        if not made and me in members:
            known.pool.take(members, flags.detail)  # before others are given back
        if known.pool.full():
            _shrink(known, tag, call)
        if me not in members:
            if made:
                known.pool.made_together(None)
            return NON_MEMBER
        if flags.detail == NOTHING:
            known.pool.disagreed(members, flags.most)
        try:
            pair = _make(known, members, flags.detail, tag, call)
        except BaseException:
            if made:
                known.pool.made_together(None)
            raise
        if made:
            known.pool.made_together(pair)
    limit = known.world.timeout if timeout is None else timeout.total_seconds()
    in_order = list(members) == sorted(members)
    display = group_desc or (f"[{compress_ranks(members)}]" if in_order else str(list(members)))
    group = ProcessGroup(
        name, pair, members.index(me), limit, level=known.world.level, display=display, desc=group_desc
    )
    known.groups[name] = group
    return group


class Watch(Protocol):
    """A wait for members that are known to come late."""

    limit: float

    def look(self) -> bool:
        """Say now and then for whom this rank waits; whether there has been no sign of life for too long."""


def new_subgroups(
    group_size: int | None = None,
    group: Any = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Divide a group into groups of equal size, of ranks that stand side by side in it.

    Called by all ranks of the world, as :func:`new_group` is.

    Args:
        group_size: ranks in each; it must divide the size of the group. None: the number of GPUs that this rank sees.
        group: the group that is divided; default the world. All ranks of the world pass the group that they are in, which may be
            another one on other ranks: then the groups of all are made. On a rank outside a group nothing can be known of it.
        timeout, backend, pg_options, group_desc: of each of the groups, as for :func:`new_group`.

    Returns:
        The group that this rank is in, and all of those that the group is divided into, in order
        (``GroupMember.NON_GROUP_MEMBER`` for those it is not in).

    Raises:
        ValueError: the size is not positive, too large, or does not divide that of the group; there is no GPU to count.
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
            raise ValueError("Invalid process group specified: this rank is not in it")
        size = _gpus() if group_size is None else group_size
        lists = _divided(found, size)
    except Exception as error:
        problem = error
    if group is None or group is known.world:
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
    try:
        return staging.runtime().count()
    except ImportError as error:
        raise ValueError(
            f"Default group size only takes effect when CUDA is available: pass group_size ({error})"
        ) from error


def _divided(group: ProcessGroup, size: Any) -> list[list[int]]:
    whole = group.size()
    if not hasattr(size, "__index__") or isinstance(size, bool):
        raise TypeError(f"group_size must be an integer, not {type(size).__name__}")
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

    Called by all ranks of the world, as :func:`new_group` is.

    Args:
        ranks_per_subgroup_list: the global ranks of each group.
        timeout, backend, pg_options, group_desc: of each of the groups, as for :func:`new_group`.

    Returns:
        The group that this rank is in, or None, and all of them in order (``GroupMember.NON_GROUP_MEMBER`` for those it is not
        in).

    Raises:
        ValueError: the list is empty, or a rank is in two groups; then none is made (torch makes those before).
        Others as :func:`new_group`.

    Source: torch.distributed.new_subgroups_by_enumeration.
    """
    execution.enter(state().world, "new_subgroups_by_enumeration")
    problem: Exception | None = None
    lists: list[list[int]] = []
    try:
        if not ranks_per_subgroup_list:
            raise ValueError("The arg 'ranks_per_subgroup_list' cannot be empty")
        lists = [list(ranks) for ranks in ranks_per_subgroup_list]
        _apart(lists, "subgroup")
    except Exception as error:
        problem = error
    return _subgroups("new_subgroups_by_enumeration", lists, problem, timeout, backend, pg_options, group_desc)


def _apart(lists: list[list[int]], word: str) -> None:
    """Raise ValueError when a rank stands in two of the lists."""
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
    """Agree on all groups at once, so that what is wrong with one of them raises on all ranks before any is made."""
    known = state()
    if problem is None:
        try:
            lists = [list(_members(ranks, known.world.size(), False)) for ranks in lists]
            _check(timeout, backend, group_desc)
        except Exception as error:
            problem = error
    key = () if problem else (("groups", len(lists)), ("ranks", tuple(map(tuple, lists))))
    execution.agree(known.world, Call(op, key, call_site(), error=problem), known.world.timeout)
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
    """Make groups of the ranks of a group, each rank being in one of them at most.

    Called by all members of the parent.

    Args:
        parent_pg: the group; default the world.
        split_ranks: the ranks of each new group, as numbered in the parent.
        timeout, group_desc, backend: as for :func:`new_group`.
        pg_options: taken and ignored.

    Returns:
        The group that this rank is in; None where it is in none of them, and on ranks that are not in the parent.

    Raises:
        ValueError: nothing to split, a rank that the parent has not, or one that is in two groups.
        Others as :func:`new_group`, on the parent.

    Source: torch.distributed.split_group (there on a GPU alone); MPI_Comm_split (MPI-4.1 section 7.4.2).
    """
    parent = member_or_warn(parent_pg, "split_group")
    if parent is None:
        return None
    execution.enter(parent, "split_group")
    problem: Exception | None = None
    lists: list[list[int]] = []
    try:
        if not split_ranks or not all(split_ranks):
            raise ValueError("split_ranks cannot be None or empty")
        lists = [list(_members(ranks, parent.size(), True)) for ranks in split_ranks]
        _apart(lists, "split")
        _check(timeout, backend, group_desc)
    except Exception as error:
        problem = error
    key = () if problem else (("ranks", tuple(map(tuple, lists))),)
    execution.agree(parent, Call("split_group", key, call_site(), error=problem), parent.timeout)
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

    Called by all ranks of the node; no other node is waited for. The group is made once: later calls return it without
    communication, until it is destroyed. The blocks of ``zero_first(scope="node")`` are of the same group.

    Raises:
        CollectiveTimeoutError: a rank of the node did not call it within the limit of the world.
        Others as :func:`new_group`.
    """
    known = state()
    execution.enter(known.world, "node_group")
    return group_of_node(known, "node_group", call_site())


def leaders_group() -> Any:
    """Return the group of the first rank of each node, in the order of the nodes, which are numbered by their lowest rank.

    Called by these ranks; on the others it returns ``GroupMember.NON_GROUP_MEMBER`` at once. The group is made once: later
    calls return it without communication, until it is destroyed.

    Raises:
        CollectiveTimeoutError: the first rank of a node did not call it within the limit of the world.
        Others as :func:`new_group`.
    """
    known = state()
    execution.enter(known.world, "leaders_group")
    node_of = known.topology.node_of
    members = tuple(node_of.index(node) for node in range(max(node_of) + 1))
    if known.world.rank() not in members:
        return NON_MEMBER
    if known.leaders is None:
        known.leaders = _by_members(known, members, "the first rank of each node", "leaders_group", call_site())
    return known.leaders


def group_of_node(known: State, op: str, site: Site, watch: Watch | None = None) -> ProcessGroup:
    """Return the group of the ranks of this node; made once, when all of them have come, and by them alone.

    Args:
        op, site: what the program needs it for, and where.
        watch: how to wait for the others; None: within the limit of the world.
    """
    if known.node is None:
        host = known.topology.hosts[known.topology.node]
        known.node = _by_members(known, known.topology.local_ranks, f"node {host}", op, site, watch)
    return known.node


def _by_members(
    known: State, members: tuple[int, ...], display: str, op: str, site: Site, watch: Watch | None = None
) -> ProcessGroup:
    world = known.world
    with waiting.shield:
        name, pair = _make_locally(known, members, site, None, op, watch)
    group = ProcessGroup(name, pair, members.index(world.rank()), world.timeout, level=world.level, display=display)
    known.groups[name] = group
    return group


def _members(ranks: Any, size: int, sort_ranks: bool) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(size))
    if isinstance(ranks, (str, bytes)) or not hasattr(ranks, "__iter__"):
        raise TypeError(f"ranks must be a list of integers or None, not {type(ranks).__name__}")
    given = list(ranks)
    if any(not hasattr(rank, "__index__") or isinstance(rank, bool) for rank in given):
        raise TypeError(f"ranks must be a list of integers, got {given}")
    given = [int(rank) for rank in given]
    if not given:
        raise ValueError("the new group's ranks must not be empty")
    if len(set(given)) != len(given):
        raise ValueError(f"the new group's ranks list must not contain duplicate entries, got {given}")
    wrong = [rank for rank in given if not 0 <= rank < size]
    if wrong:
        raise ValueError(
            f"Rank {wrong[0]} is out of range. Valid ranks are 0 to {size - 1} (world_size={size}): the new group's ranks are "
            f"{given}"
        )
    return tuple(sorted(given) if sort_ranks else given)


def _check(timeout: Any, backend: Any, group_desc: Any) -> None:
    if group_desc is not None and not isinstance(group_desc, str):
        raise TypeError(f"group_desc must be a string, not {type(group_desc).__name__}")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout!r}")
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, got {timeout}")
    check_backend(backend)


def _shrink(known: State, tag: int, call: Call) -> None:
    """Free communicators of destroyed groups; all ranks of the world are known to be here."""
    with waiting.guard:
        with execution.native(known.world, call, known.world.timeout):
            known.pool.meet_all(known.world.pair.control, tag)
        for settled in execution.drive(known.world, call, known.pool.shrink(), known.world.timeout):
            if known.base is None:
                continue
            known.base.settle(*settled)


def _make(known: State, members: tuple[int, ...], index: int, tag: int, call: Call) -> Pair:
    """Take the pair that all members agreed is idle, or make a new one; all members are known to be here."""
    if index != NOTHING and index >= 0:
        pair = known.pool.take(members, index)
        known.pool.furnish(pair, known.topology, known.settings, known.world.level)
        with waiting.guard:
            settled = execution.drive(known.world, call, pair.sweep(), known.world.timeout)
            if known.base is not None:
                known.base.settle(*settled)
            execution.drive(known.world, call, known.pool.meet(pair), known.world.timeout)
        return pair
    with waiting.guard, execution.native(known.world, call, known.world.timeout):
        pair = make_pair(known.world.pair.control, members, tag)
    pair.lane.epoch = known.world.pair.lane.epoch
    known.pool.furnish(pair, known.topology, known.settings, known.world.level)
    known.pool.add(pair)
    with waiting.guard:
        execution.drive(known.world, call, known.pool.meet(pair), known.world.timeout)
    return pair


SECOND = "!"
"""What the name of the second round of a meeting ends with."""

_local_count: dict[tuple[str, tuple[int, ...]], int] = {}


def _make_locally(
    known: State,
    members: tuple[int, ...],
    site: Site,
    problem: Exception | None,
    op: str = "new_group",
    watch: Watch | None = None,
) -> tuple[str, Pair]:
    """Agree among the members alone: each tells the first of them, which tells all when everybody has come.

    In two rounds: a member that gave up before it heard of the first never answers it, so nobody goes on into the blocking
    calls that make a communicator.
    """
    counted = (known.world.group_name, members)
    count = _local_count.get(counted, 0)
    digest = blake2b(repr((members, count, op == "new_group")).encode(), digest_size=6)
    name = f"{known.world.group_name}.L{digest.hexdigest()}"
    leader = members[0]
    candidate = known.pool.candidate(members)
    how = ("use_local_synchronization",) if op == "new_group" else ()
    call = Call(op, (("ranks", members), *how), site)
    words = (candidate, "" if problem is None else f"{type(problem).__name__}: {problem}", str(site))
    limit = known.world.timeout
    with waiting.guard:
        first_wait = _JoinWait(known.world, call, limit if watch is None else watch.limit, members, name, leader, watch)
        told = _gather_and_tell(first_wait, words)
        wrong = _wrong(told)
        if problem is None and not wrong:
            _gather_and_tell(_JoinWait(known.world, call, limit, members, name + SECOND, leader), words)
    if problem is not None:
        raise problem
    if wrong:
        rank, (text, where) = min(wrong.items())
        error = CollectiveMismatchError(
            f"new_group({name_ranks(members)}, use_local_synchronization) at {site}: arguments are wrong on rank {rank} "
            f"(at {where}), which raised {text}. Nothing was made"
        )
        calls = [Entry(((r, r),), call.op, site=its, problem=said) for r, (said, its) in sorted(wrong.items())]
        raise with_calls(error, known.world.display, sorted(wrong), [entry_of(call, known.world.rank()), *calls])
    found = {index for index, _, _ in told.values()}
    most = max(found)
    index = most if len(found) == 1 else -1
    if index < 0:
        known.pool.disagreed(members, most)
    _local_count[counted] = count + 1
    tag = _TAGS + int.from_bytes(digest.digest(), "little") % 700
    call.patience = lambda world, call, limit: _MakeWait(world, call, limit, members, name + SECOND, leader)
    return name, _make(known, members, index, tag, call)


_Words = tuple[int, str, str]
"""What a member says: the idle pair it knows, what is wrong with its arguments or "", and where it called."""


def _wrong(told: dict[int, _Words]) -> dict[int, tuple[str, str]]:
    """Return what is wrong, and where, on the ranks that say so."""
    return {rank: (text, where) for rank, (_, text, where) in told.items() if text}


def _gather_and_tell(patience: _JoinWait, words: _Words) -> dict[int, _Words]:
    """Return what every member says, when all have said it; the first of them gathers and tells the others."""
    board, name, leader = state().board, patience.name, patience.leader
    board.poll()
    gone = patience.given_up()
    if gone is not None:
        raise gone
    while len(joined) >= MOST_JOINED:
        del joined[next(iter(joined))]
    joined[name] = 1
    others = [rank for rank in patience.members if rank != board.rank]
    if board.rank != leader:
        board.post("join", (name, words), [leader])
        local_wait(lambda: patience.poll() and (name, "all") in board.joins, patience)
        told: dict[int, _Words] = board.joins.pop((name, "all"))[leader]
        board.left.pop((name, "all"), None)
        return told
    local_wait(lambda: patience.poll() and patience.joined() >= set(others), patience)
    told = {**board.joins.pop(name, {}), leader: words}
    board.left.pop(name, None)
    board.post("join", ((name, "all"), told), others)
    return told


class _JoinWait(CallWait):
    """The wait of one member for the others that were listed."""

    __slots__ = ("for_good", "leader", "members", "name", "next_poll", "watch")
    AFTERWARDS = "No group was made."

    def __init__(
        self,
        world: ProcessGroup,
        call: Call,
        limit: float,
        members: tuple[int, ...],
        name: str,
        leader: int,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(world, call, limit)
        self.members = members
        self.name = name
        self.leader = leader
        self.next_poll = 0.0
        self.watch = watch
        self.for_good = call.op != "new_group"  # the one group of a node: who gives it up does not come again

    def poll(self) -> bool:
        """Read messages, at most every tenth of a millisecond; always True, so that it can stand in a condition."""
        now = time.monotonic()
        if now >= self.next_poll:
            self.next_poll = now + 1e-4
            state().board.poll()
        return True

    def joined(self) -> set[int]:
        """Return the members that have told this rank that they are here, and have not left."""
        board = state().board
        return set(board.joins.get(self.name, {})) - board.left.get(self.name, set())

    def check(self, waited: float) -> BaseException | None:
        """Return an error when a listed rank failed or ended."""
        self.looks += 1
        board = state().board
        self.note()
        search.look_for_dead(board, waited)
        certain = search.verdict(board)
        if certain is not None:
            return certain
        for rank in self.members:
            if rank in board.failed:
                return self.because_failed(board.failed[rank], waited)
        leads = board.rank == self.leader
        ended = [board.exited[rank] for rank in self.members if rank in board.exited]
        missing = [exit_ for exit_ in ended if exit_.rank == self.leader or (leads and exit_.rank not in self.joined())]
        if missing:
            return self.because_exited(
                [replace(exit_, reason=f"{exit_.reason} without this call") for exit_ in missing], waited
            )
        gone = self.given_up()
        if gone is not None:
            return gone
        if self.watch is not None and self.watch.look():
            return self.timed_out(waited)
        return search.look(waited)

    @property
    def meeting(self) -> str:
        """The name of the meeting that this round is of: who gives one round up comes to no other."""
        return self.name.removesuffix(SECOND)

    def given_up(self) -> GroupBrokenError | None:
        """Return an error when a member has given the meeting up for good."""
        gone = state().board.withdrawn.get(self.meeting)
        return None if gone is None else GroupBrokenError(f"{self.describe()}: rank {gone[0]} gave it up: {gone[1]}")

    def came(self) -> set[int]:
        """Return the members that have told this rank that they are here, also if they have left since."""
        return set(state().board.joins.get(self.name, {}))

    def meets(self) -> tuple[str, tuple[int, ...], int]:
        """Return the meeting, as if it was a group with one call, and who has to come."""
        return self.name, self.members, 1

    def stalled(self, waited: float) -> None:
        """Say who is missing, where the watch does not."""
        if self.watch is None:
            super().stalled(waited)

    def as_wait(self) -> Wait:
        """Return this wait as a search for deadlocks sees it: a call that all listed ranks have to come to."""
        entry = entry_of(self.call, state().world.rank(), state().world.display, state="waits")
        return Wait(self.name, self.members, entry, seq=1, since=self.began, meeting=True)

    def give_up(self, reason: BaseException) -> None:
        """Take this rank's word back; nothing was posted to MPI, so the world is still good."""
        board = state().board
        if self.for_good and isinstance(reason, (PeerFailedError, GroupBrokenError)):
            pass  # the others know, or will
        elif self.for_good:
            board.withdrawn.setdefault(self.meeting, (board.rank, in_one_line(reason) or type(reason).__name__))
            board.post("withdrawn", (self.meeting, board.withdrawn[self.meeting][1], ()), self.members)
        if board.rank != self.leader:
            board.post("unjoin", self.name, [self.leader])


class _MakeWait(_JoinWait):
    """The wait of members that have all come, while they make communicators: the other ranks of the world do not matter."""

    __slots__ = ()
    AFTERWARDS = CallWait.AFTERWARDS

    def give_up(self, reason: BaseException) -> None:
        """Withdraw from the world: something may be under way on its communicator."""
        CallWait.give_up(self, reason)
