"""The array collectives: check this rank's arguments, describe the call, hand it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.checks.memory_in_use import SEALED_BYTES, Flight, Seal, claims, written
from mpicoll.diagnosis.call import Call
from mpicoll.errors import wrong_argument
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup, Stopping
from mpicoll.groups.registry import default, member_or_warn, peer_rank
from mpicoll.memory.adapt import adapt, adapt_list, memory_of, same_dtype, viewed
from mpicoll.memory.device import array as device_array
from mpicoll.memory.device.array import Held, Shadow
from mpicoll.memory.device.runtime import Fold
from mpicoll.memory.dtypes import HALVES, Reduction, dtype_name, resolve_reduction
from mpicoll.memory.half import WIDE, wide
from mpicoll.memory.layouts import joined
from mpicoll.memory.lists import Asked, Side, sides
from mpicoll.memory.memory import AnyArray, Array, Memory
from mpicoll.memory.reduce_op import RedOpType, ReduceOp
from mpicoll.operations import deferred, execution, repeating, riding
from mpicoll.operations.repeating import Repeated
from mpicoll.operations.work import Work
from mpicoll.runtime.call_site import Site, call_site, caller
from mpicoll.runtime.native import found as extension
from mpicoll.transports.base import Kind, Movement
from mpicoll.transports.control import AS_IT_IS, IN_PIECES, NOTHING
from mpicoll.transports.shm.control import EAGER_BYTES

if TYPE_CHECKING:
    from mpicoll.transports.device.ipc import Offer


MOST_BLOCKS = 16
"""Members up to which blocks of an array on a GPU move in pieces: a quarter of a MiB of each is copied by itself."""

_ndarray = np.ndarray


class Prepared:
    """What the checks of one rank's arguments came to: the key of the call, what to move, what to do around it.

    With an ``offer`` the movement only says what the call is about.

    ``inputs`` are the memories that the transfer reads: they are packed when it starts. ``awaits`` are those whose GPUs have to
    have come to the call before ``before`` is run. ``stopping`` is what the
    agreement of a barrier carries signals for.
    """

    __slots__ = (
        "after",
        "awaits",
        "before",
        "detail",
        "inputs",
        "key",
        "move",
        "offer",
        "outputs",
        "stopping",
        "uneven",
    )

    def __init__(
        self,
        key: tuple[Any, ...],
        move: Movement,
        outputs: list[Any],
        *,
        inputs: tuple[Memory, ...] = (),
        awaits: tuple[Memory, ...] = (),
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
        uneven: bool = False,
        detail: int = NOTHING,
        stopping: Stopping | None = None,
        offer: Offer | None = None,
    ) -> None:
        self.key = key
        self.offer = offer
        self.stopping = stopping
        self.move = move
        self.outputs = outputs
        self.inputs = inputs
        self.awaits = awaits
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
    stream: Any = None,
) -> Work | None:
    """Check the arguments; what is wrong with them takes part in the agreement, so that all members raise."""
    site = call_site()
    execution.enter(group, op)
    try:
        limit = execution.call_limit(group, timeout)
        execution.check_name(name)
        async_op = bool(async_op)
        with device_array.Noted(stream) as noted:
            ready = prepare(group)
        flight = _flight(group, op, site, ready, async_op)
    except Exception as error:
        call = Call(op, (), site, error=wrong_argument(error), alias=alias)
        execution.run(group, call, None, outputs=[], limit=group.timeout)
        raise AssertionError("a call with wrong arguments always raises") from error
    key = ready.key if name is None else (*ready.key, ("name", name))
    call = Call(op, key, site, uneven=ready.uneven, detail=ready.detail, alias=alias)
    carried: Any = None
    if ready.stopping is not None:
        call.signal, carried = ready.stopping.brings(), ready.stopping.carried
    if ready.offer is not None:
        call.device_reduction, call.device = ready.offer, IN_PIECES if ready.offer.in_pieces else 0
        call.block_bytes, move = ready.offer.nbytes, ready.move

        def carried(_: Any) -> Movement:
            return move
    else:
        call.device = _of_gpu(ready.move)

    work = execution.run(
        group,
        call,
        carried or ready.move,
        outputs=ready.outputs,
        async_op=async_op,
        limit=limit,
        ready=_all_ready((*ready.inputs, *ready.awaits), noted.asks),
        before=_packing(ready),
        after=ready.after,
    )
    return None if work is None else work.fly(flight)


def _untouched(op: Any) -> bool:
    """Whether nothing is done to the elements before MPI reduces them, or after."""
    return type(op) is RedOpType and op not in (RedOpType.AVG, RedOpType.PREMUL_SUM)


def _of_gpu(move: Movement) -> int:
    """Return how memory of a GPU is moved that is not copied as a whole; 0: there is none."""
    handed = [array.handed for array in (move.send, move.recv) if isinstance(array, Shadow)]
    return (AS_IT_IS if all(handed) else IN_PIECES) if handed else 0


def _finishing(memory: Memory, reduction: Reduction, size: int) -> Callable[[], None] | None:
    """Return what finishes a result when all of it is on the host; where it comes in pieces, each is finished by itself."""
    if not reduction.average:
        return None
    flat = memory.flat
    if isinstance(flat, Shadow):
        flat.finish = lambda piece: reduction.after(piece, size)
        return None
    return lambda: reduction.after(flat, size)


def _in_pieces(op: Any) -> int | None:
    """Return the bytes of an array on a GPU above which it is reduced in pieces; None where its elements are changed first."""
    return device_array.PIECES_FROM if type(op) is RedOpType and op is not RedOpType.PREMUL_SUM else None


def _of_blocks(size: int) -> int | None:
    """Return the bytes of all blocks above which they are moved in pieces; None where theirs would be too small."""
    return device_array.PIECES_FROM if size <= MOST_BLOCKS else None


def _device() -> Any:
    """Return the module of reductions on a GPU, which programs without one do not load."""
    from mpicoll.transports.device import ipc

    return ipc


def _held(g: ProcessGroup, tensor: Any, op: Any) -> Held | None:
    """Return an array that may be reduced on a GPU, if the members of the group may share one; else None."""
    if (
        not (g.pair.on_node and device_array.on_device(tensor))
        or type(op) is not RedOpType
        or op is RedOpType.PREMUL_SUM
    ):
        return None
    return None if registry.state().settings.cuda_ipc == "off" else device_array.hold(tensor, "tensor", writable=True)


def _offering(g: ProcessGroup, held: Held, tensor: Any, op: Any, by_host: Callable[[], Prepared]) -> Prepared:
    """Return what the checks of an ``all_reduce`` came to that may be made on the GPU that all members share.

    Args:
        by_host: returns the same by way of the host, for which memory is taken.
    """
    dtype = WIDE if held.named in HALVES else held.array.dtype
    reduction = resolve_reduction("all_reduce", op, dtype, held.named)
    agreed = (str(reduction.op), held.named or dtype_name(dtype), ("elements", held.origin.size))
    fold = Fold(reduction.mpi_op, held.each.wire, held.named, g.size() if reduction.average else 0)

    def otherwise() -> Any:
        found = by_host()
        return found.move, _all_ready(found.inputs, []), _packing(found), found.after

    offer = _device().Offer(g, held, fold, held.origin.size * dtype.itemsize, otherwise, held.in_pieces(_in_pieces(op)))
    return Prepared(agreed, Movement(Kind.ALL_REDUCE, recv=held.origin, op=reduction.mpi_op), [tensor], offer=offer)


def _packing(ready: Prepared) -> Callable[[], None] | None:
    """Return what is done just before data moves."""
    return _both(*(memory.pack for memory in ready.inputs), ready.before) if ready.inputs else ready.before


def _all_ready(memories: tuple[Memory, ...], noted: list[Callable[[], bool]]) -> Callable[[], bool] | None:
    """Return what says whether the GPUs have come to a call; None where all it uses is on the host."""
    asks = noted + [memory.ready for memory in memories if memory.ready is not None and not memory.direct]
    return (lambda: all(ask() for ask in asks)) if asks else None


def _flight(group: ProcessGroup, op: str, site: Site, ready: Prepared, async_op: bool) -> Flight | None:
    """Compare the memory of a call with that of the operations under way, and return what is to be kept of it.

    Raises:
        BufferInUseError: one of them uses it; raised on all members.
    """
    if not group.compares or not (async_op or claims.flights):
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
    claims.check(flight)
    if not async_op:
        flight.let_go()
        return None
    flight.seal()
    if writes and sum(array.nbytes for array in writes) <= SEALED_BYTES and not isinstance(move.recv, Shadow):
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

    ready.move, ready.before, ready.after = move.into(own), before, after


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


def _plain(memory: Memory) -> bool:
    return memory.pack is None and memory.unpack is None and not memory.named


def _into(side: Side, others: Sequence[Memory]) -> tuple[Array, Callable[[], None] | None]:
    """Return one buffer for a list of results, and what is done when they are in it; their own where it is one.

    Args:
        others: what the call reads, which must not be in that buffer; empty for a call that is not waited for.
    """
    if side.whole is not None:
        return side.whole, side.spread
    memories = side.memories
    if others and all(map(_plain, memories)):
        whole = joined([memory.flat for memory in memories])
        if whole is not None and not any(np.may_share_memory(whole, other.flat) for other in others):
            return whole, None
    packed = np.empty(sum(memory.flat.size for memory in memories), memories[0].dtype)
    return packed, _unpacker(memories, packed)


def _out_of(side: Side, others: Sequence[Memory]) -> Array:
    """Return the elements of a list in one buffer; their own where it is one.

    Args:
        others: what the call writes, which must not be in that buffer; empty for a call that is not waited for.
    """
    if side.whole is not None:
        return side.whole  # it is filled when the call begins
    memories = side.memories
    if others and all(map(_plain, memories)):
        whole = joined([memory.flat for memory in memories])
        if whole is not None and not any(np.may_share_memory(whole, other.flat) for other in others):
            return whole
    return np.concatenate([memory.filled() for memory in memories])


def _apart_from(result: Memory, source: Side) -> Array:
    """Return the elements that a call reads where they are not in the memory that it writes: MPI forbids that these overlap."""
    if source.whole is not None:
        return source.whole
    memory = source.memories[0]
    if isinstance(memory.flat, Shadow):
        return memory.flat  # both go in pieces, which those that overlap do not
    return memory.filled().copy() if np.may_share_memory(result.flat, memory.flat) else memory.flat


def _scaling(reduction: Reduction, memory: Memory) -> Callable[[], None] | None:
    """Return what puts this rank's multiplied contribution in place, for PREMUL_SUM: once all are known to make the call."""
    if reduction.factor is None:
        return None
    scaled = reduction.before(memory.filled())

    def scale() -> None:
        memory.flat[...] = scaled

    return scale


def _learn(g: ProcessGroup, key: Any, again: Repeated, memories: tuple[Memory, ...], send: Any, recv: Any) -> None:
    """Keep a call of plain arrays, whose own memory moves as it is, so that it costs less when it is made again.

    Args:
        key: what the program gave; None where the call was not plain.
        memories: of all arrays.
        send, recv: what this rank passes, and where its result goes.
    """
    if key is None or type(g) is not ProcessGroup:
        return
    if any(memory.named or memory.pack is not None or memory.unpack is not None for memory in memories):
        return
    riding.learn(g, key, again, memories[0].dtype, send, recv)


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
    stream: Any = None,
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
        stream: of arrays on a GPU, the stream before whose later work the results are there, and after whose earlier work the
            elements are read: CuPy's, torch's, or what has ``__cuda_stream__``. Default the current one (docs/gpu.md).

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
    key: Any = None
    if (
        type(tensor) is _ndarray
        and type(src) is int
        and not async_op
        and timeout is None
        and name is None
        and group_src is None
    ):
        key = ("broadcast", src, tensor.dtype, tensor.shape)
        if riding.again(group, key, tensor, tensor):
            return None
    found = member_or_warn(group, "broadcast")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        root = peer_rank(g, src, group_src, "src")
        memory = adapt(tensor, "tensor", writable=g.rank() != root, direct="broadcast", pieces=device_array.PIECES_FROM)
        agreed = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
        after = None if g.rank() == root else _unpacker([memory])
        again = Repeated("broadcast", agreed, Kind.BROADCAST, memory.flat.nbytes, root=root)
        _learn(g, key, again, (memory,), tensor if g.rank() == root else None, None if g.rank() == root else tensor)
        inputs = (memory,) if g.rank() == root else ()
        return Prepared(
            agreed, Movement(Kind.BROADCAST, recv=memory.flat, root=root), [tensor], inputs=inputs, after=after
        )

    return run_prepared("broadcast", found, async_op, timeout, prepare, name, stream=stream)


def all_reduce(
    tensor: AnyArray,
    op: RedOpType | ReduceOp = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    name: str | None = None,
    stream: Any = None,
) -> Work | None:
    """Reduce ``tensor`` over all members, in place; all of them hold the result.

    Called by all members with the same op, dtype and number of elements.

    Args:
        tensor: input and output. float16 and bfloat16 are reduced as float32, and rounded once.
        op: SUM, AVG (floating point and complex), PRODUCT, MIN, MAX, BAND, BOR, BXOR (integers and bool) or
            ``PREMUL_SUM(factor)``. On bool SUM and MAX are logical or, PRODUCT and MIN logical and.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises:
        RuntimeError, ValueError: the op has no meaning on this dtype.
        Others as :func:`broadcast`.

    Source: torch.distributed.all_reduce; MPI-4.1 section 6.9.6.
    """
    key: Any = None
    if type(tensor) is _ndarray and type(op) is RedOpType and timeout is None and name is None:
        known: Any = default.world if group is None else group
        if not async_op:
            key = (op, tensor.dtype, tensor.shape)
            try:  # as riding.again, without the call of it, which takes a sixth of what all takes
                ride = known.rides[key]
            except (KeyError, AttributeError, TypeError):
                pass
            else:
                if ride.shared is not None and extension.run(known, ride, tensor, tensor, caller()):
                    return None
                if riding.again(group, key, tensor, tensor):
                    return None
        elif tensor.nbytes <= EAGER_BYTES:
            begun = deferred.later(known, op, tensor, caller())
            if begun is not None:
                return begun
    found = member_or_warn(group, "all_reduce")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        direct = "all_reduce" if _untouched(op) else ""
        held = None if type(tensor) is _ndarray else _held(g, tensor, op)
        if held is not None and _device().Offer.possible(g, held, not async_op):
            return _offering(g, held, tensor, op, lambda: of(g, by_host(held)))
        if held is None or (direct and device_array.permits(direct, False)):
            return of(g, wide(adapt(tensor, "tensor", writable=True, direct=direct, pieces=_in_pieces(op))))
        return of(g, by_host(held))

    def by_host(held: Held) -> Memory:
        return wide(memory_of(held.stage(writable=True, pieces=_in_pieces(op))))

    def of(g: ProcessGroup, memory: Memory) -> Prepared:
        reduction = resolve_reduction("all_reduce", op, memory.dtype, memory.named)
        flat = memory.flat
        agreed = (str(reduction.op), memory.name, ("elements", flat.size))
        before = _scaling(reduction, memory)
        average = _finishing(memory, reduction, g.size())
        again = Repeated(
            "all_reduce",
            agreed,
            Kind.ALL_REDUCE,
            flat.nbytes,
            mpi_op=reduction.mpi_op,
            average=reduction.average,
        )
        _learn(g, key if before is None else None, again, (memory,), tensor, tensor)
        return Prepared(
            agreed,
            Movement(Kind.ALL_REDUCE, recv=flat, op=reduction.mpi_op),
            [tensor],
            inputs=(memory,),
            before=before,
            after=_both(average, _unpacker([memory])),
        )

    return run_prepared("all_reduce", found, async_op, timeout, prepare, name, stream=stream)


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
    stream: Any = None,
) -> Work | None:
    """Reduce ``tensor`` over all members; the rank ``dst`` holds the result in ``tensor``, the others keep theirs.

    Called by all members with the same destination, op, dtype and number of elements.

    Args:
        tensor: input, and on the destination output.
        dst: global rank of the destination; or ``group_dst``, its rank in the group.
        op: as in :func:`all_reduce`.
        group, async_op, timeout, name, stream: as in :func:`broadcast`.

    Raises: as :func:`all_reduce`.

    Source: torch.distributed.reduce; MPI-4.1 section 6.9.1.
    """
    key: Any = None
    if (
        type(tensor) is _ndarray
        and type(op) is RedOpType
        and type(dst) is int
        and not async_op
        and timeout is None
        and name is None
        and group_dst is None
    ):
        key = ("reduce", op, dst, tensor.dtype, tensor.shape)
        if riding.again(group, key, tensor, tensor):
            return None
    found = member_or_warn(group, "reduce")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        root = peer_rank(g, dst, group_dst, "dst")
        at_root = g.rank() == root
        direct = "reduce" if _untouched(op) else ""
        memory = wide(adapt(tensor, "tensor", writable=at_root, direct=direct, pieces=_in_pieces(op)))
        reduction = resolve_reduction("reduce", op, memory.dtype, memory.named)
        flat = memory.flat
        agreed = (str(reduction.op), ("root", g.ranks[root]), memory.name, ("elements", flat.size))
        again = Repeated(
            "reduce",
            agreed,
            Kind.REDUCE,
            flat.nbytes,
            mpi_op=reduction.mpi_op,
            root=root,
            average=reduction.average and at_root,
        )
        _learn(g, key if reduction.factor is None else None, again, (memory,), tensor, tensor if at_root else None)
        if not at_root:
            send = flat if reduction.factor is None else reduction.before(memory.filled())
            move = Movement(Kind.REDUCE, send=send, root=root, op=reduction.mpi_op)
            return Prepared(agreed, move, [tensor], inputs=(memory,))
        before = _scaling(reduction, memory)
        average = _finishing(memory, reduction, g.size())
        return Prepared(
            agreed,
            Movement(Kind.REDUCE, recv=flat, root=root, op=reduction.mpi_op),
            [tensor],
            inputs=(memory,),
            before=before,
            after=_both(average, _unpacker([memory])),
        )

    return run_prepared("reduce", found, async_op, timeout, prepare, name, stream=stream)


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
    plain = not async_op and timeout is None and name is None
    if plain and type(tensor) is _ndarray and type(tensor_list) is list:
        key = ("all_gather", tensor.dtype, tensor.shape)
        if riding.again(group, key, tensor, tensor_list):
            return None
    found = member_or_warn(group, "all_gather")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        results, source = sides(
            "all_gather", Asked(tensor_list, "tensor_list", True, g.size()), Asked(tensor, "tensor")
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
        packed, after = _into(results, () if async_op else (memory,))
        agreed = (memory.name, ("blocks", counts) if uneven else ("elements", counts[0]))
        again = Repeated("all_gather", agreed, Kind.ALL_GATHER, memory.flat.nbytes)
        _learn(g, None if uneven else key, again, (memory, *outputs), tensor, tensor_list)
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
    if (
        type(input_tensor) is _ndarray
        and type(output_tensor) is _ndarray
        and not async_op
        and timeout is None
        and name is None
    ):
        key = (function, input_tensor.dtype, input_tensor.shape, output_tensor.dtype, output_tensor.shape)
        if riding.again(group, key, input_tensor, output_tensor, 3):
            return None
    found = member_or_warn(group, function, stacklevel=4)
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        most = _of_blocks(g.size())
        source, result = sides(
            "all_gather",
            Asked(input_tensor, "input_tensor", pieces=None if most is None else most // g.size()),
            Asked(output_tensor, "output_tensor", True, pieces=most),
            size=min,
        )
        (memory,), (output,) = source.memories, result.memories
        same_dtype(output, memory)
        if output.flat.size != g.size() * memory.flat.size:
            raise ValueError(
                f"{function}: output_tensor must have {g.size()} x {memory.flat.size} elements, got {output.flat.size}"
            )
        # The input may be this rank's part of the output, as torch allows: MPI forbids that its buffers overlap.
        send = _apart_from(output, source)
        agreed = (memory.name, ("elements", memory.flat.size))
        again = Repeated("all_gather_single", agreed, Kind.ALL_GATHER, memory.flat.nbytes, alias=function)
        _learn(g, key, again, (memory, output), input_tensor, output_tensor)
        move = Movement(Kind.ALL_GATHER, send=send, recv=output.flat)
        return Prepared(
            agreed, move, [output_tensor], inputs=(memory,), before=source.gather, after=_unpacker([output])
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
        and timeout is None
        and name is None
        and group_dst is None
        and (gather_list is None or type(gather_list) is list)
        and (dst is None or type(dst) is int)
    ):
        key = ("gather", dst, tensor.dtype, tensor.shape)
        if riding.again(group, key, tensor, gather_list or None):
            return None
    found = member_or_warn(group, "gather")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        root = peer_rank(g, dst, group_dst, "dst", default=0)
        asked = [Asked(tensor, "tensor")]
        if g.rank() == root and isinstance(gather_list, list) and gather_list:
            asked.append(Asked(gather_list, "gather_list", True, g.size()))
        source, *results = sides("gather", *asked)
        (memory,) = source.memories
        agreed = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
        again = Repeated("gather", agreed, Kind.GATHER, memory.flat.nbytes, root=root)
        if g.rank() != root:
            _forbidden(gather_list, "gather_list", "destination")
            _learn(g, key, again, (memory,), tensor, None)
            return Prepared(agreed, Movement(Kind.GATHER, send=source.flat, root=root), [], inputs=(memory,))
        if gather_list is not None and not isinstance(gather_list, list):
            adapt_list(gather_list, "gather_list", writable=True)
        if not gather_list:
            raise ValueError("Argument ``gather_list`` must be specified on destination rank.")
        (result,) = results
        outputs = result.memories
        _same_size("gather_list", outputs, memory)
        _learn(g, key, again, (memory, *outputs), tensor, gather_list)
        packed, after = _into(result, () if async_op else (memory,))
        move = Movement(Kind.GATHER, send=source.flat, recv=packed, root=root)
        return Prepared(agreed, move, list(gather_list), inputs=(memory,), before=source.gather, after=after)

    return run_prepared("gather", found, async_op, timeout, prepare, name, stream=stream)


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
        and timeout is None
        and name is None
        and group_src is None
        and (scatter_list is None or type(scatter_list) is list)
        and (src is None or type(src) is int)
    ):
        key = ("scatter", src, tensor.dtype, tensor.shape)
        if riding.again(group, key, scatter_list or None, tensor):
            return None
    found = member_or_warn(group, "scatter")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        root = peer_rank(g, src, group_src, "src", default=0)
        asked = [Asked(tensor, "tensor", True)]
        if g.rank() == root and isinstance(scatter_list, list) and scatter_list:
            asked.append(Asked(scatter_list, "scatter_list", False, g.size()))
        result, *sources = sides("scatter", *asked)
        (memory,) = result.memories
        agreed = (("root", g.ranks[root]), memory.name, ("elements", memory.flat.size))
        again = Repeated("scatter", agreed, Kind.SCATTER, memory.flat.nbytes, root=root)
        after = _unpacker([memory])
        if g.rank() != root:
            _forbidden(scatter_list, "scatter_list", "source")
            _learn(g, key, again, (memory,), None, tensor)
            return Prepared(agreed, Movement(Kind.SCATTER, recv=memory.flat, root=root), [tensor], after=after)
        if scatter_list is not None and not isinstance(scatter_list, list):
            adapt_list(scatter_list, "scatter_list", writable=False)
        if not scatter_list:
            raise ValueError("Argument ``scatter_list`` must be specified on source rank.")
        (source,) = sources
        _same_size("scatter_list", source.memories, memory)
        _learn(g, key, again, (memory, *source.memories), scatter_list, tensor)
        packed = _out_of(source, () if async_op else (memory,))
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
    plain = not async_op and timeout is None and name is None and type(op) is RedOpType
    if plain and type(output) is _ndarray and type(input_list) is list:
        key = ("reduce_scatter", op, output.dtype, output.shape)
        if riding.again(group, key, input_list, output):
            return None
    found = member_or_warn(group, "reduce_scatter")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        result, source = sides(
            "reduce_scatter" if _untouched(op) else "",
            Asked(output, "output", True),
            Asked(input_list, "input_list", False, g.size()),
        )
        memory = wide(result.memories[0])
        inputs = source.memories = [wide(item) for item in source.memories]
        same_dtype(memory, *inputs)
        counts = tuple(item.flat.size for item in inputs)
        if counts[g.rank()] != memory.flat.size:
            raise ValueError(
                f"reduce_scatter: output has {memory.flat.size} elements, but input_list[{g.rank()}] has {counts[g.rank()]}"
            )
        packed = _out_of(source, () if async_op else (memory,))
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
    plain = not async_op and timeout is None and name is None and type(op) is RedOpType
    if plain and type(source) is _ndarray and type(output) is _ndarray:
        key = (function, op, source.dtype, source.shape, output.dtype, output.shape)
        if riding.again(group, key, source, output, 3):
            return None
    found = member_or_warn(group, function, stacklevel=4)
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        most = None if _in_pieces(op) is None else _of_blocks(g.size())
        result, given = sides(
            "reduce_scatter" if _untouched(op) else "",
            Asked(output, "output", True, pieces=None if most is None else most // g.size()),
            Asked(source, "input", pieces=most),
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
        packed = _apart_from(memory, given)
        ready = _scatter_reduced(g, function, memory, packed, op, counts, output, (sending,), given.gather)
        _learn_parts(g, key, "reduce_scatter_single", function, ready, op, (memory, sending), source, output)
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
    again = Repeated(op, ready.key, Kind.REDUCE_SCATTER, nbytes, mpi_op=ready.move.op, average=average, alias=alias)
    _learn(g, key, again, memories, send, recv)


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
    average = _finishing(memory, reduction, g.size())
    return Prepared(key, move, [output], inputs=inputs, before=before, after=_both(average, _unpacker([memory])))


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
        and timeout is None
        and name is None
        and output_split_sizes is None
        and input_split_sizes is None
    ):
        key = ("all_to_all_single", input.dtype, input.shape, output.dtype, output.shape)
        if riding.again(group, key, input, output):
            return None
    found = member_or_warn(group, "all_to_all_single")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        most = _of_blocks(g.size())
        given, result = sides(
            "all_to_all", Asked(input, "input", pieces=most), Asked(output, "output", True, pieces=most)
        )
        (source,), (out,) = given.memories, result.memories
        same_dtype(out, source)
        received = _splits(out, output_split_sizes, g.size(), "output")
        sent = _splits(source, input_split_sizes, g.size(), "input")
        send, after = _apart_from(out, given), _unpacker([out])
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
    if type(input_tensor_list) is list and not async_op and timeout is None and name is None:
        first = input_tensor_list[0] if input_tensor_list else None
        if type(first) is _ndarray:
            key = ("all_to_all", first.dtype, first.shape)
            if riding.again(group, key, input_tensor_list, output_tensor_list):
                return None
    found = member_or_warn(group, "all_to_all")
    if found is None:
        return None

    def prepare(g: ProcessGroup) -> Prepared:
        results, source = sides(
            "all_to_all",
            Asked(output_tensor_list, "output_tensor_list", True, g.size()),
            Asked(input_tensor_list, "input_tensor_list", False, g.size()),
        )
        outputs, inputs = results.memories, source.memories
        same_dtype(*outputs, *inputs)
        received, sent = [o.flat.size for o in outputs], [i.flat.size for i in inputs]
        packed, after = _into(results, () if async_op else inputs)
        send, name = _out_of(source, () if async_op else outputs), outputs[0].name
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
    again = Repeated(op, ready.key, Kind.ALL_TO_ALL, nbytes, detail=ready.detail)
    _learn(g, key, again, memories, send, recv)


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
    plain = not async_op and timeout is None and device_ids is None and name is None
    if plain:
        known: Any = default.world if group is None else group
        try:  # as riding.again, without the call of it
            ride = known.rides["barrier"]
        except (KeyError, AttributeError):
            pass
        else:
            if known.stopping is None:
                if ride.shared is not None and extension.run(known, ride, None, None, caller()):
                    return None
                if riding.again(group, "barrier", None, None):
                    return None
    found = member_or_warn(group, "barrier")
    if found is None:
        return None
    stopping = found.stopping if not async_op else None
    if plain:
        repeating.repeat(found, _BARRIER, Movement(Kind.BARRIER), caller())
        if stopping is not None:
            stopping.deliver()
        if "barrier" not in found.rides:
            riding.learn(found, "barrier", _BARRIER, _NO_DTYPE, None, None)
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
_NO_DTYPE = np.dtype(np.uint8)


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
