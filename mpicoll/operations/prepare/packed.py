"""Make prepared operations and messages of arrays that cannot be moved as they are: layouts, byte orders and half types.

Such an array has a *packed* one in its place, in C order and with a dtype of MPI. A result is copied back at the end of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from mpicoll.checks.memory_in_use import RequestClaim, claims
from mpicoll.groups.registry import default
from mpicoll.memory.adapt import adapt
from mpicoll.memory.half import wide
from mpicoll.memory.memory import Array, Memory
from mpicoll.memory.protocols import view_of
from mpicoll.operations import dispatch, messages
from mpicoll.operations.messages import move_prepared
from mpicoll.operations.prepared import prepared_of
from mpicoll.operations.work import Work
from mpicoll.runtime import signals
from mpicoll.transports.mpi.envelope import has_number


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
    prepared = prepared_of(known, key)
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
        if claims.active and known.compares and claims.conflict_once(prepared.claim(send, recv)):
            return False
        made = dispatch.again(*given)
        if made:
            arrays.unpack()
        return made


def _packed_message(tensor: Any, receives: bool) -> tuple[Array, Array, Memory] | None:
    """Return a message's array of NumPy, the packed array, filled for a send, and its memory; None if nothing is to be packed."""
    array = tensor if type(tensor) is np.ndarray else view_of(tensor, 4)
    if array is None or (array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative):
        return None
    try:
        memory = adapt(array, "tensor", writable=receives)
    except (TypeError, ValueError):  # raised by the general way
        return None
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    if memory.pack is None or not has_number(native):
        return None
    if not receives:
        memory.pack()
    return array, memory.flat.view(native).reshape(array.shape), memory


def move_packed(tensor: Any, rank: Any, group: Any, tag: Any, receives: bool) -> bool:
    """Send or receive a packed array by a persistent request; arguments and result as of :func:`move_prepared`."""
    with signals.guard:
        found = _packed_message(tensor, receives)
        if found is None:
            return False
        array, moved, memory = found
        known: Any = default.world if group is None else group
        if (
            claims.active
            and getattr(known, "compares", True)
            and claims.conflicts(RequestClaim(array, writes=receives))
        ):
            return False  # the general way raises
        if not move_prepared(moved, rank, group, tag, receives, 3):
            return False
        if memory.unpack is not None:
            memory.unpack()
    return True


def start_packed(tensor: Any, rank: Any, group: Any, tag: Any, receives: bool) -> Work | None:
    """Start a message of a packed array by a persistent request; arguments and result as of :func:`start_prepared`."""
    with signals.guard:
        found = _packed_message(tensor, receives)
        if found is None:
            return None
        array, moved, _ = found
        work = messages.start_packed(array, moved, rank, group, tag, receives, 3)
    return work if work is None or array is tensor else work.with_output(tensor)
