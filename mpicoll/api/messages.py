"""Messages between two ranks: send, recv, isend, irecv, P2POp, batch_isend_irecv."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.checks.memory_in_use import Claim, claims
from mpicoll.diagnosis.call import Call
from mpicoll.errors import CollectiveMismatchError
from mpicoll.groups import registry
from mpicoll.groups.process_group import ProcessGroup
from mpicoll.groups.registry import member_or_warn, need_member, peer_rank, resolve
from mpicoll.memory.adapt import adapt
from mpicoll.memory.device import array as device_array
from mpicoll.memory.dtypes import is_native
from mpicoll.memory.memory import AnyArray, Array, Memory
from mpicoll.operations import execution, persistent
from mpicoll.operations.failures import begun
from mpicoll.operations.nonblocking_messages import receive_again, receiving, send_again
from mpicoll.operations.operation import Operation
from mpicoll.operations.persistent import PersistentReceive, message_call
from mpicoll.operations.work import Work
from mpicoll.runtime import signals, waiting
from mpicoll.runtime.call_site import call_site, caller
from mpicoll.transports.mpi.collectives import AllRequests
from mpicoll.transports.mpi.envelope import SMALL_BYTES, write
from mpicoll.transports.mpi.matching import Message, Receive

# Objects that send and recv use in each call, as globals of this module.
_default = registry.default
_claims = claims.active
_frame = sys._getframe
_get_ident = threading.get_ident
_guard = signals.guard
_matches = persistent.matches
_ndarray = np.ndarray
_pending = waiting.pending
_spins = range(waiting.SPIN_POLLS)
_threads = signals.threads


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
    elements and tag. The send of up to 16 KiB may return before the message is received, a larger one does not.

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
    if type(tensor) is _ndarray and type(dst) is int and type(tag) is int and group_dst is None and timeout is None:
        known: Any = _default.world if group is None else group
        try:
            again = known.sends.last
            if (
                again is None
                or again.rank != dst
                or again.tag != tag
                or not _matches(tensor, again.dtype, again.shape, False)
            ):
                again = known.sends.last = known.sends[dst, tag, tensor.shape, tensor.dtype]
                if not tensor.flags.c_contiguous:
                    again = None
            frame = _frame(1)
        except (KeyError, AttributeError, ValueError):  # not prepared; no group, or not a member; called from C
            again = None
        if again is not None and not (_pending or _claims):
            # Prepared. All code is here, not in functions: a call of a function takes as long as posting the message.
            taken = False
            wrong: BaseException | None = None
            try:
                if (again.instruction == frame.f_lasti and again.code is frame.f_code) or again.move_to(known, frame):
                    again.take()
                    taken = True
                    if again.elements is not None:
                        again.elements[...] = tensor
                        again.start()
                        again.count += 1
                        known.last = again
                        _threads.add(_get_ident())
                        for _ in _spins:
                            if not again.test():
                                continue
                            break
                        else:
                            persistent.finish(known, again, tensor, again.test)
                    else:
                        persistent.send_apart(known, again, tensor)
                    again.give_back(None)
                    return
            except BaseException as error:
                if taken or not isinstance(error, persistent.Busy):
                    wrong = error
                    persistent.give_up(known, again, tensor, error)
                    raise
            finally:
                if _guard.noted is not None:
                    _guard.answer(wrong)
    found = need_member(group)
    peer = peer_rank(found, dst, group_dst, "dst")
    if peer == found.rank():
        raise ValueError(
            "Invalid destination rank: destination rank should not be the same as the rank of the current process."
        )
    limit = execution.call_limit(found, timeout)
    operation, _ = _start_send("send", found, tensor, peer, tag, limit, stream)
    operation.complete(limit)
    if group_dst is None and timeout is None and type(tensor) is _ndarray and is_native(tensor.dtype):
        persistent.learn(found, "send", peer, tensor, dst, tag)


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
    if type(tensor) is _ndarray and type(src) is int and type(tag) is int and group_src is None and timeout is None:
        known: Any = _default.world if group is None else group
        try:
            again = known.receives.last
            if (
                again is None
                or again.rank != src
                or again.tag != tag
                or not _matches(tensor, again.dtype, again.shape, True)
            ):
                again = known.receives.last = known.receives[src, tag, tensor.shape, tensor.dtype]
                if not tensor.flags.carray:
                    again = None
            frame = _frame(1)
        except (KeyError, AttributeError, ValueError):
            again = None
        if again is not None and not (_pending or _claims):
            receiver = known.pair.receiver
            posted = receiver.posted
            locked = False
            wrong: BaseException | None = None
            try:
                # One receive at a time: no other thread uses this one, or another one that could get its message.
                locked = receiver.lock.acquire(False)
                if locked and not (posted or receiver.waiting or receiver.queues) and again.rank == src:
                    if again.instruction != frame.f_lasti or again.code is not frame.f_code:
                        again.code, again.instruction = frame.f_code, frame.f_lasti
                    posted.append(again.key)
                    again.start()
                    receiver.lock.release()
                    locked = False
                    body = None if again.elements is not None else persistent.body_of(again, tensor)
                    known.last = again
                    _threads.add(_get_ident())
                    for _ in _spins:
                        if not again.test():
                            continue
                        break
                    else:
                        persistent.finish(known, again, tensor, again.test)
                    if again.words[0] != again.expected:
                        _receive_unusual(known, again, tensor)
                        return src
                    if again.elements is not None:
                        tensor[...] = again.elements
                        again.count += 1
                    else:
                        persistent.recv_apart(known, again, tensor, body)
                    posted.remove(again.key)
                    return src
            except CollectiveMismatchError as error:
                wrong = error
                raise  # the message does not fit; nothing has changed
            except BaseException as error:
                wrong = error
                persistent.give_up(known, again, tensor, error)
                raise
            finally:
                if locked:
                    receiver.lock.release()
                if _guard.noted is not None:
                    _guard.answer(wrong)
    found = member_or_warn(group, "recv")
    if found is None:
        return -1
    peer = _source(found, src, group_src)
    if peer == found.rank():
        raise ValueError("Invalid source rank: source rank should not be the same as the rank of the current process.")
    limit = execution.call_limit(found, timeout)
    operation, _ = _start_recv("recv", found, tensor, peer, tag, limit, stream)
    operation.complete(limit)
    if group_src is None and timeout is None and type(tensor) is _ndarray and is_native(tensor.dtype):
        persistent.learn(found, "recv", peer, tensor, src, tag)
    return int(found.ranks[operation.returned])


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
    elements and tag. ``tensor`` must not be written before ``wait`` of the Work has returned; ``wait`` finds writes to up to
    64 KiB (BufferInUseError). Arguments as in :func:`send`.

    Raises: as :func:`send`: errors of this rank here, errors that depend on other ranks in ``wait`` of the Work.

    Source: torch.distributed.isend; MPI-4.1 section 3.7.2.
    """
    return _isend(caller(), tensor, dst, group, tag, group_dst, stream)


def _isend(
    frame: FrameType, tensor: AnyArray, dst: int | None, group: Any, tag: int, group_dst: int | None, stream: Any
) -> Work | None:
    plain = type(tensor) is _ndarray and type(dst) is int and type(tag) is int and group_dst is None and stream is None
    if plain and tensor.flags.c_contiguous:
        known: Any = _default.world if group is None else group
        try:
            again = known.sends[dst, tag, tensor.shape, tensor.dtype]
        except (KeyError, AttributeError):  # not prepared; no group, or not a member
            pass
        else:
            work = send_again(known, again, tensor, frame)
            if work is not None:
                return work
    found = member_or_warn(group, "isend", stacklevel=4)
    if found is None:
        return None
    peer = peer_rank(found, dst, group_dst, "dst")
    operation, flight = _start_send("isend", found, tensor, peer, tag, found.timeout, stream)
    work = Work(operation).with_claim(flight)
    if plain and peer != found.rank() and is_native(tensor.dtype):
        _learn(work, found, "send", peer, tensor, dst, tag)
    return work


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
    and tag. ``tensor`` must not be read or written before ``wait`` of the Work has returned; ``wait`` finds writes to up to
    64 KiB (BufferInUseError), but no reads. Afterwards ``source_rank()`` of the Work is the sender's rank in the group.
    Arguments as in :func:`recv`.

    Raises: as :func:`recv`: errors of this rank here, errors that depend on other ranks in ``wait`` of the Work.

    Source: torch.distributed.irecv; MPI-4.1 section 3.7.2.
    """
    return _irecv(caller(), tensor, src, group, tag, group_src, stream)


def _irecv(
    frame: FrameType, tensor: AnyArray, src: int | None, group: Any, tag: int, group_src: int | None, stream: Any
) -> Work | None:
    plain = type(tensor) is _ndarray and type(src) is int and type(tag) is int and group_src is None and stream is None
    if plain and tensor.flags.carray:
        known: Any = _default.world if group is None else group
        try:
            again = known.receives[src, tag, tensor.shape, tensor.dtype]
        except (KeyError, AttributeError):
            pass
        else:
            work = receive_again(known, again, tensor, frame)
            if work is not None:
                return work
    found = member_or_warn(group, "irecv", stacklevel=4)
    if found is None:
        return None
    peer = _source(found, src, group_src)
    operation, flight = _start_recv("irecv", found, tensor, peer, tag, found.timeout, stream)
    work = Work(operation).with_claim(flight)
    if plain and peer != found.rank() and is_native(tensor.dtype):
        _learn(work, found, "recv", peer, tensor, src, tag)
    return work


def _learn(work: Work, *given: Any) -> None:
    """Prepare the next such message; an exception must not lose the Work of the pending one."""
    try:
        persistent.learn(*given)
    except MPI.Exception:
        pass  # MPI made no request: the next message is not prepared either
    except BaseException:
        work.get_future()
        raise


# A Ctrl-C in these functions is noted, and answered at their end or in a wait. To enter the guard would take 0.1 us, of the 1 us
# that they take in addition to MPI.
_guard.inside.update((send.__code__, recv.__code__))


class P2POp:
    """One ``isend`` or ``irecv`` to be started by :func:`batch_isend_irecv`.

    Args:
        op: the function :func:`isend` or :func:`irecv` itself.
        tensor: array to send, or array for the message.
        peer: global rank of the destination or source; or ``group_peer``, its rank in the group.
        group: the group; default the world.
        tag: 0 to MPI_TAG_UB - 32.

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
        adapt(tensor, "tensor", writable=op is irecv)
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
        start = _isend if op.op is isend else _irecv
        work = start(caller(), op.tensor, op.peer, op.group, op.tag, None, None)
        if work is not None:
            works.append(work)
    return works


def _source(group: ProcessGroup, src: int | None, group_src: int | None) -> int:
    """Return the rank in the group of the source, or MPI.ANY_SOURCE."""
    if src is None and group_src is None:
        return MPI.ANY_SOURCE
    return peer_rank(group, src, group_src, "src")


_tag_limit = 0


def tag_limit() -> int:
    """Return the largest tag for programs: MPI_TAG_UB - 32, as the library uses the 32 largest."""
    global _tag_limit
    if not _tag_limit:
        _tag_limit = (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) - 32
    return _tag_limit


def _check_tag(tag: Any) -> None:
    if not hasattr(tag, "__index__") or isinstance(tag, bool):
        raise TypeError(f"tag must be an integer, not {type(tag).__name__}")
    if not 0 <= tag <= tag_limit():
        raise ValueError(f"tag must be between 0 and {tag_limit()} (MPI_TAG_UB - 32), got {tag}")


def _start_send(
    name: str, group: ProcessGroup, tensor: Array, peer: int, tag: int, limit: float, stream: Any
) -> tuple[Operation, Claim | None]:
    with device_array.StreamOrder(stream):
        memory = adapt(tensor, "tensor", writable=False, direct="send", nonblocking=True)
    _check_tag(tag)
    execution.enter(group, name)
    call = _describe(name, group, memory, peer, tag)
    claim = _claim(group, call, memory)
    with signals.guard, group.posting:
        if claim is not None:
            claim.snapshot_reads()
        flat = memory.filled()
        message = write(flat, memory.named, *group.known_sites.place(peer, tag, name, call.site))
        with begun(group, call, limit, (message, flat), peer=group.ranks[peer], tag=tag):
            requests = [group.pair.data.Isend([message, MPI.BYTE], peer, tag)]
            if flat.nbytes > SMALL_BYTES:
                body = flat if flat.dtype.kind != "V" else flat.view(np.uint8)
                requests.append(persistent.post_apart(group, body, peer, tag))
            group.count_sent(peer, tag)
            waiting.transfer_hint(flat.nbytes)
            steps = execution.sending(AllRequests(requests, (message, flat)))
            operation = Operation(group, call, steps, [tensor], limit, peer=group.ranks[peer], tag=tag)
            return operation, claim


def _start_recv(
    name: str, group: ProcessGroup, tensor: Array, peer: int, tag: int, limit: float, stream: Any
) -> tuple[Operation, Claim | None]:
    # A message that is not compared may be smaller than the array, and stand in its envelope.
    with device_array.StreamOrder(stream):
        memory = adapt(tensor, "tensor", writable=True, direct="recv" if group.compares else "", nonblocking=True)
    _check_tag(tag)
    execution.enter(group, name)
    call = _describe(name, group, memory, peer, tag)
    claim = _claim(group, call, memory)
    if memory.direct:
        memory.filled()  # MPI writes there as soon as the message arrives
    with signals.guard, group.posting:
        receiver = group.pair.receiver
        source = group.ranks[peer] if peer >= 0 else -1
        with begun(group, call, limit, memory, peer=source, tag=tag):
            receive = receiver.start(memory, peer, tag, exact=group.compares)
            if claim is not None:
                receive.watch(claim)
            return _receive_operation(group, call, memory, receive, tensor, limit), claim


def _describe(name: str, group: ProcessGroup, memory: Memory, peer: int, tag: int) -> Call:
    call = message_call(name, group, memory.dtype, memory.flat.size, peer, tag, call_site())
    if memory.named:
        call.key = (*call.key[:2], memory.named, *call.key[3:])
    return call


def _claim(group: ProcessGroup, call: Call, memory: Memory) -> Claim | None:
    """Compare the memory of a message with active claims, and return its claim, or None if none is needed.

    Raises:
        BufferInUseError: a pending operation uses the memory.
    """
    if not group.compares or not (_claims or call.op in ("isend", "irecv")):
        return None
    arrays = [memory.own]
    sends = call.op in ("send", "isend")
    claim = Claim(
        call.op,
        call.site,
        reads=arrays if sends else (),
        writes=() if sends else arrays,
        gone=lambda: group.broken is not None or group.destroyed,
        group=group.display,
    )
    claims.check(claim)
    if call.op in ("send", "recv"):
        claim.clear()
        return None
    return claim


def _receive_operation(
    group: ProcessGroup, call: Call, memory: Memory, receive: Receive, tensor: Array, limit: float
) -> Operation:
    receiver = receive.receiver
    operation = Operation(
        group,
        call,
        receiving(group, call, memory, receive),
        [tensor],
        limit,
        peer=group.ranks[receive.source] if receive.source >= 0 else -1,
        tag=receive.tag,
        withdraw=lambda: receiver.withdraw(receive),
    )
    receiver.watch()
    return operation


def _receive_unusual(group: ProcessGroup, again: PersistentReceive, tensor: Array) -> None:
    """Complete a receive that was posted to MPI, and got a message of another dtype or size than expected."""
    memory = adapt(tensor, "tensor", writable=True)
    call = persistent.call(group, again, tensor)
    receive = group.pair.receiver.adopt(Message(*again.key, again.buffer.copy()), memory, exact=group.compares)
    operation = _receive_operation(group, call, memory, receive, tensor, group.timeout)
    operation.complete(group.timeout)
