"""The agreement of a group: rounds that check that all members make the same call.

Before data moves, the members make one round (:mod:`mpicoll.transports.control`). The round is the same operation for all calls.
So a mismatch neither hangs nor corrupts data, and all members see the mismatch.

MPI matches collectives on one communicator by their order only. So the control channel carries exactly one round for every
call that is compared, in the order in which calls are issued. What follows a round (sizes, a meeting, the data) uses the data
communicator or the segment, one call after another. So the order of both is the same on all members, and does not depend on
the time at which a member sees the end of a round.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from mpicoll.checks.levels import Rolling
from mpicoll.checks.mismatch import explain
from mpicoll.checks.order import make_order
from mpicoll.diagnosis.call import CallDescription
from mpicoll.errors import CollectiveMismatchError
from mpicoll.runtime.call_site import CallSite
from mpicoll.runtime.waiting import GIVE_UP_AFTER, STALL, Pollable
from mpicoll.transports.control import ControlChannel, Round, Words, make_words
from mpicoll.transports.mpi.control import Meeting, MpiControl

if TYPE_CHECKING:
    from mpi4py import MPI

MEETINGS = 6
"""Times that members meet at most before a blocking call: clocks of hosts that differ look like members that are late."""


class Agreement:
    """The rounds of one group.

    Attributes:
        comm: the control communicator.
        mpi: the channel over MPI.
        channel: the channel in use.
        order: the numbers of the group's calls.
        rolling: the calls since the last comparison, at level ``roll``.
    """

    __slots__ = ("channel", "comm", "mpi", "order", "rolling")

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.mpi = MpiControl(comm)
        self.channel: ControlChannel = self.mpi
        self.order: Any = make_order()
        self.rolling = Rolling()

    @property
    def epoch(self) -> float:
        """time.monotonic() at a moment that is the same on all members, to within the skew of a barrier."""
        return self.mpi.epoch

    @epoch.setter
    def epoch(self, to: float) -> None:
        self.mpi.epoch = to

    def use(self, channel: ControlChannel | None) -> None:
        """Make rounds through a channel from now on; None: over MPI. No round may be pending."""
        channel = channel or self.mpi
        if channel is not self.channel:
            self.channel.free()
            self.channel = channel

    def may_post(self, number: int) -> bool:
        """Return whether all earlier calls have posted, and the channel has room."""
        order = self.order
        found: bool = order.posted == number and self.channel.room(order.round + 1)
        return found

    def may_pass(self, number: int) -> bool:
        """Return whether all earlier calls have posted, for a call that makes no round."""
        found: bool = self.order.posted == number
        return found

    def is_idle(self) -> bool:
        """Return whether no call of the group is pending, and the channel has room.

        Collectives of a group are issued one at a time, so no other thread can post meanwhile.
        """
        order = self.order
        return order.issued == order.posted == order.moving and self.channel.room(order.round + 1)

    def post(self, words: Words) -> Round:
        """Post the next round."""
        order = self.order
        order.round = number = order.round + 1
        made = self.channel.fill(number, words)
        made.Start()
        order.posted += 1  # only now: another thread may post the next round at once
        return made

    def close(self, op: str, site: CallSite, seq: int, display: str, ranks: tuple[int, ...]) -> Closing | None:
        """Post the last comparison of a group at level ``roll`` without waiting; None if calls are pending or were all compared.

        Args:
            op, site: the function that ends the group on this rank, and its call site.
            seq: the number that the next call of the group would have.
            display: the group, for the message.
            ranks: global ranks of the members, by rank in the group.
        """
        if self.channel.carries_data or not self.is_idle():
            return None
        fingerprint, made = self.rolling.cut()
        call = CallDescription(op, (), site, seq=seq, print=fingerprint, made=made, closes=True)
        self.order.pass_on(self.order.issue())
        return Closing(self.post(make_words(fingerprint)), display, explain(self.comm, call, display, ranks))

    def free(self) -> None:
        """Free the persistent requests of the channel, before MPI is finalised; a pending round stays pending."""
        self.channel.free()


def meet(agreement: Agreement, data: MPI.Intracomm, call: CallDescription) -> Generator[Pollable, None, None]:
    """Wait until all members are here and none of them can withdraw: afterwards they may enter a blocking call of MPI.

    A member that has posted a round can still withdraw before a late member posts, and what was posted to MPI cannot be taken
    back. So each member stays for twice the time by which the posting times may spread. If these spread by more, all members
    post again, with twice as much time, ``MEETINGS`` times at most.

    Args:
        data: the data communicator.
    """
    for number in range(MEETINGS):
        call.stays_until = time.monotonic() + GIVE_UP_AFTER * 2**number
        meeting = Meeting(data, agreement.epoch)
        yield meeting
        if meeting.spread() <= STALL * 2**number:
            break


def is_usual(made: Round, words: Words) -> bool:
    """Return whether all members make the call of a complete round, and no member is late or asynchronous."""
    return made.unanimous(words) and not made.stalled and not made.nonblocking


class Closing:
    """The last comparison of a group, pending since the group was destroyed or the program ended (a Pollable).

    Attributes:
        display: the group, for messages.
        same: whether the members have made the same calls since the comparison before; None until that is known.
        error: the error of all members if the calls differ.
    """

    __slots__ = ("_explanation", "_request", "_round", "display", "error", "same")

    def __init__(self, made: Round, display: str, explanation: Generator[Pollable, None, None]) -> None:
        self._round = made
        self._request: Pollable | None = made
        self._explanation = explanation
        self.display = display
        self.same: bool | None = None
        self.error: CollectiveMismatchError | None = None

    def Test(self) -> bool:
        """Progress the comparison; return whether the comparison is over."""
        while self._request is not None and self._request.Test():
            if self.same is None:
                agreed = self._round.agreed()
                self._round.release()
                self.same = agreed.same
            try:
                self._request = None if self.same else next(self._explanation)
            except CollectiveMismatchError as error:
                self._request, self.error = None, error
        return self._request is None


def words_of(call: CallDescription) -> Words:
    """Return the words of a call whose data is not sent with its round."""
    return make_words(
        call.print,
        call.block_bytes,
        error=call.error is not None,
        uneven=call.uneven,
        detail=call.detail,
        device=call.device,
        preferred=call.preferred is not None,
        signal=call.signal,
        nonblocking=call.asynchronous,
    )
