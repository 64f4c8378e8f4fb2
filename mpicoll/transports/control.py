"""Control channels: how the members of a group exchange the few words of a round.

A channel carries one round for each call that is compared, in the order of the calls. A round is the same operation whatever
the members call, so calls that differ can neither hang nor corrupt a round. The words are judged in ``mpicoll.checks``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mpicoll.runtime.waiting import STALL

NOTHING = -(2**63)
"""A detail that is not compared (the neutral element of MAX on int64)."""

NO_DEVICE, BEHIND, IN_PIECES, AS_IT_IS = 0, 1, 2, 3
"""How memory of a GPU moves: there is none; copied as a whole, after the GPU has reached the call; through the host in pieces;
or passed to MPI directly. If the members differ, the largest counts."""

COMPARED, SAID = 11, 12
"""Number of words of a round that are compared, and of all words: the last one is *nonblocking*."""

Words = tuple[int, ...]
"""The words of one member: fingerprint and its negative, error, uneven, largest block, detail and its negative, device request,
negative of preferred, eager bytes + 1, signal; nonblocking."""


def make_words(
    fingerprint: int,
    block_bytes: int = 0,
    *,
    error: bool = False,
    uneven: bool = False,
    detail: int = NOTHING,
    device: int = NO_DEVICE,
    preferred: bool = False,
    eager: int = 0,
    signal: int = 0,
    nonblocking: bool = False,
) -> Words:
    """Return the words of a round.

    Args:
        fingerprint: 62 bits that must be equal.
        block_bytes: the largest block that this member moves to or from one peer.
        error: the arguments of this member are wrong.
        uneven: the blocks of this member differ in size: ``detail`` is not compared.
        detail: a number that must be equal if all members give one.
        device: one of `NO_DEVICE`, `BEHIND`, `IN_PIECES`, `AS_IT_IS`.
        preferred: this member has a schedule that it prefers (``transports.base.Preferred``).
        eager: bytes of data that come with the round, plus 1; 0: none.
        signal: requests of the signals that have reached this member (``training.stop_requests``).
        nonblocking: this member starts the call asynchronously, or has an asynchronous call pending on any group.
    """
    against = detail if detail == NOTHING else -detail
    return (
        fingerprint,
        -fingerprint,
        int(error),
        int(uneven),
        block_bytes,
        detail,
        against,
        device,
        -int(preferred),
        eager,
        signal,
        int(nonblocking),
    )


@dataclass(slots=True)
class Agreed:
    """The facts that all members know after a round.

    Attributes:
        same: all fingerprints and details are equal.
        error: the arguments of a member are wrong.
        nonblocking: a member is asynchronous, so all use the nonblocking form of MPI.
        uneven: the blocks of a member differ in size.
        block_bytes: the largest block of all.
        stalled: the posting times spread so far that a member may have withdrawn.
        detail: the common detail, or NOTHING.
        most: the largest detail.
        device: how memory of a GPU moves: `AS_IT_IS`, `IN_PIECES`, or `NO_DEVICE`.
        behind: a member may still wait for its GPU.
        preferred: all members have a schedule that they prefer.
        signal: the largest signal word.
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
    device: int
    behind: bool
    preferred: bool
    signal: int
    waited: float


def decode(maxima: list[int], spread: float, waited: float) -> Agreed:
    """Decode the maxima of the words of all members.

    Args:
        maxima: the largest of each word.
        spread: seconds between the first and the last post.
        waited: seconds between this member's post and the last one.
    """
    high, low, error, uneven, block_bytes, most, least, device, not_preferred, _, signal, nonblocking = maxima
    equal = most != NOTHING and most == -least
    return Agreed(
        same=high == -low and (bool(uneven) or most == NOTHING or equal),
        error=bool(error),
        nonblocking=bool(nonblocking),
        uneven=bool(uneven),
        block_bytes=block_bytes,
        stalled=spread > STALL,
        detail=most if equal else NOTHING,
        most=most,
        device=NO_DEVICE if device == BEHIND else device,
        behind=bool(device),
        preferred=not_preferred < 0,
        signal=signal,
        waited=waited,
    )


class Round(Protocol):
    """One round of a channel: a Pollable, complete when all members have posted the round."""

    @property
    def stalled(self) -> bool:
        """Whether the posting times of a complete round spread by more than ``STALL``."""

    @property
    def nonblocking(self) -> bool:
        """Whether a member of a complete round is asynchronous."""

    def Start(self) -> None:
        """Post the round; never blocks."""

    def Test(self) -> bool:
        """Return whether all members have posted the round."""

    def unanimous(self, words: Words) -> bool:
        """Return whether all members posted these words in a complete round; the last word is not compared.

        A channel that knows only the maxima compares these, which is enough, as the channel carries no data.
        """

    def agreed(self) -> Agreed:
        """Return the decoded words of a complete round."""

    def release(self) -> None:
        """Free the slot: the words, and the data that came with the round, have been read."""


class ControlChannel(Protocol):
    """The channel for the rounds of one group.

    Attributes:
        carries_data: data can be sent with a round.
    """

    carries_data: bool

    def room(self, number: int) -> bool:
        """Return whether the round of that number may be posted: a bounded number may be posted and not released."""

    def fill(self, number: int, words: Words) -> Round:
        """Return the round of that number with its words written, to be posted by ``Start``."""

    def withdraw(self, number: int) -> None:
        """Take back the rounds up to this one that are not over, if the channel can; no round is posted afterwards."""

    def free(self) -> None:
        """Free requests of MPI for rounds, except of a round that is not complete."""
