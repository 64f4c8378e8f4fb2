"""Place: where a rank's program stands. A file without MPI, since questions before ``init_process_group`` import it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """What a rank wrote last of where its program stands.

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
        return self.site + (f", after its last call {self.op} at {self.last}" if self.op else "")
