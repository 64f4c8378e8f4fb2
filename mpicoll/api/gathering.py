"""Collectives that gather blocks of all ranks, with torch.distributed's names and arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import member_or_warn, peer_rank
from mpicoll.memory.adapt import adapt_list, same_dtype
from mpicoll.memory.lists import ListArgument, list_memories
from mpicoll.memory.memory import AnyArray
from mpicoll.operations import dispatch
from mpicoll.operations.prepared import PreparedOperation
from mpicoll.operations.work import Work
from mpicoll.transports.base import Kind, Movement

if TYPE_CHECKING:
    pass


from mpicoll.operations.prepare_collectives import (
    Prepared,
    blocks_in_pieces,
    cache_call,
    check_same_size,
    one_result_buffer,
    refuse_values,
    result_unpacker,
    run_prepared,
    source_apart_from,
)

_ndarray = np.ndarray


def all_gather(
    tensor_list: list[AnyArray],
    tensor: AnyArray,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Gather the ``tensor`` of every member into ``tensor_list`` on all of them.

    Called by all members with the same dtype. The blocks may differ in size: ``tensor_list[r]`` must then have as many
    elements as rank r's ``tensor``, on all members alike.

    Args:
        tensor_list: one output array for each member, by rank in the group.
        tensor: this rank's input.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises: as :func:`broadcast`.

    Source: torch.distributed.all_gather; MPI-4.1 section 6.7.
    """
    key: Any = None
    plain = not async_op
    if plain and type(tensor) is _ndarray and type(tensor_list) is list:
        key = ("all_gather", tensor.dtype, tensor.shape)
        if dispatch.again(group, key, tensor, tensor_list, timeout=timeout, name=name):
            return None
    found = member_or_warn(group, "all_gather")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        results, source = list_memories(
            "all_gather", ListArgument(tensor_list, "tensor_list", True, g.size()), ListArgument(tensor, "tensor")
        )
        outputs, (memory,) = results.memories, source.memories
        same_dtype(memory, *outputs)
        counts = tuple(output.flat.size for output in outputs)
        if counts[g.rank()] != memory.flat.size:
            raise ValueError(
                f"all_gather: tensor has {memory.flat.size} elements, but its place tensor_list[{g.rank()}] has "
                f"{counts[g.rank()]}"
            )
        uneven = len(set(counts)) > 1
        packed, after = one_result_buffer(results, () if async_op else (memory,))
        agreed = (memory.name, ("blocks", counts) if uneven else ("elements", counts[0]))
        again = PreparedOperation("all_gather", agreed, Kind.ALL_GATHER, memory.flat.nbytes)
        cache_call(g, None if uneven else key, again, (memory, *outputs), tensor, tensor_list)
        move = Movement(
            Kind.ALL_GATHER, send=source.flat, recv=packed, recvcounts=counts if uneven else None, vector=uneven
        )
        return Prepared(agreed, move, list(tensor_list), inputs=(memory,), before=source.gather, after=after)

    return run_prepared("all_gather", found, async_op, timeout, prepare, name, stream=stream)


def all_gather_single(
    output_tensor: AnyArray,
    input_tensor: AnyArray,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Gather the ``input_tensor`` of every member into one array on all of them.

    Called by all members with the same dtype and number of elements.

    Args:
        output_tensor: size x as many elements as the input, in the order of ranks: the concatenation along the first
            dimension, or the stack; only the number of elements matters.
        input_tensor: this rank's input.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises: as :func:`broadcast`.

    Source: torch.distributed.all_gather_single (formerly all_gather_into_tensor); MPI-4.1 section 6.7.
    """
    return _all_gather_single("all_gather_single", output_tensor, input_tensor, group, async_op, timeout, name, stream)


def all_gather_into_tensor(
    output_tensor: AnyArray,
    input_tensor: AnyArray,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Gather into one array: the older name of :func:`all_gather_single`, with the same arguments and errors.

    Source: torch.distributed.all_gather_into_tensor.
    """
    return _all_gather_single(
        "all_gather_into_tensor", output_tensor, input_tensor, group, async_op, timeout, name, stream
    )


def _all_gather_single(
    function: str,
    output_tensor: AnyArray,
    input_tensor: AnyArray,
    group: Any,
    async_op: bool,
    timeout: timedelta | None,
    name: str | None,
    stream: Any,
) -> Work | None:
    key: Any = None
    given = input_tensor if type(input_tensor) is _ndarray else dispatch.view_of(input_tensor, 3)
    gathered = output_tensor if type(output_tensor) is _ndarray else dispatch.view_of(output_tensor, 3)
    if given is not None and gathered is not None and not async_op:
        key = (function, given.dtype, given.shape, gathered.dtype, gathered.shape)
        if dispatch.again(group, key, given, gathered, 3, timeout=timeout, name=name):
            return None
    found = member_or_warn(group, function, stacklevel=4)
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        most = blocks_in_pieces(g.size())
        source, result = list_memories(
            "all_gather",
            ListArgument(input_tensor, "input_tensor", pieces=None if most is None else most // g.size()),
            ListArgument(output_tensor, "output_tensor", True, pieces=most),
            size=min,
        )
        (memory,), (output,) = source.memories, result.memories
        same_dtype(output, memory)
        if output.flat.size != g.size() * memory.flat.size:
            raise ValueError(
                f"{function}: output_tensor must have {g.size()} x {memory.flat.size} elements, got {output.flat.size}"
            )
        # The input may be this rank's part of the output, as torch allows: MPI forbids that its buffers overlap.
        send = source_apart_from(output, source)
        agreed = (memory.name, ("elements", memory.flat.size))
        again = PreparedOperation("all_gather_single", agreed, Kind.ALL_GATHER, memory.flat.nbytes, alias=function)
        cache_call(g, key, again, (memory, output), given, gathered)
        move = Movement(Kind.ALL_GATHER, send=send, recv=output.flat)
        return Prepared(
            agreed, move, [output_tensor], inputs=(memory,), before=source.gather, after=result_unpacker([output])
        )

    return run_prepared("all_gather_single", found, async_op, timeout, prepare, name, function, stream)


def gather(
    tensor: AnyArray,
    gather_list: list[AnyArray] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Gather the ``tensor`` of every member into ``gather_list`` on the rank ``dst``.

    Called by all members with the same destination, dtype and number of elements.

    Args:
        tensor: this rank's input.
        gather_list: on the destination one output array for each member, of the input's size; elsewhere None or [].
        dst: global rank of the destination (default 0); or ``group_dst``, its rank in the group.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises: as :func:`broadcast`.

    Source: torch.distributed.gather; MPI-4.1 section 6.5.
    """
    key: Any = None
    if (
        type(tensor) is _ndarray
        and not async_op
        and group_dst is None
        and (gather_list is None or type(gather_list) is list)
        and (dst is None or type(dst) is int)
    ):
        key = ("gather", dst, tensor.dtype, tensor.shape)
        if dispatch.again(group, key, tensor, gather_list or None, timeout=timeout, name=name):
            return None
    found = member_or_warn(group, "gather")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        root = peer_rank(g, dst, group_dst, "dst", default=0)
        arguments = [ListArgument(tensor, "tensor")]
        if g.rank() == root and isinstance(gather_list, list) and gather_list:
            arguments.append(ListArgument(gather_list, "gather_list", True, g.size()))
        source, *results = list_memories("gather", *arguments)
        (memory,) = source.memories
        agreed = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
        again = PreparedOperation("gather", agreed, Kind.GATHER, memory.flat.nbytes, root=root)
        if g.rank() != root:
            refuse_values(gather_list, "gather_list", "destination")
            cache_call(g, key, again, (memory,), tensor, None)
            return Prepared(agreed, Movement(Kind.GATHER, send=source.flat, root=root), [], inputs=(memory,))
        if gather_list is not None and not isinstance(gather_list, list):
            adapt_list(gather_list, "gather_list", writable=True)
        if not gather_list:
            raise ValueError("Argument ``gather_list`` must be specified on destination rank.")
        (result,) = results
        outputs = result.memories
        check_same_size("gather_list", outputs, memory)
        cache_call(g, key, again, (memory, *outputs), tensor, gather_list)
        packed, after = one_result_buffer(result, () if async_op else (memory,))
        move = Movement(Kind.GATHER, send=source.flat, recv=packed, root=root)
        return Prepared(agreed, move, list(gather_list), inputs=(memory,), before=source.gather, after=after)

    return run_prepared("gather", found, async_op, timeout, prepare, name, stream=stream)
