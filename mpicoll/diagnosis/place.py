"""Place: where a rank's program is. This file imports no MPI, as code before ``init_process_group`` imports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The last place of its program that a rank wrote.

    Attributes:
        ago: seconds since the rank wrote.
        site: file:line and function; "" if the rank has written nothing.
        op, last: the last call, and the file:line of the program that made that call; "" if there was none.
    """

    ago: float = 0.0
    site: str = ""
    op: str = ""
    last: str = ""

    def __str__(self) -> str:
        return self.site + (f", after its last known call {self.op} at {self.last}" if self.op else "")
