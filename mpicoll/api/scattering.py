"""Collectives that give each rank blocks of its own, with torch.distributed's names and arguments."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import member_or_warn, peer_rank
from mpicoll.memory.adapt import adapt_list, same_dtype
from mpicoll.memory.dtypes import resolve_reduction
from mpicoll.memory.half import wide
from mpicoll.memory.lists import ListArgument, list_memories
from mpicoll.memory.memory import AnyArray, Array, Memory
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.operations import dispatch
from mpicoll.operations.prepared import PreparedOperation
from mpicoll.operations.work import Work
from mpicoll.transports.base import Kind, Movement
from mpicoll.transports.control import NOTHING

if TYPE_CHECKING:
    pass


from mpicoll.operations.prepare_collectives import (
    Prepared,
    all_steps_of,
    blocks_in_pieces,
    bytes_in_pieces,
    cache_call,
    check_same_size,
    is_unscaled,
    one_result_buffer,
    one_source_buffer,
    refuse_values,
    result_finisher,
    result_unpacker,
    run_prepared,
    source_apart_from,
)

_ndarray = np.ndarray


def scatter(
    tensor: AnyArray,
    scatter_list: list[AnyArray] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Send one array of ``scatter_list`` on the rank ``src`` to each member, which receives it in ``tensor``.

    Called by all members with the same source, dtype and number of elements.

    Args:
        tensor: where this rank's array is received.
        scatter_list: on the source one input array for each member, of the output's size; elsewhere None or [].
        src: global rank of the source (default 0); or ``group_src``, its rank in the group.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises: as :func:`broadcast`.

    Source: torch.distributed.scatter; MPI-4.1 section 6.6.
    """
    key: Any = None
    if (
        type(tensor) is _ndarray
        and not async_op
        and group_src is None
        and (scatter_list is None or type(scatter_list) is list)
        and (src is None or type(src) is int)
    ):
        key = ("scatter", src, tensor.dtype, tensor.shape)
        if dispatch.again(group, key, scatter_list or None, tensor, timeout=timeout, name=name):
            return None
    found = member_or_warn(group, "scatter")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        root = peer_rank(g, src, group_src, "src", default=0)
        arguments = [ListArgument(tensor, "tensor", True)]
        if g.rank() == root and isinstance(scatter_list, list) and scatter_list:
            arguments.append(ListArgument(scatter_list, "scatter_list", False, g.size()))
        result, *sources = list_memories("scatter", *arguments)
        (memory,) = result.memories
        agreed = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
        again = PreparedOperation("scatter", agreed, Kind.SCATTER, memory.flat.nbytes, root=root)
        after = result_unpacker([memory])
        if g.rank() != root:
            refuse_values(scatter_list, "scatter_list", "source")
            cache_call(g, key, again, (memory,), None, tensor)
            return Prepared(agreed, Movement(Kind.SCATTER, recv=memory.flat, root=root), [tensor], after=after)
        if scatter_list is not None and not isinstance(scatter_list, list):
            adapt_list(scatter_list, "scatter_list", writable=False)
        if not scatter_list:
            raise ValueError("Argument ``scatter_list`` must be specified on source rank.")
        (source,) = sources
        check_same_size("scatter_list", source.memories, memory)
        cache_call(g, key, again, (memory, *source.memories), scatter_list, tensor)
        packed = one_source_buffer(source, () if async_op else (memory,))
        move = Movement(Kind.SCATTER, send=packed, recv=memory.flat, root=root)
        return Prepared(agreed, move, [tensor], inputs=source.waits, before=source.gather, after=after)

    return run_prepared("scatter", found, async_op, timeout, prepare, name, stream=stream)


def reduce_scatter(
    output: AnyArray,
    input_list: list[AnyArray],
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Reduce the lists of all members element by element; member r holds the result of ``input_list[r]`` in ``output``.

    Called by all members with the same op, dtype and sizes of the list's arrays, which may differ from each other.

    Args:
        output: as many elements as ``input_list`` holds at this rank's place.
        input_list: one input array for each member.
        op: as in :func:`all_reduce`.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises: as :func:`all_reduce`.

    Source: torch.distributed.reduce_scatter; MPI-4.1 section 6.10.
    """
    key: Any = None
    plain = not async_op and type(op) is RedOpType
    if plain and type(output) is _ndarray and type(input_list) is list:
        key = ("reduce_scatter", op, output.dtype, output.shape)
        if dispatch.again(group, key, input_list, output, timeout=timeout, name=name):
            return None
    found = member_or_warn(group, "reduce_scatter")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        result, source = list_memories(
            "reduce_scatter" if is_unscaled(op) else "",
            ListArgument(output, "output", True),
            ListArgument(input_list, "input_list", False, g.size()),
        )
        memory = wide(result.memories[0])
        inputs = source.memories = [wide(item) for item in source.memories]
        same_dtype(memory, *inputs)
        counts = tuple(item.flat.size for item in inputs)
        if counts[g.rank()] != memory.flat.size:
            raise ValueError(
                f"reduce_scatter: output has {memory.flat.size} elements, but input_list[{g.rank()}] has {counts[g.rank()]}"
            )
        packed = one_source_buffer(source, () if async_op else (memory,))
        ready = _scatter_reduced(g, "reduce_scatter", memory, packed, op, counts, output, source.waits, source.gather)
        _learn_parts(g, key, "reduce_scatter", "", ready, op, (memory, *inputs), input_list, output)
        return ready

    return run_prepared("reduce_scatter", found, async_op, timeout, prepare, name, stream=stream)


def reduce_scatter_single(
    output: AnyArray,
    input: AnyArray,
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Reduce ``input`` over all members; member r holds the r-th of its equal parts in ``output``.

    Called by all members with the same op, dtype and number of elements.

    Args:
        output: one part.
        input: size x as many elements: the concatenation along the first dimension, or the stack.
        op: as in :func:`all_reduce`.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises: as :func:`all_reduce`.

    Source: torch.distributed.reduce_scatter_single (formerly reduce_scatter_tensor); MPI-4.1 section 6.10.1.
    """
    return _reduce_scatter_single("reduce_scatter_single", output, input, op, group, async_op, timeout, name, stream)


def reduce_scatter_tensor(
    output: AnyArray,
    input: AnyArray,
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Reduce and scatter one array: the older name of :func:`reduce_scatter_single`, with the same arguments and errors.

    Source: torch.distributed.reduce_scatter_tensor.
    """
    return _reduce_scatter_single("reduce_scatter_tensor", output, input, op, group, async_op, timeout, name, stream)


def _reduce_scatter_single(
    function: str,
    output: AnyArray,
    source: AnyArray,
    op: RedOpType | ReduceOp,
    group: Any,
    async_op: bool,
    timeout: timedelta | None,
    name: str | None,
    stream: Any,
) -> Work | None:
    key: Any = None
    terms = source if type(source) is _ndarray else dispatch.view_of(source, 3)
    reduced = output if type(output) is _ndarray else dispatch.view_of(output, 3)
    if terms is not None and reduced is not None and not async_op and type(op) is RedOpType:
        key = (function, op, terms.dtype, terms.shape, reduced.dtype, reduced.shape)
        if dispatch.again(group, key, terms, reduced, 3, timeout=timeout, name=name):
            return None
    found = member_or_warn(group, function, stacklevel=4)
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        most = None if bytes_in_pieces(op) is None else blocks_in_pieces(g.size())
        result, given = list_memories(
            "reduce_scatter" if is_unscaled(op) else "",
            ListArgument(output, "output", True, pieces=None if most is None else most // g.size()),
            ListArgument(source, "input", pieces=most),
            size=min,
        )
        memory, sending = wide(result.memories[0]), wide(given.memories[0])
        given.memories = [sending]
        same_dtype(memory, sending)
        if sending.flat.size != g.size() * memory.flat.size:
            raise ValueError(
                f"{function}: input must have {g.size()} x {memory.flat.size} elements, got {sending.flat.size}"
            )
        counts = (memory.flat.size,) * g.size()
        packed = source_apart_from(memory, given)
        ready = _scatter_reduced(g, function, memory, packed, op, counts, output, (sending,), given.gather)
        _learn_parts(g, key, "reduce_scatter_single", function, ready, op, (memory, sending), terms, reduced)
        return ready

    return run_prepared("reduce_scatter_single", found, async_op, timeout, prepare, name, function, stream)


def _learn_parts(
    g: ProcessGroup,
    key: Any,
    op: str,
    alias: str,
    ready: Prepared,
    reduce_op: RedOpType | ReduceOp,
    memories: tuple[Memory, ...],
    send: Any,
    recv: Any,
) -> None:
    """Keep a reduction that each member gets one equal part of."""
    if key is None or type(reduce_op) is not RedOpType or ready.move.vector:
        return
    average, nbytes = reduce_op is RedOpType.AVG, memories[0].flat.nbytes
    again = PreparedOperation(
        op, ready.key, Kind.REDUCE_SCATTER, nbytes, mpi_op=ready.move.op, average=average, alias=alias
    )
    cache_call(g, key, again, memories, send, recv)


def _scatter_reduced(
    g: ProcessGroup,
    name: str,
    memory: Memory,
    packed: Array,
    op: RedOpType | ReduceOp,
    counts: tuple[int, ...],
    output: AnyArray,
    inputs: tuple[Memory, ...] = (),
    before: Callable[[], None] | None = None,
) -> Prepared:
    reduction = resolve_reduction(name, op, memory.dtype, memory.named)
    if reduction.factor is not None:
        for each in inputs:
            each.filled()
    uneven = len(set(counts)) > 1
    key = (str(reduction.op), memory.name, ("blocks", counts) if uneven else ("elements", counts[0]))
    move = Movement(
        Kind.REDUCE_SCATTER,
        send=reduction.before(packed),
        recv=memory.flat,
        sendcounts=counts if uneven else None,
        op=reduction.mpi_op,
        vector=uneven,
    )
    average = result_finisher(memory, reduction, g.size())
    return Prepared(
        key, move, [output], inputs=inputs, before=before, after=all_steps_of(average, result_unpacker([memory]))
    )


def all_to_all_single(
    output: AnyArray,
    input: AnyArray,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Send each member one part of ``input`` and receive one part of ``output`` from each.

    Called by all members with the same dtype. What rank i sends to rank j must be what j expects from i.

    Args:
        output: where the parts are received, one behind the other along dimension 0.
        input: the parts to send, likewise.
        output_split_sizes: rows of ``output`` from each member; None or []: equal parts.
        input_split_sizes: rows of ``input`` to each member; None or []: equal parts.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises:
        RuntimeError: dimension 0 does not divide equally, or the split sizes do not add up to it (torch's texts).
        Others as :func:`broadcast`.

    Source: torch.distributed.all_to_all_single; MPI-4.1 section 6.8.
    """
    key: Any = None
    if (
        type(input) is _ndarray
        and type(output) is _ndarray
        and not async_op
        and output_split_sizes is None
        and input_split_sizes is None
    ):
        key = ("all_to_all_single", input.dtype, input.shape, output.dtype, output.shape)
        if dispatch.again(group, key, input, output, timeout=timeout, name=name):
            return None
    found = member_or_warn(group, "all_to_all_single")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        most = blocks_in_pieces(g.size())
        given, result = list_memories(
            "all_to_all", ListArgument(input, "input", pieces=most), ListArgument(output, "output", True, pieces=most)
        )
        (source,), (out,) = given.memories, result.memories
        same_dtype(out, source)
        received = _splits(out, output_split_sizes, g.size(), "output")
        sent = _splits(source, input_split_sizes, g.size(), "input")
        send, after = source_apart_from(out, given), result_unpacker([out])
        ready = _exchange(out.name, send, out.flat, sent, received, [output], after, (source,), given.gather)
        _learn_exchange(g, key, "all_to_all_single", ready, (out, source), input, output)
        return ready

    return run_prepared("all_to_all_single", found, async_op, timeout, prepare, name, stream=stream)


def all_to_all(
    output_tensor_list: list[AnyArray],
    input_tensor_list: list[AnyArray],
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Send ``input_tensor_list[j]`` to member j, and receive ``output_tensor_list[i]`` from member i.

    Called by all members with the same dtype. The sizes may differ from pair to pair.

    Args:
        output_tensor_list: one output array for each member.
        input_tensor_list: one input array for each member.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises: as :func:`broadcast`.

    Source: torch.distributed.all_to_all; MPI-4.1 section 6.8.
    """
    key: Any = None
    if type(input_tensor_list) is list and not async_op:
        first = input_tensor_list[0] if input_tensor_list else None
        if type(first) is _ndarray:
            key = ("all_to_all", first.dtype, first.shape)
            if dispatch.again(group, key, input_tensor_list, output_tensor_list, timeout=timeout, name=name):
                return None
    found = member_or_warn(group, "all_to_all")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        results, source = list_memories(
            "all_to_all",
            ListArgument(output_tensor_list, "output_tensor_list", True, g.size()),
            ListArgument(input_tensor_list, "input_tensor_list", False, g.size()),
        )
        outputs, inputs = results.memories, source.memories
        same_dtype(*outputs, *inputs)
        received, sent = [o.flat.size for o in outputs], [i.flat.size for i in inputs]
        packed, after = one_result_buffer(results, () if async_op else inputs)
        send, name = one_source_buffer(source, () if async_op else outputs), outputs[0].name
        written = list(output_tensor_list)
        ready = _exchange(name, send, packed, sent, received, written, after, source.waits, source.gather)
        memories = (*outputs, *inputs)
        _learn_exchange(g, key, "all_to_all", ready, memories, input_tensor_list, output_tensor_list)
        return ready

    return run_prepared("all_to_all", found, async_op, timeout, prepare, name, stream=stream)


def _learn_exchange(
    g: ProcessGroup, key: Any, op: str, ready: Prepared, memories: tuple[Memory, ...], send: Any, recv: Any
) -> None:
    """Keep an exchange of equal parts."""
    if key is None or ready.uneven:
        return
    nbytes = ready.detail * memories[0].dtype.itemsize
    again = PreparedOperation(op, ready.key, Kind.ALL_TO_ALL, nbytes, detail=ready.detail)
    cache_call(g, key, again, memories, send, recv)


def _exchange(
    dtype: str,
    send: Array,
    recv: Array,
    sent: list[int],
    received: list[int],
    outputs: list[Any],
    after: Callable[[], None] | None,
    inputs: tuple[Memory, ...] = (),
    before: Callable[[], None] | None = None,
) -> Prepared:
    uneven = len({*sent, *received}) > 1
    move = Movement(Kind.ALL_TO_ALL, send=send, recv=recv, sendcounts=sent, recvcounts=received)
    detail = NOTHING if uneven else sent[0]
    return Prepared((dtype,), move, outputs, inputs=inputs, before=before, after=after, uneven=uneven, detail=detail)


def _splits(memory: Memory, splits: Any, size: int, name: str) -> list[int]:
    """Return elements for each rank from rows for each rank."""
    rows = memory.shape[0] if memory.shape else 1
    row = memory.flat.size // rows if rows else int(np.prod(memory.shape[1:]))
    if isinstance(splits, (tuple, np.ndarray)):
        splits = list(splits)
    if splits is not None and not isinstance(splits, list):
        raise TypeError(f"{name}_split_sizes must be a list of integers, not {type(splits).__name__}")
    if not splits:
        if rows % size:
            raise RuntimeError(
                f"Tensor's dim 0 does not divide equally across group size: {name} has {rows} rows for {size} ranks"
            )
        return [rows // size * row] * size
    if not all(hasattr(n, "__index__") and not isinstance(n, bool) for n in splits):
        raise TypeError(f"{name}_split_sizes must be a list of integers, got {splits!r}")
    if len(splits) != size:
        raise RuntimeError(
            f"Number of tensor splits not equal to group size: {name}_split_sizes has {len(splits)}, not {size}"
        )
    if any(n < 0 for n in splits):
        raise RuntimeError(f"{name}_split_sizes must not be negative, got {splits}")
    if sum(splits) != rows:
        raise RuntimeError(
            f"Split sizes doesn't match total dim 0 size: {name}_split_sizes add up to {sum(splits)}, {name} has {rows} rows"
        )
    return [int(n) * row for n in splits]
