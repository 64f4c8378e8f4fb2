"""The results of `mpicoll bench` as a table, in sentences and as JSON; pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from mpicoll.cli.bench.measure import CONFIGS, GLOO, Measured, Results

if TYPE_CHECKING:
    from rich.table import Table


def in_bytes(nbytes: int) -> str:
    """Return a size with its unit: 8 B, 64 KiB, 1 MiB."""
    for unit, step in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << step and nbytes % (1 << step) == 0:
            return f"{nbytes >> step} {unit}"
    return f"{nbytes} B"


def parse_sizes(text: str) -> list[int]:
    """Return sizes in bytes from ``8,64K,1M``, or ``8:64M`` for every power of four from the first to the last.

    Raises:
        ValueError: ``text`` has neither form.
    """
    first, colon, last = text.partition(":")
    if colon:
        size, end = _size(first), _size(last)
        sizes = []
        while size < end:
            sizes.append(size)
            size *= 4
        return [*sizes, end]
    return [_size(word) for word in text.split(",")]


def _size(word: str) -> int:
    word = word.strip().upper().removesuffix("B").removesuffix("I")
    scale = {"K": 10, "M": 20, "G": 30}.get(word[-1:], 0)
    number = word[:-1] if scale else word
    if not number.isdecimal():
        raise ValueError(f"{word or 'nothing'} is not a size: 8, 64K, 1M")
    size = int(number) << scale
    if size < 8 or size % 8:
        raise ValueError(f"{word}: a size is a multiple of 8 bytes")
    return size


def ratio(measured: Measured, how: str) -> tuple[float, float, float]:
    """Return the time of a call divided by raw MPI's: the median over the rounds, and its quartiles."""
    ratios = [ours / raw for ours, raw in zip(measured.ours[how], measured.raw[how], strict=True)]
    if len(ratios) < 2:
        return ratios[0], ratios[0], ratios[0]
    low, half, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return half, low, high


def raw_time(measured: Measured) -> float:
    """Return the microseconds of the raw call, the median over all rounds."""
    return statistics.median(time for times in measured.raw.values() for time in times)


def table(results: Results) -> Table:
    """Return the table: for each operation and size raw MPI's time, and mpicoll's as a multiple of it."""
    from rich.table import Table

    names = [name for name in [*(config.name for config in CONFIGS), GLOO] if name in results.measured[0].ours]
    shown = Table(
        title=f"{results.ranks} ranks on {results.nodes} node{'s' * (results.nodes != 1)}, {results.about['MPI']}"
    )
    for name in ("operation", "size", "raw µs"):
        shown.add_column(name, justify="left" if name == "operation" else "right")
    for name in names:
        shown.add_column(f"{name}\nx raw", justify="right")
    shown.add_column("one copy\nx raw", justify="right")
    last = ""
    for each in results.measured:
        raw = raw_time(each)
        cells = [_cell(*ratio(each, name)) for name in names]
        copied = f"{statistics.median(each.copy) / raw:.2f}" if each.nbytes else ""
        if last and each.op != last:
            shown.add_section()
        size = in_bytes(each.nbytes) if each.nbytes else ""
        shown.add_row(each.op if each.op != last else "", size, f"{raw:,.1f}", *cells, copied)
        last = each.op
    shown.caption = "median over the rounds, quartiles in brackets; below 1 mpicoll is faster"
    return shown


def _cell(half: float, low: float, high: float) -> str:
    style = "green" if half < 0.95 else "red" if half > 1.25 else ""
    text = f"{half:.2f} ({low:.2f}-{high:.2f})"
    return f"[{style}]{text}[/]" if style else text


def summary(results: Results) -> list[str]:
    """Return a summary of the table, in sentences."""
    lines = []
    for text, sizes in (
        ("up to 16 KiB", [each for each in results.measured if 0 < each.nbytes <= 16 << 10]),
        ("from 64 KiB to 1 MiB", [each for each in results.measured if 64 << 10 <= each.nbytes <= 1 << 20]),
        ("above 1 MiB", [each for each in results.measured if each.nbytes > 1 << 20]),
    ):
        if not sizes:
            continue
        found = {(each.op, each.nbytes): ratio(each, "full")[0] for each in sizes}
        faster = sum(value < 0.95 for value in found.values())
        slower = sum(value > 1.05 for value in found.values())
        worst = max(found, key=lambda key: found[key])
        best = min(found, key=lambda key: found[key])
        lines.append(
            f"{text}: with all checks mpicoll takes {statistics.median(found.values()):.2f} times as long as raw MPI (median; "
            f"{faster} of {len(found)} faster, {slower} slower); best {_named(best)} {found[best]:.2f}, "
            f"worst {_named(worst)} {found[worst]:.2f}"
        )
    small = [each for each in results.measured if each.nbytes == 8]
    if small:
        added = statistics.median(
            ours - raw for each in small for ours, raw in zip(each.ours["full"], each.raw["full"], strict=True)
        )
        lines.append(f"8 bytes: the checks and Python add {added:.1f} µs to a call (median over the operations)")
    return lines


def _named(key: tuple[str, int]) -> str:
    return f"{key[0]} of {in_bytes(key[1])}"


def to_json(results: Results, lines: Sequence[str]) -> str:
    """Return all measurements and the summary as JSON."""
    return json.dumps({**asdict(results), "summary": list(lines)}, indent=1) + "\n"
