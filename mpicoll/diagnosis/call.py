"""Describe a call of a rank: the operation, what must agree between the members, and where the program calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from types import CodeType
from typing import Any, NamedTuple, Protocol

from mpicoll.runtime.call_site import CallSite
from mpicoll.transports.control import NO_DEVICE, NOTHING


class Issuer(Protocol):
    """What an exchange of calls asks of the request of its call."""

    def is_settled(self) -> bool:
        """Return whether the program waits for the call or looks at it, or has made a later call of the group."""

    def hold_back(self) -> bool:
        """Refuse later calls of the group until the program knows the error of this call; False if a later call was made."""


@dataclass(slots=True)
class CallDescription:
    """One call of one rank on one group.

    Attributes:
        op: the public function's name.
        key: what must be equal on all members; never the call site (the same call from different lines is legal).
        site: where the program calls it.
        seq: number of the call on its group, from 1.
        asynchronous: this rank issued it with ``async_op=True``, or has other calls pending.
        async_op: this rank issued it with ``async_op=True``.
        error: what is wrong with this rank's arguments; raised after all members know.
        uneven: this rank's blocks differ in size.
        block_bytes: the largest block that this rank moves to or from one peer.
        detail: a number that must agree if all members give one.
        device: how its memory moves, of `mpicoll.transports.control`: the largest of all members counts. ``AS_IT_IS``: this rank
            can only pass its memory to MPI; then all members use MPI. ``IN_PIECES``: its memory is a GPU's and moves through the
            host; then all members move in pieces. ``BEHIND``: its memory is copied as a whole, and the GPU may be late or
            fail; then all members meet before they enter MPI.
        signal: the word for signals that have reached this rank, on a barrier or ``should_stop``.
        print: the fingerprint that its round compares: of this call, of all calls since the last comparison, or 0.
        made: the calls since the last comparison, this call included.
        closes: this is no call, but the last comparison of a group: the group was destroyed, or the program has ended.
        breaks: why the members cannot use the group after the calls differed; "" if they can.
        issuer: the request of the call, while the members may exchange their calls.
        passes: the call makes no round.
        alias: another name of the public function, under which this rank called it.
        maker: the part of another library that made the call for the program, or "".
        explaining: the calls of the members differ, and the members exchange them.
        compared: the call is compared at level ``roll`` even if it is small.
        preferred: the schedule of this rank (``transports.base.Preferred``) that is used if all members have one, or None.
        wait_policy: makes its wait policy, if it is not :class:`mpicoll.diagnosis.wait_policy.CallWait`.
        device_ready: returns whether this rank's GPU has reached the call; None if no rank is known to have an array on a GPU.
        is_sealed: False in the start of the call, then True; looks for writes of the program before data moves in shared memory.
        stays_until: time.monotonic() before which this rank does not withdraw from the call, except if the call can never end.
    """

    op: str
    key: tuple[Any, ...]
    site: CallSite
    seq: int = 0
    asynchronous: bool = False
    async_op: bool = False
    error: Exception | None = None
    uneven: bool = False
    block_bytes: int = 0
    detail: int = NOTHING
    device: int = NO_DEVICE
    signal: int = 0
    print: int = 0
    made: list[MadeFields] = field(default_factory=list)
    closes: bool = False
    breaks: str = ""
    passes: bool = False
    alias: str = ""
    maker: str = ""
    preferred: Any = None
    explaining: bool = False
    compared: bool = False
    wait_policy: Any = None
    device_ready: Callable[[], bool] | None = None
    issuer: Issuer | None = None
    is_sealed: Callable[[], bool] | None = None
    stays_until: float = 0.0

    @property
    def name(self) -> str:
        """The name by which the program made the call."""
        return self.alias or self.op

    def describe(self) -> str:
        """Return the call as a program would write it: ``all_reduce(ReduceOp.SUM, float32, 1000 elements)``."""
        if self.error is not None and not self.key:
            return f"{self.name}(…)"
        by = f" by {self.maker}" if self.maker else ""
        return f"{self.name}({', '.join(_word(part) for part in self.key)}){by}"


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
    """Return 62 bits that are equal in all processes for the same call (never ``hash()``: it is salted)."""
    full = (op, key)
    known = _prints.get(full)
    if known is None:
        if len(_prints) >= 4096:
            _prints.clear()
        digest = blake2b(repr(full).encode(), digest_size=8).digest()
        known = _prints[full] = int.from_bytes(digest, "little") >> 2
    return known


class Made(NamedTuple):
    """A call that was made without a comparison."""

    seq: int
    fingerprint: int
    op: str
    key: tuple[object, ...]
    code: CodeType
    instruction: int


MadeFields = tuple[int, int, str, tuple[object, ...], CodeType, int]
"""The fields of a :class:`Made`; the object is made only if it is needed."""
