"""The programs under ``hang/programs``, and the score of the library on each program.

Each program is a script as its author would have written it. Its docstring gives the expected result::

    Rank 1 skips the step whose loss is not finite.

    ranks: 2
    raises: CollectiveMismatchError on all
    says: all_reduce | all_gather | 8 elements

``raises``
    The exceptions by rank, valid alternatives joined by ``or``: ``ValueError on 1; PeerFailedError on 0, 2-3``.
    ``any`` is an exception of any type, ``report`` a text at the end of a program without exception; ``on all``
    is each rank, ``on any`` at least one rank. ``nothing`` is a correct program. With ``, or ok`` a program may also pass.
``says``
    The parts that one message must contain, as whole words.
``names``
    The ranks that the same message must name; by default the ranks of the marked calls.
``code``
    The exit code of the job, if it is known; by default any code but 0.
``recover``
    ``yes``: the launcher does not kill the other ranks if one dies, as under ``mpicoll run``; by default it kills them.

A comment ``# ranks 0, 2``, ``# rank 1`` or ``# all ranks`` marks the call in which these ranks are when the error is noticed.

``python tests/support/corpus.py [words]`` runs the programs whose names contain one of the words (without words all), and prints
the score on the MPI of its interpreter: **D** ended with an error, **F** soon, **E** an exception on every rank
involved, **X** one message explains the error, **L** file and line of every rank's call.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobs import ROOT, JobResult, family, run_job

import mpicoll.errors

FOLDER = ROOT / "tests" / "hang" / "programs"
LIMIT = 45.0
TIME_LIMIT = 20
"""Seconds after which the library gives a wait up; a report that comes from it comes too late."""
SOON = 14.0
"""Seconds from the job's start: 10 from the mistake, and what the start of four ranks takes on a busy machine."""
LETTERS = "DFEXL"
ANY = "any"
REPORT = "report"

_FIELD = re.compile(r"^(ranks|raises|says|names|code|recover): *(.*)$")
_MARK = re.compile(r"#\s*(?:(all ranks)|ranks? ([\d, -]+))$")
_NAMED = re.compile(r"\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)")
_OURS = set(mpicoll.errors.__all__)
_ERROR = re.compile(r"^(?:\[rank \d+\] )?(?:\w+\.)*(\w*(?:Error|Exception|Exit|Interrupt))(?:: .+)?$", re.MULTILINE)


def expand(text: str) -> set[int]:
    """Return the ranks that ``0, 2-7`` means."""
    ranks: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return ranks


@dataclass(frozen=True)
class Program:
    """One program and its expected result.

    Attributes:
        raises: (valid types, ranks that raise one of these types); no ranks: at least one rank raises.
        may_pass: the program may also end well.
        marks: (line, ranks whose call is on this line).
    """

    path: Path
    title: str
    ranks: int
    raises: tuple[tuple[frozenset[str], frozenset[int]], ...]
    may_pass: bool
    says: tuple[str, ...]
    names: frozenset[int]
    code: int | None
    recover: bool
    marks: tuple[tuple[int, frozenset[int]], ...]

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def correct(self) -> bool:
        return not self.raises


def read(path: Path) -> Program:
    """Read a program's expectation.

    Raises:
        ValueError: the expectation is not valid.
    """
    source = path.read_text()
    parts = source.split('"""')
    if len(parts) < 3:
        raise ValueError(f"{path}: no docstring")
    fields: dict[str, str] = {}
    title = ""
    for line in parts[1].splitlines():
        if found := _FIELD.match(line):
            fields[found[1]] = found[2].strip()
        elif not title:
            title = line.strip()
    try:
        size = int(fields["ranks"])
        raises, may_pass = _raises(fields["raises"], size)
        marks = _marks(source, size)
        names = expand(fields["names"]) if "names" in fields else {rank for _, ranks in marks for rank in ranks}
        says = tuple(filter(None, (word.strip() for word in fields.get("says", "").split(" | "))))
        code = int(fields["code"]) if "code" in fields else None
        recover = {"yes": True, "no": False}[fields.get("recover", "no")]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if raises and not says:
        raise ValueError(f"{path}: what must the message hold?")
    return Program(path, title, size, raises, may_pass, says, frozenset(names), code, recover, marks)


def _raises(text: str, size: int) -> tuple[tuple[tuple[frozenset[str], frozenset[int]], ...], bool]:
    if text == "nothing":
        return (), False
    text, may_pass = text.removesuffix(", or ok"), text.endswith(", or ok")
    found = []
    for part in text.split(";"):
        types, on, where = part.strip().partition(" on ")
        if not on:
            raise ValueError(f"{part!r} says not on which ranks")
        ranks = set(range(size)) if where == "all" else set() if where == "any" else expand(where)
        if not ranks <= set(range(size)):
            raise ValueError(f"{part!r}: there are {size} ranks")
        found.append((frozenset(types.split(" or ")), frozenset(ranks)))
    return tuple(found), may_pass


def _marks(source: str, size: int) -> tuple[tuple[int, frozenset[int]], ...]:
    marks = []
    for number, line in enumerate(source.splitlines(), 1):
        if found := _MARK.search(line):
            ranks = set(range(size)) if found[1] else expand(found[2])
            if not ranks <= set(range(size)):
                raise ValueError(f"line {number}: there are {size} ranks")
            marks.append((number, frozenset(ranks)))
    return tuple(marks)


def programs() -> list[Program]:
    """Return all programs, sorted by name."""
    return [read(path) for path in sorted(FOLDER.glob("*/*.py"))]


@dataclass
class Score:
    """The result of one run: for each letter whether the letter holds, and why not."""

    program: Program
    seconds: float = 0.0
    passed: bool = False
    why: dict[str, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not self.why

    def letters(self) -> str:
        """Return ``DFEXL`` with a dot for what does not hold."""
        if self.program.correct or self.passed:
            return "ok" if self.good else "FALSE"
        return "".join("." if letter in self.why else letter for letter in LETTERS)


def score(program: Program, job: JobResult) -> Score:
    """Compare the result of a run with the expected result."""
    result = Score(program, job.seconds)
    why = result.why
    if program.correct or (program.may_pass and job.returncode == 0):
        result.passed = True
        if job.timed_out:
            why["D"] = "hangs"
        elif job.returncode:
            why["D"] = f"a correct program ends with {job.returncode}"
        elif program.correct and (job.launcher or any(job.err)):
            why["D"] = "something is said about a correct program"
        return result
    if job.timed_out:
        why["D"] = "hangs"
    elif job.returncode == 0:
        why["D"] = "ends as if all were well"
    elif program.code not in (None, job.returncode):
        why["D"] = f"exit code {job.returncode}, not {program.code}"
    elif job.left_running:
        why["D"] = f"left running: {job.left_running}"
    if job.timed_out or job.seconds > SOON:
        why["F"] = f"after {job.seconds:.0f} s"
    missing = _unraised(program, job)
    if missing:
        why["E"] = "; ".join(missing)
    told = [message(err) for err in job.err]
    if any(_comes_late(types, err) for types, _ in program.raises for err in job.err):
        told.append(" ".join(told))  # a late rank is not in the report of the other ranks, and prints its own report
    unsaid = min((_unsaid(program, text) for text in told), key=len)
    if unsaid:
        why["X"] = f"no message with {', '.join(unsaid)}"
    places = [line for line, ranks in program.marks if not _placed(program.path.name, line, ranks, job)]
    if places:
        why["L"] = f"no place {', '.join(f'{program.path.name}:{line}' for line in places)}"
    return result


def message(err: str) -> str:
    """Return the output of one rank in one line, without Python's tracebacks: only the library's text counts."""
    words: list[str] = []
    traced = False
    for line in err.splitlines():
        line = re.sub(r"^\[rank \d+\] ", "", line)
        traced = line.startswith('  File "') or (traced and line.startswith("    "))
        if not traced and not line.startswith("Traceback "):
            words += line.replace(">", "").replace("<", "").split()  # a report marks the values that differ: >4<
    return " ".join(words)


def _placed(name: str, line: int, ranks: frozenset[int], job: JobResult) -> bool:
    """Return whether a message has the place; the traceback has it if a rank's own arguments are wrong."""
    if any(re.search(rf"{re.escape(name)}:{line}\b", message(err)) for err in job.err):
        return True
    traced = re.compile(rf'/{re.escape(name)}", line {line}\b')
    return all(traced.search(job.err[rank]) and not _OURS & set(_ERROR.findall(job.err[rank])) for rank in ranks)


def _unraised(program: Program, job: JobResult) -> list[str]:
    missing = []
    for types, ranks in program.raises:
        right = [rank for rank, err in enumerate(job.err) if _has(types, err) or _comes_late(types, err)]
        wrong = sorted(ranks - set(right)) if ranks else [] if right else ["any"]
        if wrong:
            told = {rank: _ERROR.findall(job.err[rank]) for rank in wrong if isinstance(rank, int)}
            heard = ", ".join(f"rank {rank}: {' '.join(names) or 'nothing'}" for rank, names in told.items())
            missing.append(f"no {' or '.join(sorted(types))} on {', '.join(map(str, wrong))} ({heard})")
    return missing


def _has(types: frozenset[str], err: str) -> bool:
    if REPORT in types and err.strip():
        return True
    raised = _ERROR.findall(err)
    return bool(raised and ANY in types) or any(name in types for name in raised)


def _comes_late(types: frozenset[str], err: str) -> bool:
    """Return whether a rank came to its call only after the other ranks had found their certain deadlock."""
    return "DeadlockError" in types and "PeerFailedError: rank" in err and "failed: DeadlockError: deadlock:" in err


def _unsaid(program: Program, text: str) -> list[str]:
    unsaid = [repr(word) for word in program.says if not re.search(_whole(word), text)]
    named: set[int] = set()
    for found in _NAMED.findall(text):
        named |= expand(found)
    return unsaid + [f"rank {rank}" for rank in sorted(program.names - named)]


def _whole(word: str) -> str:
    """Return the pattern of a whole word."""
    before, behind = r"(?<!\w)" if re.match(r"\w", word) else "", r"(?!\w)" if re.search(r"\w$", word) else ""
    return before + re.escape(word) + behind


def run(program: Program) -> tuple[Score, JobResult]:
    """Run a program under the MPI of this environment."""
    limits = {"MPICOLL_TIMEOUT": str(TIME_LIMIT)}
    job = run_job(
        program.path,
        program.ranks,
        limit=LIMIT,
        env=limits,
        recover=program.recover,
        settle=10 if program.recover else 1,
    )
    return score(program, job), job


def main(words: Sequence[str]) -> int:
    """Run the programs whose names contain one of ``words``, and print the table."""
    chosen = [program for program in programs() if not words or any(word in program.name for word in words)]
    start = time.monotonic()
    scores = []
    show = os.environ.get("CORPUS_SHOW")
    for program in chosen:
        result, job = run(program)
        scores.append(result)
        why = "; ".join(f"{letter}: {text}" for letter, text in result.why.items())
        print(f"{result.letters():<6}{program.name:<50}{result.seconds:5.1f} s  {why}", flush=True)
        if show == "all" or (show and not result.good):
            print(job, flush=True)
    buggy = [result for result in scores if not (result.program.correct or result.program.may_pass)]
    right = [result for result in scores if result.program.correct]
    print(f"\n{family()}, {len(scores)} programs in {time.monotonic() - start:.0f} s")
    for letter in LETTERS:
        print(f"{letter} {sum(letter not in result.why for result in buggy)} of {len(buggy)}")
    print(f"correct programs left alone: {sum(result.good for result in right)} of {len(right)}")
    return 0 if all(result.good for result in scores) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
