"""Leader blocks: a block that one rank, the leader, runs first while the other ranks of its scope wait.

The leader runs its block without communicating. At the end of the block the leader broadcasts the block's outcome and what it
shares; the other ranks wait in this broadcast. After their own blocks all ranks meet once more, so that each rank learns of a
failure of any other.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Protocol

import numpy as np

from mpicoll.diagnosis.call import Call, name_ranks
from mpicoll.errors import ARGUMENT, CollectiveMismatchError
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import JobWithGroups
from mpicoll.leader_blocks.members import Members
from mpicoll.leader_blocks.outcome import (
    SharedOutcome,
    broadcast_outcome,
    failure_of,
    first_failed,
    peer_failed,
    pop_interruption,
)
from mpicoll.leader_blocks.visible_files import VisibleFiles, await_visible, path_list, record_files
from mpicoll.leader_blocks.wait_policy import LeaderWatch, SignsOfLife
from mpicoll.operations import execution
from mpicoll.runtime import signals
from mpicoll.runtime.call_site import Site, call_site
from mpicoll.runtime.settings import to_seconds
from mpicoll.transports.base import Kind, Movement

_END, _FAILURE = "end of ", "failure in "
"""Prefixes of the names of the calls at the end of a block."""


class Turn:
    """What ``with zero_first() as turn`` gives.

    Attributes:
        is_leader: whether this rank is the leader, which runs its block first.
        leader: global rank of the leader; 0 without a default group.
    """

    def __init__(self, leader: int, is_leader: bool, alone: bool = False) -> None:
        self.leader = leader
        self.is_leader = is_leader
        self._alone = alone
        self._outcome = SharedOutcome()
        self._value: Any = None
        self._over = False

    @property
    def value(self) -> Any:
        """The value that the leader shared, a copy on the other ranks; None if the leader shared nothing."""
        return self._value

    def share(self, value: Any) -> None:
        """Give ``value`` to the other ranks as their ``turn.value``. Only the leader calls it; the value is pickled at once.

        Raises:
            RuntimeError: this rank is not the leader, or the block is over.
            PicklingError, TypeError: the value cannot be pickled (raised by pickle).
        """
        if not self.is_leader:
            raise RuntimeError(f"turn.share: rank {self.leader} shares a value; this rank reads turn.value")
        if self._over:
            raise RuntimeError("turn.share: the block is over, and the other ranks have read what was shared in it")
        if not self._alone:
            self._outcome.value = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        self._value = value

    def publish(self, *paths: Any) -> None:
        """Add paths to ``publish=`` of the leader's block (see :func:`zero_first`). On other ranks the call has no effect.

        Raises:
            TypeError: an argument is not a path.
            RuntimeError: the block is over.
        """
        if self._over:
            raise RuntimeError("turn.publish: the block is over")
        self._outcome.paths += path_list(paths)

    def _read(self, outcome: SharedOutcome, block: str) -> None:
        """Store the outcome that the leader broadcast, and load the value that it shared."""
        self._outcome = outcome
        if outcome.value is not None:
            try:
                self._value = pickle.loads(outcome.value)
            except Exception as error:
                error.args = (f"what rank {self.leader} shared in {block} cannot be loaded here: {error}",)
                raise


class Block(Protocol):
    """A context manager that ranks run in an agreed order."""

    def describe(self) -> str:
        """Return the block as messages name it."""


class EnteredBlock:
    """One use of a block, from its beginning to its end. Nested blocks and each collective of the group look it up.

    Attributes:
        meets: all members meet at the end of the block, so members can make no collective inside.
        nesting: outcomes of this block and of the nested blocks that are open, the innermost last.
    """

    def __init__(self, block: Block, members: Members, leader: int, *, meets: bool) -> None:
        self.block = block
        self.members = members
        self.leader = leader
        self.meets = meets
        self.thread = threading.get_ident()
        self.life: SignsOfLife | None = None
        self.turn: Turn | None = None
        self.nesting: list[SharedOutcome] = []

    def begin(self) -> None:
        """Register the block, so that collectives of its group inside the block are refused."""
        if self.turn is not None:
            self.nesting.append(self.turn._outcome)
        self.members.known.blocks.append(self)
        group = self.members.known_group
        if group is not None and (self.meets or self.members.me == self.leader):
            group.turn = self

    def end(self) -> None:
        """Remove the block from the register."""
        with suppress(ValueError):
            self.members.known.blocks.remove(self)
        group = self.members.known_group
        if group is not None and group.turn is self:
            group.turn = None

    def group(self) -> ProcessGroup | None:
        """Return the group, or None if the group has not been made yet."""
        return self.members.known_group

    def refuse(self, op: str, site: Site) -> CollectiveMismatchError:
        """Return the error of a collective of this group inside the block."""
        me = self.members.me
        others = [rank for rank in self.members.ranks if rank != me]
        if me == self.leader:
            why = f"{name_ranks(others)} of the group {_verb(others)} for this block to end, and cannot take part"
        else:
            why = "all ranks meet at the end of the block, some may be there already"
        error = CollectiveMismatchError(
            f"{op} on group {self.members.display} at {site} inside {self.block.describe()}: {why}. Move it out of the block"
            + (
                f", or use turn.share() to give the others a value of rank {self.leader}"
                if self.turn is not None
                else ""
            )
        )
        error.group, error.ranks = self.members.display, [me]
        return error


def _verb(ranks: list[int]) -> str:
    return "wait" if len(ranks) != 1 else "waits"


def find_outer(members: Members, kind: str, block: Block) -> EnteredBlock | None:
    """Return the open block of the same scope around this one, if any.

    Raises:
        CollectiveMismatchError: ranks of this scope wait outside an open block for its end, so they can never enter this one.
    """
    thread = threading.get_ident()
    entered = [each for each in tuple(members.known.blocks) if isinstance(each, EnteredBlock)]
    mine = [each for each in entered if each.thread == thread]
    other = next((each for each in entered if each.thread != thread and each.members.key == members.key), None)
    if other is not None:
        raise CollectiveMismatchError(
            f"{block.describe()} while another thread of this rank is in {other.block.describe()}: one at a time for each "
            "group. Give each thread a group of its own"
        )
    same = next((each for each in reversed(mine) if each.members.key == members.key), None)
    if same is not None and isinstance(same.block, LeaderBlock) and kind == "zero_first":
        return same
    for each in reversed(mine):
        me, outside = members.me, set(each.members.ranks) & set(members.ranks)
        if isinstance(each.block, LeaderBlock) and me != each.leader:
            outside &= {each.leader} if each.meets else set()
        outside -= {me}
        if outside:
            waiting = sorted(outside)
            error = CollectiveMismatchError(
                f"{block.describe()} inside {each.block.describe()}: {name_ranks(waiting)} of group {members.display} "
                f"{_verb(waiting)} for the outer block to end, and cannot enter the inner one. Put the blocks one "
                "after the other, or give them the same scope"
            )
            error.group, error.ranks = members.display, [me]
            raise error
    return None


class LeaderBlock:
    """The context manager of :func:`zero_first` and of the functions built on it. A program can use it several times."""

    def __init__(
        self,
        name: Any,
        scope: Any,
        timeout: Any,
        rejoin: bool,
        publish: Any,
        visibility_timeout: Any,
        *,
        op: str = "zero_first",
        applies: bool = True,
        check: Callable[[JobWithGroups], None] | None = None,
    ) -> None:
        self.op = op
        self.site = call_site()
        if isinstance(publish, Iterator):
            publish = list(publish)  # the block may be used again
        self._given = name, timeout, publish, visibility_timeout
        self._scope = scope
        self._rejoin = bool(rejoin)
        self._applies = applies
        self._check = check
        self._name: str | None = None
        self._limit: float | None = None
        self._paths: list[str] = []
        self._visible = 0.0
        self._entered: list[EnteredBlock | NestedBlock | None] = []

    def describe(self) -> str:
        """Return the block as messages name it."""
        name = self._given[0]
        return f"{self.op}({name!r}) at {self.site}" if isinstance(name, str) else f"{self.op} at {self.site}"

    def _what(self) -> str:
        return repr(self._name) if self._name else self.describe()

    def _call(self, where: str = "") -> Call:
        """Return the description of a call of this block; ``where`` tells the block's calls apart."""
        key: tuple[Any, ...] = (("name", self._name),) if self._name is not None else ()
        if not self._rejoin:
            key = (*key, ("rejoin", False))
        return Call(where + self.op, key, self.site, compared=True)

    def _read_arguments(self, known: JobWithGroups) -> None:
        name, timeout, publish, visible = self._given
        execution.check_name(name)
        self._name = name
        self._limit = None if timeout is None else to_seconds(timeout, "timeout")
        self._paths = path_list(publish)
        self._visible = to_seconds(visible, "visibility_timeout")
        if self._check is not None:
            self._check(known)

    def __enter__(self) -> Turn:
        known = registry.current() if self._applies else None
        if known is None:
            return self._alone(0)
        members = Members(known, self._scope)
        problem: Exception | None = None
        try:
            self._read_arguments(known)
        except Exception as error:
            problem = error
        if len(members.ranks) == 1:
            if problem is not None:
                raise problem
            return self._alone(members.me)
        members.check_usable(self.op)
        outer = find_outer(members, "zero_first", self)
        if problem is not None:
            if outer is not None:
                raise problem
            self._refuse(members, problem)
        if outer is not None:
            return self._pass_through(outer)
        leader = members.ranks[0]
        opened = EnteredBlock(self, members, leader, meets=self._rejoin)
        opened.turn = turn = Turn(leader, members.me == leader)
        if turn.is_leader:
            turn._outcome.paths += self._paths
            opened.life = SignsOfLife(members)
        else:
            self._await_leader(opened)
        opened.begin()
        self._entered.append(opened)
        return turn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = self._entered.pop()
        if isinstance(error, GeneratorExit):
            error = None  # a generator was not read to its end: the block ended well
        if isinstance(opened, NestedBlock):
            opened.end(error)
        if not isinstance(opened, EnteredBlock):
            return
        opened.end()
        members, turn = opened.members, opened.turn
        assert turn is not None
        turn._over = True
        if os.getpid() != members.known.pid:
            return  # a forked child is no rank
        if not turn.is_leader:
            self._meet(members, error, 0.0)
            return
        with signals.guard:
            self._end_as_leader(opened, turn, error)

    def _end_as_leader(self, opened: EnteredBlock, turn: Turn, error: BaseException | None) -> None:
        """Broadcast the outcome of the leader's block, and meet the other ranks."""
        members = opened.members
        written: list[VisibleFiles] = []
        problem = error
        assert opened.life is not None
        try:
            if problem is None:
                written = record_files(turn._outcome.all_paths())
        except BaseException as found:  # of any kind: the other ranks are waiting
            problem = found
        finally:
            opened.life.stop()
        try:
            if problem is not None:
                outcome = False, pickle.dumps(failure_of(problem))
            else:
                outcome = (
                    True,
                    b"" if turn._outcome.is_empty() and not written else pickle.dumps((turn._outcome, written)),
                )
            broadcast_outcome(members.group(self.op, self.site), self._call, 0, outcome)
        except BaseException:
            if error is None:
                raise
            return  # the first failure is the one to raise
        if problem is None:
            interruption = pop_interruption()
            self._meet(members, interruption, self._visible if written else 0.0)
            if interruption is not None:
                raise interruption
        elif error is None:
            raise problem

    def _alone(self, leader: int) -> Turn:
        self._entered.append(None)
        return Turn(leader, True, alone=True)

    def _refuse(self, members: Members, problem: Exception) -> NoReturn:
        """Raise the error of wrong arguments; where calls are compared, all ranks raise."""
        setattr(problem, ARGUMENT, True)
        call = Call(self.op, (), self.site, error=problem)
        execution.run(members.group(self.op, self.site), call, None, outputs=[])
        raise AssertionError("a call with wrong arguments always raises") from problem

    def _pass_through(self, outer: EnteredBlock) -> Turn:
        """Return the turn of a block nested in another of the same scope; its outcome is broadcast with the outer block's."""
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
                    f"{self.describe()} inside {outer.block.describe()}: rank {outer.leader} has not entered it there, so "
                    "nothing is known of its turn. All ranks enter the same blocks inside a block"
                )
            if outcome.failure is not None:
                raise first_failed(outer.members, outer.leader, self.describe(), outcome.failure)
            turn._read(outcome, self.describe())
        outer.nesting.append(turn._outcome)
        self._entered.append(NestedBlock(outer, turn))
        return turn

    def _await_leader(self, opened: EnteredBlock) -> None:
        """Wait until the leader has ended its block, and read the outcome.

        Raises:
            FirstFailedError: the leader's block failed.
            TimeoutError: the files that the leader wrote are not seen here in time.
        """
        members, turn, leader = opened.members, opened.turn, opened.leader
        assert turn is not None
        with signals.guard:
            watch = LeaderWatch(members, leader, self._what(), self._limit)
            well, details = broadcast_outcome(members.group(self.op, self.site, watch), self._call, 0, watch=watch)
            interruption = pop_interruption()
            if not well:
                if interruption is not None:
                    raise interruption
                raise first_failed(members, leader, self.describe(), pickle.loads(details))
            written: list[VisibleFiles] = []
            try:
                if interruption is not None:
                    raise interruption
                if details:
                    outcome, written = pickle.loads(details)
                    turn._read(outcome, self.describe())
            except BaseException as error:
                self._meet(members, error, self._visible if written else 0.0)
                raise
        if written:
            try:
                writer = f"rank {leader} ({members.host(leader)})"
                await_visible(written, self._visible, writer=writer, host=members.host(members.me))
            except BaseException as error:
                self._meet(members, error, self._visible)
                raise

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
        interruption: BaseException | None = None
        try:
            with signals.guard:
                execution.enter(group, self.op)
                move = Movement(Kind.ALL_REDUCE, recv=failed, op="MAX")
                execution.run(group, self._call(_END), move, outputs=[failed], limit=group.timeout + longer)
                interruption = pop_interruption()
                if not failed[0]:
                    if interruption is not None:
                        raise interruption
                    return
                first = size - int(failed[0])
                outcome = (False, pickle.dumps(failure_of(error))) if first == me and error is not None else None
                _, details = broadcast_outcome(group, lambda where: self._call(f"{where}{_FAILURE}"), first, outcome)
        except BaseException:
            if error is None:
                raise
            return  # the first failure is the one to raise
        if error is None:
            if interruption is not None:
                raise interruption
            raise peer_failed(members, members.ranks[first], self.describe(), pickle.loads(details))


class NestedBlock:
    """One use of a block inside another block of the same scope."""

    def __init__(self, outer: EnteredBlock, turn: Turn) -> None:
        self.outer = outer
        self.turn = turn

    def end(self, error: BaseException | None) -> None:
        """End the block. A failure on the leader is stored for the other ranks, which have not entered the block yet."""
        self.turn._over = True
        nesting, outcome = self.outer.nesting, self.turn._outcome
        if any(each is outcome for each in nesting):
            while nesting[-1] is not outcome:
                nesting.pop()
            nesting.pop()
        if error is not None and self.turn.is_leader:
            outcome.failure = failure_of(error)
