"""What ranks say, merged and written: golden reports from 4 to 100,000 ranks, and bounds that hold for any input.

``UPDATE_GOLDEN=1 python -m pytest tests/unit/diagnosis/test_report.py`` writes the golden files anew: look at their difference.
"""

from __future__ import annotations

import difflib
import io
import os
import pickle
import random
import re
import sys
from collections.abc import Callable, Generator, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.report import advice as advices
from mpicoll.diagnosis.report import report as reports
from mpicoll.diagnosis.report.entries import (
    MOST_COUNTED,
    MOST_ROWS,
    RankState,
    Table,
    count,
    entry_of,
    join,
    listed,
    merge,
    name_runs,
    runs_of,
    size_bound,
    table_of,
)
from mpicoll.diagnosis.report.report import Report, call_text, show
from mpicoll.diagnosis.report.text_layout import columns, short_paths
from mpicoll.diagnosis.report.texts import (
    blocks_differ,
    calls_now,
    deadlock,
    mismatch,
    peer_exited,
    peer_failed,
    time_limit,
    with_unreceived,
)
from mpicoll.runtime.call_site import call_site

GOLDEN = Path(__file__).parent / "golden"
SIZES = (4, 64, 1_000, 100_000)
TRAIN = "/home/ada/project/train.py"


def usual(ranks: Iterable[int], **other: Any) -> RankState:
    key = (("op", "SUM"), ("dtype", "float32"), ("elements", "1024"))
    known: dict[str, Any] = {"op": "all_reduce", "key": key, "seq": 41, "site": f"{TRAIN}:88"}
    return RankState(runs_of(ranks), **{**known, **other})


def key(op: str = "SUM", dtype: str = "float32", elements: int = 1024, **other: str) -> tuple[tuple[str, str], ...]:
    return (("op", op), ("dtype", dtype), ("elements", str(elements)), *other.items())


def without(n: int, *left_out: int) -> list[int]:
    return [rank for rank in range(n) if rank not in left_out]


def a_dtype(n: int) -> Report:
    odd = usual([1], key=key(dtype="float64"), waited=(0.0, 0.0))
    return mismatch("WORLD", runs_of(range(n)), 41, table_of([usual(without(n, 1), waited=(0.2, 3.1)), odd]))


def a_skipped_call(n: int) -> Report:
    odd = usual([n - 1, n // 2], op="barrier", key=(), site=f"{TRAIN}:91")
    return mismatch("WORLD", runs_of(range(n)), 41, table_of([usual(without(n, n - 1, n // 2)), odd]))


def wrong_arguments(n: int) -> Report:
    problem = (
        "TypeError: tensor must be an array or speak DLPack, the buffer protocol or __cuda_array_interface__, not list"
    )
    odd = usual([2], key=(), problem=problem, site="/home/ada/project/data/train.py:12")
    return mismatch("WORLD", runs_of(range(n)), 41, table_of([usual(without(n, 2)), odd]))


def blocks(n: int) -> Report:
    """Return an exchange in which one rank sends more than the next one expects, and that one something to all others."""
    call = {"op": "all_to_all_single", "key": (("dtype", "float64"),)}
    sends = usual([1], **call, problem="sends 3 elements to rank 2, which expects 2")
    expects = usual([2], **call, problem="expects 2 elements from rank 1, which sends 3", site=f"{TRAIN}:99")
    return blocks_differ("WORLD", runs_of(range(n)), 41, table_of([usual(without(n, 1, 2), **call), sends, expects]))


def no_memory(n: int) -> Report:
    problem = "OutOfMemoryError: Out of memory allocating 8,000,000,512 bytes (allocated so far: 76,000,000,000 bytes)"
    odd = usual([2], key=(), problem=problem)
    return mismatch("WORLD", runs_of(range(n)), 41, table_of([usual(without(n, 2)), odd]))


def a_failed_gpu(n: int) -> Report:
    problem = "CUDARuntimeError: cudaErrorIllegalAddress: an illegal memory access was encountered"
    odd = usual([2, 3], key=(), problem=problem)
    return mismatch("WORLD", runs_of(range(n)), 41, table_of([usual(without(n, 2, 3)), odd]))


def all_different(n: int) -> Report:
    rows = [usual(range(at, n, 40), key=key(elements=1000 + at)) for at in range(min(n, 40))]
    return mismatch("[0-99999]", runs_of(range(n)), 41, table_of(rows))


def receives(n: int) -> Report:
    waits = [
        RankState(
            runs_of([rank]),
            op="recv",
            key=(("peer", f"from rank {(rank + 1) % n}"), ("tag", "0"), ("dtype", "float64"), ("elements", "4")),
            site=f"{TRAIN}:88",
            group="WORLD",
            state="waits",
            needs=f"rank {(rank + 1) % n} to send",
            peer=(rank + 1) % n,
            waited=(0.2, 0.3),
        )
        for rank in range(n)
    ]
    return deadlock(waits, {rank: [(rank + 1) % n] for rank in range(n)})


def two_groups(n: int) -> Report:
    halves = [name_runs(runs_of(range(half, n, 2))) for half in (0, 1)]
    waits = [
        usual(
            [rank],
            group=("first", "second")[rank % 2],
            state="waits",
            needs=halves[1 - rank % 2],
            site=f"{TRAIN}:{90 + rank % 2}",
            seq=1,
        )
        for rank in range(n)
    ]
    return deadlock(waits, {0: [1], 1: [0]})


def late(n: int) -> Report:
    table = table_of(
        [
            RankState(runs_of(without(n, 1, n - 1)), state="waits", waited=(1799.2, 1800.0)),
            RankState(
                runs_of([1]),
                op="recv",
                key=(("peer", "from rank 2"), ("tag", "7"), ("dtype", "float32"), ("elements", "1")),
                site="/home/ada/project/data/train.py:17",
                state="late",
            ),
            RankState(runs_of([n - 1]), state="silent"),
        ]
    )
    return time_limit(usual([0]), "WORLD", runs_of(range(n)), table, 1800.0)


def left(n: int) -> Report:
    table = table_of(
        [
            RankState(runs_of(without(n, 1)), state="waits", waited=(0.1, 0.4)),
            usual(
                [1],
                op="barrier",
                key=(),
                seq=39,
                site=f"{TRAIN}:61",
                state="exited",
                problem="ended the program after 39 calls on this group",
            ),
        ]
    )
    return peer_exited(usual([0]), "WORLD", runs_of(range(n)), table)


def failed(n: int) -> Report:
    problem = "ValueError: loss is nan in step 17"
    table = table_of(
        [
            RankState(runs_of(without(n, 3)), state="waits", waited=(0.1, 0.4)),
            RankState(runs_of([3]), state="failed", problem=problem, site=f"{TRAIN}:102"),
        ]
    )
    return peer_failed(usual([0]), "WORLD", runs_of(range(n)), table)


def at_a_moment(n: int) -> Report:
    """Return where ranks are while a test hangs: one is in no call, one does not answer, the others wait."""
    table = table_of(
        [
            usual(without(n, 1, 2, 3), state="waits", group="WORLD", waited=(2.1, 3.4)),
            usual([3], state="waits", group="rows", asynchronous=True, waited=(3.2, 3.2)),
            RankState(
                runs_of([1]),
                op="barrier",
                site=f"{TRAIN}:61",
                group="WORLD",
                state="late",
                problem="in no call of mpicoll (2 pending that the program has not waited for)",
            ),
            RankState(runs_of([2]), state="silent", problem="does not answer"),
        ]
    )
    return calls_now(table, runs_of(range(n)))


CASES: dict[str, Callable[[int], Report]] = {
    "mismatch-dtype": a_dtype,
    "mismatch-skipped-call": a_skipped_call,
    "mismatch-arguments": wrong_arguments,
    "mismatch-blocks": blocks,
    "mismatch-memory": no_memory,
    "mismatch-gpu": a_failed_gpu,
    "mismatch-all-different": all_different,
    "deadlock-receives": receives,
    "deadlock-two-groups": two_groups,
    "time-limit": late,
    "peer-exited": left,
    "peer-failed": failed,
    "calls-now": at_a_moment,
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    """The reports of synthetic jobs of 4 to 100,000 ranks are those of the golden file, within 40 lines of 120 columns."""
    blocks = []
    for size in SIZES:
        text = CASES[name](size).text(me=1)
        lines = text.splitlines()
        assert len(lines) <= 40, f"{size} ranks: {len(lines)} lines"
        assert max(map(columns, lines)) <= 120, f"{size} ranks: {max(map(columns, lines))} columns"
        blocks.append(f"== {size} ranks ==\n{text}\n")
    made = "\n".join(blocks)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(made)
    found = path.read_text()
    difference = "\n".join(
        difflib.unified_diff(found.splitlines(), made.splitlines(), str(path.name), "now", lineterm="")
    )
    assert not difference, f"UPDATE_GOLDEN=1 writes it anew\n{difference}"


def test_the_golden_files_are_those_of_the_cases() -> None:
    """No golden file is left without its test."""
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


WORDS = (
    "all_reduce",
    "barrier",
    "x" * 300,
    "a b\nc\td",
    "",
    "日本語" * 70,
    "\x1b[31mred",
    "\ud800",
    "e\u0301" * 90,
    "z " * 400,
)


def text(dice: random.Random) -> str:
    return dice.choice(WORDS) + dice.choice(("", " ", str(dice.randrange(10**6)))) + dice.choice(WORDS)


def any_entry(dice: random.Random, ranks: Iterable[int], kinds: int) -> RankState:
    """Return an entry that is one of some ``kinds``, equal ones being likely where there are few."""
    which = random.Random(dice.randrange(kinds))
    state = which.choice(("called", "waits", "late", "exited", "failed", "killed", "withdrawn", "silent"))
    waited = None if which.random() < 0.3 else tuple(sorted((dice.random() * 5, dice.random() * 5)))
    return RankState(
        runs_of(ranks),
        op=which.choice(WORDS),
        key=tuple(
            (which.choice(("dtype", "elements", "op", "", text(which))), text(which))
            for _ in range(which.randrange(14))
        ),
        seq=which.randrange(10**9),
        site=which.choice(("", f"/{text(which)}/train.py:{which.randrange(99)}", text(which))),
        group=which.choice(("", "WORLD", text(which))),
        asynchronous=which.random() < 0.5,
        state=state,  # type: ignore[arg-type]
        problem=which.choice(("", text(which), "m" * 3000)),
        needs=which.choice(("", text(which))),
        peer=which.choice((None, -1, which.randrange(99))),
        waited=waited,  # type: ignore[arg-type]
    )


def any_entries(dice: random.Random) -> list[RankState]:
    """Return entries of distinct ranks, of few or many kinds."""
    n, kinds = dice.choice((2, 5, 40, 700)), dice.choice((3, 30, 3000))
    ranks = list(range(n))
    dice.shuffle(ranks)
    cuts = sorted({0, n, *(dice.randrange(n) for _ in range(dice.choice((1, 3, 60, 60))))})
    return [any_entry(dice, ranks[a:b], kinds) for a, b in pairwise(cuts)]


def test_no_text_is_too_long() -> None:
    """Whatever ranks say, a report has at most 40 lines of 120 columns (or what is asked for), and ends as it should."""
    dice = random.Random(1)
    for turn in range(20):
        found = any_entries(dice)
        table = table_of(found)
        members = join(run for entry in found for run in entry.ranks)
        waiting, group = dice.choice(found), text(dice)
        made = [mismatch(group, members, turn, table), time_limit(waiting, group, members, table, 1e9)]
        made += [peer_exited(waiting, group, members, table), calls_now(table, members, text(dice))]
        if any(row.state in ("failed", "killed") for row in table.rows):
            made.append(peer_failed(waiting, group, members, table))
        if any(entry.state == "waits" for entry in found):
            made.append(deadlock(found, {0: [3], 3: [9], 9: [3]}))
        for report in made:
            for width, most in ((120, 40), (70, 12), (40, 8)):
                lines = report.text(dice.choice((None, 0, 1)), width, most).splitlines()
                where = f"turn {turn}, {report.kind}, {width} x {most}"
                assert len(lines) <= most, f"{where}: {len(lines)} lines"
                assert all(columns(line) <= width for line in lines), f"{where}: {max(lines, key=columns)!r}"
                assert all(line.isprintable() for line in lines), where
            assert "\n" not in report.one_line()
            if report.kind == "mismatch":
                assert "the group can still be used" in report.text().splitlines()[-1]
            assert pickle.loads(pickle.dumps(report)) == report


def test_merging_is_associative_and_commutative() -> None:
    """Tables merged in any order and any tree are the same, also where more calls differ than are kept."""
    dice = random.Random(2)
    overflows = 0
    for turn in range(50):
        found = any_entries(dice)
        whole = table_of(found)
        overflows += bool(whole.more)
        for _ in range(3):
            tables = [table_of([entry]) for entry in found]
            dice.shuffle(tables)
            while len(tables) > 1:
                at = dice.randrange(len(tables) - 1)
                a, b = tables.pop(at), tables.pop(at)
                tables.insert(dice.randrange(len(tables) + 1), merge(Table.unpack(a.pack()), b))
            assert tables[0] == whole, f"turn {turn}"
        assert merge(whole, Table()) == whole
        shown = [rank for row in whole.rows for rank in listed(row.ranks)]
        assert len(shown) == len(set(shown)), f"turn {turn}"
        assert sorted([*shown, *listed(whole.more)]) == sorted(r for entry in found for r in listed(entry.ranks))
        assert len(whole.rows) == min(MOST_ROWS, len({entry.content() for entry in found})), f"turn {turn}"
    assert overflows > 1


def test_the_call_of_most_ranks_is_never_lost() -> None:
    """Where more calls differ than are kept, the table says which call of most ranks it lacks, and takes its rows."""
    lost = 0
    for seed in range(80):
        n = 101
        odd = [usual([rank], key=key(elements=5000 + seed * n + rank)) for rank in range(40)]
        most = [usual(range(40, 70), site=f"{TRAIN}:{seed}"), usual(range(70, n), site=f"{TRAIN}:{900 + seed}")]
        table = table_of([*odd, *most])
        wanted = table.missing()
        assert wanted == most[0].fingerprint() == most[1].fingerprint()
        lost += not any(row.fingerprint() == wanted for row in table.rows)
        again = table_of([entry for entry in (*odd, *most) if entry.fingerprint() == wanted])
        table = table.with_rows(again)
        assert table.with_rows(again) == table
        report = mismatch("WORLD", runs_of(range(n)), 1, table)
        assert "expected: all_reduce #41 float32[1024] SUM, as 61 of 101 ranks called" in report.text()
        assert report.odd == ((0, 39),), report.odd
        assert "ranks 40-69: " in report.text()
        assert "ranks 70-100: " in report.text()
        number = 40 - sum(count(row.ranks) == 1 for row in table.rows)
        assert f"and {number} more different calls" in report.text(), report.text()
    assert 0 < lost < 80
    assert table_of([usual(range(9)), usual([9], op="barrier")]).missing() is None


def test_a_packed_table_is_small() -> None:
    """100,000 ranks that call alike cost some hundred bytes; the stated bound holds for the worst."""
    n = 100_000
    few = table_of([usual(without(n, 77)), usual([77], op="barrier", key=())])
    assert len(few.pack()) < 600
    assert Table.unpack(few.pack()) == few
    stripes = table_of([usual(range(0, n, 2)), usual(range(1, n, 2), op="barrier", key=())])
    assert len(stripes.pack()) < 20_000
    assert Table.unpack(stripes.pack()) == stripes
    dice = random.Random(3)
    rows = [any_entry(dice, [], 10**9) for _ in range(MOST_ROWS + MOST_COUNTED + 50)]
    ranks: list[list[int]] = [[] for _ in rows]
    for rank in range(n):
        ranks[dice.randrange(MOST_ROWS) if rank % 8 else dice.randrange(len(rows))].append(rank)
    worst = [
        RankState(**{**{name: getattr(row, name) for name in RankState.__slots__}, "ranks": runs_of(of)})
        for row, of in zip(rows, ranks, strict=True)
    ]
    chaos = table_of(worst)
    assert len(chaos.others) == MOST_COUNTED
    assert Table.unpack(chaos.pack()) == chaos
    assert len(chaos.pack()) < size_bound(n) < 2_000_000
    assert size_bound(4) < 300_000
    one = table_of([usual([rank], problem=text(dice) * 9, site=text(dice) * 9) for rank in range(300)])
    assert len(one.pack()) < size_bound(300)


def test_parts_that_are_cut_stay_different() -> None:
    """Long texts of a key are cut so that different ones are still different, and the same again when cut again."""
    long = [tuple(range(5000)), tuple(range(1, 5001)), (5,) * 5000, (*(5,) * 4999, 4), "n" * 999, "n" * 998 + "m"]
    entries = [entry_of(CallDescription("all_gather", (("blocks", value),), call_site()), 0) for value in long]
    assert len({entry.key for entry in entries}) == len(long)
    assert "[0-4999]" in call_text(entries[0])
    assert "5000 values" in call_text(entries[2])
    dtypes = (str(np.dtype([(f"field_{i}", "f8") for i in range(9)] + [(last, "i4")])) for last in ("n", "m"))
    first, second = (call_text(entry_of(CallDescription("broadcast", (dtype,), call_site()), 0)) for dtype in dtypes)
    assert "[('field_0', '<f8'), " in first
    assert "('n', '<i4')]" in first
    assert "('m', '<i4')]" in second
    for entry in entries:
        assert all(columns(part) <= 80 for _, part in entry.key)
        again = RankState(**{name: getattr(entry, name) for name in RankState.__slots__})
        assert again == entry


def test_an_entry_of_a_call() -> None:
    """The parts of a call's key have names, and what is wrong with its arguments is its problem."""
    site = call_site()
    call = CallDescription(
        "reduce", ("ReduceOp.SUM", ("root", 3), "float32", ("elements", 1000)), site, seq=7, async_op=True
    )
    entry = entry_of(call, 5, waited=2.0)
    assert entry.ranks == ((5, 5),)
    assert call_text(entry) == "reduce #7 float32[1000] SUM root 3"
    assert entry.site == str(site)
    assert entry.asynchronous
    assert (
        call_text(entry_of(CallDescription("all_to_all_single", ("bool",), site, detail=4), 0))
        == "all_to_all_single bool[4]"
    )
    received = CallDescription("recv", ("from rank 1", ("tag", 2), "complex128", ("elements", 4)), site)
    assert call_text(entry_of(received, 0)) == "recv complex128[4] from rank 1 tag 2"
    named = CallDescription("barrier", (("name", "epoch"),), site, seq=1)
    assert call_text(entry_of(named, 0)) == "barrier #1 name epoch"
    wrong = entry_of(CallDescription("gather", (), site, error=ValueError("x")), 0)
    assert (call_text(wrong), wrong.problem) == ("gather (…)", "ValueError: x")


@pytest.mark.parametrize(
    ("who", "told"), [((), False), ((0,), True), ((0, 1), True), ((0, 1, 2), False), ((0, 1, 2, 3), False)]
)
def test_advice_on_ranks_that_handle_an_exception(who: tuple[int, ...], told: bool) -> None:
    """A call in an `except` block is suspected only if most ranks handle no exception."""
    rows = [
        RankState(
            ((rank, rank),),
            op="barrier",
            group="WORLD",
            state="waits",
            handling="KeyError: 1 (at a.py:1)" * (rank in who),
        )
        for rank in range(4)
    ]
    assert ("correct the error" in advices._handled(rows)) == told


def test_loops_that_end_are_no_exceptions_handled() -> None:
    """A call in a generator that the program closes handles no exception of the program; one without a text has a name."""

    def calls() -> Generator[None, None, None]:
        try:
            yield
        finally:
            found.append(entry_of(CallDescription("barrier", (), call_site()), 0).handling)

    found: list[str] = []
    made = calls()
    next(made)
    made.close()
    try:
        raise KeyError
    except KeyError:
        found.append(entry_of(CallDescription("barrier", (), call_site()), 0).handling)
    assert found[0] == ""
    assert found[1].startswith("KeyError (at test_report.py:"), found


def test_what_differs_is_marked() -> None:
    """The parts that differ from the call of most ranks are marked, also those that are missing; the advice fits them."""
    dtype, elements, reduction = key(dtype="int32"), key(elements=7), key("MAX")
    for odd, marked, advice in (
        ({"key": dtype}, "all_reduce #41 >int32<[1024] SUM", "cast the array to float32 before the call on rank 3"),
        ({"key": elements}, "all_reduce #41 float32[>7<] SUM", "same number of elements"),
        ({"key": reduction}, "all_reduce #41 float32[1024] >MAX<", "the same reduction"),
        ({"key": key(root="1")}, "all_reduce #41 float32[1024] SUM >root 1<", "the same root"),
        ({"op": "barrier", "key": ()}, ">barrier< #41 at", "not at the same call"),
        ({"key": key()[:2]}, "all_reduce #41 float32 SUM >no elements<", "same number of elements"),
        (
            {"key": key("MAX", "int32")},
            "all_reduce #41 >int32<[1024] >MAX<",
            "make these parts alike on all ranks: dtype, op",
        ),
        (
            {"key": elements, "site": "b.py:1"},
            "[>7<] SUM at b.py:1",
            "if the arguments are intended, rank 3 skipped or",
        ),
        (
            {"key": (), "problem": "ValueError: no"},
            "all_reduce #41 (…) at train.py:88 raised ValueError: no",
            "correct",
        ),
    ):
        report = mismatch("WORLD", runs_of(range(4)), 41, table_of([usual([0, 1, 2]), usual([3], **odd)]))
        text = report.text()
        assert f"rank 3: {marked}" in text or (marked.startswith("[") and marked in text), text
        assert advice in text, text
        assert text.count(">") == text.count("<"), text
        assert report.odd == ((3, 3),)
        assert report.ranks == [3]


def test_who_is_wrong_where_nobody_is_in_the_majority() -> None:
    """Two ranks that differ are compared with the lower one, and neither is blamed."""
    report = mismatch("WORLD", ((4, 5),), 1, table_of([usual([4]), usual([5], op="barrier", key=())]))
    assert "compared with what rank 4 called: all_reduce" in report.text()
    assert report.ranks == [4, 5]
    tie = mismatch("WORLD", ((0, 3),), 1, table_of([usual([1, 3]), usual([0, 2], op="barrier", key=())]))
    assert "compared with what rank 0 called: barrier" in tie.text()


def test_wrong_arguments_beside_calls_that_differ() -> None:
    """The advice clears the other ranks only if they made one call; a tie of them is not called what most ranks made."""
    wrong = usual([0], key=(), problem="raised ValueError: no")
    alike = mismatch("WORLD", ((0, 2),), 1, table_of([wrong, usual([1, 2])]))
    assert "as 2 of 3 ranks called" in alike.text()
    assert "nothing is wrong with the calls of the other ranks" in alike.text()
    report = mismatch("WORLD", ((0, 2),), 1, table_of([wrong, usual([1]), usual([2], key=key(elements=2))]))
    assert "compared with what rank 1 called" in report.text()
    assert "correct the arguments on rank 0; the calls of the other ranks differ, too" in report.text(width=400)
    assert report.ranks == [0]


def test_the_calls_as_data() -> None:
    """A report's rows are there as dicts, with whole paths and lists of ranks."""
    first, second = a_dtype(4).calls
    assert first["ranks"] == [0, 2, 3]
    assert second == {
        "ranks": [1],
        "op": "all_reduce",
        "arguments": {"op": "SUM", "dtype": "float64", "elements": "1024"},
        "seq": 41,
        "site": f"{TRAIN}:88",
        "called_from": "",
        "group": "WORLD",
        "async": False,
        "state": "called",
        "problem": "",
        "needs": "",
        "handling": "",
        "waited": (0.0, 0.0),
        "text": "all_reduce #41 float64[1024] SUM",
    }


def test_calls_of_an_installed_package() -> None:
    """A row, and the headline of a wait, name the line of the package and the line of the program that called the package."""
    package = "/env/lib/python3.12/site-packages/trainer/steps.py:7"
    first, second, waiting = (
        usual(ranks, site=package, called_from=f"/home/ada/{file}", state=state)
        for ranks, file, state in (
            ([0], "train.py:5", "called"),
            ([1], "evaluate.py:9", "called"),
            ([2], "train.py:6", "waits"),
        )
    )
    text = mismatch("WORLD", runs_of(range(2)), 41, table_of([first, second])).text()
    assert " rank 0: all_reduce #41 float32[1024] SUM at steps.py:7, called from train.py:5\n" in text
    assert " rank 1: all_reduce #41 float32[1024] SUM at steps.py:7, called from evaluate.py:9\n" in text
    assert Table.unpack(table_of([first]).pack()).rows[0].called_from == "/home/ada/train.py:5"
    gone = RankState(((1, 1),), state="exited")
    text = peer_exited(waiting, "WORLD", runs_of(range(3)), table_of([gone])).text()
    assert "SUM on group WORLD at steps.py:7, called from train.py:6:" in text.splitlines()[0]


def test_calls_of_one_wrapper() -> None:
    """Different calls at one place name the nearest callers that differ; rows that differ in other callers only are one row."""
    comm, train = "/home/ada/comm.py", "/home/ada/train.py"
    through = f"{comm}:9"
    rows = [
        usual([0], site=f"{comm}:4", callers=(through, f"{train}:5", f"{train}:30")),
        usual([2, 3], site=f"{comm}:4", callers=(through, f"{train}:5", f"{train}:40")),
        usual([1], site=f"{comm}:4", callers=(through, f"{train}:7"), key=key("MAX")),
    ]
    assert Table.unpack(table_of(rows).pack()).told().rows == table_of(rows).told().rows
    text = mismatch("WORLD", runs_of(range(4)), 41, table_of(rows)).text()
    assert " ranks 0, 2-3: all_reduce #41 float32[1024] SUM at comm.py:4, called from train.py:5\n" in text
    assert " rank 1: all_reduce #41 float32[1024] >MAX< at comm.py:4, called from train.py:7\n" in text
    assert "rank 1 skipped or repeated a call before" in text
    alike = [*rows[:2], usual([1], site=f"{comm}:4", callers=(through, f"{train}:5", f"{train}:50"), key=key("MAX"))]
    assert "train.py:50" in mismatch("WORLD", runs_of(range(4)), 41, table_of(alike)).text()
    same = table_of(rows[:2]).told()
    assert [(row.ranks, row.called_from, row.callers) for row in same.rows] == [(((0, 0), (2, 3)), "", ())]


def test_this_rank_is_the_only_difference() -> None:
    """The reports of two ranks differ in the mark of this rank alone."""
    report = receives(4)
    texts = [report.text(me) for me in (None, 0, 2)]
    assert texts[0] not in texts[1:]
    assert [text.count("<- this rank") for text in texts] == [0, 1, 1]
    assert len({text.replace(" <- this rank", "") for text in texts}) == 1


def test_cycles() -> None:
    """The cycle of a deadlock starts at its lowest rank; ranks that only lead into it are not in it."""
    assert receives(4).cycle == (0, 1, 2, 3)
    assert receives(50).around == 50
    assert len(receives(50).cycle) == 8
    wait = usual([0], state="waits")
    assert deadlock([wait], {0: [5], 5: [7], 7: [3], 3: [5]}).cycle == (3, 5, 7)
    assert deadlock([wait], {0: [5], 5: []}).cycle == ()
    assert deadlock([wait], {0: [1], 1: [2], 2: [0, 9]}).cycle == (0, 1, 2)


def test_paths_are_as_short_as_they_can_be_told_apart() -> None:
    """A path is its file's name, and as many folders as it takes to tell it from the others."""
    a, b, c = "/home/u/p/train.py:1", "/home/u/p/data/train.py:2", "/opt/lib/model.py:3"
    assert short_paths([a, b, c, "", a]) == {a: "p/train.py:1", b: "data/train.py:2", c: "model.py:3"}
    assert short_paths(["/x/pkg/__init__.py:4", "<stdin>:1"]) == {
        "/x/pkg/__init__.py:4": "pkg/__init__.py:4",
        "<stdin>:1": "<stdin>:1",
    }
    deep = short_paths([f"/{'d' * 200}.py:17"])
    assert [(len(text), text[-7:]) for text in deep.values()] == [(60, "d.py:17")]


def test_colours_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is in colour on a terminal, plain where it is not one, NO_COLOR is set, or rich is not there."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    report = a_dtype(1000)
    plain = io.StringIO()
    show(report, 1, plain)
    assert plain.getvalue() == report.text(1) + "\n"
    for name, make in CASES.items():
        terminal = Terminal()
        show(make(64), 1, terminal, width=100, before="mpicoll: ")
        lines = terminal.getvalue().splitlines()
        heads = [line for line in lines if "\x1b[1;31m" in line]
        assert heads and heads == lines[: len(heads)], f"{name}: the headline, all of it and nothing else, is red"  # noqa: PT018
        assert sum("\x1b[36m" in line for line in lines) >= 2, f"{name}: no rows"
        uncoloured = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
        assert uncoloured == f"mpicoll: {make(64).text(1, 100)}\n", name
    monkeypatch.setenv("NO_COLOR", "1")
    without_colour = Terminal()
    show(report, 1, without_colour)
    assert without_colour.getvalue() == plain.getvalue()
    monkeypatch.delenv("NO_COLOR")
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    bare = Terminal()
    reports.show(report, 1, bare)
    assert bare.getvalue() == plain.getvalue()


def test_an_error_that_names_two_ends_clears_nobody() -> None:
    """Where a rank failed with an error between ranks, the others are not told that they did nothing wrong."""
    for problem, right in (
        ("ValueError: no", True),
        ("CollectiveMismatchError: recv: rank 0 sent 5", False),
        ("CollectiveTimeoutError: time limit: rank 0 did not make the matching call", False),
    ):
        rows = [RankState(runs_of([0]), state="waits"), RankState(runs_of([1]), state="failed", problem=problem)]
        told = peer_failed(usual([0]), "WORLD", runs_of(range(2)), table_of(rows)).text()
        assert ("did nothing wrong" in told) is right, told
        assert ("any of them may be wrong" in told) is not right, told


def test_messages_that_have_arrived() -> None:
    """The report of a receive that ends names them, and what to pass alike, before its own advice; without any it is the same."""
    before = late(4)
    assert with_unreceived(before, [], True) is before
    told = with_unreceived(before, [(1, 5, ""), (3, 7, "rows")], True)
    assert (
        told.closing
        == "Not received so far: tag 5 from rank 1, tag 7 from rank 3 on group rows. The group is broken now."
    )
    assert told.next_step.endswith(f"; else {before.next_step}")
    assert "same group= to" in told.next_step
    assert "same tag= to" in told.next_step
    objects = with_unreceived(before, [(1, 5, "")], False)
    assert objects.next_step == before.next_step
