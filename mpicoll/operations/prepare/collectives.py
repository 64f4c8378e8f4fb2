"""Prepare broadcast, reductions and barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import peer_rank, state
from mpicoll.memory.adapt import adapt
from mpicoll.memory.device import array as device_array
from mpicoll.memory.device.array import MovableArray
from mpicoll.memory.device.runtime import Fold
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
    bytes_in_pieces,
    input_scaler,
    is_unscaled,
    packing,
    result_finisher,
    result_unpacker,
)
from mpicoll.operations.prepared import PreparedOperation
from mpicoll.transports.base import Kind, Movement


def broadcast(g: ProcessGroup, cached: Cached, tensor: AnyArray, src: int | None, group_src: int | None) -> Prepared:
    """Prepare a broadcast."""
    root = peer_rank(g, src, group_src, "src")
    at_root = g.rank() == root
    memory = adapt(tensor, "tensor", writable=not at_root, direct="broadcast", pieces=device_array.PIECES_FROM)
    agreed = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
    after = None if at_root else result_unpacker([memory])
    cached = cached._replace(recv=None) if at_root else cached._replace(send=None)
    move, inputs = Movement(Kind.BROADCAST, recv=memory.flat, root=root), (memory,) if at_root else ()
    return Prepared(agreed, move, [tensor], inputs=inputs, after=after, cached=cached, memories=(memory,))


def all_reduce(g: ProcessGroup, cached: Cached, tensor: AnyArray, op: RedOpType | ReduceOp, async_op: bool) -> Prepared:
    """Prepare an ``all_reduce``: on the GPU that all members share, in pieces, or as a whole."""
    direct = "all_reduce" if is_unscaled(op) else ""
    held = None if type(tensor) is np.ndarray else _device_array_of(g, tensor, op)

    def by_host(held: MovableArray) -> Prepared:
        memory = held.stage(writable=True, pieces=bytes_in_pieces(op))
        return _reduced(g, cached, "all_reduce", tensor, memory, op)

    if held is not None and _device_reductions().DeviceReduction.possible(g, held, not async_op):
        return _on_device(g, held, tensor, op, lambda: by_host(held))
    if held is None or (direct and device_array.permits(direct, False)):
        memory = adapt(tensor, "tensor", writable=True, direct=direct, pieces=bytes_in_pieces(op))
        return _reduced(g, cached, "all_reduce", tensor, memory, op)
    return by_host(held)


def reduce(
    g: ProcessGroup, cached: Cached, tensor: AnyArray, dst: int | None, op: RedOpType | ReduceOp, group_dst: int | None
) -> Prepared:
    """Prepare a ``reduce``."""
    root = peer_rank(g, dst, group_dst, "dst")
    direct, writable = "reduce" if is_unscaled(op) else "", g.rank() == root
    memory = adapt(tensor, "tensor", writable=writable, direct=direct, pieces=bytes_in_pieces(op))
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
    memory = wide(memory)
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


def barrier(g: ProcessGroup, device_ids: list[int] | None, async_op: bool) -> Prepared:
    """Prepare a barrier. If the call is waited for, its agreement carries the signals that ranks have received."""
    if device_ids is not None and not isinstance(device_ids, list):
        raise TypeError("Invalid function argument: device_ids type should be List[int]")
    if "barrier" not in g.prepared:
        dispatch.cache(g, "barrier", PreparedOperation("barrier", (), Kind.BARRIER), NO_DTYPE, None, None)
    return Prepared((), Movement(Kind.BARRIER), [], stopping=None if async_op else g.stopping)


def _device_reductions() -> Any:
    """Return the module of reductions on a GPU, which programs without a GPU do not load."""
    from mpicoll.transports.device import ipc

    return ipc


def _device_array_of(g: ProcessGroup, tensor: Any, op: Any) -> MovableArray | None:
    """Return an array that may be reduced on a GPU, if the members of the group may share a GPU; otherwise None."""
    if (
        not (g.pair.on_node and device_array.on_device(tensor))
        or type(op) is not RedOpType
        or op is RedOpType.PREMUL_SUM
    ):
        return None
    return None if state().settings.cuda_ipc == "off" else device_array.movable_array(tensor, "tensor", writable=True)


def _on_device(g: ProcessGroup, held: MovableArray, tensor: Any, op: Any, by_host: Callable[[], Prepared]) -> Prepared:
    """Prepare an ``all_reduce`` that may be made on the GPU that all members share.

    Args:
        by_host: prepares the same call through the host, with memory of the host.
    """
    dtype = WIDE if held.named in HALVES else held.array.dtype
    reduction = resolve_reduction("all_reduce", op, dtype, held.named)
    agreed = (str(reduction.op), held.named or dtype_name(dtype), ("elements", held.origin.size))
    fold = Fold(reduction.mpi_op, held.each.wire, held.named, g.size() if reduction.average else 0)

    def otherwise() -> Any:
        found = by_host()
        return found.move, all_ready(found.inputs, []), packing(found), found.after

    on_device = _device_reductions().DeviceReduction(
        g, held, fold, held.origin.size * dtype.itemsize, otherwise, held.in_pieces(bytes_in_pieces(op))
    )
    return Prepared(
        agreed,
        Movement(Kind.ALL_REDUCE, recv=held.origin, op=reduction.mpi_op),
        [tensor],
        device_reduction=on_device,
    )
