"""The report of what went wrong between ranks: one block of text, the same on every rank, and the same as data.

Pure but for :func:`show`, which prints. A :class:`Report` is made by one function for each kind. Whatever the input is, its
text has at most ``most`` lines of ``width`` columns: rows that do not fit are counted, long texts are cut.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TextIO, TypeVar

from mpicoll.diagnosis.report import advice
from mpicoll.diagnosis.report.entries import (
    MOST_COUNTED,
    Entry,
    Runs,
    Table,
    count,
    holds,
    join,
    listed,
    name_runs,
    table_of,
)
from mpicoll.diagnosis.report.text_layout import clip, clip_line, columns, short_paths, wrap
from mpicoll.errors import DistError

MESSAGE_WIDTH = 107
"""Columns of a report in an exception's message: with ``[rank 12345] `` before each line it has 120."""

BROKEN = "The group is broken now."

Kind = Literal["mismatch", "deadlock", "time limit", "peer failed", "peer exited", "calls"]

_THIS_RANK = " <- this rank"
_WHILE = ", while "
_LABEL = 44
_FOLD = 6
_CYCLE = 8


@dataclass(frozen=True)
class Report:
    """What went wrong, told by all ranks that could be asked.

    Attributes:
        kind: what it is.
        group: the group as it is displayed; empty for a deadlock over several.
        members: the ranks that it concerns: those of the group, or those in the deadlock.
        seq: number of the call on the group.
        headline: one sentence that says what has happened.
        table: what the ranks say.
        odd: the ranks at fault as far as can be told: they differ from the others, are late, or have left.
        next_step: what the reader can do now.
        closing: what holds afterwards.
        cycle: the first ranks of a cycle of ``around`` in which each waits for the next, and the last for the first.
        waiting: the call that the headline names; rows that wait and name none wait in it.
    """

    kind: Kind
    group: str
    members: Runs
    seq: int
    headline: str
    table: Table
    odd: Runs = ()
    next_step: str = ""
    closing: str = ""
    cycle: tuple[int, ...] = ()
    around: int = 0
    waiting: Entry | None = None

    def one_line(self, width: int = 400) -> str:
        """Return the headline in one line."""
        return clip(self.headline, width, tail=width // 3)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """What the ranks say as data: a dict for each row of the table; those who wait "in it" with that call."""
        rows = [
            replace(self.waiting, ranks=row.ranks, state=row.state, waited=row.waited)
            if self.waiting is not None and row.state == "waits" and not row.op
            else row
            for row in _ordered(self)
        ]
        return _as_data(rows, self.group)

    @property
    def ranks(self) -> list[int]:
        """The ranks at fault as far as can be told (see ``odd``), else all that it concerns."""
        return listed(self.odd or self.members)

    def _head(self, width: int) -> list[str]:
        parted = {"time limit": ": ", "peer exited": ": ", "peer failed": _WHILE}.get(self.kind, "")
        before, mark, after = self.headline.rpartition(parted) if parted else ("", "", "")
        whole = clip(self.headline, len(self.headline) * 2)
        if columns(whole) <= width or not mark:
            return wrap(self.headline, width, most=3)
        first, _, rest = mark.partition(" ")
        return [*wrap(before + first, width, most=3), *wrap(rest + after, width, first=4, most=2)]

    def put_on(self, error: DistError) -> None:
        """Put the report on the exception whose message it is, also as data."""
        error.report, error.group, error.ranks, error.calls = self, self.group, self.ranks, self.calls

    def text(self, me: int | None = None, width: int = 120, most: int = 40) -> str:
        """Return the report as one block.

        Args:
            me: the rank whose row is marked as this rank's.
            width: columns, at least 40.
            most: lines, at least 8.
        """
        head = self._head(width)
        foot = []
        if self.cycle:
            foot += wrap(f"cycle: {_chain(self.cycle, self.around)}", width, first=2, rest=4, most=2)
        if self.next_step:
            foot += wrap(f"next: {self.next_step}", width, first=2, rest=8, most=3)
        if self.closing:
            foot += wrap(self.closing, width, most=2)
        expected = _reference(self)
        if self.kind == "mismatch" and expected is not None:
            head.append(_expected_line(self, expected, width))
        room = most - len(head) - len(foot)
        rows = _ordered(self)
        site = self.waiting.site if self.waiting is not None else ""
        places = short_paths([site, *(row.site for row in rows)])
        shown: list[list[str]] = []
        for lines_a_row in (4, 2, 1):
            shown = _rows(self, rows, expected, places, me, width, lines_a_row)
            if sum(map(len, shown)) + bool(self.table.more) <= room:
                break
        hidden: list[Entry] = []
        while shown and sum(map(len, shown)) + bool(hidden or self.table.more) > room:
            shown.pop()
            hidden.insert(0, rows[len(shown)])
        lines = [*head, *(line for row in shown for line in row), *_more_line(self.table, hidden, width), *foot]
        return "\n".join(clip_line(line, width) for line in lines[:most])


def _as_data(rows: Iterable[Entry], group: str) -> list[dict[str, Any]]:
    return [
        {
            "ranks": listed(row.ranks),
            "op": row.op,
            "arguments": dict(row.key),
            "seq": row.seq,
            "site": row.site,
            "group": row.group or group,
            "async": row.asynchronous,
            "state": row.state,
            "problem": row.problem,
            "needs": row.needs,
            "waited": row.waited,
            "text": call_text(row) if row.op else "",
        }
        for row in rows
    ]


E = TypeVar("E", bound=DistError)


def with_calls(error: E, group: str, ranks: Iterable[int], entries: Iterable[Entry]) -> E:
    """Return an error whose message is no report, with what it knows as data (see ``DistError``)."""
    error.group, error.ranks, error.calls = group, list(ranks), _as_data(entries, group)
    return error


def _rows(
    report: Report,
    rows: Sequence[Entry],
    expected: Entry | None,
    places: Mapping[str, str],
    me: int | None,
    width: int,
    most: int,
) -> list[list[str]]:
    labels = [name_runs(row.ranks, min(_LABEL, width // 2)) for row in rows]
    pad = max((len(label) for label in labels), default=0)
    pad = min(pad, 26)  # a long one moves its own row alone
    indent = 2 + pad + 2
    made = []
    for row, label in zip(rows, labels, strict=True):
        text = f"{label}: {row_text(report, row, expected, places)}"
        first = 2 + max(0, pad - len(label))
        lines = wrap(text, width - len(_THIS_RANK), first=first, rest=indent, most=most)
        lines[-1] += _THIS_RANK if holds(row.ranks, me) else ""  # its room is kept free, so that all ranks wrap alike
        made.append(lines)
    return made


def row_text(report: Report, row: Entry, expected: Entry | None, places: Mapping[str, str]) -> str:
    """Return what one row says, without its ranks."""
    many = count(row.ranks) > 1
    call = ""
    if row.op:
        differs = differing(row, expected) if expected is not None and report.kind == "mismatch" else frozenset()
        call = call_text(row, differs)
        if row.group and row.group != report.group:
            call += f" on group {row.group}"
        if row.site:
            call += f" at {places[row.site]}"
    place = f" (at {places[row.site]})" if row.site and not row.op else ""
    if row.state == "called":
        text = call + (f" raised {row.problem}" if row.problem else "")
    elif row.state == "waits":
        text = call if report.kind in ("deadlock", "calls") else f"wait{'' if many else 's'} in {call or 'it'}"
    elif report.kind == "calls":
        text = (row.problem or "in no call of mpicoll") + (f", last call {call}" if row.op else "")
    elif row.state == "late":
        where = row.problem or (
            f"wait{'' if many else 's'} in {call}" if row.op else f"{'are' if many else 'is'} elsewhere"
        )
        where = where if row.problem else f"{'they' if many else 'it'} {where}"
        text = f"{'have' if many else 'has'} not come to it, {where}"
        text += f", last known call {call}" if row.op and row.problem else ""
    elif row.state == "silent":
        silent = f"{'do' if many else 'does'} not answer (computing, stopped or dead)"
        text = f"did not come to it, {row.problem or silent}"
        text += f", last known call {call}" if row.op else ""
    elif row.state == "withdrawn":
        text = f"gave the group up: {row.problem}{place}"
    elif row.state == "exited":
        text = (row.problem or "ended the program") + (f", last call {call}" if row.op else place)
    else:
        verb = "failed" if row.state == "failed" else f"{'were' if many else 'was'} killed"
        text = verb + (f": {row.problem}" if row.problem else "") + (f", last call {call}" if row.op else place)
    if row.needs:
        text += f", needs {row.needs}"
    if row.asynchronous:
        text += ", async"
    return text + _waited(row)


def _waited(row: Entry) -> str:
    if row.waited is None or row.waited[1] < 0.1:
        return ""
    least, most = (f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}" for seconds in row.waited)
    return f", waited {most} s" if least == most else f", waited {least} to {most} s"


_FIRST = ("dtype", "elements", "op", "root", "peer", "tag")


def call_text(entry: Entry, marked: frozenset[str] = frozenset()) -> str:
    """Return a call as a reader wants it: ``reduce #41 float32[1024] SUM root 0``; marked parts as ``>SUM<``."""

    def mark(name: str, text: str) -> str:
        return f">{text}<" if name in marked else text

    parts = dict(entry.key)
    words = [mark("function", entry.op) + (f" #{entry.seq}" if entry.seq else "")]
    if "dtype" in parts or "elements" in parts:
        elements = f"[{mark('elements', parts['elements'])}]" if "elements" in parts else ""
        words.append(mark("dtype", parts.get("dtype", "")) + elements)
    for name in sorted(parts, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST)):
        if name in ("dtype", "elements"):
            continue
        text = clip(parts[name], 40, tail=9) if len(parts) > 5 and name not in marked else parts[name]
        words.append(mark(name, text if name in ("op", "peer", "") else f"{name} {text}"))
    words += [f">no {name}<" for name in sorted(marked - parts.keys() - {"function"})]
    if not parts and entry.problem and entry.state == "called":
        words.append("(…)")
    return " ".join(words)


def differing(entry: Entry, other: Entry) -> frozenset[str]:
    """Return the names of the parts in which two calls differ; ``function`` where they are not the same function."""
    if entry.op != other.op:
        return frozenset({"function"})
    if (entry.problem and not entry.key) or (other.problem and not other.key):
        return frozenset()
    mine, theirs = dict(entry.key), dict(other.key)
    return frozenset(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


def _classes(table: Table) -> list[tuple[int, int, Entry]]:
    """Return the distinct calls of a table, wherever they are made: ranks, minus the lowest rank, one entry of each."""
    alike: dict[tuple[Any, ...], list[Entry]] = {}
    for row in table.rows:
        if row.op and not row.problem and row.state in ("called", "waits"):
            alike.setdefault(row.call(), []).append(row)
    found = []
    for same in alike.values():
        same.sort(key=lambda row: row.ranks[0][0])
        found.append((sum(count(row.ranks) for row in same), -same[0].ranks[0][0], same[0]))
    return sorted(found, key=lambda item: item[:2], reverse=True)


def _reference(report: Report) -> Entry | None:
    """Return the call that the others are compared with: that of most ranks, of the lowest rank where none has most."""
    classes = _classes(report.table)
    if not classes:
        return None
    if _most_made(report.table):
        return classes[0][2]
    return max(classes, key=lambda item: item[1])[2]


def _most_made(table: Table) -> int:
    """Return how many ranks made the call that most of them made; 0 where two are made by equally many."""
    classes = _classes(table)
    if not classes or (len(classes) > 1 and classes[0][0] == classes[1][0]):
        return 0
    return classes[0][0]


def _expected_line(report: Report, expected: Entry, width: int) -> str:
    most = _most_made(report.table)
    call = call_text(replace(expected, problem=""))
    if most > 1 or any(row.problem for row in report.table.rows):
        return f"  expected: {clip(call, width - 50)}, as {most} of {report.table.ranks} ranks called"
    return f"  compared with what {name_runs(expected.ranks[:1], 24)} called: {clip(call, width - 50)}"


def _ordered(report: Report) -> list[Entry]:
    """Return the rows as they are shown: the expected call, what has a problem, then by lowest rank."""
    expected = _reference(report) if report.kind == "mismatch" else None
    usual = None if expected is None else expected.call()
    late = {"late", "silent", "exited", "failed", "killed", "withdrawn"}

    def place(row: Entry) -> tuple[bool, bool, bool, Runs]:
        return (
            report.kind != "mismatch" and row.state not in late,
            usual is not None and row.call() != usual,
            not row.problem,
            row.ranks,
        )

    return sorted(report.table.rows, key=place)


def _more_line(table: Table, hidden: Sequence[Entry], width: int) -> list[str]:
    if not hidden and not table.more:
        return []
    kinds = len(table.others) + len(hidden)
    ranks = join((*table.more, *(run for row in hidden for run in row.ranks)))
    number = f"{kinds}{' or' if len(table.others) >= MOST_COUNTED else ''} more"
    label = name_runs(ranks, width - 45)
    return [f"  and {number} different call{'' if kinds == 1 else 's'} ({label})"]


def _chain(cycle: Sequence[int], around: int) -> str:
    shown = [*map(str, cycle[1:])]
    if around > len(cycle):
        shown += [f"… ({around} ranks)"]
    return f"rank {cycle[0]} waits for {' -> '.join((*shown, str(cycle[0])))}"


def mismatch(group: str, members: Runs, seq: int, table: Table, closing: str = "") -> Report:
    """Return the report of members that made different calls, or of which some have wrong arguments.

    Args:
        closing: its last line, where the call was not compared before data moved.
    """
    wrong = join(run for row in table.rows if row.problem for run in row.ranks)
    lacking = {row.lacks for row in table.rows if row.problem}
    if lacking == {"memory"}:
        what = f"no memory for it on {name_runs(wrong, 30)}"
    elif lacking == {"GPU"}:
        what = f"the GPU has failed on {name_runs(wrong, 30)}"
    else:
        what = f"arguments are wrong on {name_runs(wrong, 30)}" if wrong else "its ranks made different calls"
    report = Report(
        "mismatch",
        group,
        members,
        seq,
        f"call {seq} on group {group} ({name_runs(members, 40)}): {what}",
        table,
        closing=closing or "Nothing was moved, and the group can still be used.",
    )
    expected = _reference(report)
    odd = wrong
    if not wrong and expected is not None and _most_made(table):
        usual = expected.call()
        odd = join((*table.more, *(run for row in table.rows if row.call() != usual for run in row.ranks)))
    rows = [row for row in table.rows if expected is None or row.call() != expected.call()]
    differs = [differing(row, expected) for row in rows] if expected is not None else []
    return replace(report, odd=odd, next_step=advice.after_mismatch(expected, rows, differs, odd))


def deadlock(entries: Iterable[Entry], needs: Mapping[int, Sequence[int]], unasked: bool = False) -> Report:
    """Return the report of ranks that wait for each other.

    Args:
        entries: one for each wait of each rank, state ``waits``, and one for each rank that they need and that is gone.
        needs: for each rank those that it waits for, of these.
        unasked: a message has come from a rank that one waits for, with a tag that nobody waits for.
    """
    found = list(entries)
    stuck = join(run for entry in found if entry.state == "waits" for run in entry.ranks)
    gone = join(run for entry in found if entry.state != "waits" for run in entry.ranks)
    table = table_of(_folded(found))
    groups = {entry.group for entry in found if entry.state == "waits"}
    group = groups.pop() if len(groups) == 1 else ""
    cycle = _cycle(needs)
    return Report(
        "deadlock",
        group,
        stuck,
        0,
        f"deadlock: {name_runs(stuck)} wait{'s' if count(stuck) == 1 else ''} "
        f"for {'each other, and nobody' if count(stuck) > 1 else 'something that nobody does any more: nobody'} "
        f"can release them{f' (group {group})' if group else ''}",
        table,
        odd=stuck,
        next_step=advice.after_deadlock(found, gone, unasked),
        cycle=cycle[:_CYCLE],
        around=len(cycle),
    )


def _folded(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries that differ in their peer alone as one, where it is at the same distance: ``from rank r+1``."""
    classes: dict[tuple[Any, ...], list[tuple[Entry, Entry]]] = {}
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
        classes.setdefault(folded.said(), []).append((entry, folded))
    for pairs in classes.values():
        whole += [pair[len(pairs) >= _FOLD] for pair in pairs]
    return whole


def _relative(text: str, peer: int, rank: int) -> str:
    """Return a text with ``rank 8`` as ``rank r+1``, where r is ``rank``."""
    before, name, after = text.partition(f"rank {peer}")
    return f"{before}rank r{peer - rank:+d}{after}" if name and not after[:1].isdigit() else text


def _cycle(needs: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return a cycle of ranks that need the next one, from the lowest rank that leads into one; empty if none does."""
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


def _called(waiting: Entry, group: str, table: Table) -> str:
    place = short_paths([waiting.site, *(row.site for row in table.rows)]).get(waiting.site, "")
    return f"{call_text(waiting)} on group {group}{f' at {place}' if place else ''}"


def time_limit(
    waiting: Entry,
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
    """Return the report of a wait past its limit, or (``over`` false) of one that has taken long so far.

    Args:
        waiting: the call that is waited in.
        table: what the members, or the peer, say: state ``waits``, ``late`` or ``silent``, or how they left.
        seconds: the limit, or for how long it has been waited.
        unasked: how many members have not been asked, and are not in the table.
        behind: as :func:`advice.after_time_limit` takes it.
        closing: what holds when it is over.
    """
    late = join(run for row in table.rows if row.state != "waits" for run in row.ranks)
    late = join((*late, *table.more))
    if late:
        who = f"{name_runs(late, 40)} did not come to it"
    elif unasked:
        who = f"the {table.ranks} ranks that are known of have come to it"
    else:
        who = "all ranks have come to it, and it does not end"
    limits = [f"{unasked} of its {count(members)} ranks were not asked."] if unasked else []
    start = (
        f"time limit: Timed out waiting {f'{seconds:g} s' if seconds >= 1 else f'{seconds * 1e3:g}ms'}"
        if over
        else f"{name_runs(waiting.ranks)} has waited {seconds:.0f} s"
    )
    return Report(
        "time limit",
        group,
        members,
        waiting.seq,
        f"{start} in {_called(waiting, group, table)}: {who}",
        table,
        odd=late,
        next_step=advice.after_time_limit(table.rows, late, unasked, behind),
        closing=" ".join([*limits, *([closing] if over else [])]),
        waiting=waiting,
    )


def calls_now(table: Table, members: Runs, note: str = "") -> Report:
    """Return the report of where ranks are at a moment: in a call of the library, or in none.

    Args:
        table: state ``waits``, with the call; ``late`` for a rank that is in none, its last call with it if it has made one;
            ``silent`` for one that does not answer. The problem of the two last says more.
        note: its last line.
    """
    return Report("calls", "WORLD", members, 0, "the ranks are in these calls of mpicoll:", table, closing=note)


def last_words(table: Table, members: Runs, what: str) -> Report:
    """Return the report of where the ranks of a node are when a signal ends them; its table as that of :func:`calls_now`.

    Args:
        what: ends which of them, and why; a sentence without its point.
    """
    return Report("calls", "WORLD", members, 0, f"{what}. The ranks of this node are here:", table)


def peer_exited(waiting: Entry, group: str, members: Runs, table: Table, closing: str = BROKEN) -> Report:
    """Return the report of a call that ranks have ended without making; they are in the table as ``exited``.

    The problem of their entries is what they did, as the end of a sentence: "ended the program after 2 calls".
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
        f"{_called(waiting, group, table)}: {name_runs(gone, 40)} {what}, so this call can never complete",
        table,
        odd=gone,
        next_step=advice.after_exit(gone),
        closing=closing,
        waiting=waiting,
    )


def peer_failed(waiting: Entry, group: str, members: Runs, table: Table, closing: str = BROKEN) -> Report:
    """Return the report of ranks that failed, ``failed`` or ``killed`` in the table, while others waited for them."""
    rows = [row for row in table.rows if row.state in ("failed", "killed")]
    gone = join(run for row in rows for run in row.ranks)
    first = min(rows, key=lambda row: row.ranks)
    what = f"{'was killed' if first.state == 'killed' else 'failed'}: {clip(first.problem, 180, tail=60)}"
    place = short_paths([waiting.site, *(row.site for row in table.rows)]).get(first.site, "")
    site = f", after its last call {first.op} at {place}" if first.op else f" (at {place})" if place else ""
    return Report(
        "peer failed",
        group,
        members,
        waiting.seq,
        f"{name_runs(gone, 40)} {what}{site}{_WHILE}{name_runs(waiting.ranks, 40)} waited in "
        f"{_called(waiting, group, table)}",
        table,
        odd=gone,
        next_step=advice.after_failure(gone),
        closing=closing,
        waiting=waiting,
    )


def show(
    report: Report, me: int | None = None, file: TextIO | None = None, *, width: int = 120, before: str = ""
) -> None:
    """Print a report to stderr, in colour on a terminal (see :func:`painted`); ``before`` stands in front of its first line."""
    out = sys.stderr if file is None else file
    out.write(f"{before}{painted(report.text(me, width), out)}\n")
    out.flush()


def painted(text: str, out: TextIO) -> str:
    """Return a report's text in colour where ``out`` is a terminal, rich can be imported and NO_COLOR is not set."""
    terminal = getattr(out, "isatty", None)  # a program may have put anything there
    if os.environ.get("NO_COLOR") or terminal is None or not terminal():
        return text
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return text
    coloured = Text(text)
    coloured.stylize("bold red", 0, min(found.start() for found in _BODY.finditer(f"{text}\n")))
    for pattern, style in _COLOURS:
        coloured.highlight_regex(pattern, style)
    console = Console(file=out, soft_wrap=True, highlight=False)
    with console.capture() as written:
        console.print(coloured, end="")
    return written.get()


_ROW = r"^ +ranks? \d[^:\n]*(?=: )"
_BODY = re.compile(rf"(?m){_ROW}|^ +(?:expected|compared with|cycle|next)\b|\n\Z")
_COLOURS = (
    (rf"(?m){_ROW}", "cyan"),
    (r">[^<>\n]+<", "bold yellow"),
    (r"(?<= at )[^ ,]+:\d+", "magenta"),
    (r"(?m)^  (next|expected|cycle|compared with)\b", "green"),
    (r"<- this rank", "bold"),
)
