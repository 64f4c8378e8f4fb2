"""States of ranks, and the table of them that is merged up a tree of ranks; its size is bounded for any number of ranks.

Pure: no MPI, no effects; only :func:`entry_of` reads the stacks of the threads. A :class:`RankState` is the state of one rank,
or of many ranks in one state; a :class:`Table` holds the distinct entries. Merging tables is associative and commutative, so a
tree of any shape gives the same table. The table has at most ``MOST_ROWS`` entries. The choice depends on the entries only, never
on the order of merging, so each chosen entry has all its ranks. Of the other entries the table has the ranks, and up to
``MOST_COUNTED`` fingerprints, which give their number.

The call that more than half of the ranks made must be in the table. So the table counts the fingerprints of all calls bit by
bit, and :meth:`Table.missing` returns the fingerprint of the call that a second reduction must collect.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import zlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from itertools import pairwise, zip_longest
from typing import Any, Literal

from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.report.text_layout import clip, columns, short_paths
from mpicoll.errors import DistError, in_one_line, message_of
from mpicoll.runtime.call_site import callers_of, is_installed, traceback_site
from mpicoll.transports.control import NOTHING

MOST_ROWS = 24
MOST_COUNTED = 256
_BITS = 62
_MOST_PARTS = 10
_LENGTHS = {"op": 48, "site": 300, "called_from": 300, "group": 60, "problem": 500, "needs": 160, "handling": 200}
_PART_NAME, _PART_TEXT = 24, 80
_MOST_CALLERS, _CALLER_TEXT = 3, 100
_ROW_BYTES = 4 * (sum(_LENGTHS.values()) + _MOST_PARTS * (_PART_NAME + _PART_TEXT) + _MOST_CALLERS * _CALLER_TEXT) + 512

Runs = tuple[tuple[int, int], ...]
"""Ranks as runs (first, last), in order and with gaps between them: all ranks of a job are one run."""

Standing = Literal["called", "waits", "late", "exited", "failed", "killed", "withdrawn", "silent", "unheard"]
"""``called``: the rank made this call. ``waits``: the rank waits in this call. ``late``: the rank has not made the call that
other ranks wait in, and waits in the call of its entry or, if there is a problem, has made that call last. ``silent``: the rank
has not made the call, and does not answer. ``unheard``: the rank has made the call, and does not answer. The other states say how
the rank left."""


def runs_of(ranks: Iterable[int]) -> Runs:
    """Return ranks, in any order, as runs."""
    return join((rank, rank) for rank in ranks)


def join(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return the union of runs, in any order, as runs."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def count(runs: Runs) -> int:
    """Return the number of ranks."""
    return sum(last - first + 1 for first, last in runs)


def listed(runs: Runs) -> list[int]:
    """Return the ranks one by one."""
    return [rank for first, last in runs for rank in range(first, last + 1)]


def holds(runs: Runs, rank: int | None) -> bool:
    """Return whether a rank is among the runs."""
    return rank is not None and any(first <= rank <= last for first, last in runs)


class Plural(int):
    """A number of ranks that chooses the form of a verb: ``f"{Plural(2):is/are}"`` is ``are``."""

    def __format__(self, forms: str) -> str:
        return forms.split("/")[self != 1]


def words_of(runs: Runs) -> list[str]:
    """Return each run as a word: ``3``, ``2-7``."""
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


def name_runs(runs: Runs, width: int = 60) -> str:
    """Return ``rank 3``, ``ranks 0, 2-7``, or as much as fits: ``ranks 0, 2, 4, …, 998 (500 ranks)``."""
    words = words_of(runs)
    number = count(runs)
    whole = f"rank{'' if number == 1 else 's'} {', '.join(words)}"
    if len(whole) <= width:
        return whole
    end = f"…, {words[-1]} ({number} ranks)"
    text = "ranks "
    for at, word in enumerate(words[:-1]):
        if at and len(text) + len(word) + 2 + len(end) > width:
            break
        text += f"{word}, "
    return text + end


def compress_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in short: ``0, 2-7``."""
    return ", ".join(words_of(runs_of(ranks)))


def name_ranks(ranks: Collection[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2-7``."""
    return f"rank{'s' if len(ranks) != 1 else ''} {compress_ranks(ranks)}"


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank, or of many ranks in the same state. Long texts are cut.

    Attributes:
        ranks: the ranks in this state.
        op, key, seq: the call (see ``diagnosis.call.CallDescription``), its key as named texts; empty if no call is known.
        site: file:line of the call, or of the failure.
        group: the name of the group in messages.
        asynchronous: whether the call was issued with ``async_op=True``.
        state: what the ranks do (see :data:`Standing`).
        problem: what is wrong with the arguments, or how the ranks left.
        needs: the ranks or the message that the ranks wait for.
        peer: the rank at the other end of a point-to-point call; -1: any rank.
        waited: the least and the most seconds that one of the ranks has waited.
        called_from: file:line of the program, if the call stands in an installed package, or if other ranks have made another
            call at ``site`` (see :meth:`Table.told`); "" if it is not known.
        callers: the further places of the program that have led to the call, the nearest first.
        handling: the exception of the program that was on its way when the call was made, in an ``except`` or ``finally``.
    """

    ranks: Runs
    op: str = ""
    key: tuple[tuple[str, str], ...] = ()
    seq: int = 0
    site: str = ""
    group: str = ""
    asynchronous: bool = False
    state: Standing = "called"
    problem: str = ""
    needs: str = ""
    peer: int | None = None
    waited: tuple[float, float] | None = None
    called_from: str = ""
    callers: tuple[str, ...] = ()
    handling: str = ""

    def __post_init__(self) -> None:
        for name, length in _LENGTHS.items():
            text = getattr(self, name)
            if text:
                tail = length - 1 if name in ("site", "called_from") else length // 3
                object.__setattr__(self, name, clip(text, length, tail=tail))
        parts = [(clip(name, _PART_NAME), _short(text)) for name, text in self.key]
        if len(parts) > _MOST_PARTS:
            rest = repr(parts[_MOST_PARTS - 1 :])
            parts[_MOST_PARTS - 1 :] = [
                ("further", f"{len(parts) - _MOST_PARTS + 1} arguments, {_digest(rest):06x}"[:40])
            ]
        object.__setattr__(self, "key", tuple(parts))
        object.__setattr__(
            self,
            "callers",
            tuple(clip(text, _CALLER_TEXT, tail=_CALLER_TEXT - 1) for text in self.callers[:_MOST_CALLERS]),
        )

    def content(self) -> tuple[Any, ...]:
        """Return the facts that are equal in all entries of one row: all but the ranks and their waiting times."""
        return tuple(getattr(self, name) for name in _CONTENT)

    def place(self, short: Mapping[str, str]) -> str:
        """Return where the call is, or "": ``ddp.py:80, called from train.py:12``.

        Args:
            short: the places in short (see :func:`short_sites`).
        """
        place = short.get(self.site, "")
        return f"{place}, called from {short[self.called_from]}" if place and self.called_from else place

    def call(self) -> tuple[Any, ...]:
        """Return the facts that are equal in two entries of the same call, at any place of the program."""
        return (self.op, self.key, self.group, bool(self.problem) and self.state == "called")

    @property
    def lacks(self) -> Literal["memory", "GPU", ""]:
        """The resource that the rank lacks for the call, if its arguments are right: memory, or a GPU that works; else ""."""
        name = self.problem.partition(":")[0]
        if (
            name.endswith("MemoryError") or "cudaErrorMemoryAllocation" in self.problem
        ):  # names of Python and of array packages
            return "memory"
        cuda = name.startswith(("CUDARuntime", "CUDADriver", "Accelerator"))
        return "GPU" if cuda and any(word in self.problem for word in _FOR_GOOD) else ""

    def fingerprint(self) -> int:
        """Return 62 bits of :meth:`call` (see :meth:`Table.missing`)."""
        return _digest(self.call())


def short_sites(rows: Iterable[RankState]) -> dict[str, str]:
    """Return the places of some entries in short: no two places have the same short form."""
    return short_paths(site for row in rows for site in (row.site, row.called_from))


_FOR_GOOD = (
    "IllegalAddress",
    "IllegalInstruction",
    "LaunchFailure",
    "LaunchTimeout",
    "MisalignedAddress",
    "cudaErrorAssert",
)
"""CUDA's names of errors after which CUDA no longer works in the process."""

_CONTENT = tuple(field.name for field in fields(RankState) if field.name not in ("ranks", "waited"))


def _short(text: str) -> str:
    """Return a text cut to the length of a part; different texts stay different."""
    if len(text) <= _PART_TEXT and columns(text) <= _PART_TEXT:
        return clip(text, _PART_TEXT)
    tail = 30 if text.startswith("[(") else 0  # structured dtypes may differ in the last field
    return f"{clip(text, _PART_TEXT - 9, tail=tail)} {_digest(text) & 0xFFFFFFFF:08x}"


def entry_of(
    call: CallDescription,
    rank: int,
    group: str = "",
    *,
    state: Standing = "called",
    needs: str = "",
    peer: int | None = None,
    waited: float | None = None,
) -> RankState:
    """Return the entry of a rank that makes a call or waits in it."""
    error = call.error
    callers = callers_of(call.site)
    outside = is_installed(call.site)
    parts = [_part(part) for part in call.key]
    if call.detail != NOTHING and not call.uneven and "elements" not in dict(parts):
        parts.append(("elements", str(call.detail)))
    if call.maker:
        parts.append(("by", call.maker))
    return RankState(
        ((rank, rank),),
        op=call.name,
        key=tuple(parts),
        seq=0 if call.closes else call.seq,
        site=str(call.site),
        called_from=callers[0] if outside and callers else "",
        callers=tuple(callers[outside:]),
        group=group,
        asynchronous=call.async_op,
        state=state,
        problem="" if error is None else _problem_of(error),
        needs=needs,
        peer=peer,
        waited=None if waited is None else (waited, waited),
        handling="" if error is not None else _handled(),
    )


def _handled() -> str:
    """Return the exception that the program handles in this thread, and where the exception was raised; "" if there is none."""
    error = sys.exc_info()[1]
    if isinstance(error, (GeneratorExit, StopIteration, StopAsyncIteration)):  # a loop has ended
        return ""
    site = (
        "" if error is None else traceback_site(error.__traceback__)
    )  # "": this library handles an exception of its own
    return f"{_problem_of(error)} (at {os.path.basename(site)})" if error is not None and site else ""


def _problem_of(error: BaseException) -> str:
    # Of a report the headline: its rows are about another call.
    text = in_one_line(error) if isinstance(error, DistError) else message_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_DTYPE = re.compile(
    r"(bool|[bu]?int|b?float|b?complex|c?longdouble)[0-9a-z_]*$|(date|time)[a-z]*64(\[.*\])?$|[<>|][SUV]\d+$|\[\(|\{'names'"
)


def _part(part: Any) -> tuple[str, str]:
    """Return one part of a call's key with its name."""
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str):
        return part[0], _value(part[1])
    text = _value(part)
    if text.startswith("ReduceOp."):
        return "op", text.removeprefix("ReduceOp.")
    if text.startswith(("from ", "to ")):
        return "peer", text
    return ("dtype" if _DTYPE.match(text) else "", text)


def _value(value: Any) -> str:
    if not isinstance(value, (tuple, list)):
        return str(value)
    if len(value) > 8 and all(type(item) is int for item in value):
        if all(a < b for a, b in pairwise(value)):
            runs = runs_of(value)
            if len(runs) <= 8:
                return f"[{', '.join(words_of(runs))}]"
        return f"[{', '.join(map(str, value[:6]))}, … {len(value)} values, {_digest(repr(value)) & 0xFFFFFF:06x}]"
    return f"[{', '.join(map(str, value))}]"


@dataclass(frozen=True, slots=True)
class Table:
    """The distinct entries of some ranks.

    Attributes:
        rows: at most ``MOST_ROWS`` entries, each with all its ranks: entries with a problem first, then by fingerprint.
        more: the ranks of all other entries.
        others: the ``MOST_COUNTED`` smallest fingerprints of the other entries.
        votes: for each bit of a call's fingerprint, the number of ranks whose call has the bit set.
        ranks: the number of ranks.
        pending: the ranks with asynchronous calls of the group pending for which the program does not wait.
    """

    rows: tuple[RankState, ...] = ()
    more: Runs = ()
    others: tuple[int, ...] = ()
    votes: tuple[int, ...] = (0,) * _BITS
    ranks: int = 0
    pending: Runs = ()

    def missing(self) -> int | None:
        """Return the fingerprint of the call that more than half of the ranks made, if its rows may be missing, else None."""
        if not self.more:
            return None
        return sum(1 << bit for bit, votes in enumerate(self.votes) if 2 * votes > self.ranks)

    def with_rows(self, found: Table) -> Table:
        """Return this table with the rows of a second reduction, which collected the entries of :meth:`missing`."""
        rows = {row.content(): row for row in (*self.rows, *found.rows)}
        collected = join(run for row in found.rows for run in row.ranks)
        others = set(self.others) - {_digest(content) for content in rows}
        return replace(
            self,
            rows=tuple(rows.values()),
            more=_without(self.more, collected),
            others=tuple(sorted(others)),
        )

    def told(self) -> Table:
        """Return the table with the callers that tell different calls at one place of the program apart, as ``called_from``.

        All other callers are dropped, and rows that differ in these only are one row.
        """
        at: dict[tuple[str, str], list[RankState]] = {}
        for row in self.rows:
            at.setdefault((row.site, row.called_from), []).append(row)
        alike: dict[tuple[Any, ...], list[RankState]] = {}
        for rows in at.values():
            nth = _first_difference([row.callers for row in rows]) if len({row.call() for row in rows}) > 1 else None
            for row in rows:
                caller = row.called_from if nth is None else (*row.callers, "")[min(nth, len(row.callers))]
                plain = replace(row, called_from=caller or row.called_from, callers=())
                alike.setdefault(plain.content(), []).append(plain)
        return replace(self, rows=tuple(_one(same) for same in alike.values()))

    def pack(self) -> bytes:
        """Return the table as bytes, at most :func:`size_bound`; only :meth:`unpack` reads them."""
        numbers = array("q")
        lengths = []
        for runs in (self.more, self.pending, *(row.ranks for row in self.rows)):
            lengths.append(len(runs))
            at = 0
            for first, last in runs:
                numbers.extend((first - at, last - first))
                at = last
        rows = [(row.content(), row.waited) for row in self.rows]
        whole = (rows, lengths, numbers.tobytes(), self.others, self.votes, self.ranks)
        return zlib.compress(pickle.dumps(whole, protocol=5), 1)

    @staticmethod
    def unpack(packed: bytes) -> Table:
        """Return the table that another rank has packed."""
        identities, lengths, raw, others, votes, ranks = pickle.loads(zlib.decompress(packed))
        numbers = iter(array("q", raw))
        found: list[Runs] = []
        for length in lengths:
            runs, at = [], 0
            for _ in range(length):
                first = at + next(numbers)
                at = first + next(numbers)
                runs.append((first, at))
            found.append(tuple(runs))
        rows = [
            RankState(ranks=runs, waited=waited, **dict(zip(_CONTENT, values, strict=True)))
            for runs, (values, waited) in zip(found[2:], identities, strict=True)
        ]
        return Table(tuple(rows), found[0], others, votes, ranks, found[1])


def size_bound(ranks: int) -> int:
    """Return the most bytes of a packed table of ``ranks`` ranks; most tables have some hundred bytes.

    If neighbouring ranks make different calls, each rank is a run of its own (16 bytes before compression).
    """
    return 2048 + MOST_ROWS * _ROW_BYTES + 10 * MOST_COUNTED + 10 * _BITS + 17 * ranks


def table_of(entries: Iterable[RankState], pending: Runs = ()) -> Table:
    """Return the table of entries; ``pending`` as in :class:`Table`."""
    found = list(entries)
    votes = [0] * _BITS
    total = 0
    weights: dict[tuple[Any, ...], int] = {}
    for entry in found:
        number = count(entry.ranks)
        total += number
        weights[entry.call()] = weights.get(entry.call(), 0) + number
    for call, number in weights.items():
        digest = _digest(call)
        for bit in range(_BITS):
            if digest >> bit & 1:
                votes[bit] += number
    return replace(_bounded(found, (), set(), votes, total), pending=pending)


def merge(a: Table, b: Table) -> Table:
    """Return the table of the ranks of both tables; associative and commutative."""
    votes = [x + y for x, y in zip(a.votes, b.votes, strict=True)]
    whole = _bounded((*a.rows, *b.rows), (*a.more, *b.more), {*a.others, *b.others}, votes, a.ranks + b.ranks)
    return replace(whole, pending=join((*a.pending, *b.pending)))


def _bounded(entries: Sequence[RankState], more: Runs, others: set[int], votes: Sequence[int], ranks: int) -> Table:
    alike: dict[tuple[Any, ...], list[RankState]] = {}
    for entry in entries:
        alike.setdefault(entry.content(), []).append(entry)
    order = sorted(
        ((not same[0].problem, _digest(content), same) for content, same in alike.items()), key=lambda item: item[:2]
    )
    out = order[MOST_ROWS:]
    smallest = tuple(sorted(others.union(digest for _, digest, _ in out))[:MOST_COUNTED])
    left = join((*more, *(run for _, _, same in out for entry in same for run in entry.ranks)))
    return Table(tuple(_one(same) for _, _, same in order[:MOST_ROWS]), left, smallest, tuple(votes), ranks)


def _one(same: Sequence[RankState]) -> RankState:
    if len(same) == 1:
        return same[0]
    times = [time for entry in same if entry.waited is not None for time in entry.waited]
    ranks = join(run for entry in same for run in entry.ranks)
    return replace(same[0], ranks=ranks, waited=(min(times), max(times)) if times else None)


def _first_difference(lists: Sequence[tuple[str, ...]]) -> int | None:
    """Return the first index at which the lists that are not empty differ, or None."""
    columns_of = enumerate(zip_longest(*filter(None, lists), fillvalue=""))
    return next((nth for nth, column in columns_of if len(set(column)) > 1), None)


def _without(runs: Runs, removed: Runs) -> Runs:
    left = []
    for first, last in runs:
        at = first
        for a, b in removed:
            if a > last or b < at:
                continue
            if a > at:
                left.append((at, a - 1))
            at = b + 1
        if at <= last:
            left.append((at, last))
    return tuple(left)


def _digest(value: Any) -> int:
    return int.from_bytes(blake2b(repr(value).encode(errors="replace"), digest_size=8).digest(), "little") >> 2
