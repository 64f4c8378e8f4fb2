"""What a rank is calling: the operation, what must agree between the members, and where the program calls it."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from types import CodeType, FrameType, TracebackType
from typing import Any

from mpicoll.checks.levels import Kept

__all__ = [
    "AS_IT_IS",
    "IN_PIECES",
    "NOTHING",
    "NOWHERE",
    "Call",
    "Site",
    "call_site",
    "caller",
    "compress_ranks",
    "fingerprint",
    "name_ranks",
    "pass_through",
    "program_site",
    "traceback_site",
]

_INSTALLED = tuple({os.path.join(path, "") for path in sysconfig.get_paths().values()})
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_no_places: tuple[str, ...] = (_PACKAGE,)

NOTHING = -(2**63)
"""A detail that takes no part in the comparison (the neutral element of MAX on int64)."""


@dataclass(slots=True, frozen=True)
class Site:
    """A place in the program, kept as cheaply as possible and resolved only when somebody reads it."""

    code: CodeType
    instruction: int

    @staticmethod
    def inside(code: CodeType) -> bool:
        """Whether code belongs to this package."""
        return code.co_filename.startswith(_PACKAGE)

    def __str__(self) -> str:
        line = self.code.co_firstlineno
        for start, stop, number in _lines(self.code):
            if start <= self.instruction < stop:
                line = number
                break
        return f"{self.code.co_filename}:{line}"


class _Nowhere(Site):
    """No line of the program: where it ends by itself."""

    def __str__(self) -> str:
        return ""


NOWHERE = _Nowhere(_Nowhere.__str__.__code__, 0)


def _lines(code: CodeType) -> list[tuple[int, int, int]]:
    return [(start, stop, number) for start, stop, number in code.co_lines() if number is not None]


def pass_through(*paths: str) -> None:
    """Have :func:`call_site` leave out code at these paths, too: what stands between the program and this package."""
    global _no_places
    _no_places = tuple(dict.fromkeys((*_no_places, *paths)))


def call_site() -> Site:
    """Return the innermost place on the stack that is outside this package (226 ns a level on the machine measured)."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_no_places) and frame.f_back is not None:
        frame = frame.f_back
    return Site(frame.f_code, frame.f_lasti)


def caller(depth: int = 1) -> FrameType:
    """Return the frame that called the function which calls this one; that function's own, where C called it.

    Args:
        depth: frames between the function that calls this one and the one looked for.
    """
    try:
        return _frame(depth + 1)
    except ValueError:
        return _frame(depth)


_frame = sys._getframe


def program_site(frame: FrameType | None) -> str:
    """Return the innermost place of a stack that is neither in this package nor in an installed one, or ""."""
    innermost = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE):
            text = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}()"
            if not name.startswith(_INSTALLED) and not name.startswith("<"):
                return text
            innermost = innermost or text
        frame = frame.f_back
    return innermost


def traceback_site(trace: TracebackType | None) -> str:
    """Return file:line of the innermost place of a traceback that is neither in this package nor in an installed one, or ""."""
    innermost = own = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not Site.inside(code):
            innermost = f"{code.co_filename}:{trace.tb_lineno}"
            if not code.co_filename.startswith((*_INSTALLED, "<")):
                own = innermost
        trace = trace.tb_next
    return own or innermost


BEHIND, IN_PIECES, AS_IT_IS = 1, 2, 3
"""How memory of a GPU is moved: copied as a whole, when that GPU has come to the call; by way of the host in pieces; or handed to
MPI. Where members differ, the largest counts."""


@dataclass(slots=True)
class Call:
    """One call of one rank on one group.

    Attributes:
        op: the public function's name.
        key: what must be the same on every member; never the call site (the same call from different lines is legal).
        site: where the program calls it.
        seq: number of the call on its group, from 1.
        asynchronous: this rank issued it with ``async_op=True``, or has other calls under way.
        error: what is wrong with this rank's arguments; raised after all members know.
        uneven: this rank's blocks differ in size.
        block_bytes: the largest block that this rank moves to or from one peer.
        detail: a number that must agree where every member gives one.
        native: ``AS_IT_IS``: this rank can use the native engine alone for it; then all members do. Else ``IN_PIECES``: it
            moves memory of a GPU by way of the host; then all members move in pieces alike. Else ``BEHIND``, where it
            is copied as a whole: its GPU may be late, or fail, so all meet before they enter MPI. Else 0.
        print: what its round compares: the fingerprint of this call, of all since the last comparison, or nothing.
        made: those calls, this one among them.
        closes: it is no call: here the group was destroyed, or the program has ended.
        apart: the members have made unequal numbers of calls since the last comparison, and cannot get in step again.
        passes: it makes no round at all.
        alias: another name of the public function, under which this rank called it.
        explaining: the members differ, and tell each other what they called.
        compared: it is compared at level ``roll`` however small it is.
        offer: how this rank offers to make it on the GPU that all share (see ``engines.device.Offer``).
        patience: makes the wait for it where that is a special one (see ``patience.CallWait``).
        come: asks whether this rank's GPU has come to it; None where no rank is known to have an array on one.
    """

    op: str
    key: tuple[Any, ...]
    site: Site
    seq: int = 0
    asynchronous: bool = False
    error: Exception | None = None
    uneven: bool = False
    block_bytes: int = 0
    detail: int = NOTHING
    native: int = 0
    print: int = 0
    made: list[Kept] = field(default_factory=list)
    closes: bool = False
    apart: bool = False
    passes: bool = False
    alias: str = ""
    offer: Any = None
    explaining: bool = False
    compared: bool = False
    patience: Any = None
    come: Callable[[], bool] | None = None

    @property
    def name(self) -> str:
        """The name by which the program made the call."""
        return self.alias or self.op

    def describe(self) -> str:
        """Return the call as a reader would write it: ``all_reduce(ReduceOp.SUM, float32, 1000 elements)``."""
        if self.error is not None and not self.key:
            return f"{self.name}(…)"
        return f"{self.name}({', '.join(_word(part) for part in self.key)})"


def _word(part: Any) -> str:
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str):
        return f"{part[0]} {_short(part[1])}" if part[0] != "elements" else f"{_short(part[1])} elements"
    return _short(part)


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        text = ", ".join(str(item) for item in value[:8])
        return f"[{text}{', …' if len(value) > 8 else ''}]"
    return str(value)


_prints: dict[tuple[Any, ...], int] = {}


def fingerprint(op: str, key: tuple[Any, ...]) -> int:
    """Return 62 bits that are the same in every process for the same call (never ``hash()``: it is salted)."""
    full = (op, key)
    known = _prints.get(full)
    if known is None:
        if len(_prints) >= 4096:
            _prints.clear()
        digest = blake2b(repr(full).encode(), digest_size=8).digest()
        known = _prints[full] = int.from_bytes(digest, "little") >> 2
    return known


def compress_ranks(ranks: list[int] | tuple[int, ...] | set[int]) -> str:
    """Return ranks as a reader wants them: ``0, 2-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def name_ranks(ranks: list[int] | tuple[int, ...] | set[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2-7``."""
    return f"rank{'s' if len(ranks) != 1 else ''} {compress_ranks(ranks)}"
