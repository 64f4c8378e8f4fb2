"""Adapt arguments that are arrays or lists of arrays: on GPUs, one piece of memory for each argument if MPI gets it directly.

Arrays that stand one behind the other in one allocation are one piece. Other lists are copied to or from a piece of memory of
the device, which takes little time compared to MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import Any

import numpy as np

from mpicoll.memory.adapt import adapt, adapt_list
from mpicoll.memory.device import array as device_array
from mpicoll.memory.memory import AnyArray, Array, Memory


@dataclass(slots=True, frozen=True)
class ListArgument:
    """An argument of a call: an array or a list of arrays.

    Attributes:
        value: object that the program passed.
        name: name of the parameter, for messages.
        writable: the call writes into the arrays.
        length: required length of the list; 0 for an array.
        pieces: as in :func:`adapt`, for an array; it moves in pieces if all arrays of the call do.
    """

    value: AnyArray
    name: str
    writable: bool = False
    length: int = 0
    pieces: int = 0

    def adapted(self, direct: str) -> list[Memory]:
        """Adapt the arrays, of any size, for an operation of MPI that may get memory of a GPU."""
        if self.length:
            return adapt_list(
                self.value, self.name, writable=self.writable, length=self.length, direct=direct, least=-1
            )
        return [adapt(self.value, self.name, writable=self.writable, direct=direct, least=-1)]

    def staged(self, pieces: int) -> ListMemory:
        """Adapt an array that is not passed to MPI directly; ``pieces`` as in :func:`adapt`."""
        return ListMemory([adapt(self.value, self.name, writable=self.writable, pieces=pieces)])


@dataclass(slots=True)
class ListMemory:
    """The memories of one argument.

    Attributes:
        memories: memory of each array.
        whole: memory of a GPU for all arrays, which is passed to MPI directly; None if nothing of the call is.
        gather: copies the elements of the arrays into ``whole``; None if there is nothing to copy.
        spread: copies the elements of ``whole`` into the arrays; None if there is nothing to copy.
    """

    memories: list[Memory]
    whole: Array | None = None
    gather: Callable[[], None] | None = None
    spread: Callable[[], None] | None = None

    @property
    def flat(self) -> Array:
        """The memory that moves, of an argument that is one array."""
        return self.memories[0].flat if self.whole is None else self.whole

    @property
    def waits(self) -> tuple[Memory, ...]:
        """The memories whose GPU must be ready before ``gather``; none if the argument is not passed to MPI directly."""
        return () if self.whole is None else tuple(self.memories)


def list_memories(
    operation: str, *arguments: ListArgument, size: Callable[[Iterable[int]], int] = max
) -> list[ListMemory]:
    """Return the memories of all arguments of a call: all are passed to MPI directly, all move in pieces, or none does either.

    Args:
        operation: name of the operation that may get memory of a GPU; "" for none.
        arguments: arguments of the call; if two arguments overlap, the input is copied.
        size: ``max`` or ``min``: the largest, or the smallest, array must have more than ``DIRECT_BYTES`` bytes.

    Raises: as :func:`adapt` and :func:`adapt_list`.
    """
    if operation and _on_device(arguments[0].value) and device_array.permits(operation, False):
        found = [ListMemory(each.adapted(operation)) for each in arguments]
        if _fit(found, size) and _in_one_piece(found, arguments):
            return found
    if all(each.pieces for each in arguments):
        found = []
        for each in arguments:
            found.append(each.staged(each.pieces if not found or found[-1].memories[0].direct else 0))
        in_pieces = [argument.memories[0].direct for argument in found]
        one, *others = (argument.flat for argument in found)
        if not any(in_pieces) or (all(in_pieces) and not any(np.may_share_memory(one, other) for other in others)):
            return found
        return [each.staged(0) for each in arguments]
    return [ListMemory(each.adapted("")) for each in arguments]


def _on_device(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else value
    return not isinstance(first, np.ndarray) and device_array.on_device(first)


def _fit(found: list[ListMemory], size: Callable[[Iterable[int]], int]) -> bool:
    every = [memory for argument in found for memory in argument.memories]
    first = every[0]
    return (
        all(each.direct and each.place == first.place and each.name == first.name for each in every)
        and size(each.flat.nbytes for each in every) > device_array.DIRECT_BYTES
        and all(sum(each.flat.nbytes for each in argument.memories) <= device_array.MOST_DIRECT for argument in found)
    )


def _in_one_piece(found: list[ListMemory], arguments: tuple[ListArgument, ...]) -> bool:
    """Set ``whole`` of each argument; return False if the device has no memory for one."""
    for argument in found:
        argument.whole = device_array.across([memory.flat for memory in argument.memories])
    pieces = [argument.whole for argument in found if argument.whole is not None]
    if any(np.may_share_memory(one, other) for at, one in enumerate(pieces) for other in pieces[at + 1 :]):
        for argument, each in zip(found, arguments, strict=True):
            if not each.writable:
                argument.whole = None
    for argument, each in zip(found, arguments, strict=True):
        if argument.whole is None:
            room = device_array.room([memory.flat for memory in argument.memories])
            if room is None:
                return False
            argument.whole, gather, spread = room
            if each.writable:
                argument.spread = spread
            else:
                argument.gather = gather
    return True


_MOST_WORDS = 60


def list_words(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
    """Return ``2 x float32(3, 4), float64()``: different lists have different texts, also if these are cut."""
    words = []
    for (name, shape), same in groupby(zip(names, shapes, strict=True)):
        count = sum(1 for _ in same)
        text = f"{name}({', '.join(map(str, shape))})"
        words.append(f"{count} x {text}" if count > 1 else text)
    return shortened(", ".join(words))


def shortened(text: str) -> str:
    """Return a text, or its beginning and a checksum if it is too long."""
    if len(text) <= _MOST_WORDS:
        return text
    return f"{text[: _MOST_WORDS - 20]}… {blake2b(text.encode(), digest_size=8).hexdigest()}"
