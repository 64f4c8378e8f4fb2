"""Cut, wrap and shorten text to a number of columns. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable


def columns(text: str) -> int:
    """Return the number of columns of a text on a terminal."""
    return len(text) if text.isascii() else sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def clip(text: str, width: int, *, tail: int = 0) -> str:
    """Return a text in one line of at most ``width`` columns: cut at its end, or before its last ``tail`` columns."""
    if len(text) <= width and text.isascii() and text.isprintable() and "  " not in text and text == text.strip():
        return text
    text = " ".join(text.split())
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    if columns(text) <= width:
        return text
    ending = text[len(text) - _fitting(text[::-1], tail) :]
    return f"{text[: _fitting(text, width - 1 - columns(ending))]}…{ending}"


def short_paths(sites: Iterable[str]) -> dict[str, str]:
    """Return for each file:line the shortest end of its path that is not also the end of another path."""
    wanted = {site for site in sites if site}
    split = {site: [part for part in site.rpartition(":")[0].split("/") if part] or [site] for site in wanted}
    depth = {site: 2 if parts[-1] in ("__init__.py", "__main__.py") else 1 for site, parts in split.items()}
    while True:
        ends: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
        for site, parts in split.items():
            ends.setdefault(tuple(parts[-depth[site] :]), set()).add(tuple(parts))
        longer = [
            site
            for site, parts in split.items()
            if len(ends[tuple(parts[-depth[site] :])]) > 1 and depth[site] < len(parts)
        ]
        if not longer:
            break
        for site in longer:
            depth[site] += 1
    short = {}
    for site, parts in split.items():
        line = site.rpartition(":")[2] if ":" in site else ""
        path = "/".join(parts[-depth[site] :])
        short[site] = clip(f"{path}:{line}" if line else path, 60, tail=59)
    return short


_BREAK = re.compile(r" (?!s\b)")  # no break between a number and its unit


def wrap(text: str, width: int, *, first: int = 0, rest: int = 4, most: int = 3) -> list[str]:
    """Return a text in at most ``most`` lines of at most ``width`` columns.

    Args:
        first, rest: indentation of the first line and of the other lines, in columns.
    """
    words = _BREAK.split(clip(text, max(len(text) * 2, 1)))
    lines: list[str] = []
    line, started = " " * first, False
    while words:
        word = words.pop(0)
        longer = line + (" " if started else "") + word
        if columns(longer) <= width:
            line, started = longer, True
        elif len(lines) == most - 1:
            return [*lines, clip_line(" ".join((longer, *words)), width)]
        elif started:
            lines.append(line)
            words.insert(0, word)
            line, started = " " * rest, False
        else:
            fit = max(_fitting(word, width - columns(line)), 1)
            lines.append(line + word[:fit])
            words.insert(0, word[fit:])
            line = " " * rest
    return [*lines, line]


def _fitting(text: str, room: int) -> int:
    """Return how many characters at the start of a text fit into ``room`` columns."""
    at = used = 0
    while at < len(text) and used + columns(text[at]) <= room:
        used += columns(text[at])
        at += 1
    return at


def clip_line(line: str, width: int) -> str:
    """Return a line cut to ``width`` columns, with its indentation."""
    if columns(line) <= width:
        return line
    body = line.lstrip(" ")
    indent = len(line) - len(body)
    return " " * indent + clip(body, width - indent)
