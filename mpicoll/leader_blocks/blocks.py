"""Leader blocks, which one rank, the leader, runs first while the other ranks of its scope wait; ordered blocks.

The leader runs its block without communicating. At the end of the block the leader broadcasts the block's outcome with the shared
value; the other ranks wait in this broadcast. After their own blocks all ranks meet once more, so that each rank learns of a
failure of any other rank.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import CollectiveMismatchError
from mpicoll.groups import registry
from mpicoll.groups.registry import JobWithGroups
from mpicoll.leader_blocks.entered_block import EnteredBlock, NestedBlock, Turn, find_outer
from mpicoll.leader_blocks.members import Members
from mpicoll.leader_blocks.outcome import (
    SharedOutcome,
    broadcast_outcome,
    first_failed,
    peer_failed,
    pop_interruption,
)
from mpicoll.leader_blocks.visible_files import await_visible, path_list, record_files
from mpicoll.leader_blocks.wait_policy import LeaderWatch
from mpicoll.operations import execution
from mpicoll.operations.prepare.refusal import is_group, refuse
from mpicoll.runtime import signals
from mpicoll.runtime.call_site import call_site
from mpicoll.runtime.settings import has_type, need_bool, need_integer, to_seconds
from mpicoll.transports.base import Kind, Movement

_END, _FAILURE = "end of ", "failure in "
"""Prefixes of the names of the calls at the end of a block."""


class Block:
    """A context manager that ranks run in an agreed order. A program can use it several times."""

    def __init__(self, op: str, scope: Any) -> None:
        self.op = op
        self.site = call_site()
        self._scope = scope
        self._problem: Exception | None = None  # of the arguments, for all ranks
        self._entered: list[EnteredBlock | NestedBlock | None] = []

    def describe(self) -> str:
        """Return the name of the block for messages."""
        return f"{self.op} at {self.site}"

    def _call(self, where: str = "") -> CallDescription:
        """Return the description of a call of this block; ``where`` distinguishes the block's calls."""
        return CallDescription(where + self.op, (), self.site, compared=True)

    def _members(self, known: JobWithGroups) -> Members:
        """Return the ranks of the scope; for a scope that is none the world, which :meth:`_refuse` tells of the error."""
        try:
            return Members(known, self._scope)
        except ValueError as error:
            if is_group(self._scope):
                raise
            self._problem = error
            return Members(known, "world")

    def _refuse(self, members: Members, problem: Exception) -> NoReturn:
        """Raise the error of wrong arguments; if calls are compared, all ranks raise."""
        refuse(members.group(self.op, self.site), self.op, self.site, problem)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = self._entered.pop()
        if entered is None:
            return
        if isinstance(error, GeneratorExit):
            error = None  # a generator was not read to its end: the block ended well
        entered.end(error)
        if isinstance(entered, EnteredBlock) and os.getpid() == entered.members.known.pid:  # a forked child is no rank
            self._end(entered, error)

    def _end(self, entered: EnteredBlock, error: BaseException | None) -> None:
        """Broadcast the outcome of this rank's block, and wait for the ends of the other ranks' blocks."""
        raise NotImplementedError

    def _await_outcome(
        self, members: Members, place: int, what: str, limit: float | None = None
    ) -> tuple[bool, bytes, BaseException | None]:
        """Wait for the end of another rank's block.

        Args:
            place: rank in the group of the other rank.
            what: the block, for the notices about the wait.

        Returns:
            Whether the block ended well, the details (:func:`broadcast_outcome`), and the exception that a signal handler of the
            program raised meanwhile.
        """
        watch = LeaderWatch(members, members.ranks[place], what, limit)
        well, details = broadcast_outcome(members.group(self.op, self.site, watch), self._call, place, watch=watch)
        return well, details, pop_interruption()


class LeaderBlock(Block):
    """The context manager of :func:`zero_first` and of the functions built on it."""

    def __init__(
        self,
        name: Any = None,
        scope: Any = "world",
        timeout: Any = None,
        rejoin: bool = True,
        publish: Any = (),
        visibility_timeout: Any = 60.0,
        *,
        op: str = "zero_first",
        local_rank: Any = None,
        local: Any = None,
        problem: Exception | None = None,
    ) -> None:
        super().__init__(op, scope)
        self._problem = problem
        try:
            if isinstance(publish, Iterator):
                publish = list(publish)  # the block may be used again
            self._rejoin = need_bool(rejoin, "rejoin")
            if local is not None:
                self._scope = "node" if need_bool(local, "local") else "world"
        except Exception as error:
            self._problem, self._rejoin = error, True
        self._arguments = name, timeout, publish, visibility_timeout
        self._local_rank = local_rank
        self._name: str | None = name if has_type(name, str) else None
        self._limit: float | None = None
        self._paths: list[str] = []
        self._visible = 0.0

    def describe(self) -> str:
        """Return the name of the block for messages."""
        return super().describe() if self._name is None else f"{self.op}({self._name!r}) at {self.site}"

    def _call(self, where: str = "") -> CallDescription:
        call = super()._call(where)
        if self._name is not None:
            call.key = (("name", self._name),)
        if not self._rejoin:
            call.key = (*call.key, ("rejoin", False))
        return call

    def _read_arguments(self, known: JobWithGroups) -> None:
        name, timeout, publish, visible = self._arguments
        execution.check_name(name)
        self._limit = None if timeout is None else to_seconds(timeout, "timeout")
        self._paths = path_list(publish)
        self._visible = to_seconds(visible, "visibility_timeout")
        local_rank = self._local_rank
        if local_rank is None:
            return
        need_integer(local_rank, "local_rank")
        if int(local_rank) != known.topology.local_rank:
            raise ValueError(
                f"local_rank={local_rank} on rank {known.world.rank()}, which is number {known.topology.local_rank} on its "
                "node: pass LOCAL_RANK. If rank 0 of the world is to go first, use zero_first()"
            )

    def __enter__(self) -> Turn:
        known = registry.current()
        if known is None and self._problem is not None:
            raise self._problem
        if known is None or (has_type(self._local_rank, int, np.integer) and self._local_rank == -1):
            return self._alone(0)  # -1: the program is not distributed
        members = self._members(known)
        problem = self._problem
        try:
            self._read_arguments(known)
        except Exception as error:
            problem = problem or error
        if len(members.ranks) == 1:
            if problem is not None:
                raise problem
            return self._alone(members.me)
        members.check_usable(self.op)
        what = self.describe()
        outer = find_outer(members, what, nests=True)
        if problem is not None:
            if outer is not None:
                raise problem
            self._refuse(members, problem)
        if outer is not None:
            return self._pass_through(outer)
        leader = members.ranks[0]
        turn = Turn(leader, members.me == leader)
        if turn.is_leader:
            turn._outcome.paths += self._paths
        else:
            self._await_leader(members, turn)
        self._entered.append(EnteredBlock(what, members, leader, meets=self._rejoin, turn=turn))
        return turn

    def _alone(self, leader: int) -> Turn:
        self._entered.append(None)
        return Turn(leader, True, alone=True)

    def _pass_through(self, outer: EnteredBlock) -> Turn:
        """Return the turn of a block inside another block of the same scope; both outcomes are broadcast together."""
        assert outer.turn is not None
        turn = Turn(outer.leader, outer.turn.is_leader)
        around = outer.nesting[-1]
        label = (self.op, f"name {self._name}" if self._name is not None else str(self.site))
        if turn.is_leader:
            turn._outcome.label = label
            turn._outcome.paths += self._paths
            around.inner.append(turn._outcome)
        else:
            outcome = around.next_inner(label)
            if outcome is None:
                raise CollectiveMismatchError(
                    f"{self.describe()} inside {outer.what}: the leader, rank {outer.leader}, has not entered the inner "
                    "block there. Enter the same blocks inside a block on all ranks"
                )
            if outcome.failure is not None:
                raise first_failed(outer.members, outer.leader, self.describe(), outcome.failure)
            turn._read(outcome, self.describe())
        self._entered.append(NestedBlock(outer, turn))
        return turn

    def _await_leader(self, members: Members, turn: Turn) -> None:
        """Wait until the leader has ended its block, and read the outcome.

        Raises:
            FirstFailedError: the leader's block failed.
            TimeoutError: the files that the leader wrote are not seen here in time.
        """
        with signals.guard:
            what = repr(self._name) if self._name else self.describe()
            well, details, interruption = self._await_outcome(members, 0, what, self._limit)
            if not well:
                raise interruption or first_failed(members, turn.leader, self.describe(), pickle.loads(details))
        try:
            if interruption is not None:
                raise interruption
            if details:
                turn._read(pickle.loads(details), self.describe())
            writer = f"rank {turn.leader} ({members.host(turn.leader)})"
            await_visible(turn._outcome.written, self._visible, writer=writer, host=members.host(members.me))
        except BaseException as error:
            self._meet(members, error, self._visible if turn._outcome.written else 0.0)
            raise

    def _end(self, entered: EnteredBlock, error: BaseException | None) -> None:
        """Broadcast the outcome of the leader's block, and meet the other ranks."""
        members, life, turn = entered.members, entered.life, entered.turn
        if life is None or turn is None:
            self._meet(members, error, 0.0)
            return
        with signals.guard:
            problem = error
            try:
                if problem is None:
                    turn._outcome.written = record_files(turn._outcome.all_paths())
            except BaseException as found:  # any exception: the other ranks are waiting
                problem = found
            finally:
                life.stop()
            outcome = turn._outcome if problem is None else problem
            try:
                broadcast_outcome(members.group(self.op, self.site), self._call, 0, outcome)
            except BaseException:
                if error is None:
                    raise
                return  # the first failure is the one to raise
            if problem is None:
                problem = pop_interruption()
                self._meet(members, problem, self._visible if turn._outcome.written else 0.0)
            if problem is not None and error is None:
                raise problem

    def _meet(self, members: Members, error: BaseException | None, longer: float) -> None:
        """Meet the other ranks at the end of the block.

        Args:
            error: the exception that this rank is about to raise.
            longer: seconds beyond the group's limit that other ranks may need.

        Raises:
            PeerFailedError: the block of another rank failed, and the block of this rank did not.
        """
        if not self._rejoin:
            return
        group = members.group(self.op, self.site)
        size, me = group.size(), group.rank()
        failed = np.array([size - me if error is not None else 0], np.int64)
        first, details = size, b""
        try:
            with signals.guard:
                execution.enter(group, self.op)
                move = Movement(Kind.ALL_REDUCE, recv=failed, op="MAX")
                execution.run(group, self._call(_END), move, outputs=[failed], limit=group.timeout + longer)
                interruption = pop_interruption()
                first -= int(failed[0])
                if first < size:
                    outcome = error if first == me else None
                    _, details = broadcast_outcome(
                        group, lambda where: self._call(f"{where}{_FAILURE}"), first, outcome
                    )
        except BaseException:
            if error is None:
                raise
            return  # the first failure is the one to raise
        if error is None and interruption is not None:
            raise interruption
        if error is None and first < size:
            raise peer_failed(members, members.ranks[first], self.describe(), pickle.loads(details))


class OrderedBlock(Block):
    """The context manager of :func:`ordered`."""

    def __init__(self, scope: Any) -> None:
        super().__init__("ordered", "world" if scope is None else scope)

    def __enter__(self) -> None:
        known = registry.current()
        members = None if known is None else self._members(known)
        if self._problem is not None and (members is None or len(members.ranks) == 1):
            raise self._problem
        if members is None or len(members.ranks) == 1:
            self._entered.append(None)
            return
        members.check_usable(self.op)
        what = self.describe()
        find_outer(members, what, nests=False)
        if self._problem is not None:
            self._refuse(members, self._problem)
        with signals.guard:
            place = members.ranks.index(members.me)
            interruption: BaseException | None = None
            for earlier in range(place):
                interruption = self._await(members, earlier, interruption, before=True)
            if interruption is not None:
                broadcast_outcome(members.group(self.op, self.site), self._call, place, interruption)
                raise interruption
        self._entered.append(EnteredBlock(what, members, members.me, meets=True))

    def _end(self, entered: EnteredBlock, error: BaseException | None) -> None:
        members = entered.members
        assert entered.life is not None
        entered.life.stop()
        place = members.ranks.index(members.me)
        with signals.guard:
            try:
                outcome = SharedOutcome() if error is None else error
                broadcast_outcome(members.group(self.op, self.site), self._call, place, outcome)
            except BaseException:
                if error is None:
                    raise
            if error is not None:
                return
            interruption = pop_interruption()
            for later in range(place + 1, len(members.ranks)):
                interruption = self._await(members, later, interruption, before=False)
            if interruption is not None:
                raise interruption

    def _await(
        self, members: Members, place: int, interruption: BaseException | None, *, before: bool
    ) -> BaseException | None:
        """Wait for the end of another rank's block; return the first exception that a signal handler raised meanwhile.

        Args:
            place: rank in the group of the other rank.
            interruption: the exception of a signal handler that was noted before.
            before: whether the other rank runs its block before this rank.
        """
        rank = members.ranks[place]
        well, details, noted = self._await_outcome(members, place, self.describe())
        interruption = interruption or noted
        if not well:
            if interruption is not None:
                raise interruption
            how = pickle.loads(details)
            if before:
                raise first_failed(members, rank, self.describe(), how, in_order=True)
            raise peer_failed(members, rank, self.describe(), how)
        return interruption
