"""The score of the corpus: it holds for a good report, and each letter falls where its part is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import corpus
import pytest
from jobs import JobResult

SOURCE = '''"""Rank 2 fails where the others reduce.

ranks: 3
raises: CollectiveMismatchError on 0, 1; ValueError or TypeError on 2
says: all_reduce | 5 elements
code: 1
"""

dist.all_reduce(x)  # ranks 0-1
dist.all_reduce([1])  # rank 2
'''
TRACE = '[rank {}] Traceback (most recent call last):\n[rank {}]   File "/x/p.py", line {}, in <module>\n[rank {}]     f(x)\n'
REPORT = (
    "[rank {}] mpicoll.errors.CollectiveMismatchError: call 1 on group WORLD (ranks 0-2): arguments are wrong\n"
    "[rank {}]   ranks 0-1: all_reduce(5 elements) at /x/p.py:9\n"
    "[rank {}]   rank 2: all_reduce(…) at /x/p.py:10 raised TypeError: no\n"
)


def good() -> JobResult:
    """Return a job that ended as it must."""
    err = [TRACE.replace("{}", "0", 2).format(9, 0) + REPORT.replace("{}", "0")]
    err.append(
        "[rank 1] CollectiveMismatchError: call 1 on group WORLD: arguments are wrong (rank 0 prints the report)\n"
    )
    err.append(TRACE.replace("{}", "2", 2).format(10, 2) + "[rank 2] TypeError: no\n")
    return JobResult(1, 1.0, False, ["", "", ""], err, "the launcher says something")


@pytest.fixture
def program(tmp_path: Path) -> corpus.Program:
    path = tmp_path / "p.py"
    path.write_text(SOURCE)
    return corpus.read(path)


def test_what_a_program_expects(program: corpus.Program) -> None:
    """The docstring and the marks are read."""
    assert program.title == "Rank 2 fails where the others reduce."
    assert program.ranks == 3
    assert program.raises == (
        (frozenset({"CollectiveMismatchError"}), frozenset({0, 1})),
        (frozenset({"ValueError", "TypeError"}), frozenset({2})),
    )
    assert program.says == ("all_reduce", "5 elements")
    assert program.names == {0, 1, 2}
    assert program.code == 1
    assert program.marks == ((9, frozenset({0, 1})), (10, frozenset({2})))


def test_a_good_report(program: corpus.Program) -> None:
    """All letters hold."""
    assert corpus.score(program, good()).letters() == "DFEXL"


def test_each_letter_falls(program: corpus.Program) -> None:
    """Each letter falls where its part is missing, and only that."""

    def with_err(rank: int, *change: str) -> JobResult:
        job = good()
        job.err[rank] = job.err[rank].replace(*change)
        return job

    silent = replace(good(), err=[good().err[0], "", good().err[2]])
    for what, letters, job in [
        ("hangs", "..EXL", replace(good(), timed_out=True, seconds=50.0)),
        ("exit code 0", ".FEXL", replace(good(), returncode=0)),
        ("another exit code", ".FEXL", replace(good(), returncode=3)),
        ("left running", ".FEXL", replace(good(), left_running=["python"])),
        ("late", "D.EXL", replace(good(), seconds=corpus.SOON + 1)),
        ("a silent rank", "DF.XL", silent),
        ("another exception", "DF.XL", with_err(2, "TypeError", "KeyError")),
        ("a value is missing", "DFE.L", with_err(0, "5 elements", "15 elements")),
        ("a rank is not named", "DFE.L", with_err(0, "2", "1")),
        ("no place but in a traceback", "DFEX.", with_err(0, "p.py:9", "there")),
    ]:
        assert corpus.score(program, job).letters() == letters, what


def test_the_place_of_wrong_arguments(program: corpus.Program) -> None:
    """Where a rank's own arguments are wrong its traceback is enough, on that rank alone."""
    job = good()
    job.err[0] = job.err[0].replace("p.py:10", "there")
    assert corpus.score(program, job).letters() == "DFEXL"
    job.err[2] = job.err[2].replace("line 10", "line 12")
    assert corpus.score(program, job).letters() == "DFEX."


def test_correct_programs(tmp_path: Path) -> None:
    """A correct program may fail in no way, and nothing may be said; one that may pass has both ways."""
    path = tmp_path / "right.py"
    path.write_text('"""Right.\n\nranks: 1\nraises: nothing\n"""\n')
    right = corpus.read(path)
    passed = JobResult(0, 1.0, False, ["out"], [""], "")
    assert corpus.score(right, passed).letters() == "ok"
    for job in (
        replace(passed, returncode=1),
        replace(passed, timed_out=True),
        replace(passed, err=["a warning"]),
        replace(passed, launcher="killed"),
    ):
        assert corpus.score(right, job).letters() == "FALSE"
    path.write_text('"""Either.\n\nranks: 1\nraises: ValueError on 0, or ok\nsays: bad\n"""\n')
    either = corpus.read(path)
    assert corpus.score(either, replace(passed, err=["a warning"])).good
    assert corpus.score(either, replace(passed, returncode=1, err=["ValueError: bad\n"])).letters() == "DFEXL"
    assert corpus.score(either, replace(passed, returncode=1)).letters() == "DF..L"
    assert not corpus.score(either, replace(passed, timed_out=True)).good


@pytest.mark.parametrize(
    "doc",
    [
        "ranks: 2\nraises: ValueError\nsays: x",
        "ranks: 2\nraises: ValueError on 2\nsays: x",
        "ranks: 2\nraises: ValueError on all",
        "raises: nothing",
        "ranks: 2",
    ],
)
def test_expectations_without_sense(tmp_path: Path, doc: str) -> None:
    """What says too little, or names ranks that are not there, is refused."""
    path = tmp_path / "p.py"
    path.write_text(f'"""Title.\n\n{doc}\n"""\n')
    with pytest.raises(ValueError, match=r"p\.py"):
        corpus.read(path)


def test_every_program_can_be_read() -> None:
    """The corpus holds programs of every category, each on 2 to 4 ranks, of at most 40 lines, made with no arguments."""
    programs = corpus.programs()
    assert {program.path.parent.name for program in programs} >= {"arguments", "correct", "groups", "leaving", "order"}
    for program in programs:
        source = program.path.read_text()
        assert 2 <= program.ranks <= 4, program.name
        assert len(source.splitlines()) <= 40, program.name
        assert "init_process_group()" in source, program.name
        assert program.title.endswith((".", "!")), program.name
