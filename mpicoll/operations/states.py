"""The states of a request, and the transitions between them.

=========  ========================================================================================================
state      the request
=========  ========================================================================================================
IDLE       is not started
QUEUED     has its number in the order of the group, and waits until earlier calls have posted their rounds
POSTED     has posted its round (a message: is given to MPI)
DISPUTED   waits for the exchange of what the members called, because the members differ
AGREED     is known to be made by all members, and waits until the data of earlier calls has been posted
MOVING     moves its data
COMPLETE   is over, and its result is there
FAILED     is over, and has an error
=========  ========================================================================================================
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol


class State(enum.IntEnum):
    """The state of a request; those from COMPLETE on are its end."""

    IDLE = 0
    QUEUED = 1
    POSTED = 2
    DISPUTED = 3
    AGREED = 4
    MOVING = 5
    COMPLETE = 6
    FAILED = 7


IDLE, QUEUED, POSTED, DISPUTED, AGREED, MOVING, COMPLETE, FAILED = State

TRANSITIONS = frozenset(
    (
        (IDLE, QUEUED),  # started
        (IDLE, MOVING),  # a message, which makes no round
        (QUEUED, POSTED),
        (QUEUED, AGREED),  # a call that makes no round
        (POSTED, AGREED),
        (POSTED, DISPUTED),
        (AGREED, MOVING),
        (MOVING, COMPLETE),
        *((state, FAILED) for state in (IDLE, QUEUED, POSTED, DISPUTED, AGREED, MOVING)),
        (COMPLETE, IDLE),
        (FAILED, IDLE),
    )
)
"""All transitions (from, to). A request fails from MOVING also if sizes that are exchanged before the data do not fit."""


_ALLOWED = [sum(1 << new for old, new in TRANSITIONS if old == state) for state in State]
"""For each state the states that may follow, as bits: the hash of a State is a function in Python, which takes 0.3 us."""


class HasState(Protocol):
    """What has a state."""

    state: State


Observer = Callable[[HasState, State, State], None]

_observers: list[Observer] = []


def to(request: HasState, new: State) -> None:
    """Change the state of a request, and call the observers: the only place that does so."""
    old = request.state
    assert _ALLOWED[old] >> new & 1, f"no transition from {old.name} to {new.name}"
    request.state = new
    for observer in _observers:
        observer(request, old, new)


def through(request: HasState, *states: State) -> None:
    """Make several transitions, one after the other, as :func:`to`."""
    if _observers:
        for state in states:
            to(request, state)
    else:
        request.state = states[-1]


def observe(observer: Observer) -> Callable[[], None]:
    """Call ``observer(request, old, new)`` after each transition of each request; return what ends that."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)
