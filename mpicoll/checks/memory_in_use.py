"""Memory of operations under way on this rank: who else is given it, and was it written meanwhile?

Two operations may read the same memory at once; as soon as one of them writes it, what is in it depends on which is faster.
So the memory of every operation that the program still has to wait for is kept here, and that of a new one compared with it.

A write by the program itself is noticed by copies: of what is read from the issue of the operation until it has been
waited for, of what is written until its result comes and again from there on. (A copy of 64 KiB takes a tenth of the time of a
checksum of it.) Not noticed: writes to buffers of more than
``SEALED_BYTES``, writes that put the same bytes there again, and reads of memory that an operation writes.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicoll.diagnosis.report.entries import Entry
from mpicoll.diagnosis.report.report import with_calls
from mpicoll.errors import BufferInUseError
from mpicoll.memory.device.array import DeviceAddresses
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import Site

SEALED_BYTES = 64 * 1024
"""Bytes of the largest buffer that is checked for writes of the program."""

_MOST_WORK = 10_000
_address = MPI.Get_address
_too_hard: type[Exception] = getattr(np, "exceptions", np).TooHardError

Array = npt.NDArray[Any]


def span(array: Array) -> tuple[int, int]:
    """Return the addresses of the first byte of an array and of the one behind its last; equal when it has none."""
    if array.flags.c_contiguous or not array.size:
        try:
            start = _address(array)  # in a tenth of the time
        except (BufferError, TypeError, ValueError):  # of a dtype that has no buffer
            start = int(array.__array_interface__["data"][0])
        return start, start + array.nbytes
    start = int(array.__array_interface__["data"][0])
    low = high = 0
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    return start + low, start + high + array.itemsize


class _Range:
    """The memory of one array of one operation."""

    __slots__ = ("array", "end", "flight", "start", "writes")

    def __init__(self, array: Array, flight: Flight, writes: bool) -> None:
        self.start, self.end = span(array)
        self.array = array
        self.flight = flight
        self.writes = writes

    def __lt__(self, other: _Range) -> bool:
        return self.start < other.start

    def shares(self, other: _Range) -> bool:
        """Whether they have a byte in common; where that is hard to tell, they have not."""
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.array.flags.c_contiguous and other.array.flags.c_contiguous:
            return True
        try:
            return bool(np.shares_memory(self.array, other.array, max_work=_MOST_WORK))  # type: ignore[arg-type]
        except _too_hard:
            return False


def span_of(array: Array, flight: Flight, writes: bool) -> _Range:
    """Return the memory of one array of an operation."""
    return _Range(array, flight, writes)


class Seal:
    """What is in some arrays, to tell later whether they were written."""

    __slots__ = ("_held",)

    def __init__(self, arrays: Iterable[Array]) -> None:
        self._held = [
            (array, _bytes(array))
            for array in arrays
            if array.nbytes <= SEALED_BYTES and type(array) is not DeviceAddresses
        ]

    def broken(self) -> bool:
        """Whether one of them no longer holds what it held."""
        return any(_bytes(array) != held for array, held in self._held)


def _bytes(array: Array) -> bytes:
    if array.dtype.names is not None:
        # Field by field: between them may stand what is not the array's, and a copy of it may hold anything there.
        return b"".join(_bytes(array[name]) for name in array.dtype.names)
    return array.tobytes()


def look_at(op: str, site: Site, reads: Sequence[Array], gone: Callable[[], bool], group: str) -> None:
    """Compare memory that a call reads, which is over when it returns, with that of the operations under way.

    Raises:
        BufferInUseError: one of them writes there.
    """
    if reads and claims.flights:
        claims.check(Flight(op, site, reads=reads, writes=(), gone=gone, group=group))


def written(op: str, site: Site, group: str = "") -> BufferInUseError:
    """Return the error for an operation whose buffer was written before it had been waited for."""
    error = BufferInUseError(
        f"rank {claims.rank}: the tensor of {op} at {site} was written before its wait() had returned: what was moved is not "
        "certain. Write it after wait(), or hand over a copy"
    )
    call = Entry(
        ((claims.rank, claims.rank),),
        op,
        site=str(site),
        problem="its tensor was written before wait() had returned",
    )
    return with_calls(error, group, [claims.rank], [call])


def _is_over() -> bool:
    return True


class Flight:
    """One operation under way, and its memory.

    Args:
        op, site: the operation and its place.
        reads, writes: the arrays that it reads and writes; one that does both is among the latter.
        gone: whether its group can no longer be used, so that nobody will wait for it.
        group: the group, as it is displayed.

    Attributes:
        over: whether it is complete; set when it is issued.
        advance: moves it on, and says whether it is complete; set as ``over`` is.
        adrift: the program cannot wait for it, or has it tell by a future.
    """

    __slots__ = ("_results", "_seal", "adrift", "advance", "gone", "group", "op", "over", "ranges", "site")

    def __init__(
        self,
        op: str,
        site: Site,
        reads: Iterable[Array] = (),
        writes: Iterable[Array] = (),
        gone: Callable[[], bool] = lambda: False,
        group: str = "",
    ) -> None:
        self.group = group
        self.op = op
        self.site = site
        self.gone = gone
        self.over: Callable[[], bool] = _is_over
        self.advance: Callable[[], bool] = _is_over
        self.adrift = False
        self.ranges = [_Range(array, self, True) for array in writes if array.size]
        outputs = tuple(self.ranges)
        for array in reads:
            if array.size:
                mine = _Range(array, self, False)
                if not outputs or not any(mine.shares(other) for other in outputs):
                    self.ranges.append(mine)
        self._seal: Seal | None = None
        self._results: Seal | None = None

    def seal(self) -> None:
        """Note what is in the arrays that are only read."""
        self._seal = Seal(each.array for each in self.ranges if not each.writes)

    def seal_of(self, arrays: list[Array]) -> Seal:
        """Return what is in some arrays now."""
        return Seal(arrays)

    def seal_results(self) -> None:
        """Note what is in the arrays that were written, now that the operation is complete."""
        self._results = Seal(each.array for each in self.ranges if each.writes)

    def let_go(self) -> None:
        """Forget the memory and the operation, so that they go at once and not when Python next looks for cycles.

        A bytearray cannot change its size as long as somebody has its memory, and large arrays are to be freed.
        """
        self.ranges = []
        self.over = self.advance = _is_over

    def verdict(self) -> BufferInUseError | None:
        """Return an error when an array no longer holds what it held when it was sealed."""
        if any(seal is not None and seal.broken() for seal in (self._seal, self._results)):
            return written(self.op, self.site, self.group)
        return None


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

    def expected(self) -> bytes | None:
        """Return what must be in the array when the program has waited; None: nobody compares."""

    def unclaimed(self) -> None:
        """Forget the claim: the program has waited."""


class RequestClaim(Flight):
    """The one array of a request; what its messages say is made when one is written.

    Attributes:
        request: the request; set when it is started.
        results: what is to be in the array when the program has waited; None: the request knows.
    """

    __slots__ = ("array", "request", "results")

    def __init__(self, array: Array, *, writes: bool) -> None:
        self.request: Claimer | None = None
        self.array = array
        self.results: bytes | None = None
        self.adrift = False
        self.ranges = [span_of(array, self, writes)] if array.size else []

    @property
    def op(self) -> str:  # type: ignore[override]
        return "" if self.request is None else str(self.request.call.op)

    @property
    def site(self) -> Site:  # type: ignore[override]
        assert self.request is not None
        site: Site = self.request.call.site
        return site

    @property
    def group(self) -> str:  # type: ignore[override]
        return "" if self.request is None else str(self.request.group.display)

    def gone(self) -> bool:
        """Return whether nobody will wait for the request, as its group cannot be used."""
        return self.request is not None and bool(self.request.group.gone())

    def over(self) -> bool:
        """Return whether the request is over."""
        return self.request is None or self.request.done

    def advance(self) -> bool:
        """Progress the request; return whether it is over."""
        return self.request is None or self.request.Test()

    def seal_results(self) -> None:
        """Note what is in the array, now that the request is complete."""
        if self.array.nbytes <= SEALED_BYTES:
            self.results = self.array.tobytes()

    def let_go(self) -> None:
        """Forget the memory and the request."""
        request, self.request = self.request, None
        self.ranges = []
        if request is not None:
            request.unclaimed()

    def verdict(self) -> BufferInUseError | None:
        """Return an error if the array does not hold what it must hold."""
        assert self.request is not None
        held = self.request.expected() if self.results is None else self.results
        if held is not None and self.array.tobytes() != held:
            return written(self.op, self.site, self.group)
        return None


class _Ranges:
    """Ranges sorted by their start, one list for each order of magnitude of their length.

    A range of a list can only overlap a given one if it starts within that length before it; so of many that lie side by
    side only those are looked at that are near.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[_Range]] = {}
        self._starts: dict[int, list[int]] = {}

    def add(self, new: _Range) -> None:
        size = (new.end - new.start).bit_length()
        insort(self._lists.setdefault(size, []), new)
        insort(self._starts.setdefault(size, []), new.start)

    def remove(self, old: _Range) -> None:
        size = (old.end - old.start).bit_length()
        ranges, starts = self._lists[size], self._starts[size]
        at = bisect_left(starts, old.start)
        while ranges[at] is not old:
            at += 1
        del ranges[at], starts[at]
        if not ranges:
            del self._lists[size], self._starts[size]

    def near(self, wanted: _Range) -> Iterator[_Range]:
        """Yield every range that may overlap the one given."""
        for size, starts in self._starts.items():
            first = bisect_left(starts, wanted.start - (1 << size))
            yield from self._lists[size][first : bisect_left(starts, wanted.end)]


ADRIFT_FOR = 0.05
"""Seconds for which an operation that nobody waits for is moved on before memory counts as used by it."""


class Registry:
    """The operations under way on this rank.

    Attributes:
        flights: those that the program has to wait for.
        lent: those of them that come and go in a loop: few, and looked at one by one.
    """

    def __init__(self) -> None:
        self.rank = 0  # for messages
        self.flights: set[Flight] = set()
        self.lent: set[Flight] = set()
        self._lock = threading.Lock()
        self._read = _Ranges()
        self._written = _Ranges()
        self._dropped: deque[Flight] = deque()

    def check(self, new: Flight) -> None:
        """Raise when an operation would write memory that another one uses, or use memory that another one writes.

        Raises:
            BufferInUseError: it names both operations.
        """
        found = self._shared(new)
        until = time.monotonic() + ADRIFT_FOR
        while found is not None and found[1].flight.adrift and time.monotonic() < until:
            # Nobody waits for it, so it may be over, and only not have been looked at since.
            with signals.guard:
                waiting.progress()
                found[1].flight.advance()  # a send is in no list of what every wait moves on
            found = self._shared(new)
        if found is not None:
            mine, other = found
            error = BufferInUseError(f"rank {self.rank}: {_text(mine, other)}")
            raise with_calls(error, new.group, [self.rank], [_entry(mine), _entry(other)])

    def in_the_way(self, new: Flight) -> bool:
        """Whether another operation uses memory of a new one, as far as can be told at once."""
        return self._shared(new) is not None

    def _shared(self, new: Flight) -> tuple[_Range, _Range] | None:
        """Return memory of an operation, and that of another one in its way."""
        with self._lock:
            self._sweep()
            for mine in new.ranges:
                for ranges in (self._written, self._read) if mine.writes else (self._written,):
                    for other in ranges.near(mine):
                        if not other.shares(mine) or other.flight.gone():
                            continue
                        return mine, other
                for flight in tuple(self.lent):
                    for other in flight.ranges:
                        if not (mine.writes or other.writes) or not other.shares(mine) or flight.gone():
                            continue
                        return mine, other
        return None

    def add(self, new: Flight) -> None:
        """Keep an operation until :meth:`remove`."""
        with self._lock:
            try:
                self.flights.add(new)
                self._add_ranges(new)
            except BaseException:
                self._rebuild()
                raise

    def lend(self, flight: Flight) -> None:
        """Keep an operation until :meth:`take_back`, which costs little and leaves it its memory."""
        self.lent.add(flight)
        self.flights.add(flight)

    def take_back(self, flight: Flight) -> None:
        """Forget an operation that was lent, if it was."""
        self.flights.discard(flight)
        self.lent.discard(flight)

    def _add_ranges(self, new: Flight) -> None:
        for each in new.ranges:
            (self._written if each.writes else self._read).add(each)

    def _rebuild(self) -> None:
        """Make the ranges anew: out of a signal handler an exception may strike between any two lines."""
        self._read, self._written = _Ranges(), _Ranges()
        for flight in self.flights - self.lent:
            self._add_ranges(flight)

    def remove(self, old: Flight) -> None:
        """Forget an operation."""
        if old in self.lent:
            self.take_back(old)
            old.let_go()
            return
        with self._lock:
            self._remove(old)

    def drop(self, old: Flight) -> None:
        """Forget an operation whose handle nobody holds any more, once it is over; called by the garbage collector."""
        old.adrift = True
        self._dropped.append(old)  # and no lock: this thread may hold it

    def _sweep(self) -> None:
        for _ in range(len(self._dropped)):
            old = self._dropped.popleft()
            if old.over() or old.gone():
                if old in self.lent:
                    self.take_back(old)
                    old.let_go()
                else:
                    self._remove(old)
            else:
                self._dropped.append(old)

    def _remove(self, old: Flight) -> None:
        if old in self.flights:
            try:
                self.flights.remove(old)
                for each in old.ranges:
                    (self._written if each.writes else self._read).remove(each)
            except BaseException:
                self._rebuild()
                raise
            old.let_go()


def _text(mine: _Range, other: _Range) -> str:
    common = " (they have bytes in common)"
    if mine.array.flags.c_contiguous and other.array.flags.c_contiguous:  # else it is hard to tell how many
        common = f" ({min(mine.end, other.end) - max(mine.start, other.start)} bytes in common)"
    does = {True: "writes", False: "reads"}
    new, old = mine.flight, other.flight
    return (
        f"{new.op} at {new.site} {does[mine.writes]} memory that {old.op} at {old.site} still {does[other.writes]}{common}: "
        f"call wait() on {old.op} first, or give each an array of its own"
    )


def _entry(memory: _Range) -> Entry:
    flight = memory.flight
    uses = (("memory", "writes" if memory.writes else "reads"),)
    return Entry(((claims.rank, claims.rank),), flight.op, uses, site=str(flight.site), group=flight.group)


claims = Registry()
"""The one of this process."""
