"""Make prepared operations of arrays that cannot be moved as they are: of another layout, byte order, or a half type.

Such an array has a *packed* one in its place, in C order and with a dtype of MPI. A result is copied back at the end of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from mpicoll.checks.memory_in_use import claims
from mpicoll.groups.registry import default
from mpicoll.memory.adapt import adapt
from mpicoll.memory.half import wide
from mpicoll.memory.memory import Array
from mpicoll.operations import dispatch
from mpicoll.operations.work import Work
from mpicoll.runtime import signals


@dataclass(slots=True)
class Packed:
    """Arrays that can be moved as they are, in place of the input and the output of a program.

    Attributes:
        send, recv: an array in C order, a list of such arrays, or None.
        unpacks: functions that copy the results to the arrays of the program; none if the memory is the same.
    """

    send: Any
    recv: Any
    unpacks: list[Callable[[], None]]

    def unpack(self) -> None:
        """Copy the results to the arrays of the program."""
        for each in self.unpacks:
            each()


def pack(send: Any, recv: Any, reads: bool, writes: bool, reduces: bool) -> Packed | None:
    """Return packed arrays; None if the arrays are no arrays of NumPy, or cannot be moved.

    Args:
        send, recv: an array, a list of arrays, or None; the same object for a call in place.
        reads: the call reads ``send``; otherwise nothing is copied from there.
        writes: the call writes ``recv``.
        reduces: the elements are reduced, half types as float32.
    """
    unpacks: list[Callable[[], None]] = []

    def one(array: Any, fills: bool, is_result: bool) -> Array:
        memory = adapt(array, "tensor", writable=is_result)
        memory = wide(memory) if reduces else memory
        if is_result and memory.unpack is not None:
            unpacks.append(memory.unpack)
        return (memory.filled() if fills else memory.flat).reshape(memory.shape)

    def of(given: Any, fills: bool, is_result: bool) -> Any:
        if isinstance(given, list):
            return [one(each, fills, is_result) for each in given]
        return None if given is None else one(given, fills, is_result)

    every = [each for given in (send, recv) for each in (given if isinstance(given, list) else [given])]
    if any(each is not None and type(each) is not np.ndarray for each in every):
        return None
    if send is not recv and ((send is not None and not reads) or (recv is not None and not writes)):
        return None  # such as a list on a rank that is not the root: an error
    try:
        if send is recv:
            moved = of(send, reads, writes)
            return Packed(moved, moved, unpacks)
        return Packed(of(send, True, False), of(recv, False, True), unpacks)
    except (TypeError, ValueError):  # raised where it is raised on all members
        return None


def again_packed(
    group: Any,
    key: Any,
    send: Any,
    recv: Any,
    depth: int,
    timeout: timedelta | None,
    name: str | None,
    async_op: Any,
    outputs: Any,
) -> Work | bool:
    """Make a prepared call with packed arrays; arguments and result as of :func:`dispatch.again`."""
    known: Any = default.world if group is None else group
    prepared = dispatch.prepared_of(known, key)
    if prepared is None or prepared.fits(send, recv):
        return False
    with signals.guard:
        reads, writes = prepared.send_shapes is not None, prepared.recv_shapes is not None
        arrays = pack(send, recv, reads, writes, bool(prepared.mpi_op))
        if arrays is None or not prepared.fits(arrays.send, arrays.recv):
            return False
        given = group, key, arrays.send, arrays.recv, depth + 1, timeout, name, async_op
        if async_op is not False:
            return dispatch.again(*given, outputs, arrays.unpack if arrays.unpacks else None, (send, recv))
        if claims.active and known.compares and dispatch.conflicts(prepared.claim(send, recv)):
            return False
        made = dispatch.again(*given)
        if made:
            arrays.unpack()
        return made
