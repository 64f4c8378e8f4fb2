"""End calls: errors of MPI, exceptions of signal handlers, outcomes of futures; and show the watchdog calls inside MPI."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.job_state import current, hopeless, job
from mpicoll.diagnosis.wait_policy import CallWait
from mpicoll.errors import CollectiveMismatchError, DistBackendError, GroupBrokenError, wrong_argument
from mpicoll.groups.communicators import MpiError, mpi_text
from mpicoll.runtime import handler_calls, waiting, watchdog
from mpicoll.runtime.mpi_library import retain_for_ever, retain_frames

if TYPE_CHECKING:
    from mpicoll.groups.process_group import ProcessGroup


forked = False
"""Whether this process is a forked child of a rank."""


def _in_child() -> None:
    global forked
    forked = True


os.register_at_fork(after_in_child=_in_child)


def in_child(operation: str) -> RuntimeError:
    """Return the error of a forked child of a rank, which may not communicate."""
    return RuntimeError(
        f"{operation}: this is a forked child (process {os.getpid()}) of rank {job().world.rank()}: only the process "
        "that started MPI may communicate. Start workers with the spawn method, and let them return their results"
    )


def tells_why(group: ProcessGroup) -> bool:
    """Return whether the board knows why a group is broken, so that a wait raises the reason."""
    known = current()
    if known is None:
        return False
    board = known.board
    return bool(board.failed or board.exited or group.group_name in board.withdrawn)


def broken(group: ProcessGroup, call: CallDescription) -> GroupBrokenError:
    """Return the error of a pending call of a group that was broken by another call."""
    error = GroupBrokenError(f"{call.describe()} on group {group.display} at {call.site}: {group.broken}")
    unknown = [each.error for each in group.started() if isinstance(each.error, CollectiveMismatchError)]
    if unknown:  # with the report, which the program has not seen
        error.__cause__, error.reporter = unknown[0], unknown[0].reporter
    return error


def wrap(error: MpiError, group: ProcessGroup, call: CallDescription) -> DistBackendError:
    """Give the group up; return an error of MPI as an error of the library, with operation, group, rank and text of MPI."""
    group.give_up(f"MPI reported an error in {call.op}")
    hint = (
        ""
        if group.level == "full"
        else (
            f". At check level {group.level!r} different calls may cause this: run with MPICOLL_CHECK=full to see them"
        )
    )
    return DistBackendError(
        f"{call.describe()} on group {group.display}, rank {group.ranks[group.rank()]}, at {call.site}: {mpi_text(error)}{hint}"
    )


def guarded(test: Callable[[], bool], group: ProcessGroup, call: CallDescription) -> Callable[[], bool]:
    """Return ``test`` with errors of MPI as errors of the library."""

    def wrapped() -> bool:
        try:
            return test()
        except MpiError as error:
            raise wrap(error, group, call) from error

    return wrapped


def ends_within(seconds: float, test: Callable[[], bool]) -> Callable[[], bool]:
    """Return ``test``, which is also true after some seconds."""
    end = time.monotonic() + seconds
    return lambda: test() or time.monotonic() >= end


def refuse_handler(operation: str) -> None:
    """Raise RuntimeError if a signal handler of the program makes a call while its thread is in a call of the library."""
    if threading.get_ident() not in waiting.calling and handler_calls.found():
        error = RuntimeError(
            f"{operation}: a signal handler has made this call while its rank was in another call, which the other ranks do not "
            "expect: record the signal in the handler, and make the call afterwards, or use on_signal"
        )
        raise wrong_argument(error)


class Described(Protocol):
    """A request, which makes the description of its call when that is needed."""

    @property
    def call(self) -> CallDescription:
        """The description."""


class BlockingCall:
    """Let the watchdog check a blocking MPI call inside the block.

    Args:
        call: the description of the call; or its request, whose description is made only if the watchdog needs it.
    """

    __slots__ = ("_call", "group", "limit", "since")

    def __init__(self, group: ProcessGroup, call: CallDescription | Described, limit: float) -> None:
        self.group = group
        self.limit = limit
        self.since = 0.0
        self._call = call

    def describe(self) -> str:
        """Return the call, its group and its place in the program."""
        call = self._call if isinstance(self._call, CallDescription) else self._call.call
        return f"{call.describe()} on group {self.group.display} at {call.site}"

    def hopeless(self, inside: float) -> str:
        """Return why the call can never end, or ""; ``inside``: seconds since the call began."""
        return hopeless(self.group, inside)

    def __enter__(self) -> None:
        self.since = time.monotonic()
        watchdog.active[threading.get_ident()] = self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        del watchdog.active[threading.get_ident()]


class begun:
    """Give the group up if an exception is raised inside the block, which posts a message.

    A signal handler of the program may raise between any two lines: with the message posted and not counted, or counted and
    no request that would wait for the message.

    Args:
        held: the memory that MPI may use then, which is retained for ever.
    """

    __slots__ = ("_call", "_group", "_held", "_limit", "_peer", "_tag")

    def __init__(
        self, group: ProcessGroup, call: CallDescription, limit: float, held: Any, *, peer: int, tag: int
    ) -> None:
        self._group, self._call, self._limit, self._held, self._peer, self._tag = group, call, limit, held, peer, tag

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        retain_for_ever(self._held)
        retain_frames(error)
        if isinstance(error, MpiError):
            raise wrap(error, self._group, self._call) from error
        if self._group.broken is None:
            CallWait(self._group, self._call, self._limit, self._peer, self._tag).withdraw(error)


def over(policy: CallWait, polled: float) -> BaseException | None:
    """Return an error if a request that the program polls can never complete, or was polled for longer than its limit."""
    known = current()
    if known is None:
        return None
    waiting.serve()
    if policy.call.explaining and polled < policy.limit:
        return None
    is_over = polled >= policy.limit and time.monotonic() >= policy.stays_until
    return policy.ended(known.board, polled, polled=True) or (policy.timed_out(polled) if is_over else None)


def settle(future: Future[Any], request: Any) -> None:
    """Give a future the outcome of a request; callbacks of the program run now."""
    with waiting.callbacks():
        if request.error is not None:
            future.set_exception(request.error)
        else:
            request.group.futures.pop(id(request), None)
            future.set_result(request.outputs)
