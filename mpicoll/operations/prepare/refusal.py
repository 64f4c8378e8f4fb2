"""Make calls with wrong arguments, which raise on all members."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import DistError, wrong_argument
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import NON_MEMBER, member_or_warn
from mpicoll.operations import execution
from mpicoll.runtime.call_site import CallSite, call_site

GUESS_SECONDS = 10.0
"""How long a rank waits for a call on the world if its ``group=`` is no group: the other ranks may be in no such call."""


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
        refuse(known.world, op, call_site(), error, alias, GUESS_SECONDS)
    except DistError:
        raise error from None  # the other ranks are not in a call on the world


def member(given: Any, op: str) -> ProcessGroup | None:
    """Return the group of a collective, or warn and return None if this rank is not in the group."""
    try:
        return member_or_warn(given, op)
    except ValueError as error:
        refuse_group(given, op, error)
