"""Is it certain that ranks wait for each other for ever? A certificate, not a time-out.

What each rank says of itself when it is asked (:class:`State`) holds what it waits in and what it has issued, sent and
received so far. :func:`stuck` finds the ranks that only each other could release: the greatest set in which every wait
needs somebody inside it. Two readings with nothing changed in between make it certain: each member was blocked from
before the first was over until after the second had begun, so all of them at one moment.

Anything in doubt is no deadlock: a rank that does not answer (it computes, or is inside MPI) releases all that wait for it.

Source of the idea: Chandy, Misra, Haas, "Distributed deadlock detection" (1983), for AND-waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpicoll.checks.call import name_ranks

__all__ = ["State", "Wait", "report", "stuck"]


@dataclass(frozen=True)
class Wait:
    """One wait of one thread.

    Attributes:
        group: name of the group.
        members: its ranks.
        text: the call as a reader would write it, with its place in the program.
        peer: the rank at the other end of a point-to-point call, -1 for any; None for a collective.
        seq: number of the collective on its group.
        sending: it waits for its message to be received.
        tag: of the message.
    """

    group: str
    members: tuple[int, ...]
    text: str
    peer: int | None = None
    seq: int = 0
    sending: bool = False
    tag: int = 0


@dataclass(frozen=True)
class State:
    """What one rank says of itself.

    Attributes:
        rank: which one.
        epoch: grows with every wait that begins or ends.
        waits: of all its threads that wait.
        free: a thread that uses the library does not wait, so it may release others.
        calls: collectives issued on each group.
        sent, received: messages to and from each (group, rank, tag).
        receives: (group, source, tag) of receives that are started and not complete; source -1: any.
        gone: the rank has ended, and will never do anything again.
        doubtful: other threads of the program are alive that have not used the library so far.
    """

    rank: int
    epoch: int = 0
    waits: tuple[Wait, ...] = ()
    free: bool = False
    calls: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[tuple[str, int, int], int] = field(default_factory=dict)
    received: Mapping[tuple[str, int, int], int] = field(default_factory=dict)
    receives: tuple[tuple[str, int, int], ...] = ()
    gone: bool = False
    doubtful: bool = False


def stuck(states: Mapping[int, State]) -> set[int]:
    """Return the blocked ranks that nobody outside the set can release; ranks that are gone are not returned.

    Args:
        states: of the ranks that answered, and of those that are gone.
    """
    held = {rank for rank, state in states.items() if state.gone or (state.waits and not state.free)}
    while True:
        released = {
            rank
            for rank in held
            if not states[rank].gone and any(_may_end(wait, states[rank], states, held) for wait in states[rank].waits)
        }
        if not released:
            return {rank for rank in held if not states[rank].gone}
        held -= released


def _may_end(wait: Wait, state: State, states: Mapping[int, State], held: set[int]) -> bool:
    """Whether somebody outside ``held`` may still end this wait, or its end is already on the way."""
    if wait.peer is None:
        missing = _missing(wait, state.rank, states, held)
        return not missing
    if wait.sending:
        return wait.peer not in held or _is_expected(wait, state.rank, states[wait.peer])
    sources = [rank for rank in wait.members if rank != state.rank] if wait.peer < 0 else [wait.peer]
    for source in sources:
        if source not in held:
            return True
        sent = states[source].sent.get((wait.group, state.rank, wait.tag), 0)
        if sent > state.received.get((wait.group, source, wait.tag), 0):
            return True  # a message is here or on its way
    return False


def _missing(wait: Wait, rank: int, states: Mapping[int, State], held: set[int]) -> list[int]:
    """Return the members in ``held`` that have not issued a collective yet (one is enough to keep it from ending)."""
    return [m for m in wait.members if m in held and m != rank and states[m].calls.get(wait.group, 0) < wait.seq]


def _is_expected(wait: Wait, sender: int, peer: State) -> bool:
    """Whether the peer has a receive under way that takes the message."""
    return any(
        group == wait.group and tag == wait.tag and source in (sender, -1) for group, source, tag in peer.receives
    )


def report(states: Mapping[int, State], members: set[int]) -> str:
    """Return the text of a certificate: who waits where for whom; ranks that wait alike share a line."""
    lines = [f"deadlock: {name_ranks(members)} wait for each other, and nobody can release them"]
    alike: dict[str, list[int]] = {}
    held = members | {rank for rank, state in states.items() if state.gone}
    for rank in sorted(members):
        for wait in states[rank].waits:
            needs = _needs(wait, rank, states, held)
            alike.setdefault(f"{wait.text}{needs}", []).append(rank)
    for text, ranks in sorted(alike.items(), key=lambda item: item[1][0]):
        lines.append(f"  {name_ranks(ranks)}: {text}")
    return "\n".join(lines)


def _needs(wait: Wait, rank: int, states: Mapping[int, State], held: set[int]) -> str:
    if wait.peer is None:
        missing = _missing(wait, rank, states, held)
        return f", needs {name_ranks(missing)}" if missing else ""
    if wait.peer < 0:
        return ", needs a message from anybody"
    ended = ", which has ended" if states[wait.peer].gone else ""
    return f", needs rank {wait.peer} to {'receive' if wait.sending else 'send'}{ended}"
