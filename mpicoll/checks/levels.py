"""How much of what the members call is compared: every call, a rolling fingerprint now and then, or nothing.

The points at which the rolling fingerprint is compared depend on the sequence of calls alone, never on time, so that all
members compare at the same ones.
"""

from __future__ import annotations

from mpicoll.diagnosis.call import MadeFields

EVERY = 16
"""Calls between two comparisons of the rolling fingerprint, at most."""

_MASK = (1 << 62) - 1


class Rolling:
    """All calls since the last comparison, in their order.

    Attributes:
        made: each is one appended tuple, and nothing else, since that is all that a call costs which does not compare.
    """

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made: list[MadeFields] = []

    def cut(self) -> tuple[int, list[MadeFields]]:
        """Start anew, at a call that compares; return the fingerprint of the calls that it compares, and these calls."""
        made, self.made = self.made, []
        # Of a tuple of integers: the same in every process, whatever PYTHONHASHSEED is, and made in C.
        return hash(tuple([each[1] for each in made])) & _MASK, made
