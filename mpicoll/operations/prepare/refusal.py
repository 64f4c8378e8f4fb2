"""Make calls with wrong arguments, which raise on all members."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.job_state import JobState
from mpicoll.errors import ARGUMENT, DistError, wrong_argument
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import NON_MEMBER, member_or_warn
from mpicoll.operations import execution
from mpicoll.runtime import handler_calls, signals, waiting
from mpicoll.runtime.call_site import CallSite, call_site
from mpicoll.runtime.settings import has_type

GUESS_SECONDS = 10.0
"""How long a rank waits for a call on the world if its ``group=`` is no group: the other ranks may be in no such call."""

ASK_EVERY = 0.02
"""Seconds between two questions to the other ranks."""

ELSEWHERE_SECONDS = 1.0
"""How long all other ranks must have waited in calls on other groups until this rank waits for them no longer."""


def refuse(
    group: ProcessGroup, op: str, site: CallSite, error: Exception, alias: str = "", limit: float = math.inf
) -> NoReturn:
    """Make a call with wrong arguments: this rank raises the error, the other members raise CollectiveMismatchError.

    An error that a signal handler of the program has raised says nothing about the arguments. Then the call is not made.
    """
    interruption = handler_calls.raised(error)
    if interruption is not None:
        raise interruption
    call = CallDescription(op, (), site, error=wrong_argument(error), alias=alias)
    execution.run(group, call, None, outputs=[], limit=min(group.timeout, limit))
    raise AssertionError("a call with wrong arguments always raises") from error


def is_group(given: Any) -> bool:
    """Return whether a ``group=`` argument is a group, also a group that was destroyed or that this rank is not in."""
    return given is None or has_type(given, ProcessGroup) or (has_type(given, int) and given == NON_MEMBER)


def refuse_group(given: Any, op: str, error: Exception, alias: str = "") -> NoReturn:
    """Raise the error of a ``group=`` argument. If the argument is no group, ranks that make a call on the world raise, too.

    Ranks that make the call on another group get the error of a call that this rank does not make.
    """
    known = registry.current()
    if handler_calls.raised(error) is None:
        setattr(error, ARGUMENT, True)
    if known is None or is_group(given) or known.world.gone():
        raise error
    with known.world.lock:
        known.world.tell_mismatch(GUESS_SECONDS)
    try:
        execution.enter(known.world, op)
        wait = _CallOfOthers(known)
        with signals.guard:
            waiting.wait(lambda: wait.is_made, wait)
        refuse(known.world, op, call_site(), error, alias, GUESS_SECONDS)
    except DistError:
        pass  # no rank makes the call on the world, or the ranks in it have withdrawn
    raise error from None


class _CallOfOthers:
    """Wait policy of a rank whose ``group=`` is no group: until another rank makes a call on the world, right or wrong.

    Nothing is posted meanwhile: if no rank makes the call, the world can still be used.

    Attributes:
        is_made: whether a rank makes the call.
    """

    stall_warn = math.inf
    stays_until = 0.0

    def __init__(self, known: JobState) -> None:
        self.limit = GUESS_SECONDS
        self.is_made = False
        self._known = known
        self._elsewhere = self._next = 0.0

    def check(self, waited: float) -> BaseException | None:
        """Ask the other ranks; return an error if one has ended, or all have waited in calls on other groups for a while."""
        world, board = self._known.world, self._known.board
        if board.failed or board.exited:
            return self.timed_out(waited)
        if waited < self._next:
            return None
        self._next = waited + ASK_EVERY
        answers = board.ask(world.group_name, world.ranks).values()
        # A rank that answers and does not wait is in this wait, too.
        self.is_made = any(each is not None and (each.calls > world.calls or each.waits.problem) for each in answers)
        if None in answers:
            self._elsewhere = waited
        return self.timed_out(waited) if waited > self._elsewhere + ELSEWHERE_SECONDS else None

    def stalled(self, waited: float) -> None:
        """Print nothing: no rank has to make the call."""

    def timed_out(self, waited: float) -> BaseException:
        """Return the error of a wait in which no rank has made the call; only this file sees it."""
        return DistError("no other rank makes a call on the world")

    def withdraw(self, reason: BaseException) -> None:
        """Do nothing, as nothing was posted."""


def member(given: Any, op: str) -> ProcessGroup | None:
    """Return the group of a collective, or warn and return None if this rank is not in the group."""
    try:
        return member_or_warn(given, op)
    except ValueError as error:
        refuse_group(given, op, error)
