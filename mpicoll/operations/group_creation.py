"""Create the communicators of a group, after all ranks have agreed on the group, so that no rank blocks in MPI."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Protocol

from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.deadlock import Wait
from mpicoll.diagnosis.deadlock_search import search
from mpicoll.diagnosis.report.entries import RankState, compress_ranks, entry_of, name_ranks
from mpicoll.diagnosis.report.report import with_calls
from mpicoll.diagnosis.wait_policy import CallWait, local_wait
from mpicoll.errors import (
    CollectiveMismatchError,
    GroupBrokenError,
    PeerFailedError,
    reason_of,
)
from mpicoll.groups.communicators import CommunicatorPair, make_pair
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import NON_MEMBER, JobWithGroups, state
from mpicoll.operations import composed
from mpicoll.operations.failures import BlockingCall
from mpicoll.runtime import signals
from mpicoll.runtime.backend_names import check_backend
from mpicoll.runtime.call_site import CallSite
from mpicoll.runtime.settings import need_timedelta
from mpicoll.transports.control import NOTHING

MOST_JOINED = 256
_TAGS = 32000  # MPI guarantees tags up to 32767


def create_group(
    known: JobWithGroups,
    members: tuple[int, ...],
    problem: Exception | None,
    site: CallSite,
    timeout: timedelta | None,
    use_local_synchronization: bool,
    group_desc: str | None,
) -> Any:
    """Make a group of ``members``; return the group, or the value of a rank that is no member.

    An error ``problem`` of this rank's arguments takes part in the agreement; ``members`` may be () then.
    """
    me = known.world.rank()
    if use_local_synchronization:
        if problem is not None and me not in members:
            raise problem  # the other members are not known
        if me not in members:
            return None
        name, pair = _make_locally(known, members, site, problem)
    else:
        candidate = known.pool.candidate(members) if me in members else NOTHING
        call = CallDescription(
            "new_group",
            () if problem else (("ranks", members),),
            site,
            error=problem,
            uneven=True,
            detail=candidate,
        )
        flags = composed.agree(known.world, call)
        known.created += 1
        name = f"{known.world.group_name}.{known.created}"
        tag = known.created % _TAGS
        made = flags.detail == NOTHING or flags.detail < 0
        if not made and me in members:
            known.pool.take(members, flags.detail)  # before other pairs are freed
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
    """A wait for members that may be very late."""

    limit: float

    def look(self) -> bool:
        """Report from time to time for which ranks this rank waits; return whether they have shown no activity for too long."""


def group_of_node(known: JobWithGroups, op: str, site: CallSite, watch: Watch | None = None) -> ProcessGroup:
    """Return the group of the ranks of this node. Only these ranks make it, once, when all have called this function.

    Args:
        op, site: the call that needs the group, and its call site.
        watch: wait policy for the other ranks; None: within the limit of the world.
    """
    if known.node is None:
        host = known.topology.hosts[known.topology.node]
        known.node = create_by_members(known, known.topology.local_ranks, f"node {host}", op, site, watch)
    return known.node


def create_by_members(
    known: JobWithGroups, members: tuple[int, ...], display: str, op: str, site: CallSite, watch: Watch | None = None
) -> ProcessGroup:
    """Make a group that only its members make, and return the group. Arguments as in :func:`group_of_node`."""
    world = known.world
    with signals.shield:
        name, pair = _make_locally(known, members, site, None, op, watch)
    group = ProcessGroup(name, pair, members.index(world.rank()), world.timeout, level=world.level, display=display)
    known.groups[name] = group
    return group


def check_members(ranks: Any, size: int, sort_ranks: bool) -> tuple[int, ...]:
    """Return the members of a group; raise TypeError or ValueError if ``ranks`` are no ranks of a world of ``size``."""
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


def lists_of_ranks(given: Any, name: str) -> list[list[Any]]:
    """Return the ranks of several groups as lists; no list for None.

    Raises:
        TypeError: ``given``, the argument ``name`` of the program, is no list of lists.
    """
    kind = type(given).__name__
    lists = []
    try:
        if isinstance(given, (str, bytes)):
            raise TypeError
        for ranks in () if given is None else given:
            kind = f"{type(given).__name__} with a value of type {type(ranks).__name__}"
            lists.append(list(ranks))
    except TypeError as error:
        raise TypeError(f"{name} must be a list of lists of integers, not {kind}") from error
    return lists


def check_arguments(timeout: Any, backend: Any, group_desc: Any) -> None:
    """Raise TypeError or ValueError if an argument of ``new_group`` is wrong."""
    if group_desc is not None and not isinstance(group_desc, str):
        raise TypeError(f"group_desc must be a string, not {type(group_desc).__name__}")
    if timeout is not None:
        need_timedelta(timeout, positive=True)
    check_backend(backend, lambda: state().world.rank() == 0)


def _shrink(known: JobWithGroups, tag: int, call: CallDescription) -> None:
    """Free communicators of destroyed groups. All ranks of the world are known to call this function."""
    with signals.guard:
        with BlockingCall(known.world, call, known.world.timeout):
            known.pool.make_world(known.world.pair.control, tag)
        for settled in composed.drive(known.world, call, known.pool.shrink(), known.world.timeout):
            if known.endpoint is None:
                continue
            known.endpoint.settle(*settled)


def _make(
    known: JobWithGroups, members: tuple[int, ...], index: int, tag: int, call: CallDescription
) -> CommunicatorPair:
    """Return the pair that all members agreed is idle, or make a new one. All members are known to call this function."""
    if index != NOTHING and index >= 0:
        pair = known.pool.take(members, index)
        known.pool.open_transports(pair, known.topology, known.settings, known.world.level)
        with signals.guard:
            settled = composed.drive(known.world, call, pair.sweep(), known.world.timeout)
            if known.endpoint is not None:
                known.endpoint.settle(*settled)
            composed.drive(known.world, call, known.pool.open_channel(pair), known.world.timeout)
        return pair
    with signals.guard, BlockingCall(known.world, call, known.world.timeout):
        pair = make_pair(known.world.pair.control, members, tag)
    pair.agreement.epoch = known.world.pair.agreement.epoch
    known.pool.open_transports(pair, known.topology, known.settings, known.world.level)
    known.pool.add(pair)
    with signals.guard:
        composed.drive(known.world, call, known.pool.open_channel(pair), known.world.timeout)
    return pair


SECOND = "!"
"""The suffix of the name of the second round of a meeting."""

_local_count: dict[tuple[str, tuple[int, ...]], int] = {}


def _make_locally(
    known: JobWithGroups,
    members: tuple[int, ...],
    site: CallSite,
    problem: Exception | None,
    op: str = "new_group",
    watch: Watch | None = None,
) -> tuple[str, CommunicatorPair]:
    """Agree among the members only: each sends its words to the first member, which sends all words to all members.

    There are two rounds. A member that withdrew before the end of the first round takes no part in the second one, so that no
    member enters the blocking calls that make a communicator.
    """
    counted = (known.world.group_name, members)
    count = _local_count.get(counted, 0)
    digest = blake2b(repr((members, count, op == "new_group")).encode(), digest_size=6)
    name = f"{known.world.group_name}.L{digest.hexdigest()}"
    leader = members[0]
    candidate = known.pool.candidate(members)
    how = ("use_local_synchronization",) if op == "new_group" else ()
    call = CallDescription(op, (("ranks", members), *how), site)
    words = (candidate, "" if problem is None else f"{type(problem).__name__}: {problem}", str(site))
    limit = known.world.timeout
    with signals.guard:
        first_wait = _JoinWait(known.world, call, limit if watch is None else watch.limit, members, name, leader, watch)
        told = _exchange_words(first_wait, words)
        wrong = _wrong(told)
        if problem is None and not wrong:
            _exchange_words(_JoinWait(known.world, call, limit, members, name + SECOND, leader), words)
    if problem is not None:
        raise problem
    if wrong:
        rank, (text, where) = min(wrong.items())
        error = CollectiveMismatchError(
            f"new_group({name_ranks(members)}, use_local_synchronization) at {site}: arguments are wrong on rank {rank} "
            f"(at {where}), which raised {text}. No group was made"
        )
        calls = [RankState(((r, r),), call.op, site=its, problem=said) for r, (said, its) in sorted(wrong.items())]
        raise with_calls(error, known.world.display, sorted(wrong), [entry_of(call, known.world.rank()), *calls])
    found = {index for index, _, _ in told.values()}
    most = max(found)
    index = most if len(found) == 1 else -1
    if index < 0:
        known.pool.disagreed(members, most)
    _local_count[counted] = count + 1
    tag = _TAGS + int.from_bytes(digest.digest(), "little") % 700
    call.wait_policy = lambda world, call, limit: _MakeWait(world, call, limit, members, name + SECOND, leader)
    return name, _make(known, members, index, tag, call)


_Words = tuple[int, str, str]
"""The words of a member: the idle pair that it proposes, the error of its arguments or "", and its call site."""


def _wrong(told: dict[int, _Words]) -> dict[int, tuple[str, str]]:
    """Return error and call site of each rank with wrong arguments."""
    return {rank: (text, where) for rank, (_, text, where) in told.items() if text}


def _exchange_words(policy: _JoinWait, words: _Words) -> dict[int, _Words]:
    """Return the words of all members; the first member gathers them and sends them to the other members."""
    board, name, leader = state().board, policy.name, policy.leader
    board.poll()
    gone = policy.given_up()
    if gone is not None:
        raise gone
    meetings = state().meetings
    while len(meetings) >= MOST_JOINED:
        del meetings[next(iter(meetings))]
    meetings[name] = 1
    others = [rank for rank in policy.members if rank != board.rank]
    if board.rank != leader:
        board.post("join", (name, words), [leader])
        local_wait(lambda: policy.poll() and (name, "all") in board.joins, policy)
        told: dict[int, _Words] = board.joins.pop((name, "all"))[leader]
        board.left.pop((name, "all"), None)
        return told
    local_wait(lambda: policy.poll() and policy.joined() >= set(others), policy)
    told = {**board.joins.pop(name, {}), leader: words}
    board.left.pop(name, None)
    board.post("join", ((name, "all"), told), others)
    return told


class _JoinWait(CallWait):
    """The wait of one member for the other listed members."""

    __slots__ = ("for_good", "leader", "members", "name", "next_poll", "watch")
    AFTERWARDS = "No group was made."

    def __init__(
        self,
        world: ProcessGroup,
        call: CallDescription,
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
        self.for_good = call.op != "new_group"  # the one group of a node: a member that withdraws does not call again

    def poll(self) -> bool:
        """Read messages, at most every 0.1 ms; return True, for use in a condition."""
        now = time.monotonic()
        if now >= self.next_poll:
            self.next_poll = now + 1e-4
            state().board.poll()
        return True

    def joined(self) -> set[int]:
        """Return the members that have sent their words to this rank, and have not withdrawn."""
        board = state().board
        return set(board.joins.get(self.name, {})) - board.left.get(self.name, set())

    def check(self, waited: float) -> BaseException | None:
        """Return an error if a listed rank has failed or ended."""
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
        """The name of the meeting of this round: a member that withdraws from one round takes part in no other."""
        return self.name.removesuffix(SECOND)

    def given_up(self) -> GroupBrokenError | None:
        """Return an error if a member has withdrawn from the meeting."""
        gone = state().board.withdrawn.get(self.meeting)
        return (
            None
            if gone is None
            else GroupBrokenError(f"{self.describe()}: rank {gone[0]} withdrew from the call: {gone[1]}")
        )

    def came(self) -> set[int]:
        """Return the members that have sent their words to this rank, also if they have withdrawn since."""
        return set(state().board.joins.get(self.name, {}))

    def meets(self) -> tuple[str, tuple[int, ...], int]:
        """Return the meeting as a group with one call: its name, its members and the number of calls."""
        return self.name, self.members, 1

    def stalled(self, waited: float) -> None:
        """Report the missing members, unless the watch does."""
        if self.watch is None:
            super().stalled(waited)

    def as_wait(self) -> Wait:
        """Return this wait for the deadlock search: a call that all listed ranks must make."""
        entry = entry_of(self.call, state().world.rank(), state().world.display, state="waits")
        return Wait(self.name, self.members, entry, seq=1, since=self.began, meeting=True)

    def withdraw(self, reason: BaseException) -> None:
        """Withdraw the words of this rank. Nothing was posted to MPI, so the world is not broken."""
        board = state().board
        if self.for_good and isinstance(reason, (PeerFailedError, GroupBrokenError)):
            pass  # the other members know, or will know
        elif self.for_good:
            board.withdrawn.setdefault(self.meeting, (board.rank, reason_of(reason)))
            board.post("withdrawn", (self.meeting, board.withdrawn[self.meeting][1], (), False), self.members)
        if board.rank != self.leader:
            board.post("unjoin", self.name, [self.leader])


class _MakeWait(_JoinWait):
    """The wait while all members make communicators; other ranks of the world have no part in it."""

    __slots__ = ()
    AFTERWARDS = CallWait.AFTERWARDS

    def withdraw(self, reason: BaseException) -> None:
        """Withdraw from the world, as a call may be pending on its communicator."""
        CallWait.withdraw(self, reason)
