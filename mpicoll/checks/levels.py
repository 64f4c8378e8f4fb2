"""How much of what the members call is compared: every call, a rolling fingerprint now and then, or nothing.

The points at which the rolling fingerprint is compared depend on the sequence of calls alone, never on time, so that all
members compare at the same ones.
"""

from __future__ import annotations

from types import CodeType
from typing import NamedTuple

__all__ = ["EVERY", "Made", "Rolling"]

EVERY = 16
"""Calls between two comparisons of the rolling fingerprint, at most."""

_FACTOR = 6364136223846793005  # Knuth, MMIX: a full period in a linear congruence modulo a power of two
_MASK = (1 << 62) - 1


class Made(NamedTuple):
    """A call that was made without a comparison."""

    seq: int
    fingerprint: int
    op: str
    key: tuple[object, ...]
    code: CodeType
    instruction: int


class Rolling:
    """The fingerprint of all calls since the last comparison, in their order."""

    __slots__ = ("_made", "_value")

    def __init__(self) -> None:
        self._value = 0
        self._made: list[Made] = []

    def add(self, made: Made) -> int:
        """Take in a call, and return the fingerprint of all so far."""
        self._value = value = (self._value * _FACTOR + made.fingerprint) & _MASK
        self._made.append(made)
        return value

    @property
    def value(self) -> int:
        """The fingerprint of all calls so far."""
        return self._value

    def cut(self) -> list[Made]:
        """Start anew, at a call that compares; return the calls that it compares."""
        made, self._made, self._value = self._made, [], 0
        return made
