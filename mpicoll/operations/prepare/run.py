"""Prepare collectives: check arguments, adapt arrays, make the call, and cache the call for the next time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from mpicoll.checks.memory_in_use import Claim, claims, written
from mpicoll.checks.memory_ranges import Snapshot, is_sampled
from mpicoll.diagnosis.call import CallDescription
from mpicoll.groups.process_group import ProcessGroup, Stopping
from mpicoll.groups.registry import default, member_or_warn
from mpicoll.memory.adapt import adapt_list, same_dtype, viewed
from mpicoll.memory.dtypes import Reduction, is_native
from mpicoll.memory.layouts import one_buffer
from mpicoll.memory.lists import ListMemory
from mpicoll.memory.memory import Array, Memory, StreamOrder
from mpicoll.memory.reduce_op import RedOpType
from mpicoll.memory.scratch import concatenated, scratch
from mpicoll.operations import dispatch, execution
from mpicoll.operations.prepare.packed import again_packed, pack
from mpicoll.operations.prepare.refusal import refuse, refuse_group
from mpicoll.operations.prepared import PreparedOperation
from mpicoll.operations.work import Work
from mpicoll.runtime.call_site import CallSite, follow, program_frame
from mpicoll.runtime.native import found as extension
from mpicoll.runtime.settings import need_bool
from mpicoll.transports.base import Kind, Movement, Preferred, block_bytes
from mpicoll.transports.control import NOTHING
from mpicoll.transports.selection import DEFAULT

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Arguments = TypeVarTuple("Arguments")


MOST_BLOCKS = 16
"""Most members with which blocks of an array on a GPU move in pieces: 256 KiB of each block are one copy."""


class Cached(NamedTuple):
    """How a call is cached: its signature, and the arrays that the prepared operation is started on.

    Attributes:
        key: the signature; None if the call is not to be cached.
        send, recv: the input of this rank, and the memory for its result.
        outputs: the output, or the list of outputs, that the program passed.
    """

    key: Any
    send: Any
    recv: Any
    outputs: Any


NOT_CACHED = Cached(None, None, None, None)


@dataclass(slots=True)
class Prepared:
    """The result of the checks of one rank's arguments: the key of the call, the movement, and functions before and after.

    Attributes:
        move: the movement; with a ``preferred`` schedule it only describes the call.
        inputs: memories that the transfer reads; they are packed when the transfer starts.
        awaits: memories whose GPUs must have reached the call before ``before`` is called.
        stopping: answers the signals that the agreement of a barrier carries.
        cached: how the call is cached.
        memories: memories of all arrays of the call.
        average: this rank divides the result by the number of members.
        prepared_as: of a call that is cached.
        is_sealed: compares a large result that moves in place once more, at the first test behind the start; None if none does.
    """

    key: tuple[Any, ...]
    move: Movement
    outputs: list[Any]
    _: KW_ONLY
    inputs: tuple[Memory, ...] = ()
    awaits: tuple[Memory, ...] = ()
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    uneven: bool = False
    detail: int = NOTHING
    stopping: Stopping | None = None
    preferred: Preferred | None = None
    cached: Cached = NOT_CACHED
    memories: tuple[Memory, ...] = ()
    average: bool = False
    prepared_as: type[PreparedOperation] = PreparedOperation
    is_sealed: Callable[[], bool] | None = None


def _run_cached(
    op: str,
    group: Any,
    cached: tuple[Any, Any, Any, Any],
    prepare: Callable[[ProcessGroup, Cached, Unpack[Arguments]], Prepared],
    arguments: tuple[Unpack[Arguments]],
    async_op: bool,
    timeout: timedelta | None,
    name: str | None,
    stream: Any,
    alias: str = "",
    depth: int = 1,
) -> Work | None:
    """Start the prepared operation of a call that the program makes again; otherwise make the call as :func:`run_prepared`.

    Args:
        cached: the fields of a :class:`Cached`.
        depth: frames between the function that calls this one and the program.
    """
    key, send, recv, outputs = cached
    if key is not None:
        # Copies of the lists: a finalizer that empties a list of the program during the call must not change the call.
        send = [*send] if type(send) is list else send
        recv = [*recv] if type(recv) is list else recv
        made = dispatch.again(group, key, send, recv, depth + 2, timeout, name, async_op, outputs)
        made = made or again_packed(group, key, send, recv, depth + 2, timeout, name, async_op, outputs)
        if made:
            return made if isinstance(made, Work) else None
    more = (Cached(key, send, recv, outputs), *arguments)
    return run_prepared(op, group, prepare, more, async_op, timeout, name, stream, alias)


run_cached: Callable[..., Work | None] = _run_cached
if extension is not None:
    follow(lambda find: extension.configure_calls(default, find, _run_cached, threading.main_thread().ident))
    run_cached = extension.run_cached


def run_prepared(
    op: str,
    group: Any,
    prepare: Callable[[ProcessGroup, Unpack[Arguments]], Prepared],
    arguments: tuple[Unpack[Arguments]],
    async_op: bool,
    timeout: timedelta | None,
    name: str | None,
    stream: Any = None,
    alias: str = "",
) -> Work | None:
    """Check the arguments, and make the call. An error of the arguments takes part in the agreement, so that all members raise.

    Args:
        group, async_op, timeout, name, stream: as the program passed them; a rank outside the group only gets a warning.
        prepare: function that checks ``arguments``, the other arguments of the program.
        alias: the name that the program used, if it is another one.
    """
    try:
        found = member_or_warn(group, alias or op)
    except ValueError as error:
        refuse_group(group, op, error, alias)
    if found is None:
        return None
    frame = program_frame()
    site = CallSite(frame.f_code, frame.f_lasti)
    execution.enter(found, op)
    try:
        limit = execution.call_limit(found, timeout)
        execution.check_name(name)
        async_op = async_op is True or (async_op is not False and need_bool(async_op, "async_op"))
        with StreamOrder(stream) as order:
            ready = prepare(found, *arguments)
        again = _cache(found, op, alias, ready)
    except Exception as error:
        refuse(found, op, site, error, alias)
    if again is not None:  # the first call moves as the next calls, whose arrays are those that the program passes
        _, send, recv, outputs = cast("Cached", next(iter(arguments)))
        if not async_op:
            if dispatch.run_waited(found, again, send, recv, frame, None if timeout is None else limit, name):
                return None
        elif work := dispatch.begin(found, again, send, recv, site.code, site.instruction, limit, name, outputs):
            return work
    try:
        claim = _claim(found, alias or op, site, ready, async_op)
    except Exception as error:
        refuse(found, op, site, error, alias)
    key = ready.key if name is None else (*ready.key, ("name", name))
    call = CallDescription(
        op, key, site, uneven=ready.uneven, detail=ready.detail, alias=alias, is_sealed=ready.is_sealed
    )
    carried: Any = None
    if ready.stopping is not None:
        call.signal, carried = ready.stopping.brings(), ready.stopping.carried
    if ready.preferred is not None:
        call.preferred, call.device, call.block_bytes = ready.preferred, ready.preferred.device, ready.preferred.nbytes
        move = ready.move

        def carried(_: Any) -> Movement:
            return move
    else:
        call.device = ready.move.device

    made = execution.run(
        found,
        call,
        carried or ready.move,
        outputs=ready.outputs,
        async_op=async_op,
        limit=limit,
        ready=all_ready((*ready.inputs, *ready.awaits), order.ready_tests),
        before=packing(ready),
        after=ready.after,
    )
    if ready.stopping is not None:
        ready.stopping.deliver()
    return None if made is None else made.with_claim(claim)


def is_unscaled(op: Any) -> bool:
    """Return whether the elements are reduced without a factor before, and without a division after."""
    return type(op) is RedOpType and op not in (RedOpType.AVG, RedOpType.PREMUL_SUM)


def result_finisher(memory: Memory, reduction: Reduction, size: int) -> Callable[[], None] | None:
    """Return a function that divides a result for AVG; None if there is none, or each piece is finished separately."""
    if not reduction.average:
        return None
    flat: Any = memory.flat
    if memory.direct:
        flat.finish = lambda piece: reduction.after(piece, size)
        return None
    return lambda: reduction.after(flat, size)


def pieces_reduced(op: Any) -> bool:
    """Return ``pieces=`` of :func:`adapt` for an array that is reduced: False if its elements are changed first."""
    return type(op) is RedOpType and op is not RedOpType.PREMUL_SUM


def pieces_of_blocks(size: int) -> bool:
    """Return ``pieces=`` of :func:`adapt` for an array of blocks: False if the pieces of a block would be too small."""
    return size <= MOST_BLOCKS


def packing(ready: Prepared) -> Callable[[], None] | None:
    """Return the function to call just before data moves, or None."""
    return all_steps_of(*(memory.pack for memory in ready.inputs), ready.before) if ready.inputs else ready.before


def all_ready(memories: tuple[Memory, ...], noted: list[Callable[[], bool]]) -> Callable[[], bool] | None:
    """Return a function that returns whether the GPUs have reached a call; None if all arrays are on the host."""
    asks = noted + [memory.ready for memory in memories if memory.ready is not None and not memory.direct]
    return (lambda: all(ask() for ask in asks)) if asks else None


def _claim(group: ProcessGroup, op: str, site: CallSite, ready: Prepared, async_op: bool) -> Claim | None:
    """Compare the memory of a call with the memory of pending operations; return the claim of an asynchronous call.

    Raises:
        BufferInUseError: a pending operation uses the memory; the caller raises on all members.
    """
    if not group.compares or not (async_op or claims.active):
        return None
    move = ready.move
    writes: list[Array] = []
    if move.recv is not None and not (move.kind is Kind.BROADCAST and move.root == group.rank()):
        writes = [array for array in map(viewed, ready.outputs) if array is not None]
    read = {id(memory): memory for memory in (*ready.inputs, *ready.memories)}.values()
    claim = Claim(
        op,
        site,
        reads=[memory.own for memory in read if memory.pack is None or memory.origin is not None],
        writes=writes,
        gone=lambda: group.broken is not None or group.destroyed,
        group=group.display,
    )
    claims.check(claim)
    if not async_op:
        claim.clear()
        return None
    claim.snapshot_reads()
    if writes and not move.on_gpu:
        _watch_results(claim, ready, writes)
    return claim


def _watch_results(claim: Claim, ready: Prepared, arrays: list[Array]) -> None:
    """Let an asynchronous call find writes of the program to its results.

    Small results move through memory of the library, so that they are compared until they are there. Large results that move in
    place are compared until the data moves: in shared memory at the first test behind the start, when the program may have
    written.
    """
    move, result, found_before, found_after = ready.move, ready.move.recv, ready.before, ready.after
    assert result is not None
    moved = [each.recv for each in (move, *move.more) if each.recv is not None]
    in_place = any(np.may_share_memory(one, array) for one in moved for array in arrays)
    sampled = is_sampled(arrays)
    compares = not (in_place and sampled)
    own = np.empty_like(result) if in_place and not sampled else result
    seal = Snapshot(arrays)
    dirty = tested = False

    def is_sealed() -> bool:
        nonlocal dirty, tested
        if tested:
            dirty = dirty or seal.is_changed()
            return True
        tested = True
        return False

    def before() -> None:
        nonlocal seal, dirty
        dirty = seal.is_changed()
        if found_before is not None:
            found_before()
        if own is not result:
            own[...] = result
        if compares or found_before is not None:  # that may have scaled the elements in place
            seal = Snapshot(arrays)

    def after() -> None:
        if dirty or (compares and seal.is_changed()):
            raise written(claim.op, claim.site, claim.group)
        if own is not result:
            result[...] = own
        if found_after is not None:
            found_after()
        claim.snapshot_results()

    ready.move, ready.before, ready.after = move.into(own), before, after
    ready.is_sealed = None if compares else is_sealed


def result_unpacker(memories: list[Memory], packed: Array | None = None) -> Callable[[], None] | None:
    """Return a function that copies results: blocks of ``packed`` into each memory, then each memory into its array."""
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


def _on_host(memory: Memory) -> bool:
    """Return whether a memory is on the host, and its elements have a dtype that MPI knows."""
    return memory.place == "host" and is_native(memory.dtype)


def one_result_buffer(
    argument: ListMemory, others: Sequence[Memory], apart: int
) -> tuple[Array, list[int] | None, Callable[[], None] | None]:
    """Return one buffer for a list of results, the start of each in it, and the function to call when it is filled, or None.

    The buffer is the memory of the results themselves if the program waits for the call, if no result is packed or overlaps, and
    if the results stand one behind the other, or are large. The starts are None if they stand one behind the other.

    Args:
        others: memories that the call reads, which must not overlap the buffer; empty for a call that is not waited for.
        apart: the results may stand apart if one of them has at least so many bytes.
    """
    if argument.whole is not None:
        return argument.whole, None, argument.spread
    memories = argument.memories
    whole, displs = _own_buffer(memories, others, apart)
    if whole is not None:
        return whole, displs, None
    packed = scratch(sum(memory.flat.size for memory in memories), memories[0].dtype)
    return packed, None, result_unpacker(memories, packed)


def one_source_buffer(argument: ListMemory, others: Sequence[Memory], apart: int) -> tuple[Array, list[int] | None]:
    """Return one buffer with the elements of a list, and the start of each array in it, as :func:`one_result_buffer` does.

    Args:
        others: memories that the call writes, which must not overlap the buffer; empty for a call that is not waited for.
        apart: the arrays may stand apart if one of them has at least so many bytes.
    """
    if argument.whole is not None:
        return argument.whole, None  # filled when the call begins
    whole, displs = _own_buffer(argument.memories, others, apart)
    if whole is None:
        return concatenated([memory.filled() for memory in argument.memories]), None
    return whole, displs


def _own_buffer(
    memories: list[Memory], others: Sequence[Memory], apart: int
) -> tuple[Array, list[int] | None] | tuple[None, None]:
    """Return the memory of a list of plain arrays, as :func:`mpicoll.memory.layouts.one_buffer` does."""
    if not others or not all(map(_plain, memories)):
        return None, None
    return one_buffer([memory.flat for memory in memories], [other.flat for other in others], apart)


def source_apart_from(result: Memory, source: ListMemory) -> Array:
    """Return the input of a call, copied if it overlaps the result: MPI forbids that its buffers overlap."""
    if source.whole is not None:
        return source.whole
    memory = source.memories[0]
    if memory.direct:
        return memory.flat  # both move in pieces, so they do not overlap
    return memory.filled().copy() if np.may_share_memory(result.flat, memory.flat) else memory.flat


def input_scaler(reduction: Reduction, memory: Memory) -> Callable[[], None] | None:
    """Return a function that writes this rank's scaled input for PREMUL_SUM, called when all members make the call; or None."""
    if reduction.factor is None:
        return None
    scaled = reduction.before(memory.filled())

    def scale() -> None:
        memory.flat[...] = scaled

    return scale


def _cache(g: ProcessGroup, op: str, alias: str, ready: Prepared) -> PreparedOperation | None:
    """Cache and return a call of arrays on the host, so that the next such call takes less time; or return None.

    Only kinds that shared memory moves are cached: the extension would reduce any other kind as an ``all_reduce``.
    """
    (key, send, recv, _), move, memories = ready.cached, ready.move, ready.memories
    if key is None or type(g) is not ProcessGroup or move.kind not in DEFAULT or not all(map(_on_host, memories)):
        return None
    if not all(map(_plain, memories)):
        arrays = pack(send, recv, send is not None, recv is not None, bool(move.op))
        if arrays is None:
            return None
        send, recv = arrays.send, arrays.recv
    dtype = memories[0].dtype
    again = ready.prepared_as(
        op,
        ready.key,
        move.kind,
        block_bytes(move, g.size()),
        mpi_op=move.op,
        root=move.root,
        average=ready.average,
        detail=ready.detail,
        alias=alias,
        uneven=move.vector,
    )
    dispatch.cache(g, key, again, dtype, send, recv)
    return g.prepared.get(key)


def all_steps_of(*steps: Callable[[], None] | None) -> Callable[[], None] | None:
    """Return a function that runs the steps that are not None, in their order; None if there are none."""
    wanted = [step for step in steps if step is not None]
    if not wanted:
        return None

    def all_steps() -> None:
        for step in wanted:
            step()

    return all_steps


NO_DTYPE = np.dtype(np.uint8)


def refuse_values(values: Any, name: str, role: str) -> None:
    """Raise ValueError if a rank that is not ``role`` passes values."""
    if values is not None and not isinstance(values, list):
        adapt_list(values, name, writable=False)
    if values:
        raise ValueError(f"Argument ``{name}`` must NOT be specified on non-{role} ranks.")


def need_values(values: Any, name: str, role: str, *, writable: bool) -> list[Any]:
    """Return the values of the rank that is ``role``; raise ValueError if there are none, or TypeError if they are no list."""
    if values is not None and not isinstance(values, list):
        adapt_list(values, name, writable=writable)
    if not values:
        raise ValueError(f"Argument ``{name}`` must be specified on {role} rank.")
    found: list[Any] = values
    return found


def check_same_size(name: str, memories: list[Memory], tensor: Memory) -> None:
    """Raise ValueError unless all memories have as many elements as ``tensor``; TypeError unless they have its dtype."""
    same_dtype(tensor, *memories)
    for i, memory in enumerate(memories):
        if memory.flat.size != tensor.flat.size:
            raise ValueError(
                f"{name}[{i}] has {memory.flat.size} elements, tensor has {tensor.flat.size}: all must be equal "
                "(all_gather, all_to_all and all_to_all_single move blocks of different sizes)"
            )
