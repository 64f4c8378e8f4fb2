"""Make calls with wrong arguments, which raise on all members."""

from __future__ import annotations

import math
import time
from typing import Any, NoReturn

from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.job_state import JobState
from mpicoll.errors import DistError, wrong_argument
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import NON_MEMBER, member_or_warn
from mpicoll.operations import execution
from mpicoll.runtime import signals
from mpicoll.runtime.call_site import CallSite, call_site

GUESS_SECONDS = 10.0
"""How long a rank waits for a call on the world if its ``group=`` is no group: the other ranks may be in no such call."""

ELSEWHERE_SECONDS = 1.0
"""How long all other ranks must have waited in calls on other groups until this rank waits for them no longer."""


def refuse(
    group: ProcessGroup, op: str, site: CallSite, error: Exception, alias: str = "", limit: float = math.inf
) -> NoReturn:
    """Make a call with wrong arguments: this rank raises the error, the other members raise CollectiveMismatchError."""
    call = CallDescription(op, (), site, error=wrong_argument(error), alias=alias)
    execution.run(group, call, None, outputs=[], limit=min(group.timeout, limit))
    raise AssertionError("a call with wrong arguments always raises") from error


def is_group(given: Any) -> bool:
    """Return whether a ``group=`` argument is a group, also a group that was destroyed or that this rank is not in."""
    return given is None or isinstance(given, ProcessGroup) or (isinstance(given, int) and given == NON_MEMBER)


def refuse_group(given: Any, op: str, error: Exception, alias: str = "") -> NoReturn:
    """Raise the error of a ``group=`` argument. If the argument is no group, ranks that make a call on the world raise, too.

    Ranks that make the call on another group get the error of a call that this rank does not make.
    """
    known = registry.current()
    if known is None or is_group(given) or known.world.gone():
        raise error
    try:
        execution.enter(known.world, op)
        if _is_called(known):
            refuse(known.world, op, call_site(), error, alias, GUESS_SECONDS)
    except DistError:
        pass  # the ranks in the call on the world have withdrawn
    raise error from None


def _is_called(known: JobState) -> bool:
    """Wait until another rank makes this call on the world, right or wrong, and return whether one does.

    Nothing is posted meanwhile: if no rank makes the call, the world can still be used.
    """
    world, board = known.world, known.board
    began = elsewhere = time.monotonic()
    while (now := time.monotonic()) < began + GUESS_SECONDS and not (board.failed or board.exited):
        with signals.guard:
            answers = board.ask(world.group_name, world.ranks).values()
        # A rank that answers and does not wait is in this function, too.
        if any(each is not None and (each.calls > world.calls or each.waits.problem) for each in answers):
            return True
        if None in answers:
            elsewhere = now
        if now > elsewhere + ELSEWHERE_SECONDS:
            return False
        time.sleep(0.02)
    return False


def member(given: Any, op: str) -> ProcessGroup | None:
    """Return the group of a collective, or warn and return None if this rank is not in the group."""
    try:
        return member_or_warn(given, op)
    except ValueError as error:
        refuse_group(given, op, error)
