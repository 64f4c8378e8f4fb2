"""Do all members make the same call? One small MAX all-reduce a call, on a communicator of its own, before data moves.

A round carries twelve 64-bit words: a fingerprint of the call and its negative (equal maxima of both mean that all are
equal), flags, the largest block, and the posting time and its negative, whose maxima give the spread. Whatever two
members call, the round itself is always the same operation, so a mismatch can neither hang nor corrupt: everybody sees it.
Members on one node make their rounds through memory that they share (:mod:`mpicoll.transports.shm.control`).

Two lanes, because MPI matches collectives on one communicator by their order alone. The *control lane* carries exactly
one round for every call, in the order in which calls are issued; all that follows (who called what, sizes, a second round,
the data) goes over the *data lane*, strictly one call after the other. So the order on both is the same on all members,
however early or late each of them sees a round end.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpicoll.checks.levels import EVERY, Rolling
from mpicoll.diagnosis.call import BEHIND, NOTHING, Call, Made
from mpicoll.diagnosis.report.entries import Table, entry_of, merge, runs_of, table_of
from mpicoll.diagnosis.report.report import MESSAGE_WIDTH, mismatch
from mpicoll.errors import CollectiveMismatchError
from mpicoll.runtime.call_site import Site
from mpicoll.runtime.waiting import STALL, Condition
from mpicoll.transports.base import Request
from mpicoll.transports.mpi.collectives import persistent_collectives
from mpicoll.transports.shm.control import AHEAD, MASK, RingRound, Rounds

_ROUND = struct.Struct("=12q")
_NO_FLAGS = (0, 0, 0, NOTHING, 0, 0)
_STALL_US, _STALL_NS = STALL * 1e6, STALL * 1e9

_T = TypeVar("_T")


@dataclass(slots=True)
class Flags:
    """What all members now know.

    Attributes:
        same: all fingerprints and details are equal.
        error: somebody's arguments are wrong.
        nonblocking: somebody is asynchronous, so all use the nonblocking variant.
        uneven: somebody's blocks differ in size.
        block_bytes: the largest block of all.
        stalled: the posting times spread so far that somebody may have withdrawn.
        detail: the common detail, or NOTHING.
        most: the largest detail.
        native: what somebody's memory asks for: ``AS_IT_IS``, else ``IN_PIECES``, else 0.
        behind: somebody may still wait for its GPU.
        offered: everybody offers to reduce on the GPU that all share.
        waited: seconds that this member had posted before the last one did.
    """

    same: bool
    error: bool
    nonblocking: bool
    uneven: bool
    block_bytes: int
    stalled: bool
    detail: int
    most: int
    native: int
    behind: bool
    offered: bool
    waited: float


class _Slot:
    """One round's memory, and its persistent request where MPI-4 has them."""

    __slots__ = ("_lane", "busy", "recv", "request", "send", "starting", "words")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.send = np.zeros(12, np.int64)
        self.recv = np.zeros(12, np.int64)
        self.busy = False
        self.words = self.send.data
        self.request: MPI.Prequest | None = None
        if persistent_collectives():
            self.request = lane.control.Allreduce_init(self.send, self.recv, MPI.MAX)
            self.starting = MPI.Prequest.Start, (self.request,)

    def fill(self, number: int, words: tuple[int, ...]) -> None:
        """Write what the round says."""
        now = int((time.monotonic() - self._lane.epoch) * 1e6)
        _ROUND.pack_into(self.words, 0, *words, now, -now)

    def plain(self, print_: int) -> Flags | None:
        """End the round: None when all is as usual (the same call, nobody wrong, asynchronous or late), else the flags."""
        words = self.recv.tolist()
        if (
            words[0] == print_
            and words[1] == -print_
            and not (words[2] or words[3] or words[4] or words[8])
            and (words[6] == NOTHING or words[6] == -words[7])
            and words[10] + words[11] <= _STALL_US
        ):
            self.busy = False
            return None
        return self.flags()

    def block_bytes(self) -> int:
        """Return the largest block that the last round told of."""
        return int(self.recv[5])

    def flags(self) -> Flags:
        """End the round, and return what it says."""
        *words, last, first = self.recv.tolist()
        self.busy = False
        return _flags(words, (last + first) / 1e6, (last - int(self.send[10])) / 1e6)

    def free(self) -> None:
        """Give the persistent request back to MPI; one under way is left alone."""
        if self.request is not None and not self.busy:
            self.request.Free()


class _RingSlot(RingRound):
    """One round of members on one node."""

    __slots__ = ()

    def plain(self, print_: int) -> Flags | None:
        """End the round: None when all is as usual, else the flags."""
        mine = self.words
        if self.same() and not (mine[2] or mine[3] or mine[4] or mine[8]) and self.spread() <= _STALL_NS:
            self.busy = False
            return None
        return self.flags()

    def block_bytes(self) -> int:
        """Return the largest block that the last round told of."""
        return self.maxima()[0][5]

    def flags(self) -> Flags:
        """End the round, and return what it says."""
        words, spread, waited = self.maxima()
        self.busy = False
        return _flags(words, spread, waited)


def _flags(words: list[int], spread: float, waited: float) -> Flags:
    """Return what the maxima of the words of a round say; ``spread`` is that of the posting times."""
    high, low, error, nonblocking, uneven, block_bytes, most, least, native, refused = words
    return Flags(
        same=high == -low and (bool(uneven) or most == NOTHING or most == -least),
        error=bool(error),
        nonblocking=bool(nonblocking),
        uneven=bool(uneven),
        block_bytes=block_bytes,
        stalled=spread > STALL,
        detail=most if most != NOTHING and most == -least else NOTHING,
        most=most,
        native=0 if native == BEHIND else native,
        behind=bool(native),
        offered=refused < 0,
        waited=waited,
    )


class Ticket:
    """The place of one call in the order of its group."""

    __slots__ = ("lane", "number")

    def __init__(self, lane: Lane, number: int) -> None:
        self.lane = lane
        self.number = number

    def may_post(self) -> bool:
        """Whether the control lane has come to this call and has a free slot."""
        lane = self.lane
        return lane.posted == self.number and lane.room()

    def may_pass(self) -> bool:
        """Whether the control lane has come to this call, for one that makes no round."""
        return self.lane.posted == self.number

    def Test(self) -> bool:
        """Whether every earlier call of the group has posted its data."""
        return self.lane.turn >= self.number

    def pass_on(self) -> None:
        """Let the next call of the group onto the data lane."""
        if self.lane.turn == self.number:
            self.lane.turn += 1


class Lane:
    """The control and the data lane of one group, and the zero of its clock."""

    __slots__ = (
        "_first",
        "_slots",
        "control",
        "data",
        "epoch",
        "issued",
        "posted",
        "rolling",
        "rounds",
        "shared",
        "size",
        "turn",
    )

    def __init__(self, control: MPI.Intracomm, data: MPI.Intracomm) -> None:
        self.control = control
        self.data = data
        self.size = control.Get_size()
        self.epoch = 0.0  # time.monotonic() at a moment that is the same on all members, to within a barrier's skew
        self.issued = 0
        self.posted = 0
        self.turn = 0
        self.rounds = 0
        self.rolling = Rolling()
        self.shared: Rounds | None = None
        self._slots: Any = []
        self._first = 0  # rounds before the first one that was made the way they are now

    def ticket(self) -> Ticket:
        """Take the next place in the order of calls."""
        number = self.issued
        self.issued += 1
        return Ticket(self, number)

    def share(self, shared: Rounds | None) -> None:
        """Make rounds through the memory of a node from now on; None: through MPI. Nothing is under way."""
        if shared is not self.shared:
            self.free()
            self.shared, self._first = shared, self.rounds
            if shared is not None:
                self._slots = [_RingSlot(shared, place) for place in range(MASK + 1)]

    def _next_slot(self) -> _Slot | _RingSlot:
        """Return the slot of the next round; made in the order of rounds, the same on all members."""
        made = self.rounds - self._first
        if self.shared is None and made < AHEAD and len(self._slots) <= made:
            self._slots.append(_Slot(self))
        slot: _Slot | _RingSlot = self._slots[made % AHEAD if self.shared is None else (self.rounds + 1) & MASK]
        return slot

    def slot(self, place: int) -> _RingSlot:
        """Return the slot at a place of the ring, of members on one node."""
        slot: _RingSlot = self._slots[place]
        return slot

    def room(self) -> bool:
        """Whether one more round may be posted."""
        if self.shared is not None:
            return not self._slots[(self.rounds + 1 - AHEAD) & MASK].busy
        return not self._next_slot().busy

    def slot_at_rest(self) -> _Slot | _RingSlot | None:
        """Return the slot of the next round, with a request to start, where no call is under way; else None.

        Nobody else can post then: collectives of a group are issued one at a time.
        """
        if self.issued == self.posted == self.turn and self.room():
            slot = self._next_slot()
            if slot.request is not None:
                return slot
        return None

    def pass_by(self) -> None:
        """Let a call go without a round."""
        self.posted += 1

    def post(self, print_: int, block_bytes: int, *words: int) -> tuple[_Slot | _RingSlot, Request]:
        """Post the next round; ``words`` are flags and details, none for a call that has neither."""
        slot = self._next_slot()
        self.fill(slot, print_, block_bytes, *words)
        request: Request
        if isinstance(slot, _RingSlot):
            slot.Start()
            request = slot
        elif slot.request is None:
            request = self.control.Iallreduce(slot.send, slot.recv, MPI.MAX)
        else:
            slot.request.Start()
            request = slot.request
        self.posted += 1  # only now: another thread may post the next round at once
        return slot, request

    def fill(self, slot: _Slot | _RingSlot, print_: int, block_bytes: int, *words: int) -> None:
        """Write what the next round says into its slot."""
        self.rounds += 1
        error, asynchronous, uneven, detail, native, offered = words or _NO_FLAGS
        against = detail if detail == NOTHING else -detail
        said = (print_, -print_, error, asynchronous, uneven, block_bytes, detail, against, native, -offered)
        slot.fill(self.rounds, said)
        slot.busy = True

    def close(self, op: str, site: Site, seq: int, display: str, ranks: tuple[int, ...]) -> Closing | None:
        """Post the last comparison of a group that rolls; never waits. None: calls are under way, or each was compared.

        Args:
            op, site, seq: what ends the group on this rank, where, and what number its next call would have had.
            display: the group, for the message.
            ranks: global ranks of the members, by rank in the group.
        """
        if self.shared is not None or self.posted != self.issued or self.turn != self.issued or not self.room():
            return None
        print_, made = self.rolling.cut()
        call = Call(op, (), site, seq=seq, print=print_, made=made, closes=True)
        self.issued += 1
        self.turn += 1
        slot, request = self.post(call.print, 0)
        told = explain(self, call, display, ranks, self.control.Get_rank())
        return Closing(slot, request, display, told)

    def free(self) -> None:
        """Give the persistent requests back to MPI (before MPI is finalised); a round under way is left alone."""
        for slot in self._slots:
            slot.free()
        self._slots = []


class Closing:
    """The last comparison of a group, under way since the group was destroyed or the program ended (a Request).

    Attributes:
        display: the group, for messages.
        same: what the members called since the comparison before is the same; None until that is known.
        error: what all members find where it is not.
    """

    __slots__ = ("_request", "_slot", "_told", "display", "error", "same")

    def __init__(
        self, slot: _Slot | _RingSlot, request: Request, display: str, told: Generator[Request, None, None]
    ) -> None:
        self._slot = slot
        self._request: Request | None = request
        self._told = told
        self.display = display
        self.same: bool | None = None
        self.error: CollectiveMismatchError | None = None

    def Test(self) -> bool:
        """Go on with it; whether it is over."""
        while self._request is not None and self._request.Test():
            if self.same is None:
                self.same = self._slot.flags().same
            try:
                self._request = None if self.same else next(self._told)
            except CollectiveMismatchError as error:
                self._request, self.error = None, error
        return self._request is None


def agree(ticket: Ticket, call: Call) -> Generator[Request, None, Flags]:
    """Make the one round of ``call`` and return what all members now know.

    A generator: it yields what has to complete before it goes on, so that a call that is waited for and one that is not
    take the same way. All members make the same rounds, in the same order, and they move nothing but the words.
    """
    lane = ticket.lane
    if not ticket.may_post():
        yield Condition(ticket.may_post)
    slot, request = lane.post(
        call.print,
        call.block_bytes,
        call.error is not None,
        call.asynchronous,
        call.uneven,
        call.detail,
        call.native,
        call.offer is not None,
    )
    if not request.Test():
        yield request
    return slot.flags()


def agree_or_raise(
    ticket: Ticket, call: Call, group_name: str, ranks: tuple[int, ...], me: int
) -> Generator[Request, None, Flags]:
    """Make the round; when the members differ, or one has wrong arguments, raise the same on all of them.

    Args:
        group_name: for the message.
        ranks: global ranks of the members, by rank in the group.
        me: this rank in the group.

    Raises:
        CollectiveMismatchError: the calls differ, or another member's arguments are wrong.
        Exception: this rank's own ``call.error``.
    """
    flags = yield from agree(ticket, call)
    if flags.same and not flags.error:
        return flags
    if not ticket.Test():
        yield ticket
    yield from explain(ticket.lane, call, group_name, ranks, me, flags.waited)
    raise AssertionError("explain() always raises")


def explain(
    lane: Lane, call: Call, group_name: str, ranks: tuple[int, ...], me: int, waited: float = 0.0
) -> Generator[Request, None, None]:
    """Tell all members what every member called, and raise: ``call.error`` here, CollectiveMismatchError on the others.

    Args:
        waited: seconds that this member had posted its round before the last one did.
    """
    call.explaining = True
    said, closing = call, "No default group was made." if call.op == "init_process_group" else ""
    if call.made or call.closes:
        said, closing = yield from _first_difference(lane, call, me)
    mine = entry_of(said, ranks[me], waited=waited)
    table = yield from _tell_table(lane, me, table_of([mine]))
    wanted = table.missing()
    if wanted is not None:
        again = yield from _tell_table(lane, me, table_of([mine] if mine.fingerprint() == wanted else []))
        table = table.with_rows(again)
    if call.error is not None:
        if any(row.problem != mine.problem for row in table.rows) and hasattr(call.error, "add_note"):
            # In one line: the others print what all have called, and here the error says what is wrong.
            told = mismatch(group_name, runs_of(ranks), said.seq, table, closing)
            call.error.add_note(f"{call.name}: {told.one_line()}")
        raise call.error
    report = mismatch(group_name, runs_of(ranks), said.seq, table, closing)
    error = CollectiveMismatchError(report.text(ranks[me], MESSAGE_WIDTH))
    report.put_on(error)
    right = [row.ranks[0][0] for row in table.rows if not row.problem] or [run[0] for run in table.more]
    error.reporter = min(right, default=min(ranks))
    raise error


def _first_difference(lane: Lane, call: Call, me: int) -> Generator[Request, None, tuple[Call, str]]:
    """Find the first place where the members' calls since the last comparison differ.

    Not by a collective of MPI: where one member has made a call more than another, their next ones would not fit.

    Returns:
        This member's call there, and what has to be said of the calls that have moved data already; "" if none has.
    """
    mine = np.zeros(2 * (EVERY + 2), np.int64)
    here = len(call.made) + call.closes
    mine[:2] = here, -here
    for i, (_, print_, *_) in enumerate(call.made, 1):
        mine[2 * i : 2 * i + 2] = print_, -print_
    highest = yield from _tell(
        lane, me, mine, np.maximum, np.ndarray.tobytes, lambda told: np.frombuffer(told, np.int64)
    )
    most, least = int(highest[0]), -int(highest[1])
    differ = np.flatnonzero(highest[2::2] != -highest[3::2])
    if not differ.size:
        return call, ""
    at = int(differ[0])
    if most == least == at + 1 and not call.closes:
        return call, ""  # the members differ in the call that compares, and nothing has moved
    said = call
    if at < len(call.made) - (not call.closes):
        made = Made(*call.made[at])
        said = Call(made.op, made.key, Site(made.code, made.instruction), seq=made.seq)
    call.apart = most != least
    closing = f"Compared every {EVERY} calls: what moved since call {said.seq} may be wrong."
    if not call.closes:
        closing += (
            " The ranks are out of step: the group is broken now." if call.apart else " The group can still be used."
        )
    return said, closing


def _tell_table(lane: Lane, me: int, table: Table) -> Generator[Request, None, Table]:
    return _tell(lane, me, table, merge, Table.pack, Table.unpack)


def _tell(
    lane: Lane,
    me: int,
    mine: _T,
    merge: Callable[[_T, _T], _T],
    pack: Callable[[_T], bytes],
    unpack: Callable[[bytes], _T],
) -> Generator[Request, None, _T]:
    """Merge what all members say up a binomial tree, and tell all of them what came out.

    Point to point on the control communicator, with tags that nobody else uses there. One member may be at the next call
    while another still reads: the messages of a pair come in their order.
    """
    comm, size = lane.control, lane.size
    last = comm.Get_attr(MPI.TAG_UB) or 32767  # what MPI gives at least
    up, down = last - 1, last - 2
    said = mine
    bit = 1
    while bit < size and not me & bit:
        if me + bit < size:
            told = _Incoming(comm, me + bit, up)
            yield told
            said = merge(said, unpack(told.message))
        bit *= 2
    if bit < size:
        yield comm.Isend(np.frombuffer(pack(said), np.uint8), me - bit, up)
        told = _Incoming(comm, me - bit, down)
        yield told
        packed = told.message
        said = unpack(packed)
    else:
        packed = pack(said)
    message = np.frombuffer(packed, np.uint8)
    sends = []
    while bit > 1:
        bit //= 2
        if me + bit < size:
            sends.append(comm.Isend(message, me + bit, down))
    yield from sends
    return said


class _Incoming:
    """A message of unknown length from one member (a Request)."""

    __slots__ = ("_buffer", "_comm", "_request", "_source", "_tag")

    def __init__(self, comm: MPI.Intracomm, source: int, tag: int) -> None:
        self._comm = comm
        self._source = source
        self._tag = tag
        self._request: MPI.Request | None = None
        self._buffer = np.empty(0, np.uint8)

    @property
    def message(self) -> bytes:
        return self._buffer.tobytes()

    def Test(self) -> bool:
        if self._request is None:
            status = MPI.Status()
            found = self._comm.Improbe(self._source, self._tag, status)
            if found is None:
                return False
            self._buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._request = found.Irecv(self._buffer)
        return self._request.Test()
