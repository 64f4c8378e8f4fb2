"""What a call reads and what it writes, each in one piece of memory that MPI is handed, where MPI knows of GPUs.

Arrays of a list that stand one behind the other in one allocation are one piece. Others are copied into memory of the device,
or out of it: that takes little beside what MPI needs for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicoll.memory.adapt import adapt, adapt_list
from mpicoll.memory.device import array as device_array
from mpicoll.memory.memory import AnyArray, Array, Memory


@dataclass(slots=True, frozen=True)
class Asked:
    """A parameter of a call: an array, or a list of them.

    Attributes:
        value: what the program passed.
        name: the parameter's, for messages.
        writable: the call writes into it.
        length: how many arrays the list has to have; 0 for an array.
        pieces: bytes of an array above which it moves in pieces, where all of the call does; None: as a whole.
    """

    value: AnyArray
    name: str
    writable: bool = False
    length: int = 0
    pieces: int | None = None

    def adapted(self, direct: str) -> list[Memory]:
        """Return the memories of its arrays, as :func:`adapt`: of any size, where they may be handed to MPI."""
        if self.length:
            return adapt_list(
                self.value, self.name, writable=self.writable, length=self.length, direct=direct, least=-1
            )
        return [adapt(self.value, self.name, writable=self.writable, direct=direct, least=-1)]

    def staged(self, pieces: int | None) -> Side:
        """Return the memory of an array that is not handed to MPI, in pieces from so many bytes on."""
        return Side([adapt(self.value, self.name, writable=self.writable, pieces=pieces)])


@dataclass(slots=True)
class Side:
    """What a call reads, or what it writes.

    Attributes:
        memories: of the arrays.
        whole: the memory of a GPU that MPI is handed for all of them; None where nothing of the call is handed to it.
        gather: copies the elements of the arrays into it; None where they are there.
        spread: copies them out of it; None where that is their own memory.
    """

    memories: list[Memory]
    whole: Array | None = None
    gather: Callable[[], None] | None = None
    spread: Callable[[], None] | None = None

    @property
    def flat(self) -> Array:
        """What moves, of one array."""
        return self.memories[0].flat if self.whole is None else self.whole

    @property
    def waits(self) -> tuple[Memory, ...]:
        """The memories whose GPU the call has to wait for before ``gather``; none where it is not handed to MPI."""
        return () if self.whole is None else tuple(self.memories)


def sides(operation: str, *asked: Asked, size: Callable[[Iterable[int]], int] = max, even: bool = False) -> list[Side]:
    """Return what a call reads and writes: all is handed to MPI, or moves in pieces, or nothing is and does.

    Args:
        operation: the operation of MPI that would be; "" for none.
        asked: the parameters; of two whose memory overlaps the one that is read is copied.
        size: of the bytes of all arrays, those that have to be more than ``staging.DIRECT_BYTES``: the largest or the smallest.

    Raises: as :func:`adapt` and :func:`adapt_list`.
    """
    if operation and _on_device(asked[0].value) and device_array.permits(operation, False):
        found = [Side(each.adapted(operation)) for each in asked]
        if _fit(found, size) and _in_one_piece(found, asked):
            return found
    if all(each.pieces is not None for each in asked):
        found = []
        for each in asked:
            most = each.pieces if not found or found[-1].memories[0].direct else None
            found.append(each.staged(most))
        in_pieces = [side.memories[0].direct for side in found]
        one, *others = (side.flat for side in found)
        if not any(in_pieces) or (all(in_pieces) and not any(np.may_share_memory(one, other) for other in others)):
            return found
        return [each.staged(None) for each in asked]
    return [Side(each.adapted("")) for each in asked]


def _on_device(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else value
    return not isinstance(first, np.ndarray) and device_array.on_device(first)


def _fit(found: list[Side], size: Callable[[Iterable[int]], int]) -> bool:
    every = [memory for side in found for memory in side.memories]
    first = every[0]
    return (
        all(each.direct and each.place == first.place and each.name == first.name for each in every)
        and size(each.flat.nbytes for each in every) > device_array.DIRECT_BYTES
        and all(sum(each.flat.nbytes for each in side.memories) <= device_array.MOST_DIRECT for side in found)
    )


def _in_one_piece(found: list[Side], asked: tuple[Asked, ...]) -> bool:
    """Give each side the one piece of memory that MPI is handed; False where the device has none."""
    for side in found:
        side.whole = device_array.across([memory.flat for memory in side.memories])
    pieces = [side.whole for side in found if side.whole is not None]
    if any(np.may_share_memory(one, other) for at, one in enumerate(pieces) for other in pieces[at + 1 :]):
        for side, each in zip(found, asked, strict=True):
            if not each.writable:
                side.whole = None
    for side, each in zip(found, asked, strict=True):
        if side.whole is None:
            room = device_array.room([memory.flat for memory in side.memories])
            if room is None:
                return False
            side.whole, gather, spread = room
            if each.writable:
                side.spread = spread
            else:
                side.gather = gather
    return True
