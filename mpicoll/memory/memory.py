"""The memory of one array as transports see it.

If the array itself cannot be moved, ``flat`` is packed memory of the library: ``pack`` fills it when the transfer starts, and
``unpack`` copies it to the array when the transfer is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicoll.memory.dtypes import dtype_name

Array = npt.NDArray[Any]
AnyArray = Any
"""An array that public functions accept: of NumPy, or of a kind that :func:`as_numpy` knows. No type describes all of them."""


@dataclass(slots=True)
class Memory:
    """One array as transports see it.

    Attributes:
        flat: elements in C order, one-dimensional and contiguous.
        shape: shape of the program's array.
        pack: fills ``flat`` from the array; None if ``flat`` is the memory of the array.
        unpack: copies ``flat`` to the array; None if ``flat`` is the memory of the array.
        named: name of the array's dtype if ``flat`` has another dtype, otherwise "".
        origin: memory of the array if ``flat`` is other memory; only addresses for an array on a GPU.
        place: "host", or the GPU of the array.
        ready: returns whether ``pack`` can be called without waiting for a GPU; None without a GPU.
        direct: ``flat`` is memory of a GPU, which MPI gets directly, or which moves in pieces; ``pack`` only waits for the GPU.
    """

    flat: Array
    shape: tuple[int, ...]
    pack: Callable[[], None] | None = None
    unpack: Callable[[], None] | None = None
    named: str = ""
    origin: Array | None = None
    place: str = "host"
    ready: Callable[[], bool] | None = None
    direct: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype as which the elements move."""
        return self.flat.dtype

    @property
    def name(self) -> str:
        """The name of the array's dtype, which must be the same on all ranks."""
        return self.named or dtype_name(self.flat.dtype)

    @property
    def own(self) -> Array:
        """The memory of the program's array."""
        return self.flat if self.origin is None else self.origin

    def filled(self) -> Array:
        """Return ``flat`` with the present contents of the array."""
        if self.pack is not None:
            self.pack()
        return self.flat


stream_order = threading.local()
"""The `StreamOrder` of the arrays that this thread adapts: its stream and its tests, or None."""


class StreamOrder:
    """Context in which the arrays of one call are adapted, so that all follow the stream of the call.

    Args:
        stream: the stream that the program passed; None: the current stream of the package of each array.

    Attributes:
        ready_tests: for each array passed to MPI directly, a function that returns whether its GPU has reached the call.
    """

    __slots__ = ("_stream", "ready_tests")

    def __init__(self, stream: Any = None) -> None:
        self.ready_tests: list[Callable[[], bool]] = []
        self._stream = stream

    def __enter__(self) -> StreamOrder:
        stream_order.ready_tests, stream_order.stream = self.ready_tests, self._stream
        return self

    def __exit__(self, *_: object) -> None:
        stream_order.ready_tests = stream_order.stream = None
