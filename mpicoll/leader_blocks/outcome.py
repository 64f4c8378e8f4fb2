"""The outcome of a block on one rank, and the broadcast of the outcome to the ranks that wait for the block."""

from __future__ import annotations

import functools
import pickle
import struct
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import FirstFailedError, PeerFailedError, in_one_line
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.leader_blocks.members import Members
from mpicoll.leader_blocks.visible_files import VisibleFiles
from mpicoll.leader_blocks.wait_policy import LeaderWait, LeaderWatch
from mpicoll.operations import execution
from mpicoll.runtime import signals
from mpicoll.runtime.call_site import traceback_site
from mpicoll.runtime.signals import Terminated
from mpicoll.transports.base import Kind, Movement

_HEAD = struct.Struct("<?Q")
_MESSAGE_BYTES = 512
_INLINE_BYTES = _MESSAGE_BYTES - _HEAD.size
_TEXT_LENGTH, _TRACE_LENGTH = 1000, 20_000


@dataclass
class SharedOutcome:
    """The outcome that the leader broadcasts when its block has ended well.

    Attributes:
        value: the shared value, pickled.
        paths: files and folders that the other ranks must see.
        written: the records of these files and folders, when the block has ended.
        label: key of a nested block: its function, with its name or else its place in the program.
        failure: how a nested block failed.
        inner: the nested blocks, in the order in which the leader entered them.
        matched: how many of ``inner`` this rank has entered or skipped.
    """

    value: bytes | None = None
    paths: list[str] = field(default_factory=list)
    written: list[VisibleFiles] = field(default_factory=list)
    label: tuple[str, ...] = ()
    failure: BlockFailure | None = None
    inner: list[SharedOutcome] = field(default_factory=list)
    matched: int = 0

    def all_paths(self) -> Iterator[str]:
        """Yield the paths of the block and of its nested blocks that ended well."""
        if self.failure is None:
            yield from self.paths
            for outcome in self.inner:
                yield from outcome.all_paths()

    def next_inner(self, label: tuple[str, ...]) -> SharedOutcome | None:
        """Return the leader's next nested block with this label; skip blocks that only the leader entered."""
        for at in range(self.matched, len(self.inner)):
            if self.inner[at].label == label:
                self.matched = at + 1
                return self.inner[at]
        return None


@dataclass(frozen=True)
class BlockFailure:
    """The failure of a rank's block, as other ranks read it."""

    kind: str
    text: str
    trace: str
    place: str

    def __str__(self) -> str:
        return (f"{self.kind}: {self.text}" if self.text else self.kind) + (f" (at {self.place})" if self.place else "")


def failure_of(error: BaseException) -> BlockFailure:
    """Return the failure that describes an exception."""
    place = traceback_site(error.__traceback__)
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        text = in_one_line(error)
    except Exception:
        text = "(its text cannot be made)"
    kind = "SystemExit" if isinstance(error, SystemExit) else type(error).__name__
    return BlockFailure(kind, text[:_TEXT_LENGTH], trace[-_TRACE_LENGTH:], place)


def broadcast_outcome(
    group: ProcessGroup,
    call: Callable[[str], CallDescription],
    root: int,
    outcome: SharedOutcome | BaseException | None = None,
    watch: LeaderWatch | None = None,
) -> tuple[bool, bytes]:
    """Broadcast the outcome of a block, in one small message if possible.

    Args:
        call: makes the description of this rank's call.
        root: rank in the group.
        outcome: on the root: the outcome, or the exception that ended the block.
        watch: on the other members: the watch over the root; None: wait within the group's limit.

    Returns:
        On all members whether the block ended well, and details: the pickled SharedOutcome (b"" if it is empty), or the pickled
        BlockFailure.
    """
    head, details = np.zeros(_MESSAGE_BYTES, np.uint8), b""
    if isinstance(outcome, BaseException):
        details = pickle.dumps(failure_of(outcome))
    elif outcome is not None and outcome != SharedOutcome():
        details = pickle.dumps(outcome)
    _HEAD.pack_into(head.data, 0, isinstance(outcome, SharedOutcome), len(details))
    head[_HEAD.size : _HEAD.size + len(details)] = np.frombuffer(details[:_INLINE_BYTES], np.uint8)
    this = call("")
    execution.enter(group, this.op)
    this.key = (*this.key, ("root", group.ranks[root]))
    limit = group.timeout
    if watch is not None:
        this.wait_policy, limit = functools.partial(LeaderWait, watch), watch.limit
    execution.run(group, this, Movement(Kind.BROADCAST, recv=head, root=root), outputs=[head], limit=limit)
    well, length = _HEAD.unpack_from(head.data)
    if length <= _INLINE_BYTES:
        return well, head[_HEAD.size : _HEAD.size + length].tobytes()
    body = np.frombuffer(details, np.uint8).copy() if outcome is not None else np.empty(length, np.uint8)
    rest = call("more of ")
    rest.key = (*this.key, ("bytes", length))
    execution.run(group, rest, Movement(Kind.BROADCAST, recv=body, root=root), outputs=[body])
    return well, body.tobytes()


def pop_interruption() -> BaseException | None:
    """Remove and return the exception of a signal handler that was noted during a completed call, to be raised later.

    The termination of the process stays noted, and ends the process when the call returns.
    """
    noted = signals.guard.pop()
    if isinstance(noted, Terminated):
        signals.guard.noted = noted
        return None
    return noted


def first_failed(
    members: Members, leader: int, block: str, how: BlockFailure, *, in_order: bool = False
) -> FirstFailedError:
    """Return the error of a rank that does not run its block since an earlier rank's block failed.

    Args:
        in_order: the ranks run the block one after the other.
    """
    position = "before this rank in" if in_order else "first in"
    error = FirstFailedError(
        f"rank {leader} ({members.host(leader)}), which goes {position} {block}, failed: {how}; "
        f"rank {members.me} did not run the block\n"
        f"The traceback of rank {leader}:\n{how.trace}"
    )
    error.group, error.ranks, error.reporter = members.display, (leader,), leader
    return error


def peer_failed(members: Members, rank: int, block: str, how: BlockFailure) -> PeerFailedError:
    """Return the error of a rank whose block ended well while another rank's block failed."""
    error = PeerFailedError(f"rank {rank} failed in {block}: {how}")
    error.group, error.ranks, error.reporter = members.display, (rank,), rank
    return error
