"""Decide whether it is certain that ranks wait for each other for ever: a certificate, not a time-out.

The state of a rank (:class:`State`) lists its waits, and what it has issued, sent and received so far. :func:`blocked_set` finds
the ranks that only each other could release: the greatest set in which every wait needs a rank of the set. Two readings with
unchanged states make a deadlock certain. Each rank was blocked from the end of the first reading to the begin of the second, so
all ranks were blocked at one moment.

A doubt is no deadlock: a rank that does not answer (it computes, or is inside MPI) releases the ranks that wait for it.

Source of the idea: Chandy, Misra, Haas, "Distributed deadlock detection" (1983), for AND-waits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from mpicoll.diagnosis.report.entries import Plural, RankState, name_runs, runs_of
from mpicoll.diagnosis.report.report import Report
from mpicoll.diagnosis.report.texts import deadlock


@dataclass(frozen=True)
class Wait:
    """One wait of one thread.

    Attributes:
        group: name of the group.
        members: its ranks.
        entry: the call and its place in the program, for the report.
        peer: the other rank of a point-to-point call, -1 for any rank; None for a collective.
        seq: number of the collective on its group.
        sending: the wait ends when the peer receives a message.
        tag: of the message.
        since: when the wait began, in seconds since the epoch.
        call: fingerprint of what a collective needs to complete, if its group does not compare every call; else 0.
        meeting: the ranks meet to make a group: a rank that does not list the meeting has not arrived.
        needs: the members that a collective needs; None: all members.
    """

    group: str
    members: tuple[int, ...]
    entry: RankState
    peer: int | None = None
    seq: int = 0
    sending: bool = False
    tag: int = 0
    since: float = 0.0
    call: int = 0
    meeting: bool = False
    needs: tuple[int, ...] | None = None


@dataclass(frozen=True)
class State:
    """The state of one rank.

    Attributes:
        rank: its number.
        epoch: grows with every wait that begins or ends.
        waits: the waits of all its threads.
        free: a thread that uses the library neither waits nor stands, so it may release other ranks.
        calls: collectives issued on each group; a group that is not listed was destroyed some time ago.
        sent, received: messages to and from each (group, rank, tag).
        receives: (group, source, tag) of receives that are started and not complete; source -1: any.
        gone: the rank has ended.
        doubtful: threads of the program stand, or are alive and have not used the library so far.
        non_daemon: such a thread is no daemon, so the program waits for it at its end. Such a thread probably has work to do.
        groups: its groups as messages display them, by name.
        stands: place and processor time of the threads outside the library, if one of them uses the library and all of them
            stand, in a join or on a lock of Python; or of those that are held, if no other thread may call the library.
        looks: how often each wait was tested and not over; grows while the state is unchanged.
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
    non_daemon: bool = False
    groups: Mapping[str, str] = field(default_factory=dict)
    stands: tuple[tuple[str, int], ...] = ()
    looks: tuple[int, ...] = field(default=(), compare=False)

    def issued(self, wait: Wait) -> float:
        """Return how many collectives this rank has issued on the group of a wait; for a meeting 1 if the rank has arrived."""
        return self.calls.get(wait.group, 0 if wait.meeting or self.gone else math.inf)

    def looked_since(self, before: tuple[int, ...]) -> bool:
        """Return whether each wait was tested and not over since ``before``, the ``looks`` of the same state."""
        return all(now > then for now, then in zip(self.looks, before, strict=True))


def blocked_set(states: Mapping[int, State]) -> set[int]:
    """Return the blocked ranks that no rank outside the set can release, without ranks that are gone.

    Args:
        states: the states of ranks that answered, and of ranks that are gone.
    """
    blocked = {rank for rank, state in states.items() if state.gone or (state.waits and not state.free)}
    while True:
        released = {
            rank
            for rank in blocked
            if not states[rank].gone
            and any(_may_end(wait, states[rank], states, blocked) for wait in states[rank].waits)
        }
        if not released:
            return {rank for rank in blocked if not states[rank].gone}
        blocked -= released


def _may_end(wait: Wait, state: State, states: Mapping[int, State], blocked: set[int]) -> bool:
    """Return whether a rank outside ``blocked`` may still end this wait, or its end is already on the way."""
    if wait.peer is None:
        missing = _missing(wait, state.rank, states, blocked)
        return not missing
    if wait.sending:
        return wait.peer not in blocked or _is_expected(wait, state.rank, states[wait.peer])
    for source in _sources(wait, state.rank):
        if source not in blocked or not (states[source].gone or wait.group in states[source].calls):
            return True
        sent = states[source].sent.get((wait.group, state.rank, wait.tag), 0)
        if sent > state.received.get((wait.group, source, wait.tag), 0):
            return True  # a message has arrived or is on its way
    return False


def _sources(wait: Wait, rank: int) -> list[int]:
    """Return the ranks from which a wait takes a message; [] if the wait is for no message."""
    if wait.peer is None or wait.sending:
        return []
    return [wait.peer] if wait.peer >= 0 else [source for source in wait.members if source != rank]


def _missing(wait: Wait, rank: int, states: Mapping[int, State], blocked: set[int]) -> list[int]:
    """Return the members in ``blocked`` that have not issued a collective yet; with one such member the collective cannot end.

    If calls are not compared, a member that waits in another call with the same number has not issued the collective either.
    """
    return [
        m
        for m in (wait.members if wait.needs is None else wait.needs)
        if m in blocked and m != rank and (states[m].issued(wait) < wait.seq or _differs(wait, states[m]))
    ]


def _differs(wait: Wait, peer: State) -> bool:
    """Return whether a peer waits in another collective with the same number on the group."""
    return any(
        other.group == wait.group and other.peer is None and other.seq == wait.seq and other.call != wait.call
        for other in peer.waits
    )


def _is_expected(wait: Wait, sender: int, peer: State) -> bool:
    """Return whether the peer has a pending receive that matches the message."""
    return any(
        group == wait.group and tag == wait.tag and source in (sender, -1) for group, source, tag in peer.receives
    )


def report(states: Mapping[int, State], members: set[int], now: float = 0.0) -> Report:
    """Return the report of a certificate: which ranks wait where for which ranks, and which needed ranks have ended.

    Args:
        members: the ranks that are blocked.
        now: seconds since the epoch, for the time that each rank has waited.
    """
    blocked = members | {rank for rank, state in states.items() if state.gone}
    left = _unreceived(states)
    waits = [(rank, wait, _meant(wait, left.get(rank, {}))) for rank in sorted(members) for wait in states[rank].waits]
    named: dict[str, set[str]] = {}
    for rank, wait, found in waits:
        named.setdefault(wait.entry.group, set()).add(wait.group)
        for name in {name for by_group in found.values() for name in by_group}:
            named.setdefault(states[rank].groups.get(name, name), set()).add(name)

    def shown(name: str, display: str) -> str:
        return f"{display} ({name})" if len(named[display]) > 1 else display  # two groups of the same ranks

    entries: list[RankState] = []
    needed: dict[int, list[int]] = {}
    differs: dict[str, list[int]] = {}
    for rank, wait, found in waits:
        waited = (now - wait.since, now - wait.since) if now and wait.since else None
        sent: dict[str, list[int]] = {}
        if wait.peer is not None and wait.peer >= 0:
            others = [source for source, messages in left.get(rank, {}).items() if (wait.group, wait.tag) in messages]
            others = [] if wait.sending or wait.peer in found else [each for each in others if each != wait.peer]
            if others:
                differs.setdefault("source", []).append(rank)
                sent[f"tag {wait.tag}"] = others
        for source, by_group in found.items():
            texts = []
            for name, tags in by_group.items():
                other = name != wait.group
                if other or "object" not in wait.entry.op:  # lists of objects have no tag=
                    differs.setdefault("group" if other else "tag", []).append(rank)
                where = f" on group {shown(name, states[rank].groups.get(name, name))}" if other else ""
                texts.append(f"tag{'s' if len(tags) > 1 else ''} {', '.join(map(str, tags[:8]))}{where}")
            sent.setdefault(" and ".join(texts), []).append(source)
        words, ranks = _needs(wait, rank, states, blocked, sent)
        group = shown(wait.group, wait.entry.group)
        entries.append(replace(wait.entry, ranks=((rank, rank),), group=group, needs=words, waited=waited))
        needed.setdefault(rank, []).extend(ranks)
    gone = {rank for ranks in needed.values() for rank in ranks if states[rank].gone}
    entries += [RankState(((rank, rank),), state="exited") for rank in gone]
    return deadlock(entries, needed, {what: runs_of(ranks) for what, ranks in differs.items()})


def _unreceived(states: Mapping[int, State]) -> dict[int, dict[int, list[tuple[str, int]]]]:
    """Return the group and tag of messages that no receive has taken, by receiver and source."""
    found: dict[int, dict[int, list[tuple[str, int]]]] = {}
    for source, state in states.items():
        for (group, to, tag), count in state.sent.items():
            if tag >= 0 and to in states and count > states[to].received.get((group, source, tag), 0):
                found.setdefault(to, {}).setdefault(source, []).append((group, tag))
    return found


def _meant(wait: Wait, left: Mapping[int, list[tuple[str, int]]]) -> dict[int, dict[str, list[int]]]:
    """Return the messages that a receive may mean: their tags, by source and group.

    These are the messages of its sources on its group, and on other groups those with its tag.
    """
    found: dict[int, dict[str, list[int]]] = {}
    if wait.peer is None or wait.sending:
        return found
    for source, messages in sorted(left.items()):
        for group, tag in sorted(messages, key=lambda message: (message[0] != wait.group, message)):
            if wait.peer in (source, -1) and (group == wait.group or tag == wait.tag):
                found.setdefault(source, {}).setdefault(group, []).append(tag)
    return found


def _needs(
    wait: Wait, rank: int, states: Mapping[int, State], blocked: set[int], sent: Mapping[str, Collection[int]]
) -> tuple[str, list[int]]:
    """Return what a wait needs in words, and the ranks that it needs; of a receive from any rank those that have ended.

    Args:
        sent: messages that no receive has taken, in words, and their sources.
    """
    if wait.peer is None:
        missing = _missing(wait, rank, states, blocked)
        return (name_runs(runs_of(missing)) if missing else ""), missing
    if wait.peer < 0:
        gone = [source for source in _sources(wait, rank) if states[source].gone]
        texts = [f"{_have(gone)} ended"] if gone else []
        texts += [f"{_have(ranks)} sent {text}" for text, ranks in sent.items()]
        return "a message from any rank" + (f" ({'; '.join(texts)})" if texts else ""), gone
    ended = ", which has ended" if states[wait.peer].gone else ""
    for text, ranks in sent.items():
        ended += f" ({'it has' if [*ranks] == [wait.peer] else _have(ranks)} sent {text})"
    return f"rank {wait.peer} to {'receive' if wait.sending else 'send'}{ended}", [wait.peer]


def _have(ranks: Collection[int]) -> str:
    return f"{name_runs(runs_of(ranks), 30)} {Plural(len(ranks)):has/have}"
