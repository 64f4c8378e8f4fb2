"""Prepare collectives that send a different block to each rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.checks.memory_ranges import is_sampled
from mpicoll.diagnosis.call import CallDescription
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import peer_rank
from mpicoll.memory.adapt import same_dtype
from mpicoll.memory.dtypes import resolve_reduction
from mpicoll.memory.half import wide
from mpicoll.memory.layouts import are_disjoint
from mpicoll.memory.lists import ListArgument, ListMemory, list_memories
from mpicoll.memory.memory import AnyArray, Array, Memory
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.operations.prepare.run import (
    NOT_CACHED,
    Cached,
    Prepared,
    all_steps_of,
    check_same_size,
    is_unscaled,
    need_values,
    one_result_buffer,
    one_source_buffer,
    pieces_of_blocks,
    pieces_reduced,
    refuse_values,
    result_finisher,
    result_unpacker,
    source_apart_from,
)
from mpicoll.operations.prepared import PreparedOperation, is_readable
from mpicoll.operations.request import Request
from mpicoll.runtime import waiting
from mpicoll.transports.base import EXCHANGE_BYTES, Kind, Movement
from mpicoll.transports.control import NOTHING, Words, make_words
from mpicoll.transports.selection import NEVER
from mpicoll.transports.shm.transport import poll_ns

OF_ANY_SIZE = "parts of any size"
"""The second item in the signature of an exchange whose input and output are cached as lists of parts."""

unequal: set[str] = set()
"""The functions that this process has called with parts that differ in size."""


def scatter(
    g: ProcessGroup,
    cached: Cached,
    tensor: AnyArray,
    scatter_list: list[AnyArray] | None,
    src: int | None,
    group_src: int | None,
    async_op: bool,
) -> Prepared:
    """Prepare a ``scatter``."""
    root = peer_rank(g, src, group_src, "src", default=0)
    arguments = [ListArgument(tensor, "tensor", True)]
    if g.rank() == root and isinstance(scatter_list, list) and scatter_list:
        arguments.append(ListArgument(scatter_list, "scatter_list", False, g.size()))
    result, *sources = list_memories("scatter", *arguments)
    (memory,) = result.memories
    agreed = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
    after = result_unpacker([memory])
    if g.rank() != root:
        refuse_values(scatter_list, "scatter_list", "source")
        move, cached = Movement(Kind.SCATTER, recv=memory.flat, root=root), cached._replace(send=None)
        return Prepared(agreed, move, [tensor], after=after, cached=cached, memories=(memory,))
    need_values(scatter_list, "scatter_list", "source", writable=False)
    (source,) = sources
    check_same_size("scatter_list", source.memories, memory)
    packed, displs = one_source_buffer(source, () if async_op else (memory,), g.pair.native.apart_from(Kind.SCATTER))
    counts = [memory.flat.size] * g.size() if displs else None
    return Prepared(
        agreed,
        Movement(
            Kind.SCATTER,
            send=packed,
            recv=memory.flat,
            sendcounts=counts,
            senddispls=displs,
            root=root,
        ),
        [tensor],
        inputs=source.waits,
        before=source.gather,
        after=after,
        cached=cached,
        memories=(memory, *source.memories),
    )


def reduce_scatter(
    g: ProcessGroup,
    cached: Cached,
    output: AnyArray,
    input_list: list[AnyArray],
    op: RedOpType | ReduceOp,
    async_op: bool,
) -> Prepared:
    """Prepare a ``reduce_scatter``, whose blocks may differ in size."""
    result, source = list_memories(
        "reduce_scatter" if is_unscaled(op) else "",
        ListArgument(output, "output", True),
        ListArgument(input_list, "input_list", False, g.size()),
    )
    memory = wide(result.memories[0])
    source.memories = [wide(item) for item in source.memories]
    same_dtype(memory, *source.memories)
    counts = tuple(item.flat.size for item in source.memories)
    if counts[g.rank()] != memory.flat.size:
        raise ValueError(
            f"reduce_scatter: output has {memory.flat.size} elements, but input_list[{g.rank()}] has {counts[g.rank()]}"
        )
    packed, _ = one_source_buffer(source, () if async_op else (memory,), NEVER)  # MPI has no starts of these blocks
    return _reduced(g, cached, "reduce_scatter", memory, source, packed, op, counts, output, source.waits)


def reduce_scatter_single(
    g: ProcessGroup, cached: Cached, output: AnyArray, input: AnyArray, op: RedOpType | ReduceOp, function: str
) -> Prepared:
    """Prepare a reduction of equal blocks in one array; ``function`` is the name that the program used."""
    pieces = pieces_reduced(op) * pieces_of_blocks(g.size())
    result, source = list_memories(
        "reduce_scatter" if is_unscaled(op) else "",
        ListArgument(output, "output", True, pieces=pieces * g.size()),
        ListArgument(input, "input", pieces=pieces),
        size=min,
    )
    memory, sending = wide(result.memories[0]), wide(source.memories[0])
    source.memories = [sending]
    same_dtype(memory, sending)
    if sending.flat.size != g.size() * memory.flat.size:
        raise ValueError(
            f"{function}: input must have {g.size()} x {memory.flat.size} elements, got {sending.flat.size}"
        )
    counts, packed = (memory.flat.size,) * g.size(), source_apart_from(memory, source)
    return _reduced(g, cached, function, memory, source, packed, op, counts, output, (sending,))


def _reduced(
    g: ProcessGroup,
    cached: Cached,
    function: str,
    memory: Memory,
    source: ListMemory,
    packed: Array,
    op: RedOpType | ReduceOp,
    counts: tuple[int, ...],
    output: AnyArray,
    inputs: tuple[Memory, ...],
) -> Prepared:
    """Prepare a reduction of which each member gets one block."""
    reduction = resolve_reduction(function, op, memory.dtype, memory.named)
    if reduction.factor is not None:
        for each in inputs:
            each.filled()
    uneven = len(set(counts)) > 1
    move = Movement(
        Kind.REDUCE_SCATTER,
        send=reduction.before(packed),
        recv=memory.flat,
        sendcounts=counts if uneven else None,
        op=reduction.mpi_op,
        vector=uneven,
    )
    return Prepared(
        (str(reduction.op), memory.name, ("blocks", counts) if uneven else ("elements", counts[0])),
        move,
        [output],
        inputs=inputs,
        before=source.gather,
        after=all_steps_of(result_finisher(memory, reduction, g.size()), result_unpacker([memory])),
        cached=cached,
        memories=(memory, *source.memories),
        average=reduction.average,
    )


def all_to_all_single(
    g: ProcessGroup,
    cached: Cached,
    output: AnyArray,
    input: AnyArray,
    output_split_sizes: list[int] | None,
    input_split_sizes: list[int] | None,
) -> Prepared:
    """Prepare an exchange of parts of one array."""
    pieces = pieces_of_blocks(g.size())
    source, result = list_memories(
        "all_to_all", ListArgument(input, "input", pieces=pieces), ListArgument(output, "output", True, pieces=pieces)
    )
    (given,), (out,) = source.memories, result.memories
    same_dtype(out, given)
    received = _splits(out, output_split_sizes, g.size(), "output")
    sent = _splits(given, input_split_sizes, g.size(), "input")
    send = source_apart_from(out, source)
    ready = _exchange("all_to_all_single", cached, source, send, out.flat, sent, received, (out, given))
    ready.outputs, ready.inputs, ready.after = [output], (given,), result_unpacker([out])
    return ready


def all_to_all(
    g: ProcessGroup,
    cached: Cached,
    output_tensor_list: list[AnyArray],
    input_tensor_list: list[AnyArray],
    async_op: bool,
) -> Prepared:
    """Prepare an exchange of lists of arrays."""
    result, source = list_memories(
        "all_to_all",
        ListArgument(output_tensor_list, "output_tensor_list", True, g.size()),
        ListArgument(input_tensor_list, "input_tensor_list", False, g.size()),
    )
    outputs, inputs = result.memories, source.memories
    same_dtype(*outputs, *inputs)
    received, sent = [o.flat.size for o in outputs], [i.flat.size for i in inputs]
    least = g.pair.native.apart_from(Kind.ALL_TO_ALL)
    packed, recvdispls, after = one_result_buffer(result, () if async_op else inputs, least)
    send, senddispls = one_source_buffer(source, () if async_op else outputs, least)
    ready = _exchange("all_to_all", cached, source, send, packed, sent, received, (*outputs, *inputs))
    ready.move.senddispls, ready.move.recvdispls, ready.move.apart = senddispls, recvdispls, True
    ready.outputs, ready.inputs, ready.after = list(output_tensor_list), source.waits, after
    return ready


def _exchange(
    op: str,
    cached: Cached,
    source: ListMemory,
    send: Array,
    recv: Array,
    sent: list[int],
    received: list[int],
    memories: tuple[Memory, ...],
) -> Prepared:
    """Prepare an exchange of parts, except its outputs and inputs; the call is cached if all parts are equal, or as parts."""
    uneven = len({*sent, *received}) > 1
    if uneven:
        unequal.add(op)
    in_parts = cached.key is not None and cached.key[1] is OF_ANY_SIZE
    return Prepared(
        (memories[0].name,),
        Movement(Kind.ALL_TO_ALL, send=send, recv=recv, sendcounts=sent, recvcounts=received),
        [],
        before=source.gather,
        uneven=uneven,
        detail=NOTHING if uneven else sent[0],
        cached=NOT_CACHED if uneven and not in_parts else cached,
        memories=memories,
        prepared_as=PreparedExchange if in_parts else PreparedOperation,
    )


class PreparedExchange(PreparedOperation):
    """An exchange of parts of any size, prepared for a group: on one node the parts and their lengths come with the round.

    The members compare the lengths. If these differ, all members go the general way. Parts that are too long to come with the
    round are copied from process to process when the lengths are known, or go the general way if the kernel does not copy them.
    """

    __slots__ = ("_node",)

    def bind(self, group: ProcessGroup, dtype: np.dtype[Any], send: Any, recv: Any) -> PreparedOperation:
        """Prepare the call for a group, and for lists of parts of the dtype."""
        self._node = group.pair.through(self.kind, EXCHANGE_BYTES)
        self.nbytes, self.uneven = min(EXCHANGE_BYTES, 0 if self._node is None else self._node.room), True
        return super().bind(group, dtype, send, recv)

    def _round(self, print_: int, eager: int = 0) -> Words:
        return make_words(print_, self.nbytes, uneven=True, eager=eager)

    def _bind_shared(self, group: ProcessGroup, print_: int, send: Any, recv: Any) -> None:
        if not self.nbytes or self._node is None:
            return
        self.segment, self.poll_ns = self._node.in_one_step(self.kind, self.nbytes), poll_ns(0, waiting.oversubscribed)
        self.places = self.agreement.channel.places  # type: ignore[attr-defined]
        self.eager_words = self._round(print_, self.nbytes + 1)
        self.later_words = (*self.eager_words[:-1], 1)  # asynchronous: so is the general way if the lengths differ
        more = {"result": "exchanged", "parts": group.size()}
        copies = group.pair.through(self.kind, NEVER) is not None
        place = self._node.in_single_copy(self.kind, NEVER)[2] if copies else -1
        self.shared = self._shared(group, send, recv, self.eager_words, 0, place, **more)
        self.later = self._shared(group, send, recv, self.later_words, 0, place, **more)

    def _bytes_sent(self, size: int, send: Any) -> int:
        return self.nbytes

    def fits(self, send: Any, recv: Any) -> bool:
        """Return whether lists have parts of the dtype that can be moved without a copy, and shared memory is made, if any is."""
        if self._node is not None and not self.nbytes:
            return False
        if type(send) is not list or type(recv) is not list or not len(send) == len(recv) == len(self.send_shapes):
            return False
        parts = [*send, *recv]
        if not all(is_readable(each) and each.dtype == self.dtype and each.dtype.isnative for each in parts):
            return False
        return all(each.flags.writeable for each in recv) and are_disjoint(recv)

    def describe(self, request: Request) -> CallDescription:
        """Return the description of one start."""
        call = super().describe(request)
        call.uneven, call.detail, call.block_bytes = _sizes(request)
        return call

    def moves_lists(self, send: Any, recv: Any) -> bool:
        """Return whether the lists of an asynchronous call have room, and are compared as a whole until the wait."""
        if self._node is None:  # through MPI
            return True
        shared: Any = self.later
        return shared is not None and bool(shared.accepts(send, recv)) and not is_sampled(recv)

    def _words(self, group: ProcessGroup, request: Request, eager: bool) -> Words | None:
        words = super()._words(group, request, eager)
        assert words is not None  # an exchange is compared at each level
        if eager:
            return words
        uneven, detail, largest = _sizes(request)
        return (*words[:3], int(uneven), largest, detail, detail if detail == NOTHING else -detail, *words[7:])

    def _schedule(self, group: ProcessGroup, request: Request) -> Any:
        return None


def _sizes(request: Request) -> tuple[bool, int, int]:
    """Return whether the parts differ in size, the number of elements of equal parts, and the bytes of the largest part."""
    if request.send is None:  # given up before the request had its arrays
        return True, NOTHING, 0
    parts = [*request.send, *request.recv]
    sizes = {each.size for each in parts}
    return len(sizes) > 1, NOTHING if len(sizes) > 1 else sizes.pop(), max(each.nbytes for each in parts)


def _splits(memory: Memory, splits: Any, size: int, name: str) -> list[int]:
    """Return the number of elements for each rank, from the number of rows for each rank."""
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
