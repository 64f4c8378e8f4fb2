"""The array collectives: check this rank's arguments, describe the call, hand it on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np

from mpicoll import execution
from mpicoll.buffers.array import AnyArray, Array, Memory, adapt, adapt_list, same_dtype
from mpicoll.buffers.dtypes import Reduction, resolve_reduction
from mpicoll.buffers.half import wide
from mpicoll.buffers.protocols import viewed
from mpicoll.buffers.reduce_op import RedOpType, ReduceOp
from mpicoll.checks.call import NOTHING, Call, Site, call_site
from mpicoll.checks.inflight import SEALED_BYTES, Flight, Seal, registry, written
from mpicoll.engines.base import Kind, Movement
from mpicoll.errors import ARGUMENT
from mpicoll.execution import Repeated
from mpicoll.groups import ProcessGroup, Stopping, member_or_warn, no_global_peer, peer_rank
from mpicoll.work import Work

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
]


MOST_REPEATED = 256


class Prepared:
    """What the checks of one rank's arguments came to: the key of the call, what to move, what to do around it.

    ``inputs`` are the memories that the transfer reads: they are packed when it starts. ``stopping`` is what the
    agreement of a barrier carries signals for.
    """

    __slots__ = ("after", "before", "detail", "inputs", "key", "move", "outputs", "stopping", "uneven")

    def __init__(
        self,
        key: tuple[Any, ...],
        move: Movement,
        outputs: list[Any],
        *,
        inputs: tuple[Memory, ...] = (),
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
        uneven: bool = False,
        detail: int = NOTHING,
        stopping: Stopping | None = None,
    ) -> None:
        self.key = key
        self.stopping = stopping
        self.move = move
        self.outputs = outputs
        self.inputs = inputs
        self.before = before
        self.after = after
        self.uneven = uneven
        self.detail = detail


def run_prepared(
    op: str,
    group: ProcessGroup,
    async_op: bool,
    timeout: timedelta | None,
    prepare: Callable[[ProcessGroup], Prepared],
    name: str | None,
    alias: str = "",
) -> Work | None:
    """Check the arguments; what is wrong with them takes part in the agreement, so that all members raise."""
    site = call_site()
    execution.enter(group, op)
    try:
        limit = execution.call_limit(group, timeout)
        execution.check_name(name)
        ready = prepare(group)
        flight = _flight(group, op, site, ready, async_op)
    except Exception as error:
        setattr(error, ARGUMENT, True)
        call = Call(op, (), site, error=error, alias=alias)
        execution.run(group, call, None, outputs=[], limit=group.timeout)
        raise AssertionError("a call with wrong arguments always raises") from error
    key = ready.key if name is None else (*ready.key, ("name", name))
    call = Call(op, key, site, uneven=ready.uneven, detail=ready.detail, alias=alias)
    carried = None
    if ready.stopping is not None:
        call.block_bytes, carried = ready.stopping.brings(), ready.stopping.carried
    work = execution.run(
        group,
        call,
        carried or ready.move,
        outputs=ready.outputs,
        async_op=async_op,
        limit=limit,
        before=_both(*(memory.pack for memory in ready.inputs), ready.before) if ready.inputs else ready.before,
        after=ready.after,
    )
    return None if work is None else work.fly(flight)


def _flight(group: ProcessGroup, op: str, site: Site, ready: Prepared, async_op: bool) -> Flight | None:
    """Compare the memory of a call with that of the operations under way, and return what is to be kept of it.

    Raises:
        BufferInUseError: one of them uses it; raised on all members.
    """
    if not group.compares or not (async_op or registry.flights):
        return None
    move = ready.move
    writes: list[Array] = []
    if move.recv is not None and not (move.kind is Kind.BROADCAST and move.root == group.rank()):
        writes = [array for array in map(viewed, ready.outputs) if array is not None]
    flight = Flight(
        op,
        site,
        reads=[memory.own for memory in ready.inputs if memory.pack is None or memory.origin is not None],
        writes=writes,
        gone=lambda: group.broken is not None or group.destroyed,
        group=group.display,
    )
    registry.check(flight)
    if not async_op:
        flight.let_go()
        return None
    flight.seal()
    if writes and sum(array.nbytes for array in writes) <= SEALED_BYTES:
        _watch_results(flight, ready, writes)
    return flight


def _watch_results(flight: Flight, ready: Prepared, arrays: list[Array]) -> None:
    """Have an asynchronous call move through memory of the library, so that a write of the program to its results shows."""
    move, result, found_before, found_after = ready.move, ready.move.recv, ready.before, ready.after
    assert result is not None
    own = np.empty_like(result) if any(np.may_share_memory(result, array) for array in arrays) else result
    seal = Seal(arrays)
    dirty = False

    def before() -> None:
        nonlocal seal, dirty
        dirty = seal.broken()
        if found_before is not None:
            found_before()
        if own is not result:
            own[...] = result
        seal = Seal(arrays)

    def after() -> None:
        if dirty or seal.broken():
            raise written(flight.op, flight.site, flight.group)
        if own is not result:
            result[...] = own
        if found_after is not None:
            found_after()
        flight.seal_results()

    ready.move, ready.before, ready.after = replace(move, recv=own), before, after


def _unpacker(memories: list[Memory], packed: Array | None = None) -> Callable[[], None] | None:
    """Return what writes results back: blocks of ``packed`` into each memory, then each memory into its array."""
    hooks = [memory.unpack for memory in memories if memory.unpack is not None]
    if packed is None and not hooks:
        return None

    def unpack() -> None:
        if packed is not None:
            at = 0
            for memory in memories:
                memory.flat[...] = packed[at : at + memory.flat.size]
                at += memory.flat.size
        for hook in hooks:
            hook()

    return unpack


def _scaling(reduction: Reduction, memory: Memory) -> Callable[[], None] | None:
    """Return what puts this rank's multiplied contribution in place, for PREMUL_SUM: once all are known to make the call."""
    if reduction.factor is None:
        return None
    scaled = reduction.before(memory.filled())

    def scale() -> None:
        memory.flat[...] = scaled

    return scale


def remember(group: ProcessGroup, key: Any, call: Repeated, memory: Memory | None = None) -> None:
    """Keep a call, so that it costs less when it is made again with an array whose own memory moves as it is."""
    if memory is not None and memory.named:
        return  # its elements are not what travels
    if len(group.repeated) >= MOST_REPEATED:
        group.repeated.clear()
    group.repeated[key] = call


def _both(*steps: Callable[[], None] | None) -> Callable[[], None] | None:
    wanted = [step for step in steps if step is not None]
    if not wanted:
        return None

    def all_steps() -> None:
        for step in wanted:
            step()

    return all_steps


def broadcast(
    tensor: AnyArray,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
) -> Work | None:
    """Copy ``tensor`` of one rank to all members of the group.

    Called by all members with the same source, dtype and number of elements.

    Args:
        tensor: on the source what is sent, on the others where it is received; an array of any layout, whose elements move
            in C order (docs/arrays.md).
        src: global rank of the source; or ``group_src``, its rank in the group.
        group: the group; default the world.
        async_op: return a :class:`Work` at once.
        timeout: the limit of this call; default the group's.
        name: a name for this call, which must be the same on all members (or given by none).

    Raises:
        TypeError, ValueError: wrong arguments, before anything moves. At check level ``full`` the other members raise
            CollectiveMismatchError; at the others this rank alone raises.
        CollectiveMismatchError: the members made different calls, or the arguments of one are wrong; the group is still good.
        BufferInUseError: an operation under way uses the same memory, and one of the two writes it (of this the other members
            raise CollectiveMismatchError); or it was written before the Work's ``wait``. At ``full`` alone.
        CollectiveTimeoutError: a member did not come within the limit.
        PeerFailedError, PeerExitedError: a member failed, or ended without making this call.
        DeadlockError: it is certain that ranks, this one among them, wait for each other and nobody can release them.
        GroupBrokenError: a member gave the group up, while this one waited or before.
        DistBackendError: MPI reported an error.

    After the last five the group is broken. With ``async_op`` what the others do shows in the Work's ``wait``.

    Source: torch.distributed.broadcast; MPI-4.1 section 6.4.
    """
    no_global_peer(group, src)
    found = member_or_warn(group, "broadcast")
    if found is None:
        return None
    if (
        not async_op
        and timeout is None
        and name is None
        and type(tensor) is np.ndarray
        and type(src) is int
        and group_src is None
    ):
        known = None if registry.flights else found.repeated.get((src, tensor.dtype, tensor.size, "broadcast"))
        if known is not None and tensor.flags.carray:
            execution.repeat(found, known, tensor.reshape(-1), sys._getframe(1))
            return None

    def prepare(g: ProcessGroup) -> Prepared:
        root = peer_rank(g, src, group_src, "src")
        memory = adapt(tensor, "tensor", writable=g.rank() != root)
        key = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
        after = None if g.rank() == root else _unpacker([memory])
        if type(src) is int and memory.flat.nbytes <= execution.REPEATED_BYTES:
            again = Repeated("broadcast", key, Kind.BROADCAST, root=root)
            remember(g, (src, memory.dtype, memory.flat.size, "broadcast"), again, memory)
        inputs = (memory,) if g.rank() == root else ()
        return Prepared(
            key, Movement(Kind.BROADCAST, recv=memory.flat, root=root), [tensor], inputs=inputs, after=after
        )

    return run_prepared("broadcast", found, async_op, timeout, prepare, name)


def all_reduce(
    tensor: AnyArray,
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
) -> Work | None:
    """Reduce ``tensor`` over all members, in place; all of them hold the result.

    Called by all members with the same op, dtype and number of elements.

    Args:
        tensor: input and output. float16 and bfloat16 are reduced as float32, and rounded once.
        op: SUM, AVG (floating point and complex), PRODUCT, MIN, MAX, BAND, BOR, BXOR (integers and bool) or
            ``PREMUL_SUM(factor)``. On bool SUM and MAX are logical or, PRODUCT and MIN logical and.
        group, async_op, timeout, name: as in :func:`broadcast`.

    Raises:
        RuntimeError, ValueError: the op has no meaning on this dtype.
        Others as :func:`broadcast`.

    Source: torch.distributed.all_reduce; MPI-4.1 section 6.9.6.
    """
    found = member_or_warn(group, "all_reduce")
    if found is None:
        return None
    if not async_op and timeout is None and name is None and type(tensor) is np.ndarray and type(op) is RedOpType:
        known = None if registry.flights else found.repeated.get((op, tensor.dtype, tensor.size))
        if known is not None and tensor.flags.carray:
            execution.repeat(found, known, tensor.reshape(-1), sys._getframe(1))
            return None

    def prepare(g: ProcessGroup) -> Prepared:
        memory = wide(adapt(tensor, "tensor", writable=True))
        reduction = resolve_reduction("all_reduce", op, memory.dtype, memory.named)
        flat = memory.flat
        key = (str(reduction.op), memory.name, ("elements", flat.size))
        before = _scaling(reduction, memory)
        average = (lambda: reduction.after(flat, g.size())) if reduction.average else None
        if before is None and flat.nbytes <= execution.REPEATED_BYTES:
            remember(
                g,
                (op, memory.dtype, flat.size),
                Repeated("all_reduce", key, Kind.ALL_REDUCE, mpi_op=reduction.mpi_op, average=reduction.average),
                memory,
            )
        return Prepared(
            key,
            Movement(Kind.ALL_REDUCE, recv=flat, op=reduction.mpi_op),
            [tensor],
            inputs=(memory,),
            before=before,
            after=_both(average, _unpacker([memory])),
        )

    return run_prepared("all_reduce", found, async_op, timeout, prepare, name)


def reduce(
    tensor: AnyArray,
    dst: int | None = None,
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
) -> Work | None:
    """Reduce ``tensor`` over all members; the rank ``dst`` holds the result in ``tensor``, the others keep theirs.

    Called by all members with the same destination, op, dtype and number of elements.

    Args:
        tensor: input, and on the destination output.
        dst: global rank of the destination; or ``group_dst``, its rank in the group.
        op: as in :func:`all_reduce`.
        group, async_op, timeout, name: as in :func:`broadcast`.

    Raises: as :func:`all_reduce`.

    Source: torch.distributed.reduce; MPI-4.1 section 6.9.1.
    """
    found = member_or_warn(group, "reduce")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        root = peer_rank(g, dst, group_dst, "dst")
        at_root = g.rank() == root
        memory = wide(adapt(tensor, "tensor", writable=at_root))
        reduction = resolve_reduction("reduce", op, memory.dtype, memory.named)
        flat = memory.flat
        key = (str(reduction.op), ("root", g.ranks[root]), memory.name, ("elements", flat.size))
        if not at_root:
            send = flat if reduction.factor is None else reduction.before(memory.filled())
            move = Movement(Kind.REDUCE, send=send, root=root, op=reduction.mpi_op)
            return Prepared(key, move, [tensor], inputs=(memory,))
        before = _scaling(reduction, memory)
        average = (lambda: reduction.after(flat, g.size())) if reduction.average else None
        return Prepared(
            key,
            Movement(Kind.REDUCE, recv=flat, root=root, op=reduction.mpi_op),
            [tensor],
            inputs=(memory,),
            before=before,
            after=_both(average, _unpacker([memory])),
        )

    return run_prepared("reduce", found, async_op, timeout, prepare, name)


def all_gather(
    tensor_list: list[AnyArray],
    tensor: AnyArray,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
) -> Work | None:
    """Gather the ``tensor`` of every member into ``tensor_list`` on all of them.

    Called by all members with the same dtype. The blocks may differ in size: ``tensor_list[r]`` must then have as many
    elements as rank r's ``tensor``, on all members alike.

    Args:
        tensor_list: one output array for each member, by rank in the group.
        tensor: this rank's input.
        group, async_op, timeout, name: as in :func:`broadcast`.

    Raises: as :func:`broadcast`.

    Source: torch.distributed.all_gather; MPI-4.1 section 6.7.
    """
    found = member_or_warn(group, "all_gather")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        outputs = adapt_list(tensor_list, "tensor_list", writable=True, length=g.size())
        memory = adapt(tensor, "tensor", writable=False)
        same_dtype(memory, *outputs)
        counts = tuple(output.flat.size for output in outputs)
        if counts[g.rank()] != memory.flat.size:
            raise ValueError(
                f"all_gather: tensor has {memory.flat.size} elements, but its place tensor_list[{g.rank()}] has "
                f"{counts[g.rank()]}"
            )
        uneven = len(set(counts)) > 1
        packed = np.empty(sum(counts), memory.dtype)
        key = (memory.name, ("blocks", counts) if uneven else ("elements", counts[0]))
        move = Movement(
            Kind.ALL_GATHER, send=memory.flat, recv=packed, recvcounts=counts if uneven else None, vector=uneven
        )
        return Prepared(key, move, list(tensor_list), inputs=(memory,), after=_unpacker(outputs, packed))

    return run_prepared("all_gather", found, async_op, timeout, prepare, name)


def all_gather_single(
    output_tensor: AnyArray,
    input_tensor: AnyArray,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
) -> Work | None:
    """Gather the ``input_tensor`` of every member into one array on all of them.

    Called by all members with the same dtype and number of elements.

    Args:
        output_tensor: size x as many elements as the input, in the order of ranks: the concatenation along the first
            dimension, or the stack; only the number of elements matters.
        input_tensor: this rank's input.
        group, async_op, timeout, name: as in :func:`broadcast`.

    Raises: as :func:`broadcast`.

    Source: torch.distributed.all_gather_single (formerly all_gather_into_tensor); MPI-4.1 section 6.7.
    """
    return _all_gather_single("all_gather_single", output_tensor, input_tensor, group, async_op, timeout, name)


def all_gather_into_tensor(
    output_tensor: AnyArray,
    input_tensor: AnyArray,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
) -> Work | None:
    """Gather into one array: the older name of :func:`all_gather_single`, with the same arguments and errors.

    Source: torch.distributed.all_gather_into_tensor.
    """
    return _all_gather_single("all_gather_into_tensor", output_tensor, input_tensor, group, async_op, timeout, name)


def _all_gather_single(
    function: str,
    output_tensor: AnyArray,
    input_tensor: AnyArray,
    group: Any,
    async_op: bool,
    timeout: timedelta | None,
    name: str | None,
) -> Work | None:
    found = member_or_warn(group, function, stacklevel=4)
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        output = adapt(output_tensor, "output_tensor", writable=True)
        memory = adapt(input_tensor, "input_tensor", writable=False)
        same_dtype(output, memory)
        if output.flat.size != g.size() * memory.flat.size:
            raise ValueError(
                f"{function}: output_tensor must have {g.size()} x {memory.flat.size} elements, got {output.flat.size}"
            )
        # The input may be this rank's part of the output, as torch allows: MPI forbids that its buffers overlap.
        send = memory.filled().copy() if np.may_share_memory(output.flat, memory.flat) else memory.flat
        key = (memory.name, ("elements", memory.flat.size))
        move = Movement(Kind.ALL_GATHER, send=send, recv=output.flat)
        return Prepared(key, move, [output_tensor], inputs=(memory,), after=_unpacker([output]))

    return run_prepared("all_gather_single", found, async_op, timeout, prepare, name, function)


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
) -> Work | None:
    """Gather the ``tensor`` of every member into ``gather_list`` on the rank ``dst``.

    Called by all members with the same destination, dtype and number of elements.

    Args:
        tensor: this rank's input.
        gather_list: on the destination one output array for each member, of the input's size; elsewhere None or [].
        dst: global rank of the destination (default 0); or ``group_dst``, its rank in the group.
        group, async_op, timeout, name: as in :func:`broadcast`.

    Raises: as :func:`broadcast`.

    Source: torch.distributed.gather; MPI-4.1 section 6.5.
    """
    found = member_or_warn(group, "gather")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        root = peer_rank(g, dst, group_dst, "dst", default=0)
        memory = adapt(tensor, "tensor", writable=False)
        key = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
        if g.rank() != root:
            _forbidden(gather_list, "gather_list", "destination")
            return Prepared(key, Movement(Kind.GATHER, send=memory.flat, root=root), [], inputs=(memory,))
        if gather_list is not None and not isinstance(gather_list, list):
            adapt_list(gather_list, "gather_list", writable=True)
        if not gather_list:
            raise ValueError("Argument ``gather_list`` must be specified on destination rank.")
        outputs = adapt_list(gather_list, "gather_list", writable=True, length=g.size())
        _same_size("gather_list", outputs, memory)
        packed = np.empty(g.size() * memory.flat.size, memory.dtype)
        move = Movement(Kind.GATHER, send=memory.flat, recv=packed, root=root)
        return Prepared(key, move, list(gather_list), inputs=(memory,), after=_unpacker(outputs, packed))

    return run_prepared("gather", found, async_op, timeout, prepare, name)


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
) -> Work | None:
    """Send one array of ``scatter_list`` on the rank ``src`` to each member, which receives it in ``tensor``.

    Called by all members with the same source, dtype and number of elements.

    Args:
        tensor: where this rank's array is received.
        scatter_list: on the source one input array for each member, of the output's size; elsewhere None or [].
        src: global rank of the source (default 0); or ``group_src``, its rank in the group.
        group, async_op, timeout, name: as in :func:`broadcast`.

    Raises: as :func:`broadcast`.

    Source: torch.distributed.scatter; MPI-4.1 section 6.6.
    """
    no_global_peer(group, src)
    found = member_or_warn(group, "scatter")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        root = peer_rank(g, src, group_src, "src", default=0)
        memory = adapt(tensor, "tensor", writable=True)
        key = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
        after = _unpacker([memory])
        if g.rank() != root:
            _forbidden(scatter_list, "scatter_list", "source")
            return Prepared(key, Movement(Kind.SCATTER, recv=memory.flat, root=root), [tensor], after=after)
        if scatter_list is not None and not isinstance(scatter_list, list):
            adapt_list(scatter_list, "scatter_list", writable=False)
        if not scatter_list:
            raise ValueError("Argument ``scatter_list`` must be specified on source rank.")
        inputs = adapt_list(scatter_list, "scatter_list", writable=False, length=g.size())
        _same_size("scatter_list", inputs, memory)
        packed = np.concatenate([item.filled() for item in inputs])
        move = Movement(Kind.SCATTER, send=packed, recv=memory.flat, root=root)
        return Prepared(key, move, [tensor], after=after)

    return run_prepared("scatter", found, async_op, timeout, prepare, name)


def reduce_scatter(
    output: AnyArray,
    input_list: list[AnyArray],
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
) -> Work | None:
    """Reduce the lists of all members element by element; member r holds the result of ``input_list[r]`` in ``output``.

    Called by all members with the same op, dtype and sizes of the list's arrays, which may differ from each other.

    Args:
        output: as many elements as ``input_list`` holds at this rank's place.
        input_list: one input array for each member.
        op: as in :func:`all_reduce`.
        group, async_op, timeout, name: as in :func:`broadcast`.

    Raises: as :func:`all_reduce`.

    Source: torch.distributed.reduce_scatter; MPI-4.1 section 6.10.
    """
    found = member_or_warn(group, "reduce_scatter")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        memory = wide(adapt(output, "output", writable=True))
        inputs = [wide(item) for item in adapt_list(input_list, "input_list", writable=False, length=g.size())]
        same_dtype(memory, *inputs)
        counts = tuple(item.flat.size for item in inputs)
        if counts[g.rank()] != memory.flat.size:
            raise ValueError(
                f"reduce_scatter: output has {memory.flat.size} elements, but input_list[{g.rank()}] has {counts[g.rank()]}"
            )
        return _scatter_reduced(
            g, "reduce_scatter", memory, np.concatenate([item.filled() for item in inputs]), op, counts, output
        )

    return run_prepared("reduce_scatter", found, async_op, timeout, prepare, name)


def reduce_scatter_single(
    output: AnyArray,
    input: AnyArray,
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
) -> Work | None:
    """Reduce ``input`` over all members; member r holds the r-th of its equal parts in ``output``.

    Called by all members with the same op, dtype and number of elements.

    Args:
        output: one part.
        input: size x as many elements: the concatenation along the first dimension, or the stack.
        op: as in :func:`all_reduce`.
        group, async_op, timeout, name: as in :func:`broadcast`.

    Raises: as :func:`all_reduce`.

    Source: torch.distributed.reduce_scatter_single (formerly reduce_scatter_tensor); MPI-4.1 section 6.10.1.
    """
    return _reduce_scatter_single("reduce_scatter_single", output, input, op, group, async_op, timeout, name)


def reduce_scatter_tensor(
    output: AnyArray,
    input: AnyArray,
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
) -> Work | None:
    """Reduce and scatter one array: the older name of :func:`reduce_scatter_single`, with the same arguments and errors.

    Source: torch.distributed.reduce_scatter_tensor.
    """
    return _reduce_scatter_single("reduce_scatter_tensor", output, input, op, group, async_op, timeout, name)


def _reduce_scatter_single(
    function: str,
    output: AnyArray,
    source: AnyArray,
    op: RedOpType | ReduceOp,
    group: Any,
    async_op: bool,
    timeout: timedelta | None,
    name: str | None,
) -> Work | None:
    found = member_or_warn(group, function, stacklevel=4)
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        memory = wide(adapt(output, "output", writable=True))
        sending = wide(adapt(source, "input", writable=False))
        same_dtype(memory, sending)
        if sending.flat.size != g.size() * memory.flat.size:
            raise ValueError(
                f"{function}: input must have {g.size()} x {memory.flat.size} elements, got {sending.flat.size}"
            )
        shares = np.may_share_memory(memory.flat, sending.flat)
        counts = (memory.flat.size,) * g.size()
        packed = sending.filled().copy() if shares else sending.flat
        return _scatter_reduced(g, function, memory, packed, op, counts, output, inputs=(sending,))

    return run_prepared("reduce_scatter_single", found, async_op, timeout, prepare, name, function)


def _scatter_reduced(
    g: ProcessGroup,
    name: str,
    memory: Memory,
    packed: Array,
    op: RedOpType | ReduceOp,
    counts: tuple[int, ...],
    output: AnyArray,
    inputs: tuple[Memory, ...] = (),
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
    average = (lambda: reduction.after(memory.flat, g.size())) if reduction.average else None
    return Prepared(key, move, [output], inputs=inputs, after=_both(average, _unpacker([memory])))


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
) -> Work | None:
    """Send each member one part of ``input`` and receive one part of ``output`` from each.

    Called by all members with the same dtype. What rank i sends to rank j must be what j expects from i.

    Args:
        output: where the parts are received, one behind the other along dimension 0.
        input: the parts to send, likewise.
        output_split_sizes: rows of ``output`` from each member; None or []: equal parts.
        input_split_sizes: rows of ``input`` to each member; None or []: equal parts.
        group, async_op, timeout, name: as in :func:`broadcast`.

    Raises:
        RuntimeError: dimension 0 does not divide equally, or the split sizes do not add up to it (torch's texts).
        Others as :func:`broadcast`.

    Source: torch.distributed.all_to_all_single; MPI-4.1 section 6.8.
    """
    found = member_or_warn(group, "all_to_all_single")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        out, source = adapt(output, "output", writable=True), adapt(input, "input", writable=False)
        same_dtype(out, source)
        received = _splits(out, output_split_sizes, g.size(), "output")
        sent = _splits(source, input_split_sizes, g.size(), "input")
        send = source.filled().copy() if np.may_share_memory(out.flat, source.flat) else source.flat
        return _exchange(out.name, send, out.flat, sent, received, [output], _unpacker([out]), (source,))

    return run_prepared("all_to_all_single", found, async_op, timeout, prepare, name)


def all_to_all(
    output_tensor_list: list[AnyArray],
    input_tensor_list: list[AnyArray],
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
) -> Work | None:
    """Send ``input_tensor_list[j]`` to member j, and receive ``output_tensor_list[i]`` from member i.

    Called by all members with the same dtype. The sizes may differ from pair to pair.

    Args:
        output_tensor_list: one output array for each member.
        input_tensor_list: one input array for each member.
        group, async_op, timeout, name: as in :func:`broadcast`.

    Raises: as :func:`broadcast`.

    Source: torch.distributed.all_to_all; MPI-4.1 section 6.8.
    """
    found = member_or_warn(group, "all_to_all")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        outputs = adapt_list(output_tensor_list, "output_tensor_list", writable=True, length=g.size())
        inputs = adapt_list(input_tensor_list, "input_tensor_list", writable=False, length=g.size())
        same_dtype(*outputs, *inputs)
        received, sent = [o.flat.size for o in outputs], [i.flat.size for i in inputs]
        packed = np.empty(sum(received), outputs[0].dtype)
        send = np.concatenate([item.filled() for item in inputs])
        after = _unpacker(outputs, packed)
        return _exchange(outputs[0].name, send, packed, sent, received, list(output_tensor_list), after)

    return run_prepared("all_to_all", found, async_op, timeout, prepare, name)


def _exchange(
    dtype: str,
    send: Array,
    recv: Array,
    sent: list[int],
    received: list[int],
    outputs: list[Any],
    after: Callable[[], None] | None,
    inputs: tuple[Memory, ...] = (),
) -> Prepared:
    uneven = len({*sent, *received}) > 1
    move = Movement(Kind.ALL_TO_ALL, send=send, recv=recv, sendcounts=sent, recvcounts=received)
    detail = NOTHING if uneven else sent[0]
    return Prepared((dtype,), move, outputs, inputs=inputs, after=after, uneven=uneven, detail=detail)


def _splits(memory: Memory, splits: list[int] | None, size: int, name: str) -> list[int]:
    """Return elements for each rank from rows for each rank."""
    rows = memory.shape[0] if memory.shape else 1
    row = memory.flat.size // rows if rows else int(np.prod(memory.shape[1:]))
    if isinstance(splits, np.ndarray):
        raise TypeError(f"{name}_split_sizes must be a list of integers, not an array: pass x.tolist()")
    if not splits:
        if splits is not None and not isinstance(splits, list):
            raise TypeError(f"{name}_split_sizes must be a list of integers, not {type(splits).__name__}")
        if rows % size:
            raise RuntimeError(
                f"Tensor's dim 0 does not divide equally across group size: {name} has {rows} rows for {size} ranks"
            )
        return [rows // size * row] * size
    if not isinstance(splits, list) or not all(hasattr(n, "__index__") and not isinstance(n, bool) for n in splits):
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


def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
    *,
    name: str | None = None,
) -> Work | None:
    """Return when all members have called it.

    Called by all members.

    Args:
        group: the group; default the world.
        async_op: return a :class:`Work` at once.
        device_ids: taken and ignored, as on torch's CPU backends (a list of integers).
        timeout: the limit of this call; default the group's.
        name: a name for this barrier, which must be the same on all members (or given by none).

    Raises: as :func:`broadcast`, but for memory. It compares at check level ``roll``, too.

    Source: torch.distributed.barrier; MPI-4.1 section 6.3.
    """
    found = member_or_warn(group, "barrier")
    if found is None:
        return None
    stopping = found.stopping if not async_op else None
    if not async_op and timeout is None and device_ids is None and name is None:
        execution.repeat(found, _BARRIER, _NO_DATA, sys._getframe(1))
        if stopping is not None:
            stopping.deliver()
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        if device_ids is not None and not isinstance(device_ids, list):
            raise TypeError("Invalid function argument: device_ids type should be List[int]")
        return Prepared((), Movement(Kind.BARRIER), [], stopping=stopping)

    work = run_prepared("barrier", found, async_op, timeout, prepare, name)
    if stopping is not None:
        stopping.deliver()
    return work


_BARRIER = Repeated("barrier", (), Kind.BARRIER)
_NO_DATA = np.empty(0, np.uint8)


def _forbidden(values: Any, name: str, role: str) -> None:
    if values is not None and not isinstance(values, list):
        adapt_list(values, name, writable=False)
    if values:
        raise ValueError(f"Argument ``{name}`` must NOT be specified on non-{role} ranks.")


def _same_size(name: str, memories: list[Memory], tensor: Memory) -> None:
    same_dtype(tensor, *memories)
    for i, memory in enumerate(memories):
        if memory.flat.size != tensor.flat.size:
            raise ValueError(
                f"{name}[{i}] has {memory.flat.size} elements, tensor has {tensor.flat.size}: all must be equal"
            )
