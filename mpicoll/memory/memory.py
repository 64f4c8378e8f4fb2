"""The memory of one array as the transports see it.

Where the array itself cannot be moved, ``flat`` is packed memory of the library: ``pack`` fills it when the transfer starts, and
``unpack`` writes it back when the transfer is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mpicoll.memory.dtypes import dtype_name

Array = npt.NDArray[Any]
AnyArray = Any
"""What the public functions take: a NumPy array, or what :func:`as_numpy` knows; no one type says so."""

MemoryKind = Literal["host"]


@dataclass(slots=True)
class Memory:
    """One array as the engines see it.

    Attributes:
        flat: its elements in C order, one-dimensional, contiguous.
        shape: the user's shape.
        kind: where it lives.
        pack: fills ``flat`` from the user's array; None where ``flat`` is that array's own memory.
        unpack: writes ``flat`` back into the user's array; None where ``flat`` is that array's own memory.
        named: the name of the user's dtype where it is not that of ``flat``, else "".
        origin: the user's memory as an array, where ``flat`` is not a part of it; of an array on a GPU its addresses alone.
        place: "host", or the GPU that the user's array is on.
        ready: whether ``pack`` can be called without waiting for a GPU; None where there is none.
        direct: ``flat`` is memory of a GPU, whose elements only MPI may touch, or which moves in pieces; ``pack`` waits for
            the GPU, if for MPI.
    """

    flat: Array
    shape: tuple[int, ...]
    kind: MemoryKind = "host"
    pack: Callable[[], None] | None = None
    unpack: Callable[[], None] | None = None
    named: str = ""
    origin: Array | None = None
    place: str = "host"
    ready: Callable[[], bool] | None = None
    direct: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype as which the elements travel."""
        return self.flat.dtype

    @property
    def name(self) -> str:
        """The name of the user's dtype, which has to be the same on all ranks."""
        return self.named or dtype_name(self.flat.dtype)

    @property
    def own(self) -> Array:
        """The user's memory."""
        return self.flat if self.origin is None else self.origin

    def filled(self) -> Array:
        """Return ``flat`` holding what the user's array holds now."""
        if self.pack is not None:
            self.pack()
        return self.flat
