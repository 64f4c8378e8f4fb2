"""The blocks that this rank is in, with the checks of collectives and inner blocks inside them."""

from __future__ import annotations

import pickle
import threading
from contextlib import suppress
from typing import Any

from mpicoll.diagnosis.report.entries import name_ranks
from mpicoll.errors import CollectiveMismatchError
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.leader_blocks.members import Members
from mpicoll.leader_blocks.outcome import SharedOutcome, failure_of
from mpicoll.leader_blocks.visible_files import path_list
from mpicoll.leader_blocks.wait_policy import SignsOfLife
from mpicoll.runtime.call_site import CallSite


class Turn:
    """The value of ``with zero_first() as turn``.

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
        """Send ``value`` to the other ranks as their ``turn.value``. Called by the leader only; the value is pickled at once.

        Raises:
            RuntimeError: this rank is not the leader, or the block is over.
            PicklingError, TypeError: the value cannot be pickled (raised by pickle).
        """
        if not self.is_leader:
            raise RuntimeError(f"turn.share: rank {self.leader} shares a value; this rank reads turn.value")
        if self._over:
            raise RuntimeError("turn.share: the block is over, and the other ranks have read the shared value")
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
        """Store the outcome that the leader broadcast, and load the shared value."""
        self._outcome = outcome
        if outcome.value is not None:
            try:
                self._value = pickle.loads(outcome.value)
            except Exception as error:
                error.args = (f"the value that rank {self.leader} shared in {block} cannot be loaded here: {error}",)
                raise


class EnteredBlock:
    """One use of a block, from its beginning to its end. Nested blocks and collectives of the group find the object.

    Attributes:
        what: the name of the block for messages.
        meets: all members meet at the end of the block, so members can make no collective inside.
        turn: the turn of a leader block; None in an ordered block.
        life: the leader's signs of life; None on the other ranks.
        nesting: outcomes of this block and of the nested blocks that are open, the innermost last.
    """

    def __init__(self, what: str, members: Members, leader: int, *, meets: bool, turn: Turn | None = None) -> None:
        """Register the block, so that collectives of its group inside the block are refused."""
        self.what = what
        self.members = members
        self.leader = leader
        self.meets = meets
        self.turn = turn
        self.thread = threading.get_ident()
        self.life = SignsOfLife(members) if members.me == leader else None
        self.nesting: list[SharedOutcome] = [] if turn is None else [turn._outcome]
        members.known.blocks.append(self)
        if members.known_group is not None and (meets or members.me == leader):
            members.known_group.entered_block = self

    def end(self, error: BaseException | None) -> None:
        """Remove the block from the register."""
        if self.turn is not None:
            self.turn._over = True
        with suppress(ValueError):
            self.members.known.blocks.remove(self)
        group = self.members.known_group
        if group is not None and group.entered_block is self:
            group.entered_block = None

    def group(self) -> ProcessGroup | None:
        """Return the group, or None if the group has not been made yet."""
        return self.members.known_group

    def refuse(self, op: str, site: CallSite) -> CollectiveMismatchError:
        """Return the error of a collective of this group inside the block."""
        members = self.members
        why = "all ranks meet at the end of the block, and some ranks may already wait there"
        if members.me == self.leader:
            others = [rank for rank in members.ranks if rank != members.me]
            why = f"{_names_and_verb(others, 'of the group')} for this block to end, and cannot take part"
        hint = "" if self.turn is None else f", or use turn.share() to send all ranks a value of rank {self.leader}"
        return _refused(
            members,
            f"{op} on group {members.display} at {site} inside {self.what}: {why}. Move the call out of the block{hint}",
        )


class NestedBlock:
    """One use of a block inside another block of the same scope."""

    def __init__(self, outer: EnteredBlock, turn: Turn) -> None:
        self.outer = outer
        self.turn = turn
        outer.nesting.append(turn._outcome)

    def end(self, error: BaseException | None) -> None:
        """End the block. A failure on the leader is stored for the other ranks, which have not entered the block yet."""
        self.turn._over = True
        nesting, outcome = self.outer.nesting, self.turn._outcome
        at = next((at for at, each in enumerate(nesting) if each is outcome), len(nesting))
        del nesting[at:]
        if error is not None and self.turn.is_leader:
            outcome.failure = failure_of(error)


def _names_and_verb(ranks: list[int], where: str) -> str:
    return f"{name_ranks(ranks)} {where} {'wait' if len(ranks) != 1 else 'waits'}"


def _refused(members: Members, text: str) -> CollectiveMismatchError:
    error = CollectiveMismatchError(text)
    error.group, error.ranks = members.display, [members.me]
    return error


def find_outer(members: Members, what: str, *, nests: bool) -> EnteredBlock | None:
    """Return the open leader block of the same scope around a block, if any and if the block ``nests``.

    Args:
        what: the block, for messages.

    Raises:
        CollectiveMismatchError: ranks of this scope wait outside an open block for its end, so they can never enter this block.
    """
    thread, me = threading.get_ident(), members.me
    entered = [each for each in tuple(members.known.blocks) if isinstance(each, EnteredBlock)]
    alike = [each for each in reversed(entered) if each.members.key == members.key]
    for each in alike:
        if each.thread != thread:
            raise CollectiveMismatchError(
                f"{what} while another thread of this rank is in {each.what}: only one thread can be in a block of a group. "
                "Use a group of its own for each thread"
            )
    if nests and alike and alike[0].turn is not None:
        return alike[0]
    for each in reversed(entered):
        outside = set(each.members.ranks) & set(members.ranks) - {me}
        if me != each.leader:
            outside &= {each.leader} if each.meets else set()
        if each.thread == thread and outside:
            waiting = _names_and_verb(sorted(outside), f"of group {members.display}")
            raise _refused(
                members,
                f"{what} inside {each.what}: {waiting} for the outer block to end, and cannot enter the inner block. Put the "
                "blocks one after the other, or use the same scope for both",
            )
    return None
