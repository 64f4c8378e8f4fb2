"""Requests whose transitions come from a generator, as those of messages that go the general way; waits and ends of messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mpicoll.checks.memory_in_use import written
from mpicoll.diagnosis.call import CallDescription
from mpicoll.diagnosis.report.entries import RankState, entry_of
from mpicoll.diagnosis.report.report import with_calls
from mpicoll.diagnosis.report.texts import NOT_LOST
from mpicoll.diagnosis.wait_policy import CallWait, local_wait
from mpicoll.errors import CollectiveMismatchError
from mpicoll.groups.communicators import MpiError
from mpicoll.memory.adapt import adapt
from mpicoll.memory.memory import Array, Memory
from mpicoll.operations.failures import guarded, wrap
from mpicoll.operations.request import Request
from mpicoll.operations.states import MOVING, to
from mpicoll.runtime import handler_calls, waiting
from mpicoll.runtime.call_site import CallSite
from mpicoll.runtime.mpi_library import retain_for_ever, retain_frames
from mpicoll.runtime.waiting import Pollable, Steps
from mpicoll.transports.mpi.envelope import Envelope, describe
from mpicoll.transports.mpi.matching import Message, Receive
from mpicoll.transports.mpi.messages import PersistentMessage, PersistentReceive

if TYPE_CHECKING:
    from mpicoll.groups.process_group import ProcessGroup


class Operation(Request):
    """A request whose transitions come from a generator: a message, or objects.

    Args:
        steps: yields what has to complete next, and returns the rank in the group that a message came from, or None.
        withdraw: called when the operation is given up.
    """

    __slots__ = ("_withdraw",)

    def __init__(
        self,
        group: ProcessGroup,
        call: CallDescription,
        steps: Steps,
        outputs: list[Any],
        limit: float,
        *,
        peer: int | None = None,
        tag: int = 0,
        withdraw: Callable[[], None] | None = None,
        held: Any = None,
        waited: bool = False,
    ) -> None:
        super().__init__(group, call, outputs, limit, peer=peer, tag=tag, held=held, waited=waited)
        self.steps = steps
        self._withdraw = withdraw
        to(self, MOVING)
        if not waited:
            self.Test()

    def _advance(self) -> None:
        if self._run_steps():
            self._complete()

    def _take_back(self) -> None:
        if self._withdraw is not None:
            self._withdraw()


def soon(steps: Steps) -> tuple[bool, Any]:
    """Run steps for some polls, without an operation.

    Returns:
        True and what the steps return; or False and the steps that are left, which raise what these steps have raised.
    """
    if waiting.pending:
        return False, steps  # only waits progress other requests
    try:
        request = next(steps)
        while True:
            if not waiting.comes_soon(request.Test, waiting.MOST_POLLS):
                return False, _resumed(request, steps)
            request = next(steps)
    except StopIteration as end:
        return True, end.value
    except BaseException as error:
        return False, _raising(error)


handler_calls.calls.add(soon.__code__)


def _resumed(request: Pollable, steps: Steps) -> Steps:
    yield request
    return (yield from steps)


def _raising(error: BaseException) -> Steps:
    raise error
    yield  # a generator, as all steps


def describe_message(
    group: ProcessGroup, dtype: str, count: int, peer: int, tag: int, *, receives: bool
) -> tuple[Any, ...]:
    """Return the parts of the description of a message.

    Args:
        dtype: name of the dtype.
        count: number of elements.
        peer: rank in the group; negative for any rank.
        receives: the message is received.
    """
    other = f"rank {group.ranks[peer]}" if peer >= 0 else "any rank"
    return ("from " if receives else "to ") + other, ("tag", tag), dtype, ("elements", count)


def finish(group: ProcessGroup, again: PersistentMessage, tensor: Array, test: Callable[[], bool]) -> None:
    """Wait for a request like every wait does."""
    waiting.transfer_hint(tensor.nbytes)
    call = call_of(again)
    local_wait(guarded(test, group, call), CallWait(group, call, group.timeout, group.ranks[again.peer], again.tag))


def call_of(again: PersistentMessage) -> CallDescription:
    """Return the description of a blocking message."""
    op, code, instruction = again.place
    return CallDescription(op, again.described, CallSite(code, instruction))


def give_up(group: ProcessGroup, again: PersistentMessage, tensor: Array, error: BaseException) -> None:
    """Leave a message that an exception ended: the group is broken, and the request is never used again and never freed."""
    call = call_of(again)
    retain_for_ever(again, tensor)
    retain_frames(error)
    if group.broken is None:
        CallWait(group, call, group.timeout, group.ranks[again.peer], again.tag).withdraw(error)
    if isinstance(again, PersistentReceive):
        take_back(group, again)
    if isinstance(error, MpiError):
        raise wrap(error, group, call) from error


def take_back(group: ProcessGroup, again: PersistentReceive) -> None:
    """Withdraw a receive that is posted, of a group that is given up."""
    if again.key in group.pair.receiver.posted:
        group.pair.receiver.posted.remove(again.key)
    again.cancel()


def adopt(group: ProcessGroup, again: PersistentReceive, tensor: Array) -> tuple[Memory, Receive]:
    """Start a general receive for a message that a persistent receive got, and that is not as expected."""
    memory = adapt(tensor, "tensor", writable=True)
    message = Message(*again.key, again.buffer.copy())
    return memory, group.pair.receiver.adopt(message, memory, exact=group.compares)


def receive_operation(
    group: ProcessGroup, call: CallDescription, memory: Memory, receive: Receive, tensor: Any, limit: float
) -> Operation:
    """Return the operation of a general receive that is started."""
    return receiving(group, call, receive, receive_steps(group, call, memory, receive), [tensor], limit)


def receiving(
    group: ProcessGroup, call: CallDescription, receive: Receive, steps: Steps, outputs: list[Any], limit: float
) -> Operation:
    """Return the operation of a receive that is started, and let all waits look for its message.

    Args:
        steps: complete the receive, and return the rank of the sender in the group.
    """
    receiver = receive.receiver
    peer = group.ranks[receive.source] if receive.source >= 0 else -1
    withdraw = partial(receiver.withdraw, receive)
    operation = Operation(group, call, steps, outputs, limit, peer=peer, tag=receive.tag, withdraw=withdraw)
    receiver.watch()
    return operation


def receive_steps(group: ProcessGroup, call: CallDescription, memory: Memory, receive: Receive) -> Steps:
    """Wait for the message of a receive; the steps of an operation, which return the rank of the sender in the group."""
    yield receive
    source = receive.sender
    if receive.refused is not None:
        raise misfit(group, call, receive, receive.refused, describe(memory.name, memory.flat.size), memory)
    group.count_received(source, receive.tag)
    if receive.dirty:
        raise written(call.name, call.site, group.display)
    return source


def misfit(
    group: ProcessGroup,
    call: CallDescription,
    receive: Receive,
    sent: Envelope,
    wanted: str,
    memory: Memory | None = None,
) -> CollectiveMismatchError:
    """Return the error of a receive whose message does not fit.

    Args:
        sent: envelope of the message.
        wanted: description of a message that fits.
        memory: memory of the receive; None for a receive of a list of objects.
    """
    sender, me = group.ranks[receive.sender], group.ranks[group.rank()]
    text = sent.describe(memory)
    error = CollectiveMismatchError(
        f"{call.name} on group {group.display}: rank {sender} sent {text} (tag {receive.tag}, "
        f"{receive.place or 'from a place that is not known'}), {call.name} on rank {me} of {wanted} at {call.site}"
        f"{NOT_LOST}a {'recv' if sent.objects < 0 else 'recv_object_list'} of {text} takes it"
    )
    op, _, site = receive.place.partition(" at ")
    what: tuple[tuple[str, str], ...] = (("elements", str(sent.count)),)
    if sent.objects >= 0:
        what = (("objects", str(sent.objects)),)
    elif memory is not None:
        name, count = sent.content(memory)
        what = (("dtype", name or "another"), ("elements", str(count)))
    key = (("peer", f"to rank {me}"), ("tag", str(receive.tag)), *what)
    theirs = RankState(((sender, sender),), op or "send", key, site=site, peer=me)
    return with_calls(error, group.display, [sender, me], [theirs, entry_of(call, me, peer=sender)])
