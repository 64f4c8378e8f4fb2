"""Make calls that are not one movement: calls that only agree, and calls that move their data in several steps."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from functools import partial
from typing import Any

from mpicoll.checks.agreement import meet
from mpicoll.diagnosis.call import CallDescription, fingerprint
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.operations import execution
from mpicoll.operations.failures import BlockingCall
from mpicoll.operations.operation import Operation
from mpicoll.operations.request import Request, collectives_are_pending
from mpicoll.operations.schedules import open_memory
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.waiting import Pollable, Steps
from mpicoll.transports.base import Movement, block_bytes, pieces
from mpicoll.transports.control import Agreed


def drive(group: ProcessGroup, call: CallDescription, steps: Steps, limit: float) -> Any:
    """Wait for steps that belong to no call in the order of a group; return what they return."""
    request = Operation(group, call, steps, [], limit, waited=True)
    request.complete()
    return request.returned


def agree(group: ProcessGroup, call: CallDescription, limit: float | None = None) -> Agreed:
    """Make the round of a call that moves no data; return the facts that all members then know.

    Args:
        limit: seconds; None: the limit of the group.

    Raises:
        Exception: ``call.error`` here, CollectiveMismatchError on the other members.
    """
    execution.enter(group, call.op)
    return _make(group, call, None, group.timeout if limit is None else limit)


def run(group: ProcessGroup, call: CallDescription, steps: Callable[[Agreed], Steps]) -> None:
    """Make one collective call that moves its data in several steps, and wait for it.

    The caller has called :func:`~mpicoll.operations.execution.enter`, which checks whether the group can be used.

    Args:
        steps: generator function of the agreement, which yields the next request to complete. Before data moves, the generator
            may raise CollectiveMismatchError or ``call.error``, if it does so on all members.
    """
    _make(group, call, steps, group.timeout)


def _make(group: ProcessGroup, call: CallDescription, steps: Callable[[Agreed], Steps] | None, limit: float) -> Agreed:
    if group.entered_block is not None:
        raise group.entered_block.refuse(call.describe(), call.site)
    if steps is not None and call.error is not None and group.level != "full":
        raise call.error  # the other members do not compare, so they do not learn of the error
    group.warn_of_threads()
    with signals.guard, group.lock:
        group.tell_mismatch(limit)
        try:
            group.calls += 1
            call.seq = group.calls
            group.last = call.op, call.site.code, call.site.instruction
            call.asynchronous = steps is not None and collectives_are_pending()
            execution.set_print(group, call, compares=True)
            if steps is None and group.level == "off":  # calls that make a group or the world are always compared
                call.print = fingerprint(call.op, call.key)
            request = Request(group, call, [], limit, waited=True)
            with nullcontext() if steps is None else signals.shield:
                request.start(group.pair.agreement.order.issue(), partial(meet_and_move, group, call, steps))
                request.complete()
            agreed: Agreed | None = request.agreed
            assert agreed is not None
            return agreed
        except BaseException as error:
            execution.leave_begun(group, call, limit, error)
            execution.raise_own(call, error)
            raise


def meet_and_move(
    group: ProcessGroup, call: CallDescription, steps: Callable[[Agreed], Steps] | None, agreed: Agreed
) -> Steps:
    """Make the steps of a call, behind a meeting if a member may have withdrawn after it posted the round."""
    if agreed.stalled:
        yield from meet(group.pair.agreement, group.pair.data, call)
    if steps is not None:
        yield from steps(agreed)


def move_once(
    group: ProcessGroup, call: CallDescription, agreed: Agreed, move: Movement, moved: int
) -> Generator[Pollable, None, int]:
    """Move a flat buffer within the steps of :func:`run`: by blocking calls unless a member is asynchronous.

    Args:
        move: movement of a kind whose blocks all members know to be equal.
        moved: value returned for the previous movement of the call, or 0.

    Returns:
        Bytes moved since the last wait that this rank could leave.
    """
    engine = group.pair.native
    size, nbytes = group.size(), block_bytes(move, group.size())
    node = group.pair.through(move.kind, nbytes) if not agreed.device else None
    if node is not None:
        yield from open_memory(group, node)
        if node.usable:
            yield from node.steps(move, nbytes)
            return moved
    most = execution.native_bytes(move.kind)
    for piece in pieces(move, size, nbytes, most):
        step = block_bytes(piece, size)
        if agreed.nonblocking:
            waiting.transfer_hint(step)
            yield engine.nonblocking(piece)
            continue
        moved += step
        if moved > most:
            moved = step
            yield from meet(group.pair.agreement, group.pair.data, call)  # as in execution
        with BlockingCall(group, call, group.timeout):
            engine.blocking(piece)
    return moved
