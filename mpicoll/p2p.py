"""Point to point: send, recv, isend, irecv, P2POp, batch_isend_irecv."""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

from mpi4py import MPI

from mpicoll import execution, waiting
from mpicoll.buffers.array import Array, Memory, adapt
from mpicoll.buffers.dtypes import dtype_name
from mpicoll.checks.call import Call, call_site
from mpicoll.engines.base import Request
from mpicoll.errors import DistBackendError
from mpicoll.groups import ProcessGroup, member_or_warn, no_global_peer, peer_rank
from mpicoll.matching import Receive
from mpicoll.work import Operation, Work

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]


def send(
    tensor: Array,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    timeout: timedelta | None = None,
) -> None:
    """Send ``tensor`` to one rank; return when it may be written again.

    Called by this rank alone; the destination calls :func:`recv` or :func:`irecv` with the same dtype, number of elements
    and tag. A small message may return before it is received, a large one does not.

    Args:
        tensor: what to send; C-contiguous.
        dst: global rank of the destination; or ``group_dst``, its rank in the group.
        group: the group; default the world.
        tag: 0 to MPI_TAG_UB.
        timeout: the limit of this call; default the group's.

    Raises:
        ValueError: the destination is this rank itself, or not in the group; the tag is out of range.
        TypeError: wrong arguments.
        CollectiveTimeoutError: nobody received it within the limit.
        PeerFailedError, PeerExitedError: the destination failed, or ended without receiving.

    Source: torch.distributed.send; MPI-4.1 section 3.2.1.
    """
    no_global_peer(group, dst)
    found = member_or_warn(group, "send")
    if found is None:
        return
    peer = peer_rank(found, dst, group_dst, "dst")
    if peer == found.rank():
        raise ValueError(
            "Invalid destination rank: destination rank should not be the same as the rank of the current process."
        )
    limit = execution.call_limit(found, timeout)
    execution.finish_waiting(_start_send("send", found, tensor, peer, tag, limit), limit)


def recv(
    tensor: Array,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    timeout: timedelta | None = None,
) -> int:
    """Receive into ``tensor``; return the global rank of the sender (-1 when this rank is not in the group).

    Args:
        tensor: where to receive; C-contiguous, at least as large as the message.
        src: global rank of the source; or ``group_src``, its rank in the group; neither: any member.
        group, tag, timeout: as in :func:`send`.

    Raises:
        ValueError: the source is this rank itself, or not in the group; the tag is out of range.
        DistBackendError: the message is larger than ``tensor``; it stays where it is, for another ``recv``.
        CollectiveTimeoutError: nothing came within the limit.
        PeerFailedError, PeerExitedError: the source failed, or ended without sending.

    Source: torch.distributed.recv; MPI-4.1 section 3.2.4.
    """
    found = member_or_warn(group, "recv")
    if found is None:
        return -1
    peer = _source(found, src, group_src)
    if peer == found.rank():
        raise ValueError("Invalid source rank: source rank should not be the same as the rank of the current process.")
    limit = execution.call_limit(found, timeout)
    operation = _start_recv("recv", found, tensor, peer, tag, limit)
    execution.finish_waiting(operation, limit)
    return found.ranks[operation.source]


def isend(
    tensor: Array,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Start sending ``tensor`` to one rank (this rank itself is allowed) and return a :class:`Work`.

    ``tensor`` must not be written before its ``wait`` has returned. Arguments and errors as in :func:`send`.

    Source: torch.distributed.isend; MPI-4.1 section 3.7.2.
    """
    no_global_peer(group, dst)
    found = member_or_warn(group, "isend")
    if found is None:
        return None
    peer = peer_rank(found, dst, group_dst, "dst")
    return Work(_start_send("isend", found, tensor, peer, tag, found.timeout), execution.finish_waiting)


def irecv(
    tensor: Array,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Start receiving into ``tensor`` and return a :class:`Work`.

    ``tensor`` must not be read or written before its ``wait`` has returned. Arguments and errors as in :func:`recv`;
    after ``wait`` the Work's ``source_rank()`` is the sender's rank in the group.

    Source: torch.distributed.irecv; MPI-4.1 section 3.7.2.
    """
    found = member_or_warn(group, "irecv")
    if found is None:
        return None
    peer = _source(found, src, group_src)
    return Work(_start_recv("irecv", found, tensor, peer, tag, found.timeout), execution.finish_waiting)


class P2POp:
    """One ``isend`` or ``irecv`` to be started by :func:`batch_isend_irecv`.

    Args:
        op: the function :func:`isend` or :func:`irecv` itself.
        tensor: what to send, or where to receive.
        peer: global rank of the other side; or ``group_peer``, its rank in the group.
        group: the group; default the world.
        tag: 0 to MPI_TAG_UB.

    Source: torch.distributed.P2POp.
    """

    __slots__ = ("group", "group_peer", "op", "peer", "tag", "tensor")

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: Array,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ValueError("Invalid ``op``. Expected ``op`` to be of type ``mpicoll.isend`` or ``mpicoll.irecv``.")
        adapt(tensor, "tensor", writable=op is irecv)
        found = member_or_warn(group, "P2POp")
        self.op = op
        self.tensor = tensor
        self.group = group if found is None else found
        self.tag = tag
        if found is None:
            self.group_peer, self.peer = -1, -1
        else:
            self.group_peer = peer_rank(found, peer, group_peer, "peer")
            self.peer = found.ranks[self.group_peer]

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag}, {self.tensor.dtype} x {self.tensor.size})"


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Start every operation of a list, and return their Works in the same order.

    Raises:
        ValueError: not a list of P2POp, or they are of different groups.
        IndexError: the list is empty (as torch).

    Source: torch.distributed.batch_isend_irecv.
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise ValueError("Invalid ``p2p_op_list``. Each op is expected to be of type ``mpicoll.P2POp``, in a list.")
    first = p2p_op_list[0]
    if any(op.group is not first.group for op in p2p_op_list):
        raise ValueError("All ops need to use the same group.")
    works = []
    for op in p2p_op_list:
        if op.group_peer < 0:
            continue
        name = "group_dst" if op.op is isend else "group_src"
        work = op.op(op.tensor, group=op.group, tag=op.tag, **{name: op.group_peer})
        if work is not None:
            works.append(work)
    return works


def _source(group: ProcessGroup, src: int | None, group_src: int | None) -> int:
    """Return the source's rank in the group, or MPI.ANY_SOURCE."""
    if src is None and group_src is None:
        return MPI.ANY_SOURCE
    return peer_rank(group, src, group_src, "src")


_tag_limit = 0


def _check_tag(tag: Any) -> None:
    global _tag_limit
    if not hasattr(tag, "__index__") or isinstance(tag, bool):
        raise TypeError(f"tag must be an integer, not {type(tag).__name__}")
    if not _tag_limit:
        _tag_limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767
    if not 0 <= tag <= _tag_limit:
        raise ValueError(f"tag must be between 0 and {_tag_limit} (MPI_TAG_UB), got {tag}")


def _start_send(name: str, group: ProcessGroup, tensor: Array, peer: int, tag: int, limit: float) -> Operation:
    memory = adapt(tensor, "tensor", writable=False)
    _check_tag(tag)
    execution.enter(group, name)
    call = _call(name, group, memory, peer, tag)
    with waiting.guard, group.posting:
        try:
            request = group.pair.data.Isend(memory.flat, peer, tag)
        except MPI.Exception as error:
            raise execution.wrap(error, group, call) from error
        group.sent[peer, tag] = group.sent.get((peer, tag), 0) + 1
        waiting.moving(memory.flat.nbytes)
        steps = _sending(group, call, request)
        return Operation(group, call, steps, [tensor], limit, peer=group.ranks[peer], tag=tag, give_up=execution.lost)


def _start_recv(name: str, group: ProcessGroup, tensor: Array, peer: int, tag: int, limit: float) -> Operation:
    memory = adapt(tensor, "tensor", writable=True)
    _check_tag(tag)
    execution.enter(group, name)
    call = _call(name, group, memory, peer, tag)
    with waiting.guard, group.posting:
        receiver = group.pair.receiver
        try:
            receive = receiver.start(memory, peer, tag)
        except MPI.Exception as error:
            raise execution.wrap(error, group, call) from error
        operation = Operation(
            group,
            call,
            _receiving(group, call, memory, receive),
            [tensor],
            limit,
            peer=group.ranks[peer] if peer >= 0 else -1,
            tag=tag,
            withdraw=lambda: receiver.withdraw(receive),
            give_up=execution.lost,
        )
        receiver.watch()
        return operation


def _call(name: str, group: ProcessGroup, memory: Memory, peer: int, tag: int) -> Call:
    other = f"rank {group.ranks[peer]}" if peer >= 0 else "any rank"
    other = ("to " if name in ("send", "isend") else "from ") + other
    return Call(name, (other, ("tag", tag), dtype_name(memory.dtype), ("elements", memory.flat.size)), call_site())


def _sending(group: ProcessGroup, call: Call, request: MPI.Request) -> Generator[Request, None, int | None]:
    try:
        yield request
    except MPI.Exception as error:
        raise execution.wrap(error, group, call) from error
    return None


def _receiving(
    group: ProcessGroup, call: Call, memory: Memory, receive: Receive
) -> Generator[Request, None, int | None]:
    try:
        yield receive
    except MPI.Exception as error:
        raise execution.wrap(error, group, call) from error
    source = receive.sender
    if receive.too_short:
        raise DistBackendError(
            f"{call.describe()} on group {group.display}, rank {group.ranks[group.rank()]}, at {call.site}: the message from "
            f"rank {group.ranks[source]} has {receive.message_bytes} bytes, tensor has {memory.flat.nbytes} bytes. The message "
            "is not lost: receive it into an array that is large enough"
        )
    group.received[source, receive.tag] = group.received.get((source, receive.tag), 0) + 1
    if memory.unpack is not None:
        memory.unpack()
    return source
