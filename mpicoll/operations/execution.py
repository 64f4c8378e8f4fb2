"""Make one call, from agreement to result: wait for the call, or return its Work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from functools import cache, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.checks.agreement import meet
from mpicoll.checks.levels import EVERY
from mpicoll.checks.mismatch import explain
from mpicoll.diagnosis.call import CallDescription, fingerprint
from mpicoll.errors import CollectiveMismatchError, DistError
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.operations.failures import BlockingCall, in_child, refuse_handler
from mpicoll.operations.request import Request, collectives_are_pending
from mpicoll.operations.schedules import open_memory, plan_key
from mpicoll.operations.work import Work
from mpicoll.runtime import handler_calls, signals, waiting
from mpicoll.runtime.native import reduce_rows
from mpicoll.runtime.settings import need_timedelta
from mpicoll.runtime.waiting import Pollable, Steps
from mpicoll.transports import large_counts
from mpicoll.transports.base import EXCHANGE_BYTES, SMALL_BYTES, WHOLE, Kind, Movement, block_bytes, pieces
from mpicoll.transports.control import BEHIND, IN_PIECES, Agreed
from mpicoll.transports.mpi.exchange import compare_lengths
from mpicoll.transports.selection import NEVER, Facts, Way, select, stage

NATIVE_BYTES = 32 * 1024 * 1024
"""Most bytes of one blocking call of MPI that moves one array: the call usually ends within half a second."""

BLOCKS = 4
"""By how much ``NATIVE_BYTES`` is multiplied for calls with a block of each member, whose pieces take longer than the whole
(docs/performance.md)."""


def native_bytes(kind: Kind) -> int:
    """Return the most bytes that a rank passes to one blocking call of MPI."""
    return min(NATIVE_BYTES * (1 if kind in WHOLE else BLOCKS), large_counts.COUNT_LIMIT)


def call_limit(group: ProcessGroup, timeout: Any) -> float:
    """Return the time limit of a call in seconds: ``timeout``, or the limit of the group.

    Raises:
        TypeError: not a timedelta (as in torch).
        ValueError: negative.
    """
    if timeout is None:
        return group.timeout
    return need_timedelta(timeout).total_seconds() or group.timeout


def check_name(name: Any) -> None:
    """Raise TypeError unless ``name`` is a string or None."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string or None, not {type(name).__name__}")


def move_agreed(
    group: ProcessGroup,
    call: CallDescription,
    move: Movement | Callable[[Agreed], Movement] | None,
    number: int,
    ready: Callable[[], bool] | None,
    before: Callable[[], None] | None,
    after: Callable[[], None] | None,
    limit: float,
    agreed: Agreed,
) -> Steps:
    """Move the data of one collective that all members are known to make, and finish the result.

    Args:
        move: the movement, or a function of the agreement that returns the movement; None if arguments of this rank are wrong.
        ready: returns whether the GPU has reached the call; ``before`` waits for that.
        before: called just before data moves.
        after: called when the part of this rank has moved.
        agreed: the facts that all members know.
    """
    assert move is not None
    data = group.pair.data
    fixed = isinstance(move, Movement)
    if not isinstance(move, Movement):
        move = move(agreed)
    if agreed.behind and call.device_ready is None:
        call.device_ready = move.is_ready  # other members may wait for their GPUs
    if agreed.stalled:
        yield from meet(group.pair.agreement, data, call)  # a member may have withdrawn after it posted the round
    if call.preferred is not None:
        if agreed.preferred:
            if agreed.block_bytes != call.block_bytes:  # at check level "off" nobody compares them
                raise ValueError(f"{call.describe()}: another rank passes an array of another size")
            waiting.transfer_hint(agreed.block_bytes)
            if (yield from call.preferred.steps(data)):
                return
        move, ready, before, after = call.preferred.fallback()
        assert isinstance(move, Movement)
    if agreed.uneven and move.kind is Kind.ALL_TO_ALL:
        # A member whose blocks may come with the round does not say how long they are.
        told = not group.pair.agreement.channel.carries_data
        agreed.block_bytes = yield from _check_splits(group, call, move, agreed.block_bytes if told else None)
        move.vector = True
        shared = group.pair.through(move.kind, EXCHANGE_BYTES)
        if shared is not None:
            yield from open_memory(group, shared)  # for the next such call
    if ready is not None and not ready():
        yield waiting.Condition(ready)
    if before is not None:
        before()
    spread = None
    if agreed.device and move.apart:
        # Lists on GPUs stand in one piece of memory, for which MPI's call for equal blocks is the faster one.
        move, spread = large_counts.near(move, 0) or (move, None)
        move.apart = False
    node, facts = group.pair.node, _facts(group, move, agreed, fixed)
    way = select(facts)
    if way is Way.SHARED_MEMORY and node is not None and not node.ready:
        yield from open_memory(group, node)
        facts = _facts(group, move, agreed, fixed)
        way = select(facts)
    staged = None
    if facts.device:
        staged = stage(facts, move, group.rank(), native_bytes(move.kind))
    if staged is None:
        yield from _move(group, call, number, limit, agreed, way, agreed.block_bytes, move)
    else:
        yield from staged.steps(partial(_move, group, call, number, limit, agreed, way, staged.block_bytes))
        _finish(call, staged.finish)
    _finish(call, spread)
    _finish(call, after)


def _move(
    group: ProcessGroup,
    call: CallDescription,
    number: int,
    limit: float,
    agreed: Agreed,
    way: Way,
    nbytes: int,
    move: Movement,
) -> Steps:
    """Move host memory, or memory of a GPU that MPI gets as it is, whose largest block has ``nbytes``."""
    size, engine = group.size(), group.pair.native
    if way is Way.SHARED_MEMORY:
        assert group.pair.node is not None
        is_sealed, call.is_sealed = call.is_sealed, None  # before the first of several pieces only
        if is_sealed is not None:
            yield waiting.Condition(is_sealed)
        waiting.transfer_hint(_hint(move, nbytes, size))
        for part in move.parts:  # of several parts all members know the sizes
            yield from group.pair.node.steps(part, block_bytes(part, size) if move.more else nbytes)
    elif way is Way.IN_RANK_ORDER:
        yield from _reduce_in_order(group, number, move)
    elif way is Way.NONBLOCKING:
        requests = [engine.nonblocking(part) for part in move.parts]
        if agreed.nonblocking:
            group.pair.agreement.order.pass_on(number)
            waiting.transfer_hint(_hint(move, nbytes, size) * len(requests))
        yield from requests
    elif way is Way.PERSISTENT:
        key = (call.op, plan_key(call.key), agreed.detail)
        plan = group.plan(group.plans, key, partial(engine.plan, move))
        yield plan.start(move)
        plan.finish(move)
    elif way is Way.BLOCKING:
        most = native_bytes(move.kind)
        for place, piece in enumerate(pieces(move, size, nbytes, most)):
            if agreed.nonblocking:  # in order, and the data of later calls after the last piece
                waiting.transfer_hint(_hint(piece, block_bytes(piece, size), size))
                yield engine.nonblocking(piece)
                continue
            if place or agreed.behind:
                # A rank can leave this wait, but not a blocking call. So the wait stands before each further call, and before
                # the first if a member may still wait for its GPU.
                yield from meet(group.pair.agreement, group.pair.data, call)
            with BlockingCall(group, call, limit):
                engine.blocking(piece, posted=not agreed.device)


def _facts(group: ProcessGroup, move: Movement, agreed: Agreed, fixed: bool) -> Facts:
    """Return the facts of a call that all members know, by which they select how the call moves."""
    size = group.size()
    # What is reduced in pieces goes through shared memory as the largest arrays do: there pieces of any size give the same bits.
    nbytes = NEVER if agreed.device == IN_PIECES and move.op else agreed.block_bytes
    return Facts(
        move.kind,
        size,
        agreed.block_bytes,
        reduces=bool(move.op),
        shared=group.pair.through(move.kind, nbytes) is not None,
        carries_data=group.pair.agreement.channel.carries_data,
        several=bool(move.more),
        uneven=move.vector,
        follows=not fixed,
        exceeds_count=large_counts.exceeds_count(move, size, agreed.block_bytes),
        nonblocking=agreed.nonblocking,
        device=agreed.device,
        ordered=agreed.device > 0 and move.order_matters,
    )


def _hint(move: Movement, nbytes: int, size: int) -> int:
    """Return the approximate number of bytes of a movement, whose largest block has ``nbytes``."""
    return nbytes * (1 if move.root < 0 and move.op else size)


def _reduce_in_order(group: ProcessGroup, number: int, move: Movement) -> Steps:
    """Reduce little data in the order of the ranks: the result is that of a call whose data comes with the round."""
    rank, size, engine = group.rank(), group.size(), group.pair.native
    given = move.recv if move.send is None else move.send
    assert given is not None
    parted = move.kind is Kind.REDUCE_SCATTER
    got = np.empty(given.size * (1 if parted else size), given.dtype)
    yield from [
        engine.nonblocking(Movement(Kind.ALL_TO_ALL if parted else Kind.ALL_GATHER, send=given.copy(), recv=got))
    ]
    group.pair.agreement.order.pass_on(number)
    if move.recv is not None and (move.root < 0 or move.root == rank):
        reduce_rows(move.op, got, size, move.recv)


def _finish(call: CallDescription, after: Callable[[], None] | None) -> None:
    if after is not None:
        try:
            after()
        except Exception as error:
            call.error = error  # all data has moved: the error concerns only this rank, and the group can be used
            raise


def _check_splits(
    group: ProcessGroup, call: CallDescription, move: Movement, most: int | None
) -> Generator[Pollable, None, int]:
    """Compare the numbers of elements of all blocks; raise on all members if a rank sends more or less than expected.

    Either end of a block may be wrong, so the report has both. Return the bytes of the largest block of all members.

    Args:
        most: these bytes, if all members know them.
    """
    assert move.send is not None
    assert move.recv is not None
    size = group.size()

    def counts(buffer: Any, given: Any) -> Any:
        return np.asarray([buffer.size // size] * size if given is None else given, np.int64)

    sends, expects = counts(move.send, move.sendcounts), counts(move.recv, move.recvcounts)
    largest = block_bytes(move, size) if most is None else None
    found = yield from compare_lengths(group.pair.data, sends, expects, largest)
    if isinstance(found, int):
        return found if most is None else most
    sent, expected = found
    words = [
        f"{mine} {n[peer]} element{'s' if n[peer] != 1 else ''} {what} rank {group.ranks[peer]}, which {theirs} {other[peer]}"
        for mine, n, what, theirs, other in (
            ("sends", sends, "to", "expects", expected),
            ("expects", expects, "from", "sends", sent),
        )
        for peer in np.flatnonzero(n != other)[:4]
    ]
    yield from explain(group.pair.control, call, group.display, group.ranks, blocks="; ".join(words))
    raise AssertionError("the exchange after a mismatch always raises")


def run(
    group: ProcessGroup,
    call: CallDescription,
    move: Movement | Callable[[Agreed], Movement] | None,
    *,
    outputs: list[Any],
    async_op: bool = False,
    limit: float | None = None,
    ready: Callable[[], bool] | None = None,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Work | None:
    """Make one collective call: return its Work with ``async_op``, otherwise wait for the call and return None.

    The caller has called :func:`enter`, which checks whether the group can be used.
    """
    limit = group.timeout if limit is None else limit
    if group.entered_block is not None:
        raise group.entered_block.refuse(call.describe(), call.site)
    if call.error is not None and group.level != "full":
        raise call.error  # the other members do not compare, so they do not learn of the error
    group.warn_of_threads()
    with signals.guard, group.lock:
        group.tell_mismatch(limit)
        try:
            group.calls = call.seq = group.calls + 1
            call.maker = group.maker_of(call.seq)
            group.last = call.op, call.site.code, call.site.instruction
            if isinstance(move, Movement):
                call.block_bytes = block_bytes(move, group.size())
            set_print(group, call, compares=not _passes(group, call, move))
            number = group.pair.agreement.order.issue()
            return issue(group, call, move, number, outputs, async_op, limit, ready, before, after)
        except BaseException as error:
            leave_begun(group, call, limit, error)
            raise_own(call, error)
            raise


def raise_own(call: CallDescription, error: BaseException) -> None:
    """Raise the error of this rank's arguments if the wait for the other members has ended otherwise: it would be lost."""
    own = call.error
    if own is None or own is error or not isinstance(error, DistError):
        return
    error.__traceback__ = None  # of lines of this library only
    own.__suppress_context__ = False  # tracebacks show the error of the wait first
    raise own


def leave_begun(group: ProcessGroup, call: CallDescription, limit: float, error: BaseException) -> None:
    """Give the group up if an error ends a call that this rank has begun, and is no outcome of the call.

    A signal handler of the program may raise between any two lines: when the call is counted and not posted, or when the call has
    its number in the order and no request that passes the order on. Other members make the call, so this rank cannot undo it.
    """
    if group.broken is None and error is not call.error and not isinstance(error, CollectiveMismatchError):
        Request(group, call, [], limit).policy().withdraw(error)


UNCOMPARED = frozenset(Kind) - {Kind.BARRIER, Kind.ALL_TO_ALL}
"""Kinds that may move without a comparison: each member knows the sizes of all blocks from its own arguments."""


def _passes(group: ProcessGroup, call: CallDescription, move: Movement | Callable[[Agreed], Movement] | None) -> bool:
    """Return whether a call makes no round; the same on all members that make the same calls."""
    return (
        group.level != "full"
        and not group.pair.agreement.channel.carries_data  # a round through shared memory takes almost no time
        and isinstance(move, Movement)
        and move.kind in UNCOMPARED
        and not (call.uneven or move.vector or move.more)
        and call.block_bytes <= SMALL_BYTES
        and not large_counts.exceeds_count(move, group.size(), call.block_bytes)
        and not (group.level == "roll" and (call.compared or group.calls % EVERY == 0))
    )


def set_print(group: ProcessGroup, call: CallDescription, compares: bool) -> None:
    """Set the fingerprint that the round of a call compares; record a call that makes no round."""
    shared = group.pair.agreement.channel.carries_data
    print_ = fingerprint(call.op, call.key) if group.level != "off" else 0
    if group.level != "roll" or shared:
        call.print = plain_print(group, call.op, print_)
    else:
        rolling = group.pair.agreement.rolling
        rolling.made.append((call.seq, print_, call.op, call.key, call.site.code, call.site.instruction))
        if compares:
            call.print, call.made = rolling.cut()
    call.passes = not compares


def plain_print(group: ProcessGroup, op: str, print_: int) -> int:
    """Return the fingerprint that a round compares if the round does not cover earlier calls.

    Members on one node compare each call also at level ``roll``, as a round takes almost no time there. At ``off`` they compare
    the function: otherwise two members in different functions could each complete, with half of the data of each.

    Args:
        print_: fingerprint of the call.
    """
    if group.level == "full":
        return print_
    if not group.pair.agreement.channel.carries_data:
        return 0
    return print_ if group.level == "roll" else _print_of_function(op)


@cache
def _print_of_function(op: str) -> int:
    return fingerprint(op, ())


def move_uncompared(
    group: ProcessGroup,
    call: CallDescription,
    move: Movement,
    number: int,
    ready: Callable[[], bool] | None,
    before: Callable[[], None] | None,
    after: Callable[[], None] | None,
    _: None,
) -> Steps:
    """Move the data of a small call without a round, by the nonblocking call of MPI: some members may be asynchronous."""
    if ready is not None and not ready():
        yield waiting.Condition(ready)
    if before is not None:
        before()
    engine = group.pair.native
    if call.asynchronous:
        request = engine.nonblocking(move)
        group.pair.agreement.order.pass_on(number)
        yield request
    else:
        key = (call.op, plan_key(call.key))
        plan = group.plan(group.own_plans, key, partial(engine.plan, move, persistent=False))
        yield plan.start(move)
        plan.finish(move)
    _finish(call, after)


def issue(
    group: ProcessGroup,
    call: CallDescription,
    move: Movement | Callable[[Agreed], Movement] | None,
    number: int,
    outputs: list[Any],
    async_op: bool,
    limit: float,
    ready: Callable[[], bool] | None = None,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Work | None:
    """Make a call that has its number in the order of the group. Arguments as in :func:`run`."""
    call.asynchronous, call.async_op = async_op or collectives_are_pending(), async_op
    call.device_ready = ready
    if call.preferred is not None:
        call.device_ready = call.preferred.is_ready
    elif call.device and isinstance(move, Movement):
        call.device_ready = move.is_ready
    if call.device_ready is not None and not call.device:
        call.device = BEHIND
    transfer: Callable[[Any], Steps]
    if call.passes:
        assert isinstance(move, Movement)
        transfer = partial(move_uncompared, group, call, move, number, ready, before, after)
    else:
        transfer = partial(move_agreed, group, call, move, number, ready, before, after, limit)
    request = Request(group, call, outputs, limit, held=move, waited=not call.asynchronous)
    if not call.asynchronous:
        with signals.shield:
            request.start(number, transfer)
            request.complete()
        return None
    try:
        request.start(number, transfer)
        if not request.done:
            waiting.pending.append(request)
    except BaseException as error:
        request.withdraw(error)
        raise
    if async_op:
        return Work(request)
    group.waited = request
    try:
        request.complete(limit)
    finally:
        group.waited = None
    return None


def sending(request: Pollable) -> Steps:
    """Yield the request of a send: the steps of an operation."""
    yield request


def enter(group: ProcessGroup, operation: str, *, apart: bool = False) -> None:
    """Raise an error if this process or thread may not communicate, or if the group cannot be used.

    Args:
        apart: the operation needs no other member of the group, so the group may be broken.
    """
    known = registry.state()
    if os.getpid() != known.pid:
        raise in_child(operation)
    if not known.thread_multiple and threading.get_ident() != known.thread:
        raise RuntimeError(
            f"{operation}: this MPI gives no MPI_THREAD_MULTIPLE, so only the thread that called init_process_group may "
            "communicate: make the call there"
        )
    if MPI.Is_finalized():
        raise RuntimeError(f"{operation}: MPI has been finalised")
    if handler_calls.inside or signals.guard.depth or group.order.issued != group.order.moving:
        refuse_handler(operation)
    if group.destroyed or not apart:
        group.usable(operation)
