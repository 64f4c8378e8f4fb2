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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mpicoll.runtime.native import found as extension


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
    """An object with a state."""

    state: State


Observer = Callable[[HasState, State, State], None]

observers: list[Observer] = []
"""The functions that :func:`observe` has added."""


def to(request: HasState, new: State) -> None:
    """Change the state of a request, and call the observers: the only place in Python that does so."""
    old = request.state
    assert _ALLOWED[old] >> new & 1, f"no transition from {old.name} to {new.name}"
    request.state = new
    for observer in observers:
        observer(request, old, new)


def through(request: HasState, *states: State) -> None:
    """Make several transitions, one after the other, as :func:`to`."""
    if observers:
        for state in states:
            to(request, state)
    else:
        request.state = states[-1]


def observe(observer: Observer) -> Callable[[], None]:
    """Call ``observer(request, old, new)`` after each transition of each request; return a function that removes it."""
    observers.append(observer)
    return lambda: observers.remove(observer)


@dataclass(slots=True, init=False, repr=False, eq=False)
class PythonRequestFields:
    """The fields of a request, each None, 0 or False until it is set, on a rank without the extension.

    Attributes:
        state: of the request.
        number, round: the number in the order of the group's calls, or -1; the round that is posted and not released.
        agreed: what all members know after the round; None before, and for a call without a round.
        error: of the request, once its state is FAILED.
        outputs, held: the arrays of the result, for ``Work.result``; what has the memory that MPI uses.
        limit: seconds until a wait raises CollectiveTimeoutError.
        waited: the caller waits at once: the request is never pending, and may make blocking calls of MPI.
        awaited: the program has begun to wait for an asynchronous request.
        told: the program knows the error.
        peer, tag: of a message: the global rank at the other end (-1: any), and the tag; ``peer`` is None for a collective.
        words: of the round; None for a call without a round.
        prepared: the prepared operation; None for other calls.
        schedule: moves the data of a prepared operation if all members make the call as this member does.
        steps: move the data in all other cases.
        claim: of memory that the call uses until it is waited for.
        returned: value that the steps returned; of a receive the source's rank in the group, -1 before.
        future: of the result, if the program has asked for one; ``landing`` is called just before the request is over.
        polled, next_look: times (time.monotonic) of the first poll of the program, and of the next check whether the request
            can complete.
        send, recv: of a prepared operation: the arrays with the data of this rank, and the arrays for its result.
        arrays, spread: the arrays of the program for the result, and the function that copies ``recv`` to these arrays; None if
            ``arrays`` are ``recv``.
        into: the arrays to which the result is copied, if ``recv`` became a copy of these as the data began to move; or None.
        before, after: contents of these arrays at the start, and after the result was written; empty if they are not compared.
        wrong: the error of this rank that the request raises when its data has moved, which the others need; or None.
        code, instruction, name, seq: the call site; the name that the program gives the call; its number on the group.
        made: the calls since the last comparison, at level ``roll``.
        move, plan, unpack: the movement and its plan, after the data has begun to move; the function that copies the result to
            the arrays of the program.
    """

    group: Any
    outputs: list[Any]
    state: State
    number: int
    seq: int
    tag: int
    instruction: int
    limit: float
    polled: float
    next_look: float
    peer: int | None
    waited: bool
    awaited: bool
    told: bool
    error: BaseException | None
    _advancing: bool
    _call: Any
    _current: Any
    _in_effect: bool
    _lock: Any
    _transfer: Any
    after: Any
    agreed: Any
    arrays: Any
    before: Any
    claim: Any
    code: Any
    future: Any
    held: Any
    into: Any
    landing: Any
    made: Any
    move: Any
    name: Any
    plan: Any
    prepared: Any
    recv: Any
    returned: Any
    round: Any
    schedule: Any
    send: Any
    spread: Any
    steps: Any
    unpack: Any
    words: Any
    wrong: Any

    def __new__(cls, *_args: Any, **_more: Any) -> Any:
        made = object.__new__(cls)
        for descriptor, value in _first_values:
            descriptor.__set__(made, value)  # a subclass may have an attribute of the name
        return made

    def finish(self) -> bool:
        """Return False: only the extension completes a call that it has started."""
        return False


_NOT_NONE: dict[str, Any] = {
    **dict.fromkeys(("seq", "tag", "instruction", "limit", "polled", "next_look"), 0),
    **dict.fromkeys(("waited", "awaited", "told", "_in_effect", "_advancing"), False),
    "number": -1,
}
_first_values = [(vars(PythonRequestFields)[name], _NOT_NONE.get(name)) for name in PythonRequestFields.__slots__]

RequestFields = PythonRequestFields
if extension is not None and not TYPE_CHECKING:
    RequestFields = extension.RequestFields  # which sets the fields of a call that it starts
