"""Do all members make the same call? One small MAX all-reduce a call, on a communicator of its own, before data moves.

A round carries eleven 64-bit words: a fingerprint of the call and its negative (equal maxima of both mean that all are
equal), flags, the largest block, and the posting time and its negative, whose maxima give the spread. Whatever two
members call, the round itself is always the same operation, so a mismatch can neither hang nor corrupt: everybody sees it.

Two lanes, because MPI matches collectives on one communicator by their order alone. The *control lane* carries exactly
one round for every call, in the order in which calls are issued; all that follows (who called what, sizes, a second round,
the data) goes over the *data lane*, strictly one call after the other. So the order on both is the same on all members,
however early or late each of them sees a round end.
"""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.checks.call import NOTHING, Call, fingerprint, name_ranks
from mpicoll.engines.base import Request
from mpicoll.engines.mpi import persistent_collectives
from mpicoll.errors import CollectiveMismatchError
from mpicoll.waiting import STALL

__all__ = [
    "Flags",
    "Lane",
    "Ticket",
    "agree",
    "agree_or_raise",
    "explain",
    "mismatch_text",
]

_ROUND = struct.Struct("=11q")
_NO_FLAGS = (0, 0, 0, NOTHING)
_STALL_US = STALL * 1e6
SLOTS = 8
_DESCRIPTION_BYTES = 2048


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
        refused: 0, or the number of the first engine, in the order of preference, that all members can use.
    """

    same: bool
    error: bool
    nonblocking: bool
    uneven: bool
    block_bytes: int
    stalled: bool
    detail: int
    most: int
    refused: int


class _Slot:
    """One round's memory, and its persistent request where MPI-4 has them."""

    __slots__ = ("busy", "recv", "request", "send", "words")

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.send = np.zeros(11, np.int64)
        self.recv = np.zeros(11, np.int64)
        self.busy = False
        self.words = self.send.data
        self.request: MPI.Prequest | None = None
        if persistent_collectives():
            self.request = comm.Allreduce_init(self.send, self.recv, MPI.MAX)

    def plain(self, print_: int) -> Flags | None:
        """End the round: None when all is as usual (the same call, nobody wrong, asynchronous or late), else the flags."""
        words = self.recv.tolist()
        if (
            words[0] == print_
            and words[1] == -print_
            and not (words[2] or words[3] or words[4])
            and words[6] + words[7] <= _STALL_US
        ):
            self.busy = False
            return None
        return self.flags()

    def flags(self) -> Flags:
        """End the round, and return what it says."""
        high, low, error, nonblocking, uneven, block_bytes, last, first, most, least, refused = self.recv.tolist()
        self.busy = False
        return Flags(
            same=high == -low and (bool(uneven) or most == NOTHING or most == -least),
            error=bool(error),
            nonblocking=bool(nonblocking),
            uneven=bool(uneven),
            block_bytes=block_bytes,
            stalled=last + first > _STALL_US,
            detail=most if most != NOTHING and most == -least else NOTHING,
            most=most,
            refused=refused,
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
        return lane.posted == self.number and not lane.slot(self.number).busy

    def Test(self) -> bool:
        """Whether every earlier call of the group has posted its data."""
        return self.lane.turn >= self.number

    def pass_on(self) -> None:
        """Let the next call of the group onto the data lane."""
        if self.lane.turn == self.number:
            self.lane.turn += 1


class _MayPost:
    __slots__ = ("ticket",)

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket

    def Test(self) -> bool:
        return self.ticket.may_post()


class Lane:
    """The control and the data lane of one group, and the zero of its clock."""

    def __init__(self, control: MPI.Intracomm, data: MPI.Intracomm) -> None:
        self.control = control
        self.data = data
        self.size = control.Get_size()
        self.epoch = 0.0  # time.monotonic() at a moment that is the same on all members, to within a barrier's skew
        self.issued = 0
        self.posted = 0
        self.turn = 0
        self._slots: list[_Slot] = []

    def ticket(self) -> Ticket:
        """Take the next place in the order of calls."""
        number = self.issued
        self.issued += 1
        return Ticket(self, number)

    def slot(self, number: int) -> _Slot:
        """Return the slot of call ``number``; made in the order of calls, the same on all members."""
        if number < SLOTS and len(self._slots) <= number:
            self._slots.append(_Slot(self.control))
        return self._slots[number % SLOTS]

    def post(self, number: int, print_: int, block_bytes: int, *words: int) -> tuple[_Slot, Request]:
        """Post the round of call ``number``; ``words`` are flags and details, none for a call that has neither."""
        slot = self._slots[number % SLOTS]
        now = int((time.monotonic() - self.epoch) * 1e6)
        error, asynchronous, uneven, detail = words or _NO_FLAGS
        _ROUND.pack_into(
            slot.words,
            0,
            print_,
            -print_,
            error,
            asynchronous,
            uneven,
            block_bytes,
            now,
            -now,
            detail,
            detail if detail == NOTHING else -detail,
            0,  # the native engine serves everybody; one that a member cannot use is refused here
        )
        slot.busy = True
        self.posted += 1
        if slot.request is None:
            return slot, self.control.Iallreduce(slot.send, slot.recv, MPI.MAX)
        slot.request.Start()
        return slot, slot.request

    def free(self) -> None:
        """Give the persistent requests back to MPI (before MPI is finalised); a round under way is left alone."""
        for slot in self._slots:
            if slot.request is not None and not slot.busy:
                slot.request.Free()
        self._slots.clear()


def agree(ticket: Ticket, call: Call) -> Generator[Request, None, Flags]:
    """Make the one round of ``call`` and return what all members now know.

    A generator: it yields what has to complete before it goes on, so that a call that is waited for and one that is not
    take the same way. All members make a round for every call, in the same order, and it moves nothing but the words.
    """
    lane = ticket.lane
    if not ticket.may_post():
        yield _MayPost(ticket)
    slot, request = lane.post(
        ticket.number,
        fingerprint(call.op, call.key),
        call.block_bytes,
        call.error is not None,
        call.asynchronous,
        call.uneven,
        call.detail,
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
    yield from explain(ticket.lane, call, group_name, ranks, me)
    raise AssertionError("explain() always raises")


def explain(lane: Lane, call: Call, group_name: str, ranks: tuple[int, ...], me: int) -> Generator[Request, None, None]:
    """Exchange what every member called, and raise: ``call.error`` here, CollectiveMismatchError on the others."""
    error = call.error
    mine = {
        "call": call.describe(),
        "site": str(call.site),
        "async": call.asynchronous,
        "error": None if error is None else f"{type(error).__name__}: {error}",
    }
    encoded = pickle.dumps(mine)
    while len(encoded) > _DESCRIPTION_BYTES - 8:
        mine = {key: value[: len(value) // 2] if isinstance(value, str) else value for key, value in mine.items()}
        encoded = pickle.dumps(mine)
    send = np.zeros(_DESCRIPTION_BYTES, np.uint8)
    send[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    recv = np.empty((lane.size, _DESCRIPTION_BYTES), np.uint8)
    yield lane.data.Iallgather(send, recv)
    if error is not None:
        raise error
    told = [pickle.loads(row.tobytes()) for row in recv]
    mismatch = CollectiveMismatchError(mismatch_text(call, group_name, ranks, told))
    mismatch.reporter = min(rank for rank, entry in zip(ranks, told, strict=True) if not entry["error"])
    raise mismatch


def mismatch_text(call: Call, group_name: str, ranks: tuple[int, ...], told: list[dict[str, Any]]) -> str:
    """Return the report of a mismatch: one line for each different call, ranks grouped."""
    wrong = any(entry["error"] for entry in told)
    what = "arguments are wrong on one of its ranks" if wrong else "its ranks made different calls"
    lines = [f"call {call.seq} on group {group_name} ({name_ranks(ranks)}): {what}"]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank, entry in zip(ranks, told, strict=True):
        groups.setdefault((entry["call"], entry["site"], entry["error"]), []).append(rank)
    for (text, site, problem), members in sorted(groups.items(), key=lambda item: item[1][0]):
        line = f"  {name_ranks(members)}: {text} at {site}"
        lines.append(line + (f" raised {problem}" if problem else ""))
    lines.append("Nothing was moved, and the group can still be used.")
    return "\n".join(lines)
