"""Words that names, comments and docstrings of the package do not use any more."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpicoll

PACKAGE = Path(mpicoll.__file__).parent

RETIRED = frozenset(
    (
        *(
            "cross",
            "crosses",
            "crossed",
            "crossing",
            "deferred",
            "handed",
            "kept",
            "lane",
            "lanes",
            "lastwords",
            "leaving",
        ),
        *("lingering", "patience", "quiet", "quietly", "ride", "rides", "ridden", "riding", "rode", "struck"),
        *("ticket", "tickets", "underway"),
    )
)
ALLOWED = {"DeferredInterrupt"}  # names that have a retired word for another thing

_NOT_CODE = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def texts(source: str) -> Iterator[str]:
    """Yield the names, comments and docstrings of a module, without other strings, such as messages."""
    starts = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.COMMENT) or (token.type == tokenize.STRING and starts):
            yield token.string
        if token.type != tokenize.COMMENT:
            starts = token.type in _NOT_CODE


def retired(text: str) -> set[str]:
    """Return the retired words in a text; names are split at underscores and at capital letters."""
    for name in ALLOWED:
        text = text.replace(name, "")
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)} & RETIRED


def words_of(path: Path) -> set[str]:
    """Return the retired words that a file uses."""
    source = path.read_text()
    found = texts(source) if path.suffix == ".py" else iter([source])
    return {word for text in found for word in retired(text)}


def files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".h"))


def test_words() -> None:
    """No file of the package uses a retired word."""
    found = {path.relative_to(PACKAGE).as_posix(): sorted(words_of(path)) for path in files()}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("_kept_lanes = quietly(x)\n", {"kept", "lanes", "quietly"}),
        ("class LaneOfRides:\n    KEPT_BYTES = 1\n", {"lane", "rides", "kept"}),
        ("x = 1  # handed on\n", {"handed"}),
        ('def f():\n    """Return what struck."""\n    return 1\n', {"struck"}),
        ('x = 1\n"""What is kept."""\n', {"kept"}),
        ('raise ValueError("it is kept")\n', set()),
        ("def across(stride, DeferredInterrupt, overrides):\n    return planet\n", set()),
    ],
)
def test_retired_words_are_found(source: str, words: set[str]) -> None:
    """Words in names, comments and docstrings count, and not parts of other words, or texts for users."""
    assert {word for text in texts(source) for word in retired(text)} == words
