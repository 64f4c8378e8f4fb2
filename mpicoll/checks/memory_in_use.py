"""Claims on memory that pending operations of this rank use: find conflicting operations, and writes of the program.

Two operations may read the same memory. If one of them writes, the result depends on which is faster. So each operation that
the program has to wait for claims its memory, and a new claim is compared with earlier claims.

Snapshots find writes of the program. Memory that an operation reads is compared from the issue of the operation until the
program has waited for it. Memory that an operation writes is compared until the result arrives, and again afterwards. (A copy of
64 KiB takes a tenth of the time of its checksum.) Memory of more than ``SNAPSHOT_BYTES`` is sampled. While its result arrives in
place, nothing is compared. Snapshots do not find writes of equal bytes, and reads of memory that an operation writes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from mpicoll.checks.memory_ranges import EVERYWHERE, Range, Ranges, Snapshot, bounds, contents, differ, span
from mpicoll.diagnosis.report.entries import RankState
from mpicoll.diagnosis.report.report import with_calls
from mpicoll.errors import BufferInUseError
from mpicoll.memory.layouts import may_share
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import CallSite

_FEW = 8

Array = npt.NDArray[Any]


def check_read(op: str, site: CallSite, reads: Sequence[Array], gone: Callable[[], bool], group: str) -> None:
    """Compare memory that a blocking call reads with the claims of pending operations.

    Raises:
        BufferInUseError: a pending operation writes the memory.
    """
    if reads and claims.active:
        claims.check(Claim(op, site, reads=reads, writes=(), gone=gone, group=group))


def written(op: str, site: CallSite, group: str = "") -> BufferInUseError:
    """Return the error for an operation whose buffer was written before ``wait()`` had returned."""
    error = BufferInUseError(
        f"rank {claims.rank}: the tensor of {op} at {site} was written before its wait() had returned: the moved data may be "
        "wrong. Write the tensor after wait(), or pass a copy"
    )
    call = RankState(
        ((claims.rank, claims.rank),),
        op,
        site=str(site),
        problem="its tensor was written before wait() had returned",
    )
    return with_calls(error, group, [claims.rank], [call])


def _is_over() -> bool:
    return True


class Claim:
    """A pending operation and its memory.

    Args:
        op, site: the operation and its call site.
        reads, writes: arrays that the operation reads, and arrays that it writes or both reads and writes.
        gone: returns whether the group is broken or destroyed, so that the program will not wait for the operation.
        group: display name of the group.

    Attributes:
        over: returns whether the operation is complete; set when the operation is issued.
        advance: progresses the operation, and returns whether it is complete; set like ``over``.
        unawaited: the program cannot wait for the operation, or uses a future.
        start, end: addresses, set when the claim is added: all its memory stands between them. The extension reads them, too.
    """

    __slots__ = (
        "_results",
        "_snapshot",
        "advance",
        "end",
        "gone",
        "group",
        "op",
        "over",
        "ranges",
        "site",
        "start",
        "unawaited",
    )

    def __init__(
        self,
        op: str,
        site: CallSite,
        reads: Iterable[Array] = (),
        writes: Iterable[Array] = (),
        gone: Callable[[], bool] = lambda: False,
        group: str = "",
    ) -> None:
        self.start: int
        self.end: int
        self.group = group
        self.op = op
        self.site = site
        self.gone = gone
        self.over: Callable[[], bool] = _is_over
        self.advance: Callable[[], bool] = _is_over
        self.unawaited = False
        self.ranges = [Range(array, self, True) for array in writes if array.size]
        self.ranges += _only_read(reads, self, self.ranges)
        self._snapshot: Snapshot | None = None
        self._results: Snapshot | None = None

    def bounds(self) -> tuple[int, int]:
        """Return addresses between which all the memory stands."""
        return bounds(self.ranges)

    def snapshot_reads(self) -> None:
        """Record the contents of arrays that the operation only reads."""
        self._snapshot = Snapshot(each.array for each in self.ranges if not each.writes)

    def snapshot_of(self, arrays: list[Array]) -> Snapshot:
        """Return a snapshot of some arrays."""
        return Snapshot(arrays)

    def snapshot_results(self) -> None:
        """Record the contents of arrays that the operation, complete now, has written."""
        self._results = Snapshot(each.array for each in self.ranges if each.writes)

    def clear(self) -> None:
        """Drop the references to memory and operation, so that they are freed before the next garbage collection.

        A bytearray cannot change its size while there are references to its memory, and large arrays must be freed.
        """
        self.ranges = []
        self.over = self.advance = _is_over

    def verdict(self) -> BufferInUseError | None:
        """Return an error if the contents of an array have changed since its snapshot."""
        if any(snapshot is not None and snapshot.is_changed() for snapshot in (self._snapshot, self._results)):
            return written(self.op, self.site, self.group)
        return None


def _only_read(reads: Iterable[Array], claim: Claim, writes: list[Range]) -> list[Range]:
    """Return the ranges of arrays that share no memory with the ranges ``writes``."""
    found = [Range(array, claim, False) for array in reads if array.size]
    return [each for each in found if not any(each.shares(other) for other in writes)]


class Claimer(Protocol):
    """A request whose memory is claimed."""

    group: Any

    @property
    def call(self) -> Any:
        """The description of the call."""

    @property
    def done(self) -> bool:
        """Whether the request is over."""

    def Test(self) -> bool:
        """Progress the request; return whether it is over."""

    def expected(self) -> bytes | Snapshot | None:
        """Return the contents that the array must have when the program has waited; None: the array is not compared."""

    def unclaimed(self) -> None:
        """Drop the claim, as the program has waited."""


class RequestClaim(Claim):
    """The claim of a request, which gives the operation, call site and group when an error needs them.

    Args:
        array: an array, or a list of arrays; None if the request only has ``reads``.
        writes: the request writes ``array``.
        reads: arrays that the request only reads. After :meth:`snapshot_reads` these are compared when the program has waited.

    Attributes:
        request: the request; set when it is started.
        results: the contents that the array must have when the program has waited; None: those of ``request.expected()``.
    """

    __slots__ = ("_found", "_only_reads", "_writes", "array", "reads", "request", "results")

    def __init__(self, array: Any, *, writes: bool, reads: Sequence[Array] = ()) -> None:
        self.request: Claimer | None = None
        self.array = array
        self.results: bytes | None = None
        self.unawaited = False
        self._writes = writes
        self._found: list[Range] | None = None
        self._snapshot = None
        self._only_reads, self.reads = reads, bool(reads)

    @property
    def ranges(self) -> list[Range]:  # type: ignore[override]
        """The memory, found when another claim is compared with this claim: most claims end before."""
        if self._found is None:
            self._found = [Range(array, self, self._writes) for array in self._own() if array.size]
            self._found += _only_read(self._only_reads, self, self._found)
        return self._found

    def _own(self) -> list[Array]:
        return self.array if isinstance(self.array, list) else [] if self.array is None else [self.array]

    def bounds(self) -> tuple[int, int]:
        """Return addresses between which all memory of the claim stands; ``EVERYWHERE`` for a list whose ranges are not known."""
        if self._found is None and self.array is not None and not self.reads:
            return EVERYWHERE if isinstance(self.array, list) else span(self.array)
        return bounds(self.ranges)

    def snapshot_reads(self) -> None:
        """Record the contents of arrays that the request only reads."""
        reads, own = self._only_reads, self._own()
        if any(may_share(each, own) for each in reads):
            super().snapshot_reads()
        else:  # which takes less time than to find the ranges
            self._snapshot = Snapshot(reads)

    def with_snapshot(self) -> RequestClaim:
        """Return this claim, with the contents of arrays that are only read."""
        if self.reads:
            self.snapshot_reads()
        return self

    @property
    def op(self) -> str:  # type: ignore[override]
        return "" if self.request is None else str(self.request.call.name)

    @property
    def site(self) -> CallSite:  # type: ignore[override]
        assert self.request is not None
        site: CallSite = self.request.call.site
        return site

    @property
    def group(self) -> str:  # type: ignore[override]
        return "" if self.request is None else str(self.request.group.display)

    def gone(self) -> bool:
        """Return whether the group of the request cannot be used, so that the program will not wait for the request."""
        return self.request is not None and bool(self.request.group.gone())

    def over(self) -> bool:
        """Return whether the request is over."""
        return self.request is None or self.request.done

    def advance(self) -> bool:
        """Progress the request; return whether it is over."""
        return self.request is None or self.request.Test()

    def snapshot_results(self) -> None:
        """Record the contents of the array of the request, which is complete now."""
        self.results = contents(self.array)

    def clear(self) -> None:
        """Drop the references to the memory and the request."""
        request, self.request = self.request, None
        self._found, self._only_reads = [], ()
        if request is not None:
            request.unclaimed()

    def verdict(self) -> BufferInUseError | None:
        """Return an error if the array does not have the expected contents, or an array that is only read has changed."""
        request = self.request
        if request is None:  # another thread has waited for the request meanwhile
            return None
        held = request.expected() if self.results is None else self.results
        changed = self._snapshot is not None and self._snapshot.is_changed()
        if not changed and held is not None:
            changed = differ(self.array, held) if isinstance(held, bytes) else held.is_changed()
        return written(self.op, self.site, self.group) if changed else None


UNAWAITED_FOR = 0.05
"""Seconds for which :meth:`Registry.check` progresses a conflicting operation that the program cannot wait for."""


class Registry:
    """The claims of pending operations on this rank.

    Attributes:
        active: all claims, in a dictionary, which the extension reads.
        reusable: claims of operations that start repeatedly; they are few, and are compared one by one.
        dropped: claims of operations without a handle, removed when the operation is over.
    """

    def __init__(self) -> None:
        self.rank = 0  # for messages
        self.active: dict[Claim, None] = {}
        self.reusable: set[Claim] = set()
        self._lock = threading.Lock()
        self._read = Ranges()
        self._written = Ranges()
        self.dropped: deque[Claim] = deque()

    def check(self, new: Claim) -> None:
        """Raise if a new claim conflicts with an active claim.

        Raises:
            BufferInUseError: an operation writes memory that another operation uses; the message names both.
        """
        found = self._shared(new)
        until = time.monotonic() + UNAWAITED_FOR
        while found is not None and found[1].claim.unawaited and time.monotonic() < until:
            # The program does not wait for the other operation, so that operation may be complete without having been tested.
            with signals.guard:
                waiting.progress()
                found[1].claim.advance()  # waits do not progress sends
            found = self._shared(new)
        if found is not None:
            mine, other = found
            error = BufferInUseError(f"rank {self.rank}: {_text(mine, other)}")
            raise with_calls(error, new.group, [self.rank], [_entry(mine), _entry(other)])

    def conflicts(self, new: Claim) -> bool:
        """Return whether a pending operation conflicts with a new claim, without progressing that operation."""
        if not self.dropped and len(self.active) <= _FEW:
            start, end = new.bounds()
            if all(end <= each.start or each.end <= start for each in tuple(self.active)):
                return False
        return self._shared(new) is not None

    def conflict_once(self, new: Claim) -> bool:
        """Return :meth:`conflicts` of a claim that is not needed any more."""
        try:
            return self.conflicts(new)
        finally:
            new.clear()  # the claim and its ranges refer to each other, and hold the arrays

    def _shared(self, new: Claim) -> tuple[Range, Range] | None:
        """Return the range of a new claim and the range of an active claim that conflict, or None."""
        with self._lock:
            self._sweep()
            for mine in new.ranges:
                for ranges in (self._written, self._read) if mine.writes else (self._written,):
                    for other in ranges.near(mine):
                        if not other.shares(mine) or other.claim.gone():
                            continue
                        return mine, other
                for claim in tuple(self.reusable):
                    for other in claim.ranges:
                        if not (mine.writes or other.writes) or not other.shares(mine) or claim.gone():
                            continue
                        return mine, other
        return None

    def add(self, new: Claim) -> None:
        """Add a claim, until :meth:`remove`."""
        with self._lock:
            try:
                new.start, new.end = new.bounds()
                self.active[new] = None
                self._add_ranges(new)
            except BaseException:
                self._rebuild()
                raise

    def claim(self, claim: Claim) -> None:
        """Add a reusable claim, until :meth:`release`; both calls cost little, and the claim retains its memory."""
        claim.start, claim.end = claim.bounds()
        self.reusable.add(claim)
        self.active[claim] = None

    def release(self, claim: Claim) -> None:
        """Remove a reusable claim, if it is active."""
        self.active.pop(claim, None)
        self.reusable.discard(claim)

    def _add_ranges(self, new: Claim) -> None:
        for each in new.ranges:
            (self._written if each.writes else self._read).add(each)

    def _rebuild(self) -> None:
        """Rebuild the ranges after an exception, which a signal handler may raise between any two lines."""
        self._read, self._written = Ranges(), Ranges()
        for claim in self.active.keys() - self.reusable:
            self._add_ranges(claim)

    def remove(self, old: Claim) -> None:
        """Remove a claim."""
        if old in self.reusable:
            self.release(old)
            old.clear()
            return
        with self._lock:
            self._remove(old)

    def drop(self, old: Claim) -> None:
        """Remove the claim of an operation without a handle, when the operation is over; for the garbage collector."""
        old.unawaited = True
        self.dropped.append(old)  # without the lock, which this thread may hold

    def _sweep(self) -> None:
        for _ in range(len(self.dropped)):
            old = self.dropped.popleft()
            if old.over() or old.gone():
                if old in self.reusable:
                    self.release(old)
                    old.clear()
                else:
                    self._remove(old)
            else:
                self.dropped.append(old)

    def _remove(self, old: Claim) -> None:
        if old in self.active:
            try:
                del self.active[old]
                for each in old.ranges:
                    (self._written if each.writes else self._read).remove(each)
            except BaseException:
                self._rebuild()
                raise
            old.clear()


def _text(mine: Range, other: Range) -> str:
    common = " (they have bytes in common)"
    if mine.array.flags.c_contiguous and other.array.flags.c_contiguous:  # otherwise the number takes long to find out
        common = f" ({min(mine.end, other.end) - max(mine.start, other.start)} bytes in common)"
    does = {True: "writes", False: "reads"}
    new, old = mine.claim, other.claim
    return (
        f"{new.op} at {new.site} {does[mine.writes]} memory that {old.op} at {old.site} still {does[other.writes]}{common}: "
        f"call wait() on {old.op} first, or pass an array of its own to each operation"
    )


def _entry(memory: Range) -> RankState:
    claim = memory.claim
    uses = (("memory", "writes" if memory.writes else "reads"),)
    return RankState(((claims.rank, claims.rank),), claim.op, uses, site=str(claim.site), group=claim.group)


claims = Registry()
"""The claims of this process."""
