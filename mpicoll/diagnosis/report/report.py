"""The report of an error between ranks: one block of text, the same on every rank, and the same facts as data.

Pure, except :func:`show`, which prints. ``diagnosis/report/texts.py`` makes a :class:`Report` of each kind. Whatever the input
is, its text has at most ``most`` lines of ``width`` columns: rows that do not fit are counted, long texts are cut.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TextIO, TypeVar

from mpicoll.diagnosis.report.entries import (
    MOST_COUNTED,
    Plural,
    RankState,
    Runs,
    Table,
    count,
    holds,
    join,
    listed,
    name_runs,
    short_sites,
)
from mpicoll.diagnosis.report.text_layout import clip, clip_line, columns, wrap
from mpicoll.errors import DistError, Message

Kind = Literal["mismatch", "blocks", "deadlock", "time limit", "peer failed", "peer exited", "calls"]

E = TypeVar("E", bound=DistError)

MESSAGE_WIDTH = 107
"""Columns of a report in an exception's message: 120 with ``[rank 12345] `` before each line."""

_THIS_RANK = " <- this rank"
_WHILE = ", while "
_LABEL_WIDTH = 44


@dataclass(frozen=True)
class Report:
    """An error between ranks, as described by all ranks that could be asked.

    Attributes:
        kind: the kind of error.
        group: the name of the group in messages; empty for a deadlock over several groups.
        members: the ranks that the report concerns: the members of the group, or the ranks of the deadlock.
        seq: number of the call on the group.
        headline: one sentence on the error.
        table: the states of the ranks, as told (see ``Table.told``).
        odd: the ranks at fault, if known: ranks that differ from the other ranks, are late, or have left.
        next_step: what the reader can do now.
        closing: the state after the error, as a sentence.
        cycle: the first ranks of a cycle of ``around`` ranks: each rank waits for the next, the last for the first.
        waiting: the call that the headline names; rows that wait and name no call wait in this call.
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
    waiting: RankState | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self.table.told())

    def one_line(self, width: int = 400) -> str:
        """Return the headline in one line."""
        return clip(self.headline, width, tail=width // 3)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The rows of the table as dicts. A row that waits and names no call has the call of the headline."""
        rows = [
            replace(self.waiting, ranks=row.ranks, state=row.state, waited=row.waited, problem=row.problem)
            if self.waiting is not None and row.state == "waits" and not row.op
            else row
            for row in _ordered(self)
        ]
        return _as_data(rows, self.group)

    @property
    def ranks(self) -> list[int]:
        """The ranks at fault, if known (see ``odd``), else all ranks that the report concerns."""
        return listed(self.odd or self.members)

    def _head(self, width: int) -> list[str]:
        parted = {"time limit": ": ", "peer exited": ": ", "peer failed": _WHILE}.get(self.kind, "")
        before, mark, after = self.headline.rpartition(parted) if parted else ("", "", "")
        whole = clip(self.headline, len(self.headline) * 2)
        if columns(whole) <= width or not mark:
            return wrap(self.headline, width, most=3)
        first, _, rest = mark.partition(" ")
        return [*wrap(before + first, width, most=3), *wrap(rest + after, width, first=4, most=2)]

    def as_error(self, kind: type[E], me: int) -> E:
        """Return an exception whose message is this report, as rank ``me`` reads the report, with the same facts as data."""
        error = kind(self.text(me, MESSAGE_WIDTH))
        error.report, error.group, error.ranks, error.calls = self, self.group, self.ranks, self.calls
        return error

    def text(self, me: int | None = None, width: int = 120, most: int = 40) -> str:
        """Return the report as one block of text.

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
            foot += wrap(f"next: {self.next_step}", width, first=2, rest=8, most=4)
        if self.closing:
            foot += wrap(self.closing, width, most=2)
        expected = reference_call(self)
        if self.kind == "mismatch" and expected is not None:
            head.append(_expected_line(self, expected, width))
        room = most - len(head) - len(foot)
        rows = _ordered(self)
        places = short_sites([*([] if self.waiting is None else [self.waiting]), *rows])
        shown: list[list[str]] = []
        for lines_a_row in (4, 2, 1):
            shown = _rows(self, rows, expected, places, me, width, lines_a_row)
            if sum(map(len, shown)) + bool(self.table.more) <= room:
                break
        hidden: list[RankState] = []
        while shown and sum(map(len, shown)) + bool(hidden or self.table.more) > room:
            shown.pop()
            hidden.insert(0, rows[len(shown)])
        lines = [*head, *(line for row in shown for line in row), *_more_line(self.table, hidden, width), *foot]
        return "\n".join(clip_line(line, width) for line in lines[:most])


def _as_data(rows: Iterable[RankState], group: str) -> list[dict[str, Any]]:
    return [
        {
            "ranks": listed(row.ranks),
            "op": row.op,
            "arguments": dict(row.key),
            "seq": row.seq,
            "site": row.site,
            "called_from": row.called_from,
            "group": row.group or group,
            "async": row.asynchronous,
            "state": row.state,
            "problem": row.problem,
            "needs": row.needs,
            "handling": row.handling,
            "waited": row.waited,
            "text": call_text(row) if row.op else "",
        }
        for row in rows
    ]


def with_calls(error: E, group: str, ranks: Iterable[int], entries: Iterable[RankState]) -> E:
    """Return an error whose message is no report, with its facts set as data (see ``DistError``)."""
    error.group, error.ranks, error.calls = group, list(ranks), _as_data(entries, group)
    return error


def _rows(
    report: Report,
    rows: Sequence[RankState],
    expected: RankState | None,
    places: Mapping[str, str],
    me: int | None,
    width: int,
    most: int,
) -> list[list[str]]:
    labels = [name_runs(row.ranks, min(_LABEL_WIDTH, width // 2)) for row in rows]
    pad = max((len(label) for label in labels), default=0)
    pad = min(pad, 26)  # a longer label indents its own row only
    indent = 2 + pad + 2
    made = []
    for row, label in zip(rows, labels, strict=True):
        text = f"{label}: {row_text(report, row, expected, places)}"
        first = 2 + max(0, pad - len(label))
        lines = wrap(text, width - len(_THIS_RANK), first=first, rest=indent, most=most)
        lines[-1] += _THIS_RANK if holds(row.ranks, me) else ""  # the columns are free on all ranks: all wrap alike
        made.append(lines)
    return made


CALLED_WRONG = Message("{call} raised {problem}", "The rank made the call with arguments that it refused.")
BLOCKS = Message("{call}, {problem}", "The rank made the call, and these of its blocks do not fit.")
WAITS = Message("{n:waits/wait} in {call}", "The rank waits in this call; `this call` is the call of the headline.")
ELSEWHERE = Message("{n:is/are} elsewhere", "The rank is in the program's own code, and its place there is not known.")
LATE = Message(
    "{n:has/have} not made the matching call, and {where}",
    "The rank is late. `where` is the call that the rank waits in, or the place of its main thread.",
)
LATE_BECAUSE = Message(
    "{n:has/have} not made the matching call, {problem}",
    "The rank is late; `problem` says what the rank does.",
)
SILENT = Message(
    "did not make the matching call, {problem}",
    "The rank is late and does not answer questions; `problem` is the place of its main thread if that can be read.",
)
NO_ANSWER = Message(
    "{n:does/do} not answer (computing, stopped or dead)",
    "The rank is late, does not answer, and its place cannot be read.",
)
UNHEARD = Message(
    "made this call, and {n:does/do} not answer (stopped, or without a processor)",
    "The rank has made the call, by the record on its node or as all ranks know the call; the rank does not answer questions.",
)
STARTED = Message(
    "made this call, and does not progress the call: {problem}",
    "The rank has made the call with `async_op=True`, and computes; `problem` is the place of its main thread.",
)
NO_CALL = Message("in no call of mpicoll", "The rank is in no call of the library at this moment.")
WITHDREW = Message("gave the group up: {problem}", "The rank withdrew from its call, and the group was broken.")
ENDED = Message("ended the program", "The rank's program ended without the call.")
FAILED = Message("failed: {problem}", "An exception ended the rank's program.")
KILLED = Message("{n:was/were} killed: {problem}", "A signal ended the rank's process.")
LAST_CALL = Message(", last call {call}", "Follows the state of a rank that is in no call, or has ended.")
LAST_KNOWN = Message(", last known call {call}", "Follows the state of a rank that is late.")
HANDLING = Message(
    ", while handling {handling}",
    "Follows a call that the rank made in an `except` or a `finally` block: the exception may be the cause.",
)
REFUSED = Message(
    ", raised {problem}",
    "Follows the call of a waiting rank that made the call with arguments that it refused. The rank raises that error when the "
    "other ranks have made the call, or when its wait ends.",
)
NEEDS = Message(", needs {needs}", "The ranks, or the message, that a waiting rank waits for.")
WAITED = Message(
    ", waited {seconds} s", "How long the rank has waited: the least and the most of the ranks of the row."
)


def row_text(report: Report, row: RankState, expected: RankState | None, places: Mapping[str, str]) -> str:
    """Return the text of one row, without its ranks."""
    n = Plural(count(row.ranks))
    call = ""
    if row.op:
        differs = differing(row, expected) if expected is not None and report.kind == "mismatch" else frozenset()
        call = call_text(row, differs)
        if row.group and row.group != report.group:
            call += f" on group {row.group}"
        if row.site:
            call += f" at {row.place(places)}"
    place = f" (at {row.place(places)})" if row.site and not row.op else ""
    last = LAST_CALL(call=call) if row.op else place
    if row.state == "called":
        message = BLOCKS if report.kind == "blocks" else CALLED_WRONG
        text = message(call=call, problem=row.problem) if row.problem else call
    elif row.state == "waits":
        text = call if report.kind in ("deadlock", "calls") else WAITS(n=n, call=call or "this call")
        text += REFUSED(problem=row.problem) if row.problem else ""
    elif row.state == "unheard":
        text = STARTED(problem=row.problem) if row.problem else UNHEARD(n=n)
    elif report.kind == "calls":
        text = (row.problem or NO_CALL.text) + (LAST_CALL(call=call) if row.op else "")
    elif row.state in ("late", "silent"):
        if row.state == "silent":
            text = SILENT(problem=row.problem or NO_ANSWER(n=n))
        elif row.problem:
            text = LATE_BECAUSE(n=n, problem=row.problem)
        else:
            text = LATE(n=n, where=WAITS(n=n, call=call) if row.op else ELSEWHERE(n=n))
        if row.op and (row.state == "silent" or row.problem):
            text += LAST_KNOWN(call=call)
    elif row.state == "withdrawn":
        text = WITHDREW(problem=row.problem) + place
    elif row.state == "exited":
        text = (row.problem or ENDED.text) + last
    else:
        how = (FAILED if row.state == "failed" else KILLED)(n=n, problem=row.problem)
        text = (how if row.problem else how.removesuffix(": ")) + last
    if row.handling:
        text += HANDLING(handling=row.handling)
    if row.needs:
        text += NEEDS(needs=row.needs)
    if row.asynchronous:
        text += ", async"
    return text + _waited(row)


def _waited(row: RankState) -> str:
    if row.waited is None or row.waited[1] < 0.1:
        return ""
    least, most = (f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}" for seconds in row.waited)
    return WAITED(seconds=most if least == most else f"{least} to {most}")


_FIRST = ("dtype", "elements", "op", "root", "peer", "tag")


def call_text(entry: RankState, marked: frozenset[str] = frozenset()) -> str:
    """Return a call as text: ``reduce #41 float32[1024] SUM root 0``; marked parts read ``>SUM<``."""

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


def differing(entry: RankState, other: RankState) -> frozenset[str]:
    """Return the names of the parts in which two calls differ, but for what made them; ``function``: they are two functions."""
    if entry.op != other.op:
        return frozenset({"function"})
    if (entry.problem and not entry.key) or (other.problem and not other.key):
        return frozenset()
    mine, theirs = dict(entry.key), dict(other.key)
    return frozenset(name for name in (mine.keys() | theirs.keys()) - {"by"} if mine.get(name) != theirs.get(name))


def _classes(table: Table) -> list[tuple[int, int, RankState]]:
    """Return the distinct calls of a table, at any place: number of ranks, minus the lowest rank, one entry of each."""
    alike: dict[tuple[Any, ...], list[RankState]] = {}
    for row in table.rows:
        if row.op and not row.problem and row.state in ("called", "waits"):
            alike.setdefault(row.call(), []).append(row)
    found = []
    for same in alike.values():
        same.sort(key=lambda row: row.ranks[0][0])
        found.append((sum(count(row.ranks) for row in same), -same[0].ranks[0][0], same[0]))
    return sorted(found, key=lambda item: item[:2], reverse=True)


def reference_call(report: Report) -> RankState | None:
    """Return the call that other calls are compared with: the call of most ranks, or of the lowest rank if no call has most."""
    classes = _classes(report.table)
    if not classes:
        return None
    if made_by_most(report.table):
        return classes[0][2]
    return max(classes, key=lambda item: item[1])[2]


def made_by_most(table: Table) -> int:
    """Return how many ranks made the call that most ranks made; 0 if equally many ranks made two calls."""
    classes = _classes(table)
    if not classes or (len(classes) > 1 and classes[0][0] == classes[1][0]):
        return 0
    return classes[0][0]


def _expected_line(report: Report, expected: RankState, width: int) -> str:
    most = made_by_most(report.table)
    call = call_text(replace(expected, problem=""))
    if most > 1 or (most and any(row.problem for row in report.table.rows)):
        return f"  expected: {clip(call, width - 50)}, as {most} of {report.table.ranks} ranks called"
    return f"  compared with what {name_runs(expected.ranks[:1], 24)} called: {clip(call, width - 50)}"


def _ordered(report: Report) -> list[RankState]:
    """Return the rows in the order of the text: the expected call, rows with a problem, then by lowest rank."""
    expected = reference_call(report) if report.kind == "mismatch" else None
    usual = None if expected is None else expected.call()
    late = {"late", "silent", "unheard", "exited", "failed", "killed", "withdrawn"}

    def place(row: RankState) -> tuple[bool, bool, bool, Runs]:
        return (
            report.kind not in ("mismatch", "blocks") and row.state not in late,
            usual is not None and row.call() != usual,
            not row.problem,
            row.ranks,
        )

    return sorted(report.table.rows, key=place)


def _more_line(table: Table, hidden: Sequence[RankState], width: int) -> list[str]:
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


def show(
    report: Report, me: int | None = None, file: TextIO | None = None, *, width: int = 120, before: str = ""
) -> None:
    """Print a report to stderr, in colour on a terminal (see :func:`painted`); ``before`` precedes its first line."""
    out = sys.stderr if file is None else file
    out.write(f"{before}{painted(report.text(me, width), out)}\n")
    out.flush()


def painted(text: str, out: TextIO) -> str:
    """Return a report's text, in colour if ``out`` is a terminal, rich can be imported and NO_COLOR is not set."""
    terminal = getattr(out, "isatty", None)  # the program may have replaced the stream by any object
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
