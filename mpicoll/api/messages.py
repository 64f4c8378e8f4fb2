"""Messages between two ranks: send, recv, isend, irecv, P2POp, batch_isend_irecv."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mpicoll.groups.registry import member_or_warn, need_member, peer_rank, resolve
from mpicoll.memory.adapt import adapt, check_array
from mpicoll.memory.memory import AnyArray
from mpicoll.operations.execution import call_limit
from mpicoll.operations.messages import move_prepared, start_prepared
from mpicoll.operations.prepare.messages import (
    learn,
    learn_pending,
    receive_at_once,
    refuse_self,
    source_rank,
    start_receive,
    start_send,
)
from mpicoll.operations.work import Work


def send(
    tensor: AnyArray,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    timeout: timedelta | None = None,
    stream: Any = None,
) -> None:
    """Send ``tensor`` to one rank; return when ``tensor`` may be written again.

    Only this rank calls this function; the destination calls :func:`recv` or :func:`irecv` with the same dtype, number of
    elements and tag. A send of up to 16 KiB may return before the message is received; a larger send does not.

    Args:
        tensor: array to send, of any layout; its elements move in C order.
        dst: global rank of the destination; or ``group_dst``, its rank in the group.
        group: the group; default the world.
        tag: 0 to MPI_TAG_UB - 32.
        timeout: time limit of this call; default the limit of the group.
        stream: as in :func:`broadcast`.

    Raises:
        ValueError: the destination is this rank itself; one of both ranks is not in the group; the tag is out of range.
        TypeError: wrong arguments.
        BufferInUseError: a pending operation writes the memory of ``tensor`` (at check level ``full``).
        CollectiveTimeoutError: the message was not received within the limit.
        PeerFailedError, PeerExitedError: the destination failed, or ended without receiving; another member failed.
        DeadlockError: ranks, including this rank, certainly wait for each other for ever.
        GroupBrokenError: a member withdrew from a call of the group, before or during this call.
        DistBackendError: MPI reported an error.

    Wrong arguments and BufferInUseError concern only this rank, and the group can be used; after other errors it is broken.

    Source: torch.distributed.send; MPI-4.1 section 3.2.1.
    """
    plain = group_dst is None and timeout is None
    if plain and move_prepared(tensor, dst, group, tag, False):
        return
    found = need_member(group)
    peer = peer_rank(found, dst, group_dst, "dst")
    refuse_self(found, peer, "destination")
    limit = call_limit(found, timeout)
    operation, _ = start_send("send", found, tensor, peer, tag, limit, stream)
    operation.complete(limit)
    if plain:
        learn(found, peer, tensor, dst, tag, receives=False)


def recv(
    tensor: AnyArray,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    timeout: timedelta | None = None,
    stream: Any = None,
) -> int:
    """Receive into ``tensor``; return the global rank of the sender (-1 if this rank is not in the group).

    Only this rank calls this function; the source calls :func:`send` or :func:`isend` with the same dtype, number of elements
    and tag.

    Args:
        tensor: array for the message, of the same dtype and number of elements (shape and layout may differ).
        src: global rank of the source; or ``group_src``, its rank in the group; neither: any member.
        group, tag, timeout, stream: as in :func:`send`.

    Raises:
        ValueError: the source is this rank itself, or not in the group; the tag is out of range.
        TypeError: wrong arguments.
        BufferInUseError: a pending operation uses the memory of ``tensor`` (at check level ``full``).
        CollectiveMismatchError: the message has another dtype or number of elements (at ``roll`` and ``off``: more bytes than
            ``tensor``); the error names both calls. Another ``recv`` can get the message, and the group can be used.
        CollectiveTimeoutError: no message arrived within the limit.
        PeerFailedError, PeerExitedError: the source failed, or ended without sending; another member failed.
        Others as :func:`send`.

    Source: torch.distributed.recv; MPI-4.1 section 3.2.4.
    """
    plain = group_src is None and timeout is None
    if plain and move_prepared(tensor, src, group, tag, True):
        assert src is not None
        return src
    found = member_or_warn(group, "recv")
    if found is None:
        return -1
    peer = source_rank(found, src, group_src)
    refuse_self(found, peer, "source")
    limit = call_limit(found, timeout)
    source = receive_at_once(found, tensor, peer, tag) if plain and stream is None else None
    if source is None:
        operation, _ = start_receive("recv", found, tensor, peer, tag, limit, stream)
        operation.complete(limit)
        source = operation.returned
    if plain:
        learn(found, peer, tensor, src, tag, receives=True)
    return int(found.ranks[source])


def isend(
    tensor: AnyArray,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    stream: Any = None,
) -> Work | None:
    """Start to send ``tensor`` to one rank (this rank itself is allowed), and return a :class:`Work` to wait for.

    Only this rank calls this function; the destination calls :func:`recv` or :func:`irecv` with the same dtype, number of
    elements and tag. ``tensor`` must not be written before ``wait`` of the Work has returned; ``wait`` finds most writes
    (BufferInUseError). Arguments as in :func:`send`. A rank that is not in the group gets None, and a warning.

    Raises: as :func:`send`: errors of this rank here, errors that depend on other ranks in ``wait`` of the Work.

    Source: torch.distributed.isend; MPI-4.1 section 3.7.2.
    """
    if group_dst is None and stream is None:
        work = start_prepared(tensor, dst, group, tag, False)
        if work is not None:
            return work
    return _start(False, tensor, dst, group, tag, group_dst, stream)


def irecv(
    tensor: AnyArray,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    stream: Any = None,
) -> Work | None:
    """Start to receive into ``tensor``, and return a :class:`Work` to wait for.

    Only this rank calls this function; the source calls :func:`send` or :func:`isend` with the same dtype, number of elements
    and tag. ``tensor`` must not be read or written before ``wait`` of the Work has returned; ``wait`` finds most writes
    (BufferInUseError), but no reads. Afterwards ``source_rank()`` of the Work is the sender's rank in the group.
    Arguments as in :func:`recv`. A rank that is not in the group gets None, and a warning.

    Raises: as :func:`recv`: errors of this rank here, errors that depend on other ranks in ``wait`` of the Work.

    Source: torch.distributed.irecv; MPI-4.1 section 3.7.2.
    """
    if group_src is None and stream is None:
        work = start_prepared(tensor, src, group, tag, True)
        if work is not None:
            return work
    return _start(True, tensor, src, group, tag, group_src, stream)


def _start(
    receives: bool, tensor: AnyArray, rank: int | None, group: Any, tag: int, group_rank: int | None, stream: Any
) -> Work | None:
    """Start a message the general way."""
    name = "irecv" if receives else "isend"
    found = member_or_warn(group, name, stacklevel=4)
    if found is None:
        return None
    peer = source_rank(found, rank, group_rank) if receives else peer_rank(found, rank, group_rank, "dst")
    start = start_receive if receives else start_send
    operation, claim = start(name, found, tensor, peer, tag, found.timeout, stream)
    work = Work(operation).with_claim(claim)
    if group_rank is None and stream is None:
        learn_pending(work, found, peer, tensor, rank, tag, receives=receives)
    return work


class P2POp:
    """One ``isend`` or ``irecv`` to be started by :func:`batch_isend_irecv`.

    Args:
        op: the function :func:`isend` or :func:`irecv` itself.
        tensor: array to send, or array for the message.
        peer: global rank of the destination or source; or ``group_peer``, its rank in the group.
        group: the group; default the world.
        tag: 0 to MPI_TAG_UB - 32.

    Raises:
        TypeError: ``tensor`` cannot be moved, or the peer is not an integer.
        ValueError: ``op`` is another function, the peer is not in the group, or ``irecv`` cannot write into ``tensor``.

    Source: torch.distributed.P2POp.
    """

    __slots__ = ("group", "group_peer", "op", "peer", "tag", "tensor")

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: AnyArray,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ValueError("Invalid ``op``. Expected ``op`` to be of type ``mpicoll.isend`` or ``mpicoll.irecv``.")
        check_array(tensor, "tensor", writable=op is irecv)
        found = resolve(group)
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
        memory = adapt(self.tensor, "tensor", writable=False)
        what = f"{memory.name} x {memory.flat.size}"
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag}, {what})"


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Start all operations of a list, and return their Works in the same order.

    Only this rank calls this function; each peer starts the matching operations. Operations on a group without this rank are
    skipped, with a warning.

    Raises:
        ValueError: not a list of P2POp, or the operations have different groups.
        IndexError: the list is empty (as in torch).
        Others as :func:`isend` and :func:`irecv`; earlier operations of the list have been started then.

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
            member_or_warn(op.group, op.op.__name__)
            continue
        receives = op.op is irecv
        given = op.tensor, op.peer, op.group, op.tag, receives
        work = start_prepared(*given)
        if work is None:
            work = _start(receives, op.tensor, op.peer, op.group, op.tag, None, None)
        if work is not None:
            works.append(work)
    return works
