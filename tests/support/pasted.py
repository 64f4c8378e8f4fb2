"""The programs in ``docs/order-checks.md`` and ``docs/torch.md``, and the reports that they print.

A program is a Python block behind a comment that says how it is run::

    <!-- report: late.py, 4 ranks, rank 0, MPICOLL_CHECK=roll -->

Each program begins with the lines of the block behind ``<!-- head -->``, and an empty line. The next block that is indented by
four spaces is the output of the rank that the comment names: its error without the traceback, or the text of the library; if
the library printed no text, the output of the program.

``python tests/support/pasted.py [words]`` runs the programs whose names contain one of the words (without words all) on the
MPI of its interpreter, and names programs with another output, except seconds; ``--write`` writes the output into the page. The
programs of the second page are run if the interpreter has torch.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import ROOT, run_job

PAGE = ROOT / "docs" / "order-checks.md"
TORCH_PAGE = ROOT / "docs" / "torch.md"
LIMIT = 90.0

_HEAD = re.compile(r"<!-- head -->\n```python\n(.*?)```\n", re.DOTALL)
_REPORT = re.compile(
    r"<!-- report: (?P<name>\w+\.py), (?P<ranks>\d+) ranks?, rank (?P<shown>\d+)(?P<settings>(?:, MPICOLL_\w+=\w+)*) -->\n"
    r"```python\n(?P<source>[\s\S]*?)```\n"
    r"(?P<between>(?:(?!<!-- )(?!    ).*\n)*)"
    r"(?P<text>(?:    .*\n)+)",
)
_ERROR = re.compile(r"^(?:mpicoll\.errors\.)?(?=\w*(?:Error|Exception): )")
_RANK = re.compile(r"\[rank ?\d+\]:? ")
_SECONDS = re.compile(r"\b\d+(?:\.\d+)?(?: to \d+(?:\.\d+)?)? s\b")
_WAITED = re.compile(r", waited [0-9.]+( to [0-9.]+)? s")


@dataclass(frozen=True)
class Pasted:
    """One program of the page, and its output there.

    Attributes:
        shown: the rank whose output is shown.
        span: the place of the pasted text in the page.
    """

    name: str
    source: str
    ranks: int
    shown: int
    settings: dict[str, str]
    text: str
    span: tuple[int, int]


def read(page: str) -> list[Pasted]:
    """Return the programs of a page.

    Raises:
        ValueError: a comment is not followed by a program and a text.
    """
    head = _HEAD.search(page)
    if head is None:
        raise ValueError("no <!-- head -->")
    found = [
        Pasted(
            match["name"],
            head[1] + "\n" + match["source"],
            int(match["ranks"]),
            int(match["shown"]),
            dict(setting.split("=") for setting in match["settings"].split(", ")[1:]),
            "".join(line[4:] for line in match["text"].splitlines(keepends=True)),
            match.span("text"),
        )
        for match in _REPORT.finditer(page)
    ]
    meant = re.findall(r"<!-- report: (\w+\.py)", page)
    if [each.name for each in found] != meant:
        raise ValueError(f"{set(meant) - {each.name for each in found}}: no program or no text follows")
    return found


def printed(pasted: Pasted) -> str:
    """Run a program, and return the output of the rank that is shown."""
    with tempfile.TemporaryDirectory(prefix="pasted-") as name:
        (Path(name) / pasted.name).write_text(pasted.source)
        job = run_job([pasted.name], pasted.ranks, limit=LIMIT, env=pasted.settings, cwd=Path(name))
        if job.timed_out:
            raise RuntimeError(f"{pasted.name} did not end: {job}")
        err, out = (text[pasted.shown].replace(f"{name}/", "/home/ann/") for text in (job.err, job.out))
    # Output of MPI itself does not begin with the rank.
    lines = [line[len(begin[0]) :].rstrip() for line in err.splitlines() if (begin := _RANK.match(line))]
    error = next((at for at, line in enumerate(lines) if _ERROR.match(line)), 0)
    return "".join(f"{_ERROR.sub('', line)}\n" for line in lines[error:]) or out


def same(text: str, pasted: str) -> bool:
    """Return whether a text is equal to what was pasted, except their seconds and the line breaks that depend on these.

    How long ranks have waited stands in a report from 0.1 s on: if one of the texts has no such words, the other may have some.
    """
    text, pasted = (" ".join(each.split()) for each in (text, pasted))
    if not (_WAITED.search(pasted) and _WAITED.search(text)):
        text, pasted = _WAITED.sub("", text), _WAITED.sub("", pasted)
    return _SECONDS.sub("0 s", text) == _SECONDS.sub("0 s", pasted)


def main(words: Sequence[str]) -> int:
    """Run the programs whose names contain one of ``words``; print which differ, or write their output into the page."""
    write = "--write" in words
    words = [word for word in words if not word.startswith("--")]
    pages = [PAGE, *([TORCH_PAGE] if importlib.util.find_spec("torch") else [])]
    differ = sum(_compare(path, words, write=write) for path in pages)
    return 1 if differ and not write else 0


def _compare(path: Path, words: Sequence[str], *, write: bool) -> int:
    """Run the programs of a page; return how many differ."""
    page = path.read_text()
    differ = 0
    for pasted in reversed(read(page)):
        if words and not any(word in pasted.name for word in words):
            continue
        text = printed(pasted)
        if same(text, pasted.text):
            print(f"same     {pasted.name}", flush=True)
            continue
        differ += 1
        print(f"{'written' if write else 'differs':<8} {pasted.name}\n{text}", flush=True)
        indented = "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True))
        page = page[: pasted.span[0]] + indented + page[pasted.span[1] :]
    if write:
        path.write_text(page)
    return differ


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
