"""Prepare collectives that gather blocks of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import peer_rank
from mpicoll.memory.adapt import adapt_list, apart, same_dtype
from mpicoll.memory.lists import ListArgument, list_memories, list_words
from mpicoll.memory.memory import AnyArray, Memory
from mpicoll.memory.scratch import scratch
from mpicoll.operations.prepare.run import (
    Cached,
    Prepared,
    check_same_size,
    need_values,
    one_result_buffer,
    pieces_of_blocks,
    refuse_values,
    result_unpacker,
    source_apart_from,
)
from mpicoll.transports.base import Kind, Movement


def all_gather(
    g: ProcessGroup, cached: Cached, tensor_list: list[AnyArray], tensor: AnyArray, async_op: bool
) -> Prepared:
    """Prepare an ``all_gather``, whose blocks may differ in size."""
    results, source = list_memories(
        "all_gather", ListArgument(tensor_list, "tensor_list", True, g.size()), ListArgument(tensor, "tensor")
    )
    outputs, (memory,) = results.memories, source.memories
    same_dtype(memory, *outputs)
    counts = tuple(output.flat.size for output in outputs)
    if counts[g.rank()] != memory.flat.size:
        raise ValueError(
            f"all_gather: tensor has {memory.flat.size} elements, but the output for this rank, tensor_list[{g.rank()}], has "
            f"{counts[g.rank()]}"
        )
    uneven = len(set(counts)) > 1
    packed, displs, after = one_result_buffer(
        results, () if async_op else (memory,), g.pair.native.apart_from(Kind.ALL_GATHER)
    )
    agreed = (memory.name, ("blocks", counts) if uneven else ("elements", counts[0]))
    blocks = counts if uneven or displs else None
    return Prepared(
        agreed,
        Movement(
            Kind.ALL_GATHER,
            send=source.flat,
            recv=packed,
            recvcounts=blocks,
            recvdispls=displs,
            vector=uneven,
            apart=True,
        ),
        list(tensor_list),
        inputs=(memory,),
        before=source.gather,
        after=after,
        cached=cached,
        memories=(memory, *outputs),
    )


def all_gather_single(
    g: ProcessGroup, cached: Cached, output_tensor: AnyArray, input_tensor: AnyArray, function: str
) -> Prepared:
    """Prepare a gather of equal blocks into one array; ``function`` is the name that the program used."""
    pieces = pieces_of_blocks(g.size())
    source, result = list_memories(
        "all_gather",
        ListArgument(input_tensor, "input_tensor", pieces=pieces * g.size()),
        ListArgument(output_tensor, "output_tensor", True, pieces=pieces),
        size=min,
    )
    (memory,), (output,) = source.memories, result.memories
    _check_rows(f"{function}: output_tensor", g.size(), output, memory)
    # The input may be this rank's part of the output, as torch allows: MPI forbids that its buffers overlap.
    send = source_apart_from(output, source)
    return Prepared(
        (memory.name, ("elements", memory.flat.size)),
        Movement(Kind.ALL_GATHER, send=send, recv=output.flat),
        [output_tensor],
        inputs=(memory,),
        before=source.gather,
        after=result_unpacker([output]),
        cached=cached,
        memories=(memory, output),
    )


def _check_rows(what: str, size: int, output: Memory, memory: Memory) -> None:
    """Raise unless an output has the dtype of a block, and holds a block of each member."""
    same_dtype(output, memory)
    if output.flat.size != size * memory.flat.size:
        raise ValueError(f"{what} must have {size} x {memory.flat.size} elements, got {output.flat.size}")


def gather(
    g: ProcessGroup,
    cached: Cached,
    tensor: AnyArray,
    gather_list: list[AnyArray] | None,
    dst: int | None,
    group_dst: int | None,
    async_op: bool,
) -> Prepared:
    """Prepare a ``gather``."""
    root = peer_rank(g, dst, group_dst, "dst", default=0)
    arguments = [ListArgument(tensor, "tensor")]
    if g.rank() == root and isinstance(gather_list, list) and gather_list:
        arguments.append(ListArgument(gather_list, "gather_list", True, g.size()))
    source, *results = list_memories("gather", *arguments)
    (memory,) = source.memories
    agreed = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
    inputs = (memory,)
    if g.rank() != root:
        refuse_values(gather_list, "gather_list", "destination")
        move, cached = Movement(Kind.GATHER, send=source.flat, root=root), cached._replace(recv=None)
        return Prepared(agreed, move, [], inputs=inputs, cached=cached, memories=inputs)
    values = need_values(gather_list, "gather_list", "destination", writable=True)
    (result,) = results
    check_same_size("gather_list", result.memories, memory)
    packed, displs, after = one_result_buffer(result, () if async_op else inputs, g.pair.native.apart_from(Kind.GATHER))
    counts = [memory.flat.size] * g.size() if displs else None
    return Prepared(
        agreed,
        Movement(
            Kind.GATHER,
            send=source.flat,
            recv=packed,
            recvcounts=counts,
            recvdispls=displs,
            root=root,
        ),
        list(values),
        inputs=inputs,
        before=source.gather,
        after=after,
        cached=cached,
        memories=(memory, *result.memories),
    )


def gather_single(
    g: ProcessGroup,
    cached: Cached,
    tensor: AnyArray,
    gather_tensor: AnyArray | None,
    dst: int | None,
    group_dst: int | None,
    function: str,
) -> Prepared:
    """Prepare a gather of equal blocks into one array on the root; ``function`` is the name that the program used."""
    root = peer_rank(g, dst, group_dst, "dst", default=0)
    arguments = [ListArgument(tensor, "tensor")]
    if g.rank() == root and gather_tensor is not None:
        arguments.append(ListArgument(gather_tensor, "gather_tensor", True))
    source, *results = list_memories("gather", *arguments, size=min)
    (memory,) = source.memories
    agreed = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
    if g.rank() != root:
        if gather_tensor is not None:
            raise ValueError("Argument ``gather_tensor`` must NOT be specified on non-destination ranks.")
        move = Movement(Kind.GATHER, send=source.flat, root=root)
        return Prepared(agreed, move, [], inputs=(memory,), cached=cached, memories=(memory,))
    if not results:
        raise ValueError("Argument ``gather_tensor`` must be specified on destination rank.")
    (result,) = results
    (output,) = result.memories
    _check_rows(f"{function}: gather_tensor", g.size(), output, memory)
    send = source_apart_from(output, source)
    return Prepared(
        agreed,
        Movement(Kind.GATHER, send=send, recv=result.flat, root=root),
        [gather_tensor],
        inputs=(memory,),
        before=source.gather,
        after=result_unpacker([output]),
        cached=cached,
        memories=(memory, output),
    )


def all_gather_coalesced(
    g: ProcessGroup, output_tensor_lists: list[list[AnyArray]], input_tensor_list: list[AnyArray]
) -> Prepared:
    """Prepare an ``all_gather_coalesced``."""
    inputs, rows = _gathered_lists(g, output_tensor_lists, input_tensor_list)
    dtype = inputs[0].dtype
    counts = tuple(sum(memory.flat.size for memory in row) for row in rows)
    uneven = len(set(counts)) > 1
    shapes = [[memory.shape for memory in row] for row in rows]
    texts = [list_words([inputs[0].name] * len(row), row) for row in shapes]
    words = texts[0] if len(set(texts)) == 1 else tuple(texts)
    key = (inputs[0].name, ("arrays", len(inputs)), ("layout", words))
    send, packed = scratch(counts[g.rank()], dtype), scratch(sum(counts), dtype)

    def before() -> None:
        np.concatenate([memory.flat for memory in inputs], out=send)

    after = result_unpacker([memory for row in rows for memory in row], packed)
    move = Movement(Kind.ALL_GATHER, send=send, recv=packed, recvcounts=counts if uneven else None, vector=uneven)
    outputs = [array for row in output_tensor_lists for array in row]
    return Prepared(key, move, outputs, inputs=tuple(inputs), before=before, after=after)


def _gathered_lists(g: ProcessGroup, outputs: Any, given: Any) -> tuple[list[Memory], list[list[Memory]]]:
    inputs = adapt_list(given, "input_tensor_list", writable=False)
    if not inputs:
        raise ValueError("all_gather_coalesced: parameter `input_tensor_list` must hold one array at least")
    if not isinstance(outputs, list):
        raise TypeError("Invalid function argument: output_tensor_lists should be a list")
    if len(outputs) != g.size():
        raise ValueError(
            "all_gather_coalesced: output lists should be equal to world size: output_tensor_lists must hold one list for "
            f"each of the {g.size()} ranks, got {len(outputs)}"
        )
    rows = []
    for rank, row in enumerate(outputs):
        memories = adapt_list(row, f"output_tensor_lists[{rank}]", writable=True)
        if len(memories) != len(inputs):
            raise ValueError(
                f"all_gather_coalesced: invalid output size: output_tensor_lists[{rank}] must hold {len(inputs)} arrays, as "
                f"input_tensor_list does, got {len(memories)}"
            )
        same_dtype(inputs[0], *memories)
        rows.append(memories)
    apart([memory.own for row in rows for memory in row], "output_tensor_lists", [len(inputs)] * len(rows))
    for place, (mine, memory) in enumerate(zip(inputs, rows[g.rank()], strict=True)):
        if mine.shape != memory.shape:
            raise ValueError(
                f"all_gather_coalesced: input_tensor_list[{place}] has shape {mine.shape}, but its output "
                f"output_tensor_lists[{g.rank()}][{place}] has {memory.shape}"
            )
    return inputs, rows
