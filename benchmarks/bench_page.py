"""Put what ``mpicoll bench --json`` has measured into a page, between its marks.

    python benchmarks/bench_page.py docs/performance.md benchmarks/results/bench-openmpi.json benchmarks/results/bench-mpich.json

The page has, for each file, ``<!-- bench: NAME -->`` and ``<!-- end -->``, NAME being the file's without its ending; what is
between them is written anew: where it was measured, the table, and the summary in words.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from mpicoll.cli.bench.measure import GLOO, Measured, Results
from mpicoll.cli.bench.table import in_bytes, ratio, raw_time

COLUMNS = ("off", "full", "full, MPI", "full, shared memory", GLOO)


def read(path: Path) -> tuple[Results, list[str]]:
    """Return the results in a file, and their summary."""
    told = json.loads(path.read_text())
    measured = [Measured(**each) for each in told["measured"]]
    return Results(told["ranks"], told["nodes"], told["about"], measured), told["summary"]


def command(results: Results) -> str:
    """Return the command that made them, with its number of ranks, and without names of folders."""
    words = [Path(word).name if "/" in word else word for word in results.about["command"].split()]
    return " ".join([*words[:2], "-n", str(results.ranks), *words[2:]])


def markdown(results: Results, lines: Sequence[str]) -> str:
    """Return the page's part."""
    about = results.about
    names = [name for name in COLUMNS if name in results.measured[0].ours]
    rows = [
        f"{about['MPI'].replace(' Version:', '')}, mpi4py {about['mpi4py']}, NumPy {about['numpy']}, Python {about['Python']}; "
        f"{about['processor']}, {about['cores']} cores; {about['date']}:",
        "",
        f"    {command(results)}",
        "",
        f"| operation | size | raw, us | {' | '.join(f'{name}, times raw' for name in names)} | one copy, times raw |",
        f"|{'---|' * (len(names) + 4)}",
    ]
    for each in results.measured:
        found = [ratio(each, name) for name in names]
        cells = [f"{half:.2f} ({low:.2f} to {high:.2f})" for half, low, high in found]
        copied = f"{statistics.median(each.copy) / raw_time(each):.2f}" if each.nbytes else ""
        size = in_bytes(each.nbytes) if each.nbytes else ""
        rows.append(f"| {each.op} | {size} | {raw_time(each):,.1f} | {' | '.join(cells)} | {copied} |")
    return "\n".join([*rows, "", *(f"- {line.replace('µs', 'us')}" for line in lines), ""])


def update(page: str, name: str, text: str) -> str:
    """Return a page with another text between the marks of a name.

    Raises:
        ValueError: it has no such marks.
    """
    marks = re.compile(rf"(<!-- bench: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marks.search(page):
        raise ValueError(f"the page has no <!-- bench: {name} --> with an <!-- end --> behind it")
    return marks.sub(lambda found: found[1] + text + found[2], page)


def main(argv: Sequence[str]) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(argv)
    page = options.page.read_text()
    for path in options.files:
        page = update(page, path.stem, markdown(*read(path)))
    options.page.write_text(page)


if __name__ == "__main__":
    main(sys.argv[1:])
