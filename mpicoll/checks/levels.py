"""The rolling fingerprint of check level ``roll``, which is compared every few calls.

Only the sequence of calls decides which calls compare the fingerprint, never the time, so that all members compare at the same
calls.
"""

from __future__ import annotations

from mpicoll.diagnosis.call import MadeFields

EVERY = 16
"""Most calls between two comparisons of the rolling fingerprint."""

_MASK = (1 << 62) - 1


class Rolling:
    """All calls since the last comparison, in their order.

    Attributes:
        made: one tuple for each call: a call without a comparison only appends a tuple.
    """

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made: list[MadeFields] = []

    def cut(self) -> tuple[int, list[MadeFields]]:
        """Start a new sequence at a call that compares; return the fingerprint of the calls before, and these calls."""
        made, self.made = self.made, []
        # The hash of a tuple of integers is the same in all processes, for any PYTHONHASHSEED, and fast.
        return hash(tuple([each[1] for each in made])) & _MASK, made
