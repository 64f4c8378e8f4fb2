"""Make prepared operations of arrays that cannot be moved as they are: layouts, byte orders and half types.

Such an array has a *packed* one in its place, in C order and with a dtype of MPI. A result is copied back at the end of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np

from mpicoll.checks.memory_in_use import claims
from mpicoll.groups.registry import default
from mpicoll.memory.adapt import adapt, apart, same_dtype
from mpicoll.memory.half import wide
from mpicoll.memory.memory import Memory
from mpicoll.memory.scratch import scratch
from mpicoll.operations import dispatch
from mpicoll.operations.prepared import prepared_of
from mpicoll.operations.work import Work
from mpicoll.runtime import handler_calls, signals


@dataclass(slots=True)
class PackedArrays:
    """Arrays that can be moved as they are, in place of the input and the output of a program.

    Attributes:
        send, recv: an array in C order, a list of such arrays, or None.
        unpacks: functions that copy the results to the arrays of the program; none if the memory is the same.
        shares: all memory is that of the arrays of the program.
    """

    send: Any
    recv: Any
    unpacks: list[Callable[[], None]]
    shares: bool

    def unpack(self) -> None:
        """Copy the results to the arrays of the program."""
        for each in self.unpacks:
            each()


def pack(send: Any, recv: Any, reads: bool, writes: bool, reduces: bool) -> PackedArrays | None:
    """Return packed arrays; None if the arrays are no arrays of NumPy, or cannot be moved.

    Args:
        send, recv: an array, a list of arrays, or None; the same object for a call in place.
        reads: the call reads ``send``; otherwise nothing is copied from there.
        writes: the call writes ``recv``.
        reduces: the elements are reduced, half types as float32.
    """
    if any(type(each) is not np.ndarray for each in (*_listed(send), *_listed(recv))):
        return None
    in_place = send is recv
    if not in_place and ((send is not None and not reads) or (recv is not None and not writes)):
        return None  # such as a list on a rank that is not the root: an error
    try:
        inputs = [adapt(each, "input", writable=in_place and writes) for each in _listed(send)]
        results = inputs if in_place else [adapt(each, "output", writable=True) for each in _listed(recv)]
        same_dtype(*inputs, *results)
        if not in_place:
            apart([memory.own for memory in results], "output")
    except (TypeError, ValueError) as error:  # raised where it is raised on all members
        if handler_calls.raised(error) is not None:
            raise
        return None
    if reduces:
        inputs = list(map(wide, inputs))
        results = inputs if in_place else list(map(wide, results))
    shares = all(memory.pack is None for memory in (*inputs, *results))
    if writes and any(memory.unpack is not None for memory in results):
        results[:] = map(_apart_from_its_array, results)
    if reads:
        for memory in inputs:
            memory.filled()
    unpacks = [memory.unpack for memory in results if writes and memory.unpack is not None]
    moved = _as_given(send, inputs)
    return PackedArrays(moved, moved if in_place else _as_given(recv, results), unpacks, shares)


def _listed(given: Any) -> list[Any]:
    return given if type(given) is list else [] if given is None else [given]


def _as_given(given: Any, memories: list[Memory]) -> Any:
    arrays = [memory.flat.reshape(memory.shape) for memory in memories]
    return arrays if type(given) is list else None if given is None else arrays[0]


def _apart_from_its_array(memory: Memory) -> Memory:
    """Return a memory of the library for a result: of a list all results are copied at the end, or none is."""
    if memory.unpack is not None:
        return memory
    array, own = memory.flat, scratch(memory.flat.size, memory.dtype)

    def pack() -> None:
        own[...] = array

    def unpack() -> None:
        array[...] = own

    return replace(memory, flat=own, pack=pack, unpack=unpack, origin=memory.own)


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
            claimed = None if arrays.shares else (send, recv)
            return dispatch.again(*given, outputs, arrays.unpack if arrays.unpacks else None, claimed)
        if claims.active and known.compares and claims.conflict_once(prepared.claim(send, recv)):
            return False
        made = dispatch.again(*given)
        if made:
            arrays.unpack()
        return made
