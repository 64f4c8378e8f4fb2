"""Prepare broadcast, reductions and barriers."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import peer_rank, state
from mpicoll.memory.adapt import adapt
from mpicoll.memory.dtypes import HALVES, dtype_name, resolve_reduction
from mpicoll.memory.half import WIDE, wide
from mpicoll.memory.memory import AnyArray, Memory
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.operations import dispatch
from mpicoll.operations.prepare.run import (
    NO_DTYPE,
    NOT_CACHED,
    Cached,
    Prepared,
    all_ready,
    all_steps_of,
    input_scaler,
    is_unscaled,
    packing,
    pieces_reduced,
    result_finisher,
    result_unpacker,
)
from mpicoll.operations.prepared import PreparedOperation
from mpicoll.transports.base import Kind, Movement
from mpicoll.transports.selection import prefer


def broadcast(g: ProcessGroup, cached: Cached, tensor: AnyArray, src: int | None, group_src: int | None) -> Prepared:
    """Prepare a broadcast."""
    root = peer_rank(g, src, group_src, "src")
    at_root = g.rank() == root
    memory = adapt(tensor, "tensor", writable=not at_root, direct="broadcast", pieces=1)
    agreed = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
    after = None if at_root else result_unpacker([memory])
    cached = cached._replace(recv=None) if at_root else cached._replace(send=None)
    move, inputs = Movement(Kind.BROADCAST, recv=memory.flat, root=root), (memory,) if at_root else ()
    return Prepared(agreed, move, [tensor], inputs=inputs, after=after, cached=cached, memories=(memory,))


def all_reduce(g: ProcessGroup, cached: Cached, tensor: AnyArray, op: RedOpType | ReduceOp, async_op: bool) -> Prepared:
    """Prepare an ``all_reduce``: by the schedule that this rank prefers, in pieces, or as a whole."""
    pieces, checked = pieces_reduced(op), None
    if pieces and type(tensor) is not np.ndarray:
        preferred = prefer(g, tensor, state().settings)
        if preferred is not None:
            if preferred.is_possible(not async_op):
                return _preferring(preferred, g, cached, tensor, op, pieces)
            checked = preferred.checked
    direct = "all_reduce" if is_unscaled(op) else ""
    memory = adapt(tensor, "tensor", writable=True, direct=direct, pieces=pieces, checked=checked)
    return _reduced(g, cached, "all_reduce", tensor, memory, op)


def _preferring(preferred: Any, g: ProcessGroup, cached: Cached, tensor: AnyArray, op: Any, pieces: int) -> Prepared:
    """Prepare an ``all_reduce`` that moves by the preferred schedule, or through the host if a member has none."""
    checked = preferred.checked

    def fallback() -> Any:
        memory = adapt(tensor, "tensor", writable=True, pieces=pieces, checked=checked)
        found = _reduced(g, cached, "all_reduce", tensor, memory, op)
        return found.move, all_ready(found.inputs, []), packing(found), found.after

    dtype = WIDE if checked.named in HALVES else checked.array.dtype
    reduction = resolve_reduction("all_reduce", op, dtype, checked.named)
    preferred.prepare(reduction.mpi_op, g.size() if reduction.average else 0, dtype.itemsize, pieces, fallback)
    key = (str(reduction.op), checked.named or dtype_name(dtype), ("elements", checked.origin.size))
    move = Movement(Kind.ALL_REDUCE, recv=checked.origin, op=reduction.mpi_op)
    return Prepared(key, move, [tensor], preferred=preferred)


def reduce(
    g: ProcessGroup, cached: Cached, tensor: AnyArray, dst: int | None, op: RedOpType | ReduceOp, group_dst: int | None
) -> Prepared:
    """Prepare a ``reduce``."""
    root = peer_rank(g, dst, group_dst, "dst")
    direct, writable = "reduce" if is_unscaled(op) else "", g.rank() == root
    memory = adapt(tensor, "tensor", writable=writable, direct=direct, pieces=pieces_reduced(op))
    return _reduced(g, cached if writable else cached._replace(recv=None), "reduce", tensor, memory, op, root)


def _reduced(
    g: ProcessGroup,
    cached: Cached,
    call: str,
    tensor: AnyArray,
    memory: Memory,
    op: RedOpType | ReduceOp,
    root: int | None = None,
) -> Prepared:
    """Prepare a reduction, in place on each rank that gets the result: the root, or all members if there is no root."""
    memory = wide(memory) if memory.named else memory
    reduction = resolve_reduction(call, op, memory.dtype, memory.named)
    flat, mpi_op = memory.flat, reduction.mpi_op
    of_root = () if root is None else (("root", g.ranks[root]),)
    key = (str(reduction.op), *of_root, memory.name, ("elements", flat.size))
    again, inputs = NOT_CACHED if reduction.factor is not None else cached, (memory,)
    if root not in (None, g.rank()):
        send = flat if reduction.factor is None else reduction.before(memory.filled())
        move = Movement(Kind.REDUCE, send=send, root=root, op=mpi_op)
        return Prepared(key, move, [tensor], inputs=inputs, cached=again, memories=inputs)
    kind = Kind.ALL_REDUCE if root is None else Kind.REDUCE
    return Prepared(
        key,
        Movement(kind, recv=flat, root=-1 if root is None else root, op=mpi_op),
        [tensor],
        inputs=inputs,
        before=input_scaler(reduction, memory),
        after=all_steps_of(result_finisher(memory, reduction, g.size()), result_unpacker([memory])),
        cached=again,
        memories=inputs,
        average=reduction.average,
    )


def barrier(g: ProcessGroup, cached: Cached, device_ids: list[int] | None, async_op: bool) -> Prepared:
    """Prepare a barrier. If the call is waited for, its agreement carries the signals that ranks have received."""
    if device_ids is not None and not isinstance(device_ids, list):
        raise TypeError("Invalid function argument: device_ids type should be List[int]")
    if "barrier" not in g.prepared and g.stopping is None:
        dispatch.cache(g, "barrier", PreparedOperation("barrier", (), Kind.BARRIER), NO_DTYPE, None, None)
    return Prepared((), Movement(Kind.BARRIER), [], stopping=None if async_op else g.stopping)
