"""The order of a group's calls: three numbers that only grow, and counts of rounds and of calls."""

from __future__ import annotations

from typing import Any

from mpicoll.runtime import native


class CallOrder:
    """The numbers of a group's calls, on a rank without the extension; with the extension ``_native.CallOrder``.

    Attributes:
        issued: the number of the next call to issue.
        posted: the number of the next call to post its round.
        moving: the number of the next call to move its data. Only the calls numbered ``posted`` and ``moving`` may post and move.
        round: rounds made.
        calls: calls of the program made on the group.
        closed: not 0 if the group refuses calls; the general way raises the error.
    """

    __slots__ = ("calls", "closed", "issued", "moving", "posted", "round")

    def __init__(self) -> None:
        self.issued = self.posted = self.moving = self.round = self.calls = self.closed = 0

    def issue(self) -> int:
        """Return the number of the next call, and count the call as issued."""
        number = self.issued
        self.issued = number + 1
        return number

    def may_move(self, number: int) -> bool:
        """Return whether the data of all earlier calls has been posted."""
        return self.moving >= number

    def pass_on(self, number: int) -> None:
        """Let the next call move its data, if ``moving`` is the number of this call."""
        if self.moving == number:
            self.moving = number + 1


def make_order() -> Any:
    """Return the order of a new group, of the extension's class if possible: C code reads that class without the interpreter."""
    return CallOrder() if native.found is None else native.found.CallOrder()
