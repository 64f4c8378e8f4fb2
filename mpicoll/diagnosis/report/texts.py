"""The sentences of reports: a function for each kind makes the report from the states of the ranks. Pure.

``docs/messages.md`` lists the messages of this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpicoll.diagnosis.report import advice
from mpicoll.diagnosis.report.entries import RankState, Runs, Table, count, join, name_runs, short_sites, table_of
from mpicoll.diagnosis.report.report import Report, call_text, differing, made_by_most, reference_call
from mpicoll.diagnosis.report.text_layout import clip
from mpicoll.errors import Message

_FEWEST_FOLDED = 6
_CYCLE_SHOWN = 8
_SEE_NEXT = "follow the line `next:` of the report"

DIFFERENT_CALLS = Message(
    "call {seq} on group {group} ({members}): its ranks made different calls",
    "The members of a group do not make the same call. All members raise CollectiveMismatchError.",
    "compare the rows; " + _SEE_NEXT,
)
WRONG_ARGUMENTS = Message(
    "call {seq} on group {group} ({members}): arguments are wrong on {ranks}",
    "Some members pass arguments that the call refuses. These members raise their own error, the other "
    "members raise CollectiveMismatchError.",
    "correct the arguments on these ranks; the rows hold the errors",
)
NO_MEMORY = Message(
    "call {seq} on group {group} ({members}): no memory for the call on {ranks}",
    "Some members cannot allocate the memory that the call needs.",
    "free memory on these ranks, or make the call with less data",
)
GPU_FAILED = Message(
    "call {seq} on group {group} ({members}): the GPU has failed on {ranks}",
    "The CUDA context of some members was lost through an earlier error.",
    "find the kernel that failed before the call; CUDA works again only in a new process",
)
NOT_PREPARED = Message(
    "call {seq} on group {group} ({members}): an error between ranks ended the call on {ranks}",
    "While some members prepared the call, code of the program made another call that failed, such as `__reduce__` of an object.",
    "read the error on these ranks; the rows hold its first line",
)
BLOCKS_DIFFER = Message(
    "call {seq} on group {group} ({members}): blocks of {ranks} do not fit: {first}",
    "A member of an `all_to_all` or `all_to_all_single` sends another number of elements than the receiver expects. All members "
    "raise CollectiveMismatchError.",
    "compare the two ends of each block in the rows: either may be wrong",
)
DEADLOCK = Message(
    "deadlock: {ranks} wait for each other, and no rank can release them{group}",
    "It is certain that ranks wait for each other in a circle. All these ranks raise DeadlockError.",
    _SEE_NEXT,
)
STUCK_ALONE = Message(
    "deadlock: {ranks} waits for a call or a message that no rank makes or sends any more{group}",
    "It is certain that one rank waits for a call or a message that no rank will make or send.",
    _SEE_NEXT,
)
OTHERS_ALIVE = Message(
    "Other threads are alive; no state has changed for {seconds} s.",
    "The last line of the report of a deadlock: threads of the program are alive that have never called the library.",
    "nothing; if such a thread was to make the missing call later, let it make another call of the library first",
)
OTHERS_STAND = Message(
    "Threads outside of mpicoll wait in a join or on a lock (on rank {rank} at {site}); no state has changed for {seconds} s.",
    "The last line of the report of a deadlock: all threads outside of the library wait for other threads of their rank.",
    "compare the rows: they are the calls of the threads that are joined or hold the lock",
)
TIMED_OUT = Message(
    "time limit: Timed out waiting {seconds} in {call}: {who}",
    "The limit of a call passed (`timeout=`, the group's, `MPICOLL_TIMEOUT`). The call raises CollectiveTimeoutError.",
    _SEE_NEXT,
)
WAITING = Message(
    "{ranks} has waited {seconds} in {call}: {who}",
    "A call has waited for `MPICOLL_STALL_WARN` seconds. The call continues to wait.",
    "nothing, if the ranks that are late are only slow; else " + _SEE_NEXT,
)
RANKS_LATE = Message(
    "{ranks} did not make the matching call",
    "The end of the two messages before: some ranks are late.",
    "find what these ranks do; their rows say where they are",
)
ASKED_ARE_THERE = Message(
    "the {number} ranks whose state is known have made the call",
    "The end of the same messages: this rank knows the state of some members only, and these members are not late.",
    "read what the ranks far from this rank print: they ask other members",
)
ALL_ARE_THERE = Message(
    "all ranks have made the call, and the call does not end",
    "The end of the same messages: no rank is late, but the data does not arrive.",
    "look for a stopped rank, a GPU that is behind, or a network that is down",
)
NOT_ASKED = Message(
    "{number} of the group's {members} ranks were not asked.",
    "At the end of a report about a large group: a rank asks a bounded number of members.",
    "read what other ranks print, too",
)
PEER_EXITED = Message(
    "{call}: {ranks} {how}, so this call can never complete",
    "A rank ended, or left the group, without making a call that other ranks wait in. These ranks raise PeerExitedError.",
    _SEE_NEXT,
)
PEER_FAILED = Message(
    "{ranks} {how}{place}, while {waiting} waited in {call}",
    "A rank failed with an exception or was killed while other ranks waited for it. These ranks raise PeerFailedError.",
    "correct the error on the first ranks of the sentence",
)
CALLS_NOW = Message(
    "the ranks are in these calls of mpicoll:",
    "The test plugin ends a test that takes too long.",
    "compare the rows: the ranks that are in no call, or in another call, are the cause",
)
NODE_ENDS = Message(
    "{what}. The ranks of this node are here:",
    "A signal (time limit of the job, cancellation) ends the ranks of a node.",
    "nothing, if the end was intended; else compare the rows",
)
BROKEN_NOW = Message(
    "The group is broken now.",
    "The last line of a report after which a group cannot be used.",
    "end the job, or continue with another group",
)
STILL_USABLE = Message(
    "Nothing was moved, and the group can still be used.",
    "The last line of a report on calls that were compared before data moved.",
    "catch the error and make the calls alike, or end the job",
)

UNRECEIVED = Message(
    "Not received so far: {messages}.",
    "Before the last line of a report of a receive: messages of ranks that it waits for have arrived, with another tag or on "
    "another group.",
    "if one of them is the expected message, give its send and its receive the same `tag=` and `group=`",
)
PENDING_CALLS = Message(
    "The group is broken now: {ranks} had later asynchronous calls of the group pending.",
    "The last line of such a report if the calls behind the different ones could be taken for one another.",
    "wait for each asynchronous call before the next call of the group whose mismatch is to be caught; else end the job",
)

NOT_LOST = ". The message is not lost: "
"""Ends the facts of a receive whose message does not fit: what follows is of use on the receiver only."""
BROKEN = BROKEN_NOW.text


def mismatch(group: str, members: Runs, seq: int, table: Table, closing: str = "") -> Report:
    """Return the report of members that made different calls, or some of which passed wrong arguments.

    Args:
        closing: the last line, if the call was not compared before data moved.
    """
    table = table.told()
    wrong = join(run for row in table.rows if row.problem for run in row.ranks)
    lacking = {row.lacks for row in table.rows if row.problem}
    message = DIFFERENT_CALLS if not wrong else WRONG_ARGUMENTS
    if lacking == {"memory"}:
        message = NO_MEMORY
    elif lacking == {"GPU"}:
        message = GPU_FAILED
    elif wrong and all(row.problem.startswith(advice.BETWEEN_RANKS) for row in table.rows if row.problem):
        message = NOT_PREPARED
    report = Report(
        "mismatch",
        group,
        members,
        seq,
        message(seq=seq, group=group, members=name_runs(members, 40), ranks=name_runs(wrong, 30)),
        table,
        closing=closing or STILL_USABLE.text,
    )
    expected = reference_call(report)
    odd = wrong
    if not wrong and expected is not None and made_by_most(table):
        usual = expected.call()
        odd = join((*table.more, *(run for row in table.rows if row.call() != usual for run in row.ranks)))
    rows = [row for row in table.rows if expected is None or row.call() != expected.call()]
    differs = [differing(row, expected) for row in rows] if expected is not None else []
    return replace(report, odd=odd, next_step=advice.after_mismatch(expected, rows, differs, odd))


def blocks_differ(group: str, members: Runs, seq: int, table: Table, closing: str = "") -> Report:
    """Return the report of blocks that a member sends and that are not as their receiver expects.

    Args:
        table: the problem of a row has the blocks of its ranks that do not fit.
        closing: as in :func:`mismatch`.
    """
    rows = [row for row in table.rows if row.problem]
    ends = join(run for row in rows for run in row.ranks)
    first = min(rows, key=lambda row: row.ranks)
    what = f"rank {first.ranks[0][0]} {first.problem.partition('; ')[0]}"
    return Report(
        "blocks",
        group,
        members,
        seq,
        BLOCKS_DIFFER(seq=seq, group=group, members=name_runs(members, 40), ranks=name_runs(ends, 40), first=what),
        table,
        odd=ends,
        next_step=advice.SAME_SPLITS.text,
        closing=closing or STILL_USABLE.text,
    )


def deadlock(
    entries: Iterable[RankState], needs: Mapping[int, Sequence[int]], differs: Mapping[str, Runs] | None = None
) -> Report:
    """Return the report of ranks that wait for each other.

    Args:
        entries: an entry for each wait of each rank, state ``waits``, and for each rank that is needed and has ended.
        needs: for each rank the ranks of the entries that the rank waits for.
        differs: see :func:`advice.after_arrival`.
    """
    found = list(entries)
    stuck = join(run for entry in found if entry.state == "waits" for run in entry.ranks)
    gone = join(run for entry in found if entry.state != "waits" for run in entry.ranks)
    groups = {entry.group for entry in found if entry.state == "waits"}
    group = groups.pop() if len(groups) == 1 else ""
    cycle = _cycle(needs)
    message = DEADLOCK if count(stuck) > 1 else STUCK_ALONE
    return Report(
        "deadlock",
        group,
        stuck,
        0,
        message(ranks=name_runs(stuck), group=f" (group {group})" if group else ""),
        table_of(_folded(found)),
        odd=stuck,
        next_step=advice.after_arrival(differs or {}, advice.after_deadlock(found, gone)),
        cycle=cycle[:_CYCLE_SHOWN],
        around=len(cycle),
    )


def _folded(entries: Sequence[RankState]) -> list[RankState]:
    """Return the entries; many entries that differ in their peer only, at the same distance, read ``from rank r+1``."""
    classes: dict[tuple[Any, ...], list[tuple[RankState, RankState]]] = {}
    whole = []
    for entry in entries:
        if entry.peer is None or entry.peer < 0 or count(entry.ranks) != 1:
            whole.append(entry)
            continue
        rank = entry.ranks[0][0]
        folded = replace(
            entry,
            key=tuple((name, _relative(text, entry.peer, rank)) for name, text in entry.key),
            needs=_relative(entry.needs, entry.peer, rank),
            peer=entry.peer - rank,
        )
        classes.setdefault(folded.content(), []).append((entry, folded))
    for pairs in classes.values():
        whole += [pair[len(pairs) >= _FEWEST_FOLDED] for pair in pairs]
    return whole


def _relative(text: str, peer: int, rank: int) -> str:
    """Return a text with ``rank 8`` as ``rank r+1``, where r is ``rank``."""
    before, name, after = text.partition(f"rank {peer}")
    return f"{before}rank r{peer - rank:+d}{after}" if name and not after[:1].isdigit() else text


def _cycle(needs: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return a cycle of ranks that each need the next, reached from the lowest rank that leads into one; () if there is none."""
    walked: set[int] = set()
    for start in sorted(needs):
        at: int | None = start
        path: dict[int, None] = {}
        while at is not None and at in needs and at not in walked:
            walked.add(at)
            path[at] = None
            at = next((rank for rank in needs[at] if rank in path), next(iter(needs[at]), None))
        if at in path:
            ranks = list(path)
            cycle = ranks[ranks.index(at) :]
            lowest = cycle.index(min(cycle))
            return (*cycle[lowest:], *cycle[:lowest])
    return ()


def _called(waiting: RankState, group: str, table: Table) -> str:
    place = waiting.place(short_sites([waiting, *table.rows]))
    return f"{call_text(waiting)} on group {group}{f' at {place}' if place else ''}"


def time_limit(
    waiting: RankState,
    group: str,
    members: Runs,
    table: Table,
    seconds: float,
    over: bool = True,
    *,
    unasked: int = 0,
    behind: bool | None = None,
    closing: str = BROKEN,
) -> Report:
    """Return the report of a wait that exceeded its limit, or, with ``over=False``, of a wait that has taken long.

    Args:
        waiting: the call of the wait.
        table: the states of the members, or of the peer: ``waits``, ``unheard``, ``late``, ``silent``, or a state of a rank
            that has left.
        seconds: the limit, or the time waited so far.
        unasked: the number of members that were not asked, and are not in the table.
        behind: as for :func:`advice.after_time_limit`.
        closing: the last line of a report with ``over``.
    """
    late = join(run for row in table.rows if row.state not in ("waits", "unheard") for run in row.ranks)
    late = join((*late, *table.more))
    unheard = join(run for row in table.rows if row.state == "unheard" for run in row.ranks)
    if late:
        who = RANKS_LATE(ranks=name_runs(late, 40))
    elif unasked:
        who = ASKED_ARE_THERE(number=table.ranks)
    else:
        who = ALL_ARE_THERE.text
    limits = [NOT_ASKED(number=unasked, members=count(members))] if unasked else []
    call = _called(waiting, group, table)
    if over:
        limit = f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g}ms"
        headline = TIMED_OUT(seconds=limit, call=call, who=who)
    else:
        headline = WAITING(ranks=name_runs(waiting.ranks), seconds=f"{seconds:.0f} s", call=call, who=who)
    return Report(
        "time limit",
        group,
        members,
        waiting.seq,
        headline,
        table,
        odd=late or unheard,
        next_step=advice.after_time_limit(table.rows, late, unasked, behind),
        closing=" ".join([*limits, *([closing] if over else [])]),
        waiting=waiting,
    )


def with_unreceived(report: Report, messages: Sequence[tuple[int, int, str]], tagged: bool) -> Report:
    """Return the report of a receive with the messages that have arrived, and that no receive takes.

    Args:
        messages: (source, tag, group) of each; group "": that of the receive.
        tagged: the receive has an argument for the tag.
    """
    if not messages:
        return report
    words = [f"tag {tag} from rank {rank}{f' on group {on}' if on else ''}" for rank, tag, on in messages[:4]]
    receiver = report.waiting.ranks if report.waiting is not None else ()
    differs = {"group" if on else "tag": receiver for _, _, on in messages if tagged or on}
    return replace(
        report,
        next_step=advice.after_arrival(differs, report.next_step),
        closing=f"{UNRECEIVED(messages=', '.join(words))} {report.closing}".rstrip(),
    )


def calls_now(table: Table, members: Runs, note: str = "") -> Report:
    """Return the report of the calls of the library that ranks are in at a moment.

    Args:
        table: state ``waits``, with the call; ``late`` for a rank that is in no call, with its last call if it has made one;
            ``silent`` for a rank that does not answer. The problem of the last two states has the details.
        note: the last line.
    """
    return Report("calls", "WORLD", members, 0, CALLS_NOW.text, table, closing=note)


def node_ends(table: Table, members: Runs, what: str) -> Report:
    """Return the report of the calls of a node's ranks when a signal ends the ranks; ``table`` as in :func:`calls_now`.

    Args:
        what: a sentence without its full stop that says which ranks end, and why.
    """
    return Report("calls", "WORLD", members, 0, NODE_ENDS(what=what), table)


def peer_exited(waiting: RankState, group: str, members: Runs, table: Table, closing: str = BROKEN) -> Report:
    """Return the report of a call that some ranks, state ``exited``, ended without making.

    The problem of their entries is the end of a sentence: "ended the program after 2 calls".
    """
    rows = [row for row in table.rows if row.state == "exited"]
    gone = join(run for row in rows for run in row.ranks)
    how = {row.problem for row in rows}
    what = (how.pop() if len(how) == 1 else "") or "ended the program"
    return Report(
        "peer exited",
        group,
        members,
        waiting.seq,
        PEER_EXITED(call=_called(waiting, group, table), ranks=name_runs(gone, 40), how=what),
        table,
        odd=gone,
        next_step=advice.after_exit(table.rows, gone),
        closing=closing,
        waiting=waiting,
    )


def peer_failed(waiting: RankState, group: str, members: Runs, table: Table, closing: str = BROKEN) -> Report:
    """Return the report of ranks, state ``failed`` or ``killed``, that failed while other ranks waited for them."""
    rows = [row for row in table.rows if row.state in ("failed", "killed")]
    gone = join(run for row in rows for run in row.ranks)
    first = min(rows, key=lambda row: row.ranks)
    how = f"{'was killed' if first.state == 'killed' else 'failed'}: {clip(first.problem, 240, tail=100)}"
    place = first.place(short_sites([waiting, *table.rows]))
    site = f", after its last known call {first.op} at {place}" if first.op else f" (at {place})" if place else ""
    return Report(
        "peer failed",
        group,
        members,
        waiting.seq,
        PEER_FAILED(
            ranks=name_runs(gone, 40),
            how=how,
            place=site,
            waiting=name_runs(waiting.ranks, 40),
            call=_called(waiting, group, table),
        ),
        table,
        odd=gone,
        next_step=advice.after_failure(table.rows, gone, first.problem),
        closing=closing,
        waiting=waiting,
    )
